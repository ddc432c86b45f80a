// A blocking TCP client on loopback that says whatever a test wants; every wait of it ends after 10 s.
#pragma once

#include <netinet/in.h>
#include <sys/socket.h>

#include <cerrno>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <string_view>

#include "daemon/abi/fd.h"

namespace moed::test {

class Tcp {
 public:
  explicit Tcp(uint16_t port) : fd_(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
    const timeval limit{10, 0};
    ::setsockopt(fd_.get(), SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
    ::setsockopt(fd_.get(), SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof limit);
    sockaddr_in to{};
    to.sin_family = AF_INET;
    to.sin_port = htons(port);
    to.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    if (::connect(fd_.get(), reinterpret_cast<const sockaddr*>(&to), sizeof to) != 0)
      throw std::runtime_error("nobody listens on port " + std::to_string(port));
  }

  /// False: the other end would not take all of it.
  bool send(std::string_view bytes) const {
    while (!bytes.empty()) {
      const ssize_t sent = ::send(fd_.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL);
      if (sent <= 0) return false;
      bytes.remove_prefix(static_cast<size_t>(sent));
    }
    return true;
  }

  /// So many bytes, or fewer when the other end closes first or is silent.
  std::string receive(size_t bytes) const {
    std::string all(bytes, '\0');
    size_t have = 0;
    while (have < bytes) {
      const ssize_t got = ::recv(fd_.get(), all.data() + have, bytes - have, 0);
      if (got <= 0) break;
      have += static_cast<size_t>(got);
    }
    all.resize(have);
    return all;
  }

  /// Until the other end closes, in whatever way; false: it has not.
  bool closed() const {
    char byte = 0;
    for (;;) {
      const ssize_t got = ::recv(fd_.get(), &byte, 1, 0);
      if (got <= 0) return got == 0 || (errno != EAGAIN && errno != EWOULDBLOCK);
    }
  }

 private:
  Fd fd_;
};

}  // namespace moed::test
