// A world of real daemons in one run directory, on ports of their own.
#pragma once

#include <netinet/in.h>
#include <sys/socket.h>

#include <functional>
#include <memory>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include "daemon/abi/fd.h"
#include "tests/support/process.h"

namespace moed::test {

inline Fd listen_on(uint16_t port) {
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
    Fd fd = listen_on(port);
    if (!fd) continue;
    held.push_back(std::move(fd));
    ports.push_back(port);
  }
  if (ports.size() < count) throw std::runtime_error("no free ports");
  return ports;
}

inline std::string peers_of(const std::vector<uint16_t>& ports) {
  std::string list;
  for (const uint16_t port : ports)
    list += (list.empty() ? "\"127.0.0.1:" : ",\"127.0.0.1:") + std::to_string(port) + "\"";
  return "control.peers=[" + list + "]";
}

class Daemons {
 public:
  using Sets = std::vector<std::string>;

  /// sets: of all; own: of one rank. The loops do not spin: there are more of them than cores. Waits until all are
  /// ready.
  Daemons(uint32_t ranks, const Sets& sets, const std::function<Sets(uint32_t rank)>& own = {})
      : ports_(free_ports(ranks)) {
    for (uint32_t r = 0; r < ranks; ++r) {
      Sets all{peers_of(ports_), "service.spin_us=0"};
      all.insert(all.end(), sets.begin(), sets.end());
      if (own) {
        const Sets more = own(r);
        all.insert(all.end(), more.begin(), more.end());
      }
      daemons_.push_back(std::make_unique<Daemon>(all, dir_.path(), r));
    }
    wait_ready();
  }

  void wait_ready() const {
    for (const auto& d : daemons_) d->wait_ready();
  }

  uint32_t ranks() const { return static_cast<uint32_t>(daemons_.size()); }
  Daemon& operator[](uint32_t rank) const { return *daemons_[rank]; }
  uint16_t port(uint32_t rank) const { return ports_[rank]; }
  const std::vector<uint16_t>& ports() const { return ports_; }
  const std::string& run_dir() const { return dir_.path(); }

 private:
  TempDir dir_;
  std::vector<uint16_t> ports_;
  std::vector<std::unique_ptr<Daemon>> daemons_;
};

}  // namespace moed::test
