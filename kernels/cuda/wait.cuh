// The loops on flags of the kernels behind the loops; loop.cuh has those of the loops. All are bounded, look at a
// disarm word, and never longer than 1 ms: a process that is killed while a longer kernel runs takes other clients of
// its GPU along (design.md section 8).
#pragma once

#include "kernels/cuda/ptx.cuh"
#include "kernels/lines.h"

namespace moed::cuda {

inline constexpr uint64_t kGateNs = 400'000;      ///< one gate, and one wait for return lines
inline constexpr uint64_t kRowsNs = 50'000;       ///< rows that their call line has announced
inline constexpr uint64_t kPartialsNs = 100'000;  ///< partials whose return line has come, in one pass
inline constexpr uint64_t kLateNs = 10'000'000;   ///< the same, in all passes of a piece
inline constexpr uint32_t kLineLanes = 8;         ///< lanes that read or write one line together

/// Lanes of the caller's group of eight, for shuffles: groups of one warp go their own ways.
__device__ inline uint32_t line_mask() { return 0xFFU << (threadIdx.x & 24U); }

/// Waits until the line at `line` carries `awaited`, at the latest until `until`. Eight lanes call it together; each
/// gets its 16 bytes, the last one the sequence in .y. `found`: the sequence seen last.
__device__ inline Seen wait_line(const std::byte* line, uint64_t awaited, uint64_t until, ulonglong2& words,
                                 uint64_t& found) {
  const uint32_t lane = threadIdx.x % kLineLanes;
  for (;;) {
    words = load_16(line + lane * 16);
    found = __shfl_sync(line_mask(), words.y, kLineLanes - 1, kLineLanes);
    if (found == awaited) return Seen::same;
    if (found > awaited) return Seen::newer;
    const bool late = __shfl_sync(line_mask(), global_time(), 0, kLineLanes) >= until;
    if (late) return Seen::older;
  }
}

/// A whole block looks until `look(now)` is true for one of its threads, at the latest until `until` or until a disarm
/// word is set. look() runs on every thread with the same time and may use barriers. Returns whether it was true.
template <class Look>
__device__ inline bool wait_block(uint64_t until, const uint32_t* disarm_all, const uint32_t* disarm, Look look) {
  __shared__ uint64_t now;
  __shared__ bool stop;
  for (;;) {
    if (threadIdx.x == 0) {
      now = global_time();
      stop = now >= until || load_u32(disarm_all) != 0 || load_u32(disarm) != 0;
    }
    __syncthreads();
    const bool last = stop;
    if (__syncthreads_or(look(now) ? 1 : 0) != 0) return true;
    if (last) return false;
  }
}

/// A drill's delay. It breaks the rule above on purpose; it is off unless configured.
__device__ inline void delay(uint64_t ns) {
  for (const uint64_t until = global_time() + ns; global_time() < until;) __nanosleep(1000);
}

}  // namespace moed::cuda
