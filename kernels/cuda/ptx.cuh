// Every inline assembly instruction of the project. Memory accesses are relaxed at system scope: they bypass L1, are
// never cut in parts, and wait for nothing.
#pragma once

#include <cstdint>

namespace moed::cuda {

/// Nanoseconds of the GPU's own clock; the same for all of its multiprocessors.
__device__ inline uint64_t global_time() {
  uint64_t t;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t));
  return t;
}

__device__ inline uint32_t load_u32(const uint32_t* at) {
  uint32_t v;
  asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(v) : "l"(at) : "memory");
  return v;
}

/// What the writer stored before this word is seen after it.
__device__ inline uint32_t load_u32_acquire(const uint32_t* at) {
  uint32_t v;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(v) : "l"(at) : "memory");
  return v;
}

__device__ inline void store_u32(uint32_t* at, uint32_t v) {
  asm volatile("st.relaxed.sys.global.u32 [%0], %1;" ::"l"(at), "r"(v) : "memory");
}

__device__ inline void store_u32_release(uint32_t* at, uint32_t v) {
  asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(at), "r"(v) : "memory");
}

__device__ inline uint64_t load_u64(const uint64_t* at) {
  uint64_t v;
  asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(v) : "l"(at) : "memory");
  return v;
}

__device__ inline void store_u64_release(uint64_t* at, uint64_t v) {
  asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(at), "l"(v) : "memory");
}

/// 16 bytes in one instruction: eight neighbouring lanes make one line of it, which stays whole within a GPU and over
/// NVLink (0 torn of 10^9, design.md section 8).
__device__ inline ulonglong2 load_16(const void* at) {
  ulonglong2 v;
  asm volatile("ld.relaxed.sys.global.v2.u64 {%0, %1}, [%2];" : "=l"(v.x), "=l"(v.y) : "l"(at) : "memory");
  return v;
}

__device__ inline void store_16(void* at, ulonglong2 v) {
  asm volatile("st.relaxed.sys.global.v2.u64 [%0], {%1, %2};" ::"l"(at), "l"(v.x), "l"(v.y) : "memory");
}

/// Orders everything before it against everything after it, for every processor of the machine.
__device__ inline void fence_system() { asm volatile("fence.sc.sys;" ::: "memory"); }

}  // namespace moed::cuda
