// The GPU's half of cuda_million_test: an engine that rings for records and compares their out itself, and a load
// beside it.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <cuda/ptx>

#include "daemon/abi/mailbox.h"
#include "kernels/cuda/ptx.cuh"

namespace moed::million {

inline constexpr uint32_t kRanks = 2, kThreads = 512, kLoadThreads = 256;
inline constexpr uint64_t kLongest = 2'000'000'000;   ///< ns that a call may take on the GPU
inline constexpr uint64_t kBulk = uint64_t{1} << 30;  ///< streamed by the load: far more than an L2 has

/// Tokens of the records, mostly few, as decoding has.
inline constexpr uint32_t kTokens[] = {1, 5, 16, 1,  3, 64, 2,   1,  8, 33, 5,  1, 4, 16, 128, 7,
                                       1, 5, 2,  12, 1, 3,  127, 1,  6, 1,  16, 5, 1, 9,  31,  2,
                                       1, 5, 17, 3,  1, 16, 4,   65, 1, 5,  10, 2, 1, 13, 5,   1};
inline constexpr uint32_t kRecords = sizeof kTokens / sizeof *kTokens;

/// A registered call as the engine knows it.
struct Record {
  uint16_t* out;
  const uint16_t* want;
  uint32_t parts;  ///< of out: eight elements each
  int32_t ulps;    ///< 0: the same bits
};

struct Difference {
  unsigned long long call;
  uint32_t record, element;
  uint16_t got, want;
};

/// What a rank's calls have come to so far.
struct Tally {
  unsigned long long calls, elements, wrong;
  unsigned long long endless;  ///< 1 + the call that had no end
  uint32_t claimed;            ///< `first` is taken
  Difference first;
};

/// Calls first to first + calls of a rank, while `limit` ns are not over.
struct Chunk {
  DeviceMailbox* box;
  const Record* records;
  Tally* tally;
  uint32_t* place;  ///< where the load keeps away: 1 + the multiprocessor
  uint64_t first, calls, limit;
  uint32_t rank;
};

/// Which record a call rings for, and how long the engine rests before it.
struct Step {
  uint32_t record, rest_ns;
};
__host__ __device__ inline Step step_of(uint32_t rank, uint64_t call) {
  uint64_t h = (call * kRanks + rank + 1) * 0x9E3779B97F4A7C15ULL;
  h = (h ^ h >> 30) * 0xBF58476D1CE4E5B9ULL;
  h = (h ^ h >> 27) * 0x94D049BB133111EBULL;
  h ^= h >> 31;
  const auto low = static_cast<uint32_t>(h);
  const uint32_t rest = low % 5000 == 0 ? 300'000 : low % 10 == 1 ? 1'000 + low / 10 % 29'000 : 0;
  return {static_cast<uint32_t>(h >> 32) % kRecords, rest};
}

/// bf16_ulps() of tolerance.h, which is the host's.
__device__ inline int32_t ulps_between(uint16_t a, uint16_t b) {
  const bool a_nan = (a & 0x7FFF) > 0x7F80;
  const bool b_nan = (b & 0x7FFF) > 0x7F80;
  if (a_nan || b_nan) return a_nan && b_nan ? 0 : 1 << 30;
  const int32_t x = (a & 0x8000) != 0 ? -int32_t{a & 0x7FFF} : int32_t{a};
  const int32_t y = (b & 0x8000) != 0 ? -int32_t{b & 0x7FFF} : int32_t{b};
  return abs(x - y);
}

/// Eight elements that are not the same bits.
__device__ inline void compare_part(const Chunk& c, const Record& r, Difference where, ulonglong2 got,
                                    ulonglong2 want) {
#pragma unroll 1
  for (uint32_t k = 0; k < 8; ++k) {
    where.got = static_cast<uint16_t>((k < 4 ? got.x : got.y) >> (16 * (k % 4)));
    where.want = static_cast<uint16_t>((k < 4 ? want.x : want.y) >> (16 * (k % 4)));
    if (r.ulps == 0 ? where.got == where.want : ulps_between(where.got, where.want) <= r.ulps) continue;
    atomicAdd(&c.tally->wrong, 1ULL);
    if (atomicExch(&c.tally->claimed, 1U) == 0) {
      c.tally->first = where;
      c.tally->first.element += k;
    }
  }
}

/// All of a record's out, read past L1; how many elements this thread has compared.
__device__ inline uint64_t compare(const Chunk& c, const Record& r, uint64_t call, uint32_t record) {
  constexpr uint32_t kAhead = 2;
  uint64_t compared = 0;
  for (uint32_t base = threadIdx.x; base < r.parts; base += kAhead * kThreads) {
    ulonglong2 got[kAhead] = {};
    ulonglong2 want[kAhead] = {};
#pragma unroll
    for (uint32_t k = 0; k < kAhead; ++k)
      if (base + k * kThreads < r.parts) got[k] = cuda::load_16(r.out + (base + k * kThreads) * 8);
#pragma unroll
    for (uint32_t k = 0; k < kAhead; ++k)
      if (base + k * kThreads < r.parts)
        want[k] = *reinterpret_cast<const ulonglong2*>(r.want + (base + k * kThreads) * 8);
#pragma unroll
    for (uint32_t k = 0; k < kAhead; ++k) {
      if (base + k * kThreads < r.parts) compared += 8;
      if (got[k].x != want[k].x || got[k].y != want[k].y)
        compare_part(c, r, {call, record, (base + k * kThreads) * 8, 0, 0}, got[k], want[k]);
    }
  }
  return compared;
}

/// Rings and waits for done. One thread. False: it did not come.
__device__ inline bool ring_for(const Chunk& c, uint64_t call, uint32_t record) {
  const uint64_t until = cuda::global_time() + kLongest;
  cuda::store_u32(&c.box->bell, 1 + record);
  while (cuda::load_u32(&c.box->done) == 0) {
    if (cuda::global_time() < until) continue;
    c.tally->endless = 1 + call;
    return false;
  }
  return true;
}

static __global__ void __launch_bounds__(kThreads, 2) call_and_compare(const __grid_constant__ Chunk c) {
  const bool leads = threadIdx.x == 0;
  const uint64_t until = cuda::global_time() + c.limit;
  if (leads) cuda::store_u32(c.place, 1 + ::cuda::ptx::get_sreg_smid());
  uint64_t elements = 0;
  uint64_t call = c.first;
  for (; call < c.first + c.calls; ++call) {
    const Step step = step_of(c.rank, call);
    const Record r = c.records[step.record];
    bool good = true;
    if (leads) {
      if (step.rest_ns != 0) __nanosleep(step.rest_ns);
      good = cuda::global_time() < until;
      cuda::store_u32(&c.box->done, 0);
    }
    if (__syncthreads_and(good ? 1 : 0) == 0) break;
    for (uint32_t i = threadIdx.x; i < r.parts; i += kThreads) cuda::store_16(r.out + i * 8, {~0ULL, ~0ULL});
    __threadfence_system();
    __syncthreads();
    if (leads) good = ring_for(c, call, step.record);
    if (__syncthreads_and(good ? 1 : 0) == 0) break;
    elements += compare(c, r, call, step.record);
  }
  atomicAdd(&c.tally->elements, static_cast<unsigned long long>(elements));
  if (!leads) return;
  atomicAdd(&c.tally->calls, static_cast<unsigned long long>(call - c.first));
  cuda::store_u32(c.place, 0);
}

/// What the load needs: bytes to read, and when to stop.
struct Stream {
  const uint4* memory;
  const uint32_t* end;  ///< on the host: not 0: stop
  uint32_t* places;     ///< [kRanks] multiprocessors of engines; then whether to stop, for all blocks
  uint32_t* sink;
  uint64_t limit;  ///< ns
};

/// Reads memory on all multiprocessors but those of engines, whose fences would wait for what it has under way.
static __global__ void __launch_bounds__(kLoadThreads) stream_memory(const __grid_constant__ Stream s) {
  constexpr uint64_t kCount = kBulk / sizeof(uint4);
  const uint64_t until = cuda::global_time() + s.limit;
  const uint32_t here = 1 + ::cuda::ptx::get_sreg_smid();
  uint64_t i = uint64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  uint32_t sum = 0;
  for (;;) {
    bool over = false;
    if (threadIdx.x == 0) {  // one looks at the host's word: all would stop whoever else writes there
      if (blockIdx.x == 0 && cuda::load_u32(s.end) != 0) cuda::store_u32(s.places + kRanks, 1);
      over = cuda::load_u32(s.places + kRanks) != 0 || cuda::global_time() > until;
    }
    if (__syncthreads_or(over ? 1 : 0) != 0) break;
    bool engine = false;
    for (uint32_t r = 0; r < kRanks; ++r) engine = engine || cuda::load_u32(s.places + r) == here;
    if (engine) {
      __nanosleep(20'000);
      continue;
    }
    for (uint32_t turn = 0; turn < 64; ++turn) {
      uint4 v[4];
#pragma unroll
      for (auto& one : v) {
        one = __ldcs(s.memory + i % kCount);
        i += uint64_t{gridDim.x} * blockDim.x;
      }
#pragma unroll
      for (const auto& one : v) sum += one.x ^ one.y ^ one.z ^ one.w;
    }
  }
  if (sum == 0x12345678U) *s.sink = sum;
}

}  // namespace moed::million
