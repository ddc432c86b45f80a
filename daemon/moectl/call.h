// moectl call: one call whose arrays come from files.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

namespace moed::ctl {

/// Files are raw little-endian arrays as moed_call_t describes them; the number of tokens follows from x's size.
struct CallOptions {
  std::string socket, x, scales, ids, weights, out;
  uint32_t kind = 0, layer = 0, flags = 0, timeout_us = 0;
  std::optional<int32_t> valid;
  bool dry = false;
};

/// Makes the call, prints its line, writes out when it is done; an exit code.
int run_call(const CallOptions& options);

}  // namespace moed::ctl
