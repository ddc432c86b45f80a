// Ports of loopback for those who have to agree on them beforehand.
#pragma once

#include <netinet/in.h>
#include <sys/socket.h>

#include <cstdint>
#include <random>
#include <stdexcept>
#include <vector>

#include "daemon/abi/fd.h"

namespace moed::test {

inline Fd hold_port(uint16_t port) {
  Fd fd(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(port);
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  if (::bind(fd.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address) != 0) return {};
  return fd;
}

/// Ports that nobody has, below those that the system gives out by itself: a daemon that restarts finds its own again.
inline std::vector<uint16_t> free_ports(uint32_t count) {
  std::mt19937 random(std::random_device{}());
  std::vector<uint16_t> ports;
  std::vector<Fd> held;
  for (int tries = 0; ports.size() < count && tries < 20'000; ++tries) {
    const auto port = static_cast<uint16_t>(10'000 + random() % 20'000);
    Fd fd = hold_port(port);
    if (!fd) continue;
    held.push_back(std::move(fd));
    ports.push_back(port);
  }
  if (ports.size() < count) throw std::runtime_error("no free ports");
  return ports;
}

}  // namespace moed::test
