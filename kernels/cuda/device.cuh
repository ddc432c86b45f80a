// Small things that several kernels do.
#pragma once

#include "kernels/cuda/ptx.cuh"
#include "kernels/cuda/state.h"
#include "kernels/cuda/wait.cuh"

namespace moed::cuda {

/// Shared memory for a type whose members have initial values, which shared memory cannot have.
template <class T>
struct Shared {
  alignas(16) unsigned char bytes[sizeof(T)];
  __device__ T& get() { return *reinterpret_cast<T*>(bytes); }
};

__device__ inline bool has(const RankSet& set, uint32_t r) { return (set.word[r / 64] >> (r % 64) & 1) != 0; }

/// Adds to a set that other threads change, too.
__device__ inline void add_atomic(RankSet& set, uint32_t r) {
  atomicOr(reinterpret_cast<unsigned long long*>(&set.word[r / 64]), 1ULL << (r % 64));
}
__device__ inline void remove_atomic(RankSet& set, uint32_t r) {
  atomicAnd(reinterpret_cast<unsigned long long*>(&set.word[r / 64]), ~(1ULL << (r % 64)));
}

__device__ inline bool empty(const RankSet& set) { return (set.word[0] | set.word[1]) == 0; }

__device__ inline uint32_t saturated(uint64_t v) { return v < 0xFFFFFFFFULL ? static_cast<uint32_t>(v) : 0xFFFFFFFFU; }

/// Publishes 120 bytes of payload as one line: eight lanes call it together, each with its 16 bytes; the last lane's
/// second word becomes the sequence.
__device__ inline void store_line(std::byte* line, ulonglong2 words, uint64_t sequence) {
  const uint32_t lane = threadIdx.x % kLineLanes;
  if (lane == kLineLanes - 1) words.y = sequence;
  store_16(line + lane * 16, words);
}

/// This lane's 16 bytes of line `number` of a record in memory that is readable up to whole lines, 8-byte aligned.
__device__ inline ulonglong2 record_words(const uint64_t* record, uint32_t number) {
  const uint32_t lane = threadIdx.x % kLineLanes;
  const uint64_t* at = record + number * (kLinePayload / 8) + lane * 2;
  return {at[0], lane == kLineLanes - 1 ? 0 : at[1]};
}

/// Leaves a fault for the host. Slots are used in turn; the number tells a reader which it is.
__device__ inline void report_fault(const World& w, const WaitFault& fault) {
  const uint64_t number = atomicAdd(reinterpret_cast<unsigned long long*>(w.faults), 1ULL) + 1;
  DeviceFault& slot = w.board->fault[(number - 1) % kFaults];
  slot.fault = fault;
  store_u64_release(&slot.number, number);
}

/// Says that a pass has begun before it reads what the host may replace: the host replaces, then looks who has begun.
__device__ inline uint32_t begin_pass(const World& w, uint64_t& passes, uint64_t& begun) {
  store_u64_release(&begun, ++passes);
  fence_system();
  return load_u32_acquire(w.present);
}

/// A drill's delay, while drills are on.
__device__ inline void drill(const World& w, uint64_t ns) {
  if (ns != 0 && (w.delay_for_ns == 0 || global_time() < w.serve->started + w.delay_for_ns)) delay(ns);
}

/// Identity layers have no experts.
__device__ inline const uint8_t* layer_experts(const World& w, uint32_t layer) {
  const uint32_t m = layer - w.shape.first_layer;
  return layer == kIdentityLayer || layer < w.shape.first_layer || m >= w.model_layers ? nullptr : w.layers[m].experts;
}

__device__ inline bool is_local(const World& w, int32_t id) {
  return id >= 0 && static_cast<uint32_t>(id) >= w.first && static_cast<uint32_t>(id) - w.first < w.local;
}

/// A source whose rows are in the pass.
__device__ inline bool served(const DeviceSource& s) {
  return s.status == static_cast<uint32_t>(Status::ok) && s.incomplete == 0;
}

}  // namespace moed::cuda
