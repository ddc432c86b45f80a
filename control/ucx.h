// UCX active messages between daemons: one worker over TCP, driven by an Asio context. Endpoints are made from worker
// addresses that were exchanged and proven elsewhere; there is no listener, because UCX's aborts on garbage (1.13).
//
// UCX_MEM_EVENTS=n has to be in the environment when the process starts: otherwise UCX patches mmap while its library
// loads, and a process under TSan crashes.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

namespace boost::asio {
class io_context;
}

namespace moed::control {

/// Everything runs on the one thread that runs `io`. A message is a header and a body, at most kMaxBody bytes, copied
/// and sent eagerly; messages of one endpoint arrive in order or the endpoint fails.
class UcxWorker {
 public:
  using Endpoint = uint64_t;  ///< 0: none; a number is never used again
  static constexpr size_t kMaxBody = 4096;
  static constexpr size_t kMaxPending = 256;  ///< sends of one endpoint that UCX has not taken yet

  struct Handlers {
    /// The bytes are gone when it returns. Whoever has our address can send: nothing is authenticated here.
    std::function<void(std::span<const uint8_t> header, std::span<const uint8_t> body)> message;
    /// The endpoint is closed already. Called once, never from within connect() or send().
    std::function<void(Endpoint endpoint, const std::string& why)> failed;
  };

  /// ports: "low-high", what UCX's own sockets may use; set in this process's environment, so one range a process.
  /// devices: network interfaces, separated by commas; empty: UCX_NET_DEVICES, else all. Throws std::runtime_error
  /// naming the step and UCX's reason.
  UcxWorker(boost::asio::io_context& io, Handlers handlers, const std::string& ports, const std::string& devices = {});
  ~UcxWorker();
  UcxWorker(const UcxWorker&) = delete;
  UcxWorker& operator=(const UcxWorker&) = delete;

  /// "1.13.1".
  static std::string version();
  /// What a peer needs to send to us.
  const std::vector<uint8_t>& address() const;
  /// An endpoint to whoever has this address; 0 and a sentence when UCX refuses. That the peer lives shows only later.
  Endpoint connect(std::span<const uint8_t> address, std::string& why);
  /// False: no such endpoint, too large, or too many pending: the caller gives the link up.
  bool send(Endpoint endpoint, std::span<const uint8_t> header, std::span<const uint8_t> body);
  /// Drops what is pending; no failed() follows. The other end's endpoint to us is a connection of its own and stays.
  void close(Endpoint endpoint);

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace moed::control
