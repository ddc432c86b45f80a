// What call loops and serve loops have in common: how long they run, how their tickets are numbered, and how the warps
// of a block speak through words of shared memory.
#pragma once

#include "kernels/cuda/device.cuh"

namespace moed::cuda {

inline constexpr uint64_t kTakeNs = 700'000;  ///< takes work for so long,
inline constexpr uint64_t kStayNs = 250'000;  ///< and stays for it for so long after: never longer than 1 ms
inline constexpr uint64_t kComeNs = 5'000;    ///< the blocks that follow are waited for so long when a loop begins
inline constexpr uint32_t kTurnBits = 20;     ///< of a ticket's number; the rest is the loop's

__device__ inline uint32_t warp_lane() { return threadIdx.x % 32; }

/// Words of shared memory by which one warp tells others, without a barrier.
template <class T>
__device__ inline T look(const T& shared) {
  return *const_cast<const volatile T*>(&shared);
}
template <class T>
__device__ inline void show(T& shared, T value) {
  *const_cast<volatile T*>(&shared) = value;
}

/// What the first thread of every block does first. How many blocks had begun to follow in this loop, with this one; 0
/// for the leading block. The next loop, which may begin when all blocks of this one have begun and the leading one
/// says so, counts from what all of them leave.
__device__ inline uint32_t begin_block(uint32_t& checked, uint64_t loop) {
  if (blockIdx.x == 0) return 0;
  const uint32_t before = fetch_add_u32(&checked, 1);
  const uint32_t index = before + 1 - static_cast<uint32_t>((loop - 1) * (gridDim.x - 1));
  if (index != ~0U) let_next_begin();  // what was there before is known by now
  return index;
}

/// Whether it is so late, decided by one thread for its warp.
__device__ inline bool is_late(uint64_t until) { return __any_sync(0xFFFFFFFFU, global_time() >= until) != 0; }

}  // namespace moed::cuda
