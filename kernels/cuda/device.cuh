// Small things that several kernels do.
#pragma once

#include "kernels/cuda/ptx.cuh"
#include "kernels/cuda/state.h"
#include "kernels/cuda/wait.cuh"

namespace moed::cuda {

/// Shared memory for a type whose members have initial values, which shared memory cannot have.
template <class T>
struct Shared {
  alignas(128) unsigned char bytes[sizeof(T)];
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

/// 16 bytes as four words, two BF16 values each, and back.
__device__ inline void to_pairs(const ulonglong2& words, uint32_t (&pair)[4]) {
  pair[0] = static_cast<uint32_t>(words.x);
  pair[1] = static_cast<uint32_t>(words.x >> 32);
  pair[2] = static_cast<uint32_t>(words.y);
  pair[3] = static_cast<uint32_t>(words.y >> 32);
}
__device__ inline ulonglong2 from_pairs(const uint32_t (&pair)[4]) {
  return {pair[0] | uint64_t{pair[1]} << 32, pair[2] | uint64_t{pair[3]} << 32};
}

/// The greatest magnitude of eight BF16 values, as bits: above 0x7F80 there is a NaN.
__device__ inline uint32_t greatest_of(const uint32_t (&pair)[4]) {
  const uint32_t two = __vmaxu2(__vmaxu2(pair[0] & 0x7FFF7FFFU, pair[1] & 0x7FFF7FFFU),
                                __vmaxu2(pair[2] & 0x7FFF7FFFU, pair[3] & 0x7FFF7FFFU));
  return max(two & 0xFFFFU, two >> 16);
}

/// What bf16_pair_raw has made of NaNs becomes what bf16_pair makes of them. Rare.
__device__ inline void settle_nans(uint32_t (&pair)[4]) {
#pragma unroll
  for (uint32_t& two : pair) {
    if ((two & 0x7FFFU) > 0x7F80U) two = (two & 0xFFFF0000U) | 0x7FC0U;
    if ((two >> 16 & 0x7FFFU) > 0x7F80U) two = (two & 0xFFFFU) | 0x7FC00000U;
  }
}

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

/// Says that a loop has begun before it reads what the host may replace: the host replaces, then looks who has begun.
/// `which`: of w.begun. The addition has come back before the picture is read, so no fence is needed.
__device__ inline uint32_t begin_pass(const World& w, uint32_t which, uint64_t& mirror) {
  const uint64_t begun = fetch_add_u64(&w.begun[which], 1) + 1;
  if (begun == 0) return 0;
  store_u64(&mirror, begun);
  return load_u32(w.present);
}

/// A record for the host, by one warp, without a fence: the host takes it when all its words have their tag.
template <class Record>
__device__ void store_tagged(Tagged<Record>& to, const Record& from, uint64_t number, uint32_t bytes) {
  const auto* words = reinterpret_cast<const uint32_t*>(&from);
  const uint64_t tag = number << 32;
  for (uint32_t i = threadIdx.x % 32; i < (bytes + 3) / 4; i += 32) store_u64(&to.word[i], tag | words[i]);
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

__device__ inline bool is_identity(const World& w, uint32_t layer) {
  return layer == kIdentityLayer || (layer >= w.shape.first_layer && layer - w.shape.first_layer < w.shape.layers &&
                                     layer_experts(w, layer) == nullptr);
}

__device__ inline const uint32_t* bitmap_words(const CallLine& call) {
  return reinterpret_cast<const uint32_t*>(call.bitmap);
}

/// The rank that owns an expert, without a division: the quotient in FP32 is off by one at most.
__device__ inline uint32_t owner_of(const World& w, uint32_t expert) {
  const uint32_t n = (expert + 1) * w.ranks - 1;
  auto r = static_cast<uint32_t>(static_cast<float>(n) * w.per_expert);
  const auto left = static_cast<int32_t>(n - r * w.shape.experts);
  if (left < 0) --r;
  if (left >= static_cast<int32_t>(w.shape.experts)) ++r;
  return r;
}

__device__ inline bool is_local(const World& w, int32_t id) {
  return id >= 0 && static_cast<uint32_t>(id) >= w.first && static_cast<uint32_t>(id) - w.first < w.local;
}

/// Whether a loop of this pass has left something to the kernels behind it: then all kernels before have ended, and
/// what they have stored is seen. Else nobody waits, and nothing but `working` may be read of what they write.
__device__ inline bool has_work(const uint32_t& working) {
  if (load_u32(&working) == 0) return false;
  await_kernels_ahead();
  return true;
}

/// A source whose rows are in the pass.
__device__ inline bool served(const DeviceSource& s) {
  return s.status == static_cast<uint32_t>(Status::ok) && s.incomplete == 0;
}

}  // namespace moed::cuda
