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

__device__ inline uint16_t load_u16(const void* at) {
  uint16_t v;
  asm volatile("ld.relaxed.sys.global.u16 %0, [%1];" : "=h"(v) : "l"(at) : "memory");
  return v;
}

__device__ inline uint8_t load_u8(const void* at) {
  uint32_t v;
  asm volatile("ld.relaxed.sys.global.u8 %0, [%1];" : "=r"(v) : "l"(at) : "memory");
  return static_cast<uint8_t>(v);
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

__device__ inline void store_u64(uint64_t* at, uint64_t v) {
  asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(at), "l"(v) : "memory");
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

/// Adds to a word; what it was before, once that is so in the GPU's L2.
__device__ inline uint64_t fetch_add_u64(uint64_t* at, uint64_t v) {
  uint64_t before;
  asm volatile("atom.relaxed.sys.global.add.u64 %0, [%1], %2;" : "=l"(before) : "l"(at), "l"(v) : "memory");
  return before;
}

__device__ inline uint64_t exchange_u64(uint64_t* at, uint64_t v) {
  uint64_t before;
  asm volatile("atom.relaxed.sys.global.exch.b64 %0, [%1], %2;" : "=l"(before) : "l"(at), "l"(v) : "memory");
  return before;
}

__device__ inline uint32_t exchange_u32(uint32_t* at, uint32_t v) {
  uint32_t before;
  asm volatile("atom.relaxed.sys.global.exch.b32 %0, [%1], %2;" : "=r"(before) : "l"(at), "r"(v) : "memory");
  return before;
}

/// Stores 16 bytes; what was there before, once they have reached the GPU's L2. Unlike a fence, or a load behind a
/// store, it waits for nothing else.
__device__ inline ulonglong2 exchange_16(void* at, ulonglong2 v) {
  ulonglong2 before;
  asm volatile(
      "{ .reg .b128 v, w; mov.b128 v, {%2, %3}; atom.relaxed.gpu.global.exch.b128 w, [%4], v; mov.b128 {%0, %1}, w; }"
      : "=l"(before.x), "=l"(before.y)
      : "l"(v.x), "l"(v.y), "l"(at)
      : "memory");
  return before;
}

/// Adds 1 to a word of any GPU, waits for nothing.
__device__ inline void ring(uint32_t* at) {
  asm volatile("red.relaxed.sys.global.add.u32 [%0], 1;" ::"l"(at) : "memory");
}

/// Adds to a word of this GPU; what it was before.
__device__ inline uint32_t fetch_add_u32(uint32_t* at, uint32_t v) {
  uint32_t before;
  asm volatile("atom.relaxed.gpu.global.add.u32 %0, [%1], %2;" : "=r"(before) : "l"(at), "r"(v) : "memory");
  return before;
}

/// Adds to a word, waits for nothing.
__device__ inline void add_u32(uint32_t* at, uint32_t v) {
  asm volatile("red.relaxed.gpu.global.add.u32 [%0], %1;" ::"l"(at), "r"(v) : "memory");
}

/// A barrier of some `threads` threads of a block, beside __syncthreads(); id: 1 to 15.
__device__ inline void sync_some(uint32_t id, uint32_t threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

/// Arrives at such a barrier and goes on.
__device__ inline void arrive_some(uint32_t id, uint32_t threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

/// The same, and whether `v` is true for any of them.
__device__ inline bool any_of_some(uint32_t id, uint32_t threads, bool v) {
  uint32_t any;
  asm volatile("{ .reg .pred p, q; setp.ne.u32 p, %3, 0; bar.red.or.pred q, %1, %2, p; selp.u32 %0, 1, 0, q; }"
               : "=r"(any)
               : "r"(id), "r"(threads), "r"(v ? 1U : 0U)
               : "memory");
  return any != 0;
}

/// The same object of shared memory by an address that the compiler keeps in a register. By its name it would make the
/// address anew at every use, from a special register that takes longer than the access.
template <class T>
__device__ inline T& in_register(T& shared) {
  uint32_t at = static_cast<uint32_t>(__cvta_generic_to_shared(&shared));
  asm volatile("mov.u32 %0, %0;" : "+r"(at));
  return *static_cast<T*>(__cvta_shared_to_generic(at));
}

/// Copies 16 bytes to shared memory past L1, of which `bytes` are read and the others are zeros. It is there after
/// wait_copies() and a barrier.
__device__ inline void copy_16(void* to, const void* from, uint32_t bytes) {
  asm volatile(
      "cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(static_cast<uint32_t>(__cvta_generic_to_shared(to))),
      "l"(from), "r"(bytes)
      : "memory");
}
__device__ inline void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
/// Until at most kLeft of this thread's groups of copies are under way.
template <int kLeft>
__device__ inline void wait_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kLeft) : "memory");
}

/// Until the kernels ahead in the stream have ended, if each of them has waited likewise for those ahead of it.
__device__ inline void await_kernels_ahead() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
/// The next kernel may begin when every block has called this or ended.
__device__ inline void let_next_begin() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

/// Two floats as BF16, nearest even; a NaN as numbers.h has it.
__device__ inline uint32_t bf16_pair(float low, float high) {
  uint32_t v;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(v) : "f"(high), "f"(low));
  if (low != low) v = (v & 0xFFFF0000U) | 0x7FC0U;
  if (high != high) v = (v & 0xFFFFU) | 0x7FC00000U;
  return v;
}

/// The same, but a NaN becomes 0x7FFF: for who looks for NaNs in several at once (device.cuh).
__device__ inline uint32_t bf16_pair_raw(float low, float high) {
  uint32_t v;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(v) : "f"(high), "f"(low));
  return v;
}

/// Two neighbouring E4M3 codes of floats: nearest even, saturating. Only numbers.
__device__ inline uint16_t e4m3_pair(float low, float high) {
  uint16_t v;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(v) : "f"(high), "f"(low));
  return v;
}

/// The halves that two E4M3 codes stand for, exactly.
__device__ inline uint32_t e4m3_halves(uint16_t codes) {
  uint32_t v;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(v) : "h"(codes));
  return v;
}

__device__ inline float half_to_float(uint16_t half) {
  float v;
  asm("cvt.f32.f16 %0, %1;" : "=f"(v) : "h"(half));
  return v;
}

/// Orders everything before it against everything after it, for all of this GPU.
__device__ inline void fence_gpu() { asm volatile("fence.acq_rel.gpu;" ::: "memory"); }

}  // namespace moed::cuda
