// Fetches the descriptors behind one-time tokens from the socket of a peer daemon on this host.
#pragma once

#include <boost/asio/io_context.hpp>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "daemon/abi/attach.h"
#include "daemon/abi/fd.h"

namespace moed {

/// One connection, one request after the other. Everything runs on the thread that runs `io`.
class Fetcher {
 public:
  /// Either all descriptors, in the order of `requests`, or none and a sentence. Not called after destruction.
  using Done = std::function<void(std::vector<Fd> fds, const std::string& why)>;

  /// Ends within 5 s.
  Fetcher(boost::asio::io_context& io, const std::string& path, std::vector<Fetch> requests, Done done);
  ~Fetcher();
  Fetcher(const Fetcher&) = delete;
  Fetcher& operator=(const Fetcher&) = delete;

 private:
  class Impl;
  std::shared_ptr<Impl> impl_;
};

}  // namespace moed
