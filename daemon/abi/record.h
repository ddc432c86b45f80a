// What is remembered of a call and of a serve pass. Metrics, moectl status and traces are made of these two.
#pragma once

#include <cstdint>

#include "daemon/abi/shape.h"

namespace moed {

enum class CallPath : uint16_t { host = 0, stream = 1 };
enum class Phase : uint32_t { dispatch = 0, wait = 1, reduce = 2 };

/// One ended call. Times are nanoseconds; start is CLOCK_MONOTONIC.
struct CallRecord {
  uint64_t number;  ///< of its attach's calls, from 1
  uint64_t count;   ///< the lane's count when it ended: pieces take one each
  uint64_t start;
  uint32_t kind;
  uint32_t layer;
  uint32_t tokens;  ///< as asked for
  uint32_t status;  ///< Status
  uint16_t path;    ///< CallPath
  uint16_t lane;
  uint32_t last;         ///< rank whose return line came last, or did not come; kNoRank: none was awaited
  uint64_t phase_ns[3];  ///< dispatch, wait, reduce
  uint64_t ranks[2];     ///< as Reply::ranks
  uint32_t token, slot, field, dropped;
  int64_t value;
  uint64_t limit;
  uint64_t total_ns;
  struct Peer {
    uint32_t wait, queue, experts, send;  ///< saturating; wait is ours, the others are the server's own times
  } peer[kMaxRanks];
};
static_assert(sizeof(CallRecord) == 2176);
inline constexpr uint32_t kNoRank = 0xFFFFFFFFu;

/// One ended serve pass.
struct ServeRecord {
  uint64_t start;  ///< CLOCK_MONOTONIC, ns
  uint32_t rows;
  uint32_t sources;
  uint32_t pairs;         ///< (row, local expert) pairs computed
  uint32_t refused;       ///< sources whose rows did not pass gather's checks
  uint64_t weight_bytes;  ///< of the distinct experts touched
  uint64_t wait_ns;       ///< from the first call line seen to the start of gather
  uint64_t gather_ns;
  uint64_t experts_ns;
  uint64_t send_ns;
  uint64_t reserved[8];
};
static_assert(sizeof(ServeRecord) == 128);

}  // namespace moed
