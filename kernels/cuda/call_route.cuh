// What the leading block of a call loop does with a call's ids: which ranks have rows of which tokens, and the call
// lines to them. See call_loop.cu.
#pragma once

#include "kernels/cuda/call_end.cuh"

namespace moed::cuda {

/// Starts copying ids and weights once, to be checked and used from there: a group of copies each. `threads` threads,
/// of which this is `thread`.
template <class Z>
__device__ void fetch_routing(const World& w, const CallBlock& b, const Room& room, uint32_t thread, uint32_t threads) {
  const RawBytes bytes = raw_bytes<Z>(w, b);
  uint8_t* const weights = raw_weights(room, bytes);
  const uint32_t mine = (threads - 1 - thread) * 16;  // the first threads have x to fetch
#pragma unroll 1
  for (uint32_t at = mine; at < bytes.ids; at += threads * 16)
    copy_16(room.raw + at, b.arena + b.ticket.ids + at, min(16U, bytes.ids - at));
  commit_copies();
#pragma unroll 1
  for (uint32_t at = mine; at < bytes.weights; at += threads * 16)
    copy_16(weights + at, b.arena + b.ticket.weights + at, min(16U, bytes.weights - at));
  commit_copies();
}

/// What the likely call has to be routed of, when one warp does it alone: 16 bytes a lane.
struct SmallRouting {
  const std::byte *ids, *weights;
  uint32_t ids_bytes, weights_bytes;  ///< of this lane
  uint32_t weights_at;                ///< in Room::raw
};
template <class Z>
__device__ SmallRouting small_routing(const World& w, const CallBlock& b) {
  static_assert(kAlone * sizeof(int64_t) <= 32 * 16);
  const RawBytes bytes = raw_bytes<Z>(w, b);
  const uint32_t at = warp_lane() * 16;
  return {b.arena + b.ticket.ids + at, b.arena + b.ticket.weights + at, at < bytes.ids ? min(16U, bytes.ids - at) : 0,
          at < bytes.weights ? min(16U, bytes.weights - at) : 0, weights_at(bytes)};
}
__device__ inline void fetch_small(const Room& room, const SmallRouting& r) {
  const uint32_t at = warp_lane() * 16;
  if (r.ids_bytes != 0) copy_16(room.raw + at, r.ids, r.ids_bytes);
  if (r.weights_bytes != 0) copy_16(room.raw + r.weights_at + at, r.weights, r.weights_bytes);
  commit_copies();
}

/// A token has a row at a rank, which has to be ready.
__device__ inline void note_token(CallBlock& b, uint32_t r, uint32_t token) {
  if (b.peer[r].ready == 0) b.bad = 1;
  atomicOr(&b.bits[r][token / 32], 1U << (token % 32));
}

/// The same for all tokens whose slots a warp has, 32 from token `first` on. K is a power of two, and there are 32
/// ranks at most: the lanes vote for rank after rank, then each of the first lanes has a token and a rank. `r`: of this
/// lane's slot; kMaxRanks: of none.
template <class Z>
__device__ void note_slots(const World& w, CallBlock& b, const Room& room, uint32_t r, uint32_t first) {
  const uint32_t k = Z::top_k(w);
  const uint32_t lane = warp_lane();
  const uint32_t slots = k == 32 ? 0xFFFFFFFFU : (1U << k) - 1;
  const uint32_t own = lane < 32 / k ? slots << (lane * k) : 0;
  uint32_t votes = 0;
  uint32_t ranks = 0;
#pragma unroll 2
  for (uint32_t q = 0; q < w.ranks; ++q) {
    const uint32_t vote = __ballot_sync(0xFFFFFFFFU, r == q);
    if (lane == q) votes = vote;
    if ((vote & own) != 0) ranks |= 1U << q;
  }
  if (own != 0 && first + lane < b.ticket.valid)
    ranks_of<Z>(w, room.records + (first + lane) * Z::routing_bytes(w)).word[0] = ranks;
  if (votes == 0) return;
  uint32_t tokens = 0;
#pragma unroll 4
  for (uint32_t i = 0; i < 32 / k; ++i) tokens |= (votes >> (i * k) & slots) != 0 ? 1U << i : 0;
  atomicOr(&b.bits[lane][first / 32], tokens << (first % 32));
  if (b.peer[lane].ready == 0) b.bad = 1;
}

/// The routing of a call, a lane for each slot: makes each rank's bitmap of it, and each token's ranks; b.bad: an id is
/// out of range, or its rank is not ready. `warps` warps, of which this is `warp`.
template <class Z>
__device__ void route_slots(const World& w, CallBlock& b, const Room& room, uint32_t warp, uint32_t warps) {
  const uint32_t k = Z::top_k(w);
  const uint32_t slots = b.ticket.valid * k;
#pragma unroll 1
  for (uint32_t base = warp * 32; base < slots; base += warps * 32) {
    const uint32_t i = base + warp_lane();
    const uint32_t expert = i < slots ? raw_expert(b, room, i) : kNoExpert;
    const bool good = expert < w.shape.experts;
    if (!good && expert != kNoExpert) b.bad = 1;
    const uint32_t r = good ? owner_of(w, expert) : kMaxRanks;
    if (routes_together<Z>(w)) {
      note_slots<Z>(w, b, room, r, base / k);
    } else if (good) {
      const uint32_t token = i * w.per_slot >> 16;
      note_rank<Z>(w, room.records + token * Z::routing_bytes(w), r);
      note_token(b, r, token);
    }
  }
}

/// The ranks from `base` on, 32 at most, that some of a token's slots go to: `per` slots from `from` on, in an order in
/// which neighbouring lanes meet different banks of shared memory.
template <class Z>
__device__ uint32_t ranks_of_slots(const World& w, CallBlock& b, const Room& room, uint32_t token, uint32_t from,
                                   uint32_t base) {
  const uint32_t k = Z::top_k(w);
  const uint32_t per = (k + 1) / 2;
  uint32_t step = (token % 16 * k / 32) % per;
  uint32_t ranks = 0;
  bool bad = false;
#pragma unroll 4
  for (uint32_t i = 0; i < per; ++i) {
    const uint32_t slot = from + step;
    step = step + 1 == per ? 0 : step + 1;
    const uint32_t expert = slot < k ? raw_expert(b, room, token * k + slot) : kNoExpert;
    const bool good = expert < w.shape.experts;
    bad = bad || (expert != kNoExpert && !good);
    const uint32_t r = (good ? owner_of(w, expert) : kMaxRanks) - base;
    if (r < 32) ranks |= 1U << r;
  }
  if (bad) b.bad = 1;
  return ranks;
}

/// The same of a larger call by the data warps, of which each has 16 tokens at a time, two lanes a token: a bitmap's
/// bits come from a vote.
template <class Z>
__device__ void route_tokens(const World& w, CallBlock& b, const Room& room) {
  const uint32_t k = Z::top_k(w);
  const uint32_t valid = b.ticket.valid;
  const uint32_t half = warp_lane() / 16;
#pragma unroll 1
  for (uint32_t first = team_thread() / 32 * 16; first < valid; first += kTeam / 2) {
    const uint32_t token = first + warp_lane() % 16;
    uint8_t* const record = room.records + token * Z::routing_bytes(w);
    const bool own = b.first < valid && token < valid;  // else nobody here asks for the token's ranks
#pragma unroll 1
    for (uint32_t base = 0; base < w.ranks; base += 32) {
      uint32_t ranks = token < valid ? ranks_of_slots<Z>(w, b, room, token, half * ((k + 1) / 2), base) : 0;
      ranks |= __shfl_xor_sync(0xFFFFFFFFU, ranks, 16);
      if (own && half == 0) reinterpret_cast<uint32_t*>(&ranks_of<Z>(w, record))[base / 32] = ranks;
      const uint32_t here = min(w.ranks - base, 32U);
      uint32_t mine = 0;  // of rank base + this lane: which tokens
#pragma unroll 1
      for (uint32_t r = 0; r < here; ++r) {
        const uint32_t tokens = __ballot_sync(0xFFFFFFFFU, (ranks >> r & 1) != 0);
        if (warp_lane() == r) mine = tokens;
      }
      if (warp_lane() >= here || mine == 0) continue;
      if (b.peer[base + warp_lane()].ready == 0) b.bad = 1;
      reinterpret_cast<uint16_t*>(b.bits[base + warp_lane()])[first / 16] = static_cast<uint16_t>(mine);
    }
  }
}

/// Call lines to the ranks. `threads` threads, of which this is `thread`.
__device__ inline void announce(const World& w, uint32_t lane, const CallBlock& b, uint32_t thread, uint32_t threads) {
  const uint32_t group = thread / kLineLanes;
  const uint32_t groups = threads / kLineLanes;
  const uint32_t part = thread % kLineLanes;
#pragma unroll 1
  for (uint32_t r = group; r < w.ranks; r += groups) {
    if (!is_needed(b, r)) continue;
    // CallLine as words: layer, tokens | generation << 16, bitmap.
    ulonglong2 words = {0, 0};
    const auto& bits = b.bits[r];
    static_assert(kLoopWords == 4);
    if (part == 0) words = {b.ticket.layer | uint64_t{b.ticket.valid} << 32, bits[0] | uint64_t{bits[1]} << 32};
    if (part == 1) words.x = bits[2] | uint64_t{bits[3]} << 32;
    store_line(b.peer[r].theirs + w.layout.call(lane), words, b.peer[r].awaited);
    if (part == 0 && b.peer[r].bell != nullptr) ring(b.peer[r].bell);
  }
}

/// The routing of the call, by the leading block's last warp; its ids and weights are under way.
template <class Z>
__device__ void route_alone(const World& w, uint32_t lane, CallBlock& b, const Room& room, uint32_t call) {
  wait_copies<0>();
  __syncwarp();
  route_slots<Z>(w, b, room, 0, 1);
  __threadfence_block();  // before the lines, for which it would wait
  __syncwarp();
  if (warp_lane() == 0) show(b.routed, call << 8 | kAllRouted);
  if (b.bad == 0) announce(w, lane, b, warp_lane(), 32);
}

/// The same by all the others.
template <class Z>
__device__ void route_together(const World& w, uint32_t lane, CallBlock& b, const Room& room, uint32_t call,
                               bool started) {
  if (!started) fetch_routing<Z>(w, b, room, threadIdx.x, kTeam);
  if (b.first < b.ticket.valid)
    wait_copies<0>();
  else
    wait_copies<1>();  // nobody here needs the weights, unless the call is handed over
  sync_team();
  if (b.ticket.valid * Z::top_k(w) <= kTeam)
    route_slots<Z>(w, b, room, threadIdx.x / 32, kTeam / 32);
  else
    route_tokens<Z>(w, b, room);
  sync_team();
  if (b.bad == 0) announce(w, lane, b, threadIdx.x, kTeam);
  if (threadIdx.x != 0) return;
  show(b.told[call % 2].sent, global_time());
  show(b.routed, call << 8 | kAllRouted);
}

}  // namespace moed::cuda
