// A world of real daemons in one run directory, on ports of their own.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "tests/support/ports.h"
#include "tests/support/process.h"

namespace moed::test {

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
