// moectl top: a live view of one or several ranks, made of what they say of themselves (status).
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "daemon/abi/futex.h"

namespace moed::ctl {

struct TopOptions {
  std::vector<std::string> sockets;  ///< empty: libmoed's choice
  uint32_t interval_ms = 1000;       ///< from one frame to the next
  uint64_t count = 0;                ///< frames; 0: until the process is ended
};

/// One look at a rank.
struct Look {
  Nanos at = 0;
  std::string json;  ///< its state; empty: it was not reachable
  std::string why;   ///< and this is why
};

/// What is shown of one rank: rates and shares are of the time between two looks. Without an earlier look at the same
/// life of the daemon they are "-".
std::string top_rank(const std::string& socket, const std::optional<Look>& before, const Look& now);

/// Shows frame after frame; an exit code: not reachable when no rank is in the last frame. On a terminal each frame
/// takes the place of the one before it, elsewhere frames follow one another, an empty line between them.
int run_top(const TopOptions& options);

}  // namespace moed::ctl
