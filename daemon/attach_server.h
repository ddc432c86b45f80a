// The Unix socket RUN_DIR/GROUP/RANK.sock: who may attach, which lane, which descriptors. A connection is the lease:
// when it hangs up, its lane is let go.
#pragma once

#include <boost/asio/io_context.hpp>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "daemon/abi/attach.h"
#include "daemon/abi/fd.h"
#include "daemon/metrics.h"
#include "daemon/service_loop.h"
#include "kernels/backend.h"

namespace moed {

struct AttachOptions {
  std::string run_dir, group;
  uint32_t rank = 0;
  Shape shape;
  uint32_t lanes = 2, slots = 2, max_call_tokens = 65536;
  uint64_t arena_bytes = 64ULL << 20;  ///< the most that an attach may ask for, and what 0 means
  uint32_t deadline_ms = 2000, first_deadline_ms = 60000;
  Info info;  ///< what is the same for every lane
};

/// One attached lane as status shows it.
struct LaneInfo {
  uint32_t lane = 0;
  std::string name;
  int32_t pid = 0;
  uint64_t calls = 0;
  bool dry = false;
};

/// What only the rest of the daemon knows.
struct AttachHandlers {
  std::function<std::string()> status_json;
  /// The descriptor behind a peer's token; empty and a sentence: there is none.
  std::function<Fd(const Fetch&, std::string& why)> fetch;
  /// The recorder's file, which nobody else can write; it stays the recorder's.
  std::function<int()> trace;
};

/// Everything runs on the thread that runs `io`. The rank's lock is held by the caller. The constructor throws
/// std::runtime_error naming path and reason.
class AttachServer {
 public:
  AttachServer(boost::asio::io_context& io, AttachOptions options, Backend& backend, ServiceLoop& service,
               Metrics& metrics, AttachHandlers handlers);
  ~AttachServer();
  AttachServer(const AttachServer&) = delete;
  AttachServer& operator=(const AttachServer&) = delete;

  const std::string& path() const;
  std::vector<LaneInfo> lanes() const;
  /// No new engines; those that are there stay.
  void drain();
  /// Closes every connection and the socket.
  void stop();

 private:
  class Impl;
  std::shared_ptr<Impl> impl_;
};

}  // namespace moed
