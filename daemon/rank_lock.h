// RUN_DIR/GROUP/RANK.lock: one daemon a rank on one host, for as long as the process lives.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>

#include "daemon/abi/fd.h"

namespace moed {

/// Another daemon has this rank of this group on this host.
struct RankHeld : std::runtime_error {
  using std::runtime_error::runtime_error;
};

class RankLock {
 public:
  /// Makes the directory and takes the lock. Throws std::runtime_error naming path and reason, RankHeld naming the
  /// holder's pid.
  RankLock(const std::string& run_dir, const std::string& group, uint32_t rank);

 private:
  Fd file_;
};

}  // namespace moed
