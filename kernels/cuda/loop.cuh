// What call loops and serve loops have in common: how long they run, how their tickets are numbered, and how the warps
// of a block speak through words of shared memory.
#pragma once

#include "kernels/cuda/device.cuh"

namespace moed::cuda {

inline constexpr uint64_t kTakeNs = 700'000;  ///< takes work for so long,
inline constexpr uint64_t kStayNs = 250'000;  ///< and stays for it for so long after: never longer than 1 ms
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

/// Whether it is so late, decided by one thread for its warp.
__device__ inline bool is_late(uint64_t until) { return __any_sync(0xFFFFFFFFU, global_time() >= until) != 0; }

}  // namespace moed::cuda
