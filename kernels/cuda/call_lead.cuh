// What the leading block of a call loop does before a call is under way: bell, ticket, routing, call lines. See
// call_loop.cu.
#pragma once

#include "kernels/cuda/call_end.cuh"

namespace moed::cuda {

/// A bell as it was found, the picture of the links, and how many blocks share a call.
struct Rung {
  uint32_t bell, picture, blocks;
};

/// The last warp waits for a bell; 0: none came, or a word says that the loop has to end. Meanwhile the host is told of
/// the last call, as soon as all have answered it.
__device__ inline Rung await_bell(const World& w, const LaneState& s, uint32_t n, CallBlock& b, Told& last,
                                  uint64_t until) {
  const uint32_t lane = warp_lane();
  const uint32_t* const word = lane == 0   ? &b.mailbox->bell
                               : lane == 1 ? w.disarm
                               : lane == 2 ? &s.disarm
                               : lane == 3 ? w.present
                                           : &s.checked;
  const auto before = static_cast<uint32_t>(((b.turn >> kTurnBits) - 1) * (gridDim.x - 1));
  for (;;) {
    const uint32_t seen = load_u32(word);
    const uint64_t found = last.open != 0 ? ask_return(w, n, b, last, 0) : 0;
    const uint32_t bell = __shfl_sync(0xFFFFFFFFU, seen, 0);
    const uint32_t present = __shfl_sync(0xFFFFFFFFU, seen, 3);
    const bool disarmed = (__ballot_sync(0xFFFFFFFFU, seen != 0) & 6U) != 0;
    const uint32_t blocks = 1 + __shfl_sync(0xFFFFFFFFU, seen, 4) - before;
    const bool ready = blocks == gridDim.x || is_late(until - kTakeNs + kComeNs);
    if ((bell == 0 || !ready) && !disarmed && !is_late(until)) {
      if (last.open == 0) continue;
      take_returns(w, n, b, last, 0, found, last.done);
      if (empty(last.waiting) || is_late(last.done + kTellNs)) tell(w, n, last);
      continue;
    }
    return {disarmed ? 0 : bell, present, blocks};
  }
}

/// An engine can write the bell, too: what the host has not given is not taken, and nothing is taken twice.
__device__ inline bool is_given(LaneState& s) {
  const uint32_t number = load_u32(&s.host_number);
  const uint32_t taken = load_u32(&s.host_taken);
  if (number == taken) return false;
  // Waited for: the next loop, which may begin at once, has to find it.
  return __shfl_sync(0xFFFFFFFFU, warp_lane() == 0 ? exchange_u32(&s.host_taken, number) : 0, 0) == taken;
}

/// Which 16 bytes of a ticket say how many blocks share the call.
inline constexpr uint32_t kTicketBlocks = offsetof(CallTicket, blocks) / 16;
static_assert(offsetof(CallTicket, blocks) % 16 == 4);

/// A record that is likely to be rung for next, as its ticket: each lane of the last warp has 16 bytes.
struct Guess {
  uint32_t bell;  ///< 0: none
  ulonglong2 words;
};
__device__ inline Guess guess(const CallBlock& b, const DeviceCall& call, uint32_t bell, uint64_t count) {
  if (bell == 0 || bell > kMostRecords || call.plain == 0 || call.call.valid != 0) return {0, {0, 0}};
  constexpr uint32_t kOwn = offsetof(CallTicket, count) / 16;
  const uint32_t part = warp_lane();
  if (part < kOwn) return {bell, reinterpret_cast<const ulonglong2*>(&call.call)[part]};
  if (part == kOwn) return {bell, {count, call.call.tokens | uint64_t{b.picture} << 32}};
  return {bell, {0, 0}};
}

/// The ticket of a guess, for blocks that all have begun.
template <class Z>
__device__ ulonglong2 put_guess(const World& w, CallBlock& b, const Guess& guess) {
  const uint32_t part = warp_lane();
  ulonglong2 words = guess.words;
  if (part == kTicketBlocks) words.x = uint64_t{gridDim.x} << 32;
  if (part < sizeof(CallTicket) / 16) reinterpret_cast<ulonglong2*>(&b.ticket)[part] = words;
  __syncwarp();
  if (part == 0) share_tokens<Z>(w, b);
  __syncwarp();
  return words;
}

/// The record that a bell names into b.now. The last warp.
static __device__ __noinline__ void read_call(const World& w, const LaneState& s, uint32_t lane, CallBlock& b,
                                              uint32_t bell) {
  if (bell != kHostBell && bell == b.last_bell) return;
  const uint32_t part = warp_lane();
  const DeviceCall* const record = w.calls + uint64_t{lane} * kMostRecords + bell - 1;
  const auto* const from = reinterpret_cast<const std::byte*>(bell == kHostBell ? &s.host_call : record);
  const bool ahead = bell == b.ahead_bell && b.ahead.number != 0;
  if (part < sizeof(DeviceCall) / 16)
    reinterpret_cast<ulonglong2*>(&b.now)[part] =
        ahead ? reinterpret_cast<const ulonglong2*>(&b.ahead)[part] : load_16(from + part * 16);
  __syncwarp();
  if (part == 0 && b.now.number == 0) b.now.forced = Status::bad_call;  // not registered
  if (part == 0) b.last_bell = bell;
  __syncwarp();
}

/// A captured graph names its records in turn: the next one is read ahead. Records of an attach do not change.
static __device__ __noinline__ void read_ahead(const World& w, uint32_t lane, CallBlock& b) {
  if (b.last_bell >= kMostRecords || b.ahead_bell == b.last_bell + 1) return;  // the host's, too
  const uint32_t part = warp_lane();
  const auto* const from = reinterpret_cast<const std::byte*>(w.calls + uint64_t{lane} * kMostRecords + b.last_bell);
  if (part < sizeof(DeviceCall) / 16) reinterpret_cast<ulonglong2*>(&b.ahead)[part] = load_16(from + part * 16);
  __syncwarp();
  if (part == 0) b.ahead_bell = b.last_bell + 1;
}

/// Tells all blocks of the call, unless it is none for the loop. The last warp: each of its lanes has 16 bytes of it.
static __device__ __noinline__ void take_call(const World& w, uint32_t lane, CallBlock& b, uint64_t turn,
                                              uint64_t count) {
  const Call& c = b.now.call;
  const uint32_t part = warp_lane();
  uint32_t valid = c.tokens;
  if (b.now.forced == Status::ok && c.valid != 0) {
    const auto given = static_cast<int32_t>(load_u32(reinterpret_cast<const uint32_t*>(b.arena + c.valid)));
    valid = given < 0 ? 0 : min(static_cast<uint32_t>(given), c.tokens);
    valid = __shfl_sync(0xFFFFFFFFU, valid, 0);  // an engine may change it meanwhile
  }
  constexpr uint32_t kOwn = offsetof(CallTicket, count) / 16;
  static_assert(offsetof(CallTicket, count) % 16 == 0);
  ulonglong2 words = {0, 0};
  if (part < kOwn) words = reinterpret_cast<const ulonglong2*>(&c)[part];
  if (part == kOwn) words = {count, valid | uint64_t{look(b.ticket.picture)} << 32};
  if (part == kTicketBlocks) words.x = uint64_t{look(b.ticket.blocks)} << 32;
  const bool plain = b.now.plain != 0;
  if (plain && gridDim.x > 1 && part < kLineLanes) store_line(ticket_line(w, lane), words, turn);
  __syncwarp();
  if (part < sizeof(CallTicket) / 16) reinterpret_cast<ulonglong2*>(&b.ticket)[part] = words;
  if (part == 0) b.refused = plain ? 0 : 1;
  __syncwarp();
  if (b.picture != b.ticket.picture || b.next_count != count) load_peers(w, b, count);
}

/// Starts copying ids and weights once, to be checked and used from there. `threads` threads, of which this is
/// `thread`.
template <class Z>
__device__ void fetch_routing(const World& w, const CallBlock& b, const Room& room, uint32_t thread, uint32_t threads) {
  const RawBytes bytes = raw_bytes<Z>(w, b);
  uint8_t* const weights = raw_weights(room, bytes);
  const uint32_t mine = (threads - 1 - thread) * 16;  // the first threads have x to fetch
#pragma unroll 1
  for (uint32_t at = mine; at < bytes.ids; at += threads * 16)
    copy_16(room.raw + at, b.arena + b.ticket.ids + at, min(16U, bytes.ids - at));
#pragma unroll 1
  for (uint32_t at = mine; at < bytes.weights; at += threads * 16)
    copy_16(weights + at, b.arena + b.ticket.weights + at, min(16U, bytes.weights - at));
  commit_copies();
}

/// A token has a row at a rank, which has to be ready.
__device__ inline void note_token(CallBlock& b, uint32_t r, uint32_t token) {
  if (b.peer[r].ready == 0) b.bad = 1;
  atomicOr(&b.bits[r][token / 32], 1U << (token % 32));
}

/// Makes token records of it, where this block has tokens, and each rank's bitmap; b.bad: an id is out of range, or its
/// rank is not ready. Whole warps of `threads` threads, of which this is `thread`.
template <class Z>
__device__ void route(const World& w, CallBlock& b, const Room& room, uint32_t thread, uint32_t threads) {
  const uint32_t k = Z::top_k(w);
  const uint32_t slots = b.ticket.valid * k;
  const bool own = b.first < b.ticket.valid;  // else nobody here needs the records
#pragma unroll 1
  for (uint32_t base = thread - warp_lane(); base < slots; base += threads) {
    const uint32_t i = base + warp_lane();
    const uint32_t token = i * w.per_slot >> 16;
    const uint32_t slot = i - token * k;
    uint8_t* const record = room.records + token * Z::routing_bytes(w);
    const int64_t id = i < slots ? raw_id(b, room, i) : -1;
    const bool good = id >= 0 && id < static_cast<int64_t>(w.shape.experts);
    if (own && i < slots) put_slot<Z>(w, record, slot, id, raw_weight<Z>(w, b, room, i));
    if (id != -1 && !good) b.bad = 1;
    const uint32_t r = good ? owner_of(w, static_cast<uint32_t>(id)) : 0;
    if (routes_together<Z>(w)) {
      const uint32_t ranks = all_ranks<Z>(w, good ? 1U << r : 0);
      if (slot != 0 || i >= slots) continue;
      if (own) ranks_of<Z>(w, record).word[0] = ranks;
#pragma unroll 1
      for (uint32_t left = ranks; left != 0; left &= left - 1) note_token(b, __ffs(static_cast<int>(left)) - 1, token);
    } else if (good) {
      if (own) note_rank<Z>(w, record, r);
      note_token(b, r, token);
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

}  // namespace moed::cuda
