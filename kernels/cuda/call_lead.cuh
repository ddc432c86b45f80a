// What the leading block of a call loop does beside its tokens: bell, routing, call lines, the end. See call_loop.cu.
#pragma once

#include "kernels/cuda/call_block.cuh"

namespace moed::cuda {

inline constexpr uint64_t kTellNs = 20'000;  ///< the record of a call waits for its return lines for so long

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

/// Tells all blocks of a call that was guessed right. The last warp.
__device__ inline void take_guess(std::byte* line, CallBlock& b, ulonglong2 words, uint64_t turn) {
  const uint32_t part = warp_lane();
  if (part == kTicketBlocks) words.x = uint64_t{b.ticket.blocks} << 32;
  if (gridDim.x > 1 && part < kLineLanes) store_line(line, words, turn);
  if (part < sizeof(CallTicket) / 16) reinterpret_cast<ulonglong2*>(&b.ticket)[part] = words;
}

/// The record that a bell names into b.now. The last warp.
__device__ inline void read_call(const World& w, const LaneState& s, uint32_t lane, CallBlock& b, uint32_t bell) {
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
__device__ inline void read_ahead(const World& w, uint32_t lane, CallBlock& b) {
  if (b.last_bell >= kMostRecords || b.ahead_bell == b.last_bell + 1) return;  // the host's, too
  const uint32_t part = warp_lane();
  const auto* const from = reinterpret_cast<const std::byte*>(w.calls + uint64_t{lane} * kMostRecords + b.last_bell);
  if (part < sizeof(DeviceCall) / 16) reinterpret_cast<ulonglong2*>(&b.ahead)[part] = load_16(from + part * 16);
  __syncwarp();
  if (part == 0) b.ahead_bell = b.last_bell + 1;
}

/// Tells all blocks of the call, unless it is none for the loop. The last warp: each of its lanes has 16 bytes of it.
__device__ inline void take_call(const World& w, uint32_t lane, CallBlock& b, uint64_t turn, uint64_t count) {
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

/// Bytes of the engine's ids, and of its weights, that this call has.
struct RawBytes {
  uint32_t ids, weights;
};
template <class Z>
__device__ RawBytes raw_bytes(const World& w, const CallBlock& b) {
  const uint32_t slots = b.ticket.valid * Z::top_k(w);
  return {slots * ((b.ticket.flags & kFlagIds64) != 0 ? 8 : 4),
          slots * ((b.ticket.flags & kFlagWeights16) != 0 ? 2 : 4)};
}
__device__ inline uint8_t* raw_weights(const Room& room, const RawBytes& bytes) {
  return room.raw + (bytes.ids + 15) / 16 * 16;
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

/// Makes token records of it and each rank's bitmap; b.bad: an id is out of range, or its rank is not ready. Whole
/// warps of `threads` threads, of which this is `thread`.
template <class Z>
__device__ void route(const World& w, CallBlock& b, const Room& room, uint32_t thread, uint32_t threads) {
  const uint32_t k = Z::top_k(w);
  const RawBytes bytes = raw_bytes<Z>(w, b);
  const uint8_t* const weights = raw_weights(room, bytes);
  const uint32_t slots = b.ticket.valid * k;
#pragma unroll 1
  for (uint32_t base = thread - warp_lane(); base < slots; base += threads) {
    const uint32_t i = base + warp_lane();
    const uint32_t token = i * w.per_slot >> 16;
    const uint32_t slot = i - token * k;
    uint8_t* const record = room.records + token * Z::routing_bytes(w);
    int64_t id = -1;
    bool good = false;
    if (i < slots) {
      if ((b.ticket.flags & kFlagIds64) != 0)
        id = reinterpret_cast<const int64_t*>(room.raw)[i];
      else
        id = reinterpret_cast<const int32_t*>(room.raw)[i];
      good = put_slot<Z>(w, record, slot, id,
                         (b.ticket.flags & kFlagWeights16) != 0
                             ? bf16_to_float(reinterpret_cast<const uint16_t*>(weights)[i])
                             : reinterpret_cast<const float*>(weights)[i]);
    }
    const uint32_t r = good ? owner_of(w, static_cast<uint32_t>(id)) : 0;
    if (id != -1 && (!good || b.peer[r].ready == 0)) b.bad = 1;
    if (routes_together<Z>(w)) {
      uint32_t ranks = all_ranks<Z>(w, good ? 1U << r : 0);
      if (slot != 0 || i >= slots) continue;
      ranks_of<Z>(w, record).word[0] = ranks;
#pragma unroll 1
      for (; ranks != 0; ranks &= ranks - 1)
        atomicOr(&b.bits[__ffs(static_cast<int>(ranks)) - 1][token / 32], 1U << (token % 32));
    } else if (good) {
      note_rank<Z>(w, record, r);
      atomicOr(&b.bits[r][token / 32], 1U << (token % 32));
    }
  }
}

__device__ inline bool is_needed(const CallBlock& b, uint32_t r) {
  uint32_t any = 0;
  for (const uint32_t word : b.bits[r]) any |= word;
  return any != 0;
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

/// Ranks that the call's tokens go to. The last warp.
__device__ inline RankSet needed_ranks(const World& w, const CallBlock& b) {
  RankSet all{};
  for (uint32_t base = 0; base < w.ranks; base += 32) {
    const uint32_t r = base + warp_lane();
    const uint32_t mine = __ballot_sync(0xFFFFFFFFU, r < w.ranks && is_needed(b, r));
    all.word[base / 64] |= uint64_t{mine} << (base % 64);
  }
  return all;
}

/// The sequence in the return line of this lane's rank, one of 32 from `base` on; 0: it is not waited for. The last
/// warp.
__device__ inline uint64_t ask_return(const World& w, uint32_t lane, const CallBlock& b, const Told& t, uint32_t base) {
  const uint32_t r = base + warp_lane();
  if (r >= w.ranks || !has(t.waiting, r)) return 0;
  return load_u64(reinterpret_cast<const uint64_t*>(b.peer[r].mine + w.layout.return_line(lane) + kLinePayload));
}

/// Notes who has answered of those asked. A line is written as a whole, so what is read of it after its sequence is as
/// new.
__device__ inline void take_returns(const World& w, uint32_t lane, const CallBlock& b, Told& t, uint32_t base,
                                    uint64_t found, uint64_t now) {
  const uint32_t r = base + warp_lane();
  const bool came = found != 0 && found == sequence(b.peer[r].session, t.count);
  const uint32_t all = __ballot_sync(0xFFFFFFFFU, came);
  if (all == 0) return;
  uint32_t took = 0;
  if (came) {  // ReturnLine: status, rows, pass_rows, pass_sources | queue, experts, send
    const std::byte* const line = b.peer[r].mine + w.layout.return_line(lane);
    const ulonglong2 first = load_16(line);
    const ulonglong2 times = load_16(line + 16);
    const uint64_t at = t.done != 0 ? t.done : now;
    CallRecord::Peer& peer = t.record.peer[r];
    peer = {t.sent != 0 && at > t.sent ? saturated(at - t.sent) : 0, static_cast<uint32_t>(times.x),
            static_cast<uint32_t>(times.x >> 32), static_cast<uint32_t>(times.y)};
    took = saturated(uint64_t{peer.queue} + peer.experts + peer.send);
    if (static_cast<uint32_t>(first.x) != 0) t.failed = 1;
  }
  const uint32_t most = __reduce_max_sync(0xFFFFFFFFU, took);
  const uint32_t whose = __ballot_sync(0xFFFFFFFFU, came && took == most);
  if (warp_lane() == 0) {
    t.waiting.word[base / 64] &= ~(uint64_t{all} << (base % 64));
    if (empty(t.waiting)) t.decided = now;
    if (most >= t.slowest) {
      t.slowest = most;
      t.record.last = base + __ffs(static_cast<int>(whose)) - 1;
    }
  }
  __syncwarp();
}

/// One look at the return lines of all ranks that have not answered. The last warp.
__device__ inline void look_at_returns(const World& w, uint32_t lane, const CallBlock& b, Told& t, uint64_t now) {
#pragma unroll 1
  for (uint32_t base = 0; base < w.ranks; base += 32)
    take_returns(w, lane, b, t, base, ask_return(w, lane, b, t, base), now);
}

/// Tells the host of the call that has ended. The last warp.
__device__ inline void tell(const World& w, uint32_t lane, Told& t) {
  HostLane& host = w.board->lane[lane];
  const CallRecord& r = t.record;
  const uint32_t used = offsetof(CallRecord, peer) + w.ranks * static_cast<uint32_t>(sizeof(CallRecord::Peer));
  store_tagged(host.record, r, r.count, used);
  if (warp_lane() == 0) {
    store_u64(&host.done, r.count << 32 | (r.number & 0xFFFFFFFFU));
    t.open = 0;
  }
  __syncwarp();
}

/// The last warp waits for a bell; 0: none came, or a word says that the loop has to end. Meanwhile the host is told of
/// the last call, as soon as all have answered it.
__device__ inline uint32_t await_bell(const World& w, const LaneState& s, uint32_t n, CallBlock& b, Told& last,
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
    if (lane == 0) {
      b.ticket.picture = present;
      b.ticket.blocks = blocks;
    }
    __syncwarp();
    return disarmed ? 0 : bell;
  }
}

/// The last warp waits until every block has summed up: `arrived` is at `expected`. A sum has all its partials, so
/// nobody waits for return lines; they say how long the ranks took, or that one does not serve the call. False: the
/// kernels behind the loop have to go on.
__device__ inline bool await_sums(const World& w, LaneState& s, uint32_t lane, CallBlock& b, Told& t, uint32_t expected,
                                  uint64_t until) {
  const uint32_t call = look(b.routed) >> 8;
  const uint32_t part = warp_lane();
  const uint32_t* const word = part == 0 ? &s.arrived : part == 1 ? w.disarm : part == 2 ? &s.disarm : w.present;
  uint32_t arrived = expected + 1;
  for (uint32_t base = 0;; base = base + 32 < w.ranks ? base + 32 : 0) {
    const uint32_t seen = load_u32(word);
    const uint64_t found = ask_return(w, lane, b, t, base);
    // What was asked for takes its time; meanwhile this block may end its part.
    for (uint32_t i = 0; i < 16 && arrived == expected; ++i)
      if (__all_sync(0xFFFFFFFFU, look(b.finished) == call) != 0) return true;
    const uint64_t now = __shfl_sync(0xFFFFFFFFU, global_time(), 0);
    arrived = __shfl_sync(0xFFFFFFFFU, seen, 0);
    if (arrived == expected && __all_sync(0xFFFFFFFFU, look(b.finished) == call) != 0) return true;
    take_returns(w, lane, b, t, base, found, now);
    const bool disarmed = (__ballot_sync(0xFFFFFFFFU, seen != 0) & 6U) != 0;
    const bool same = __shfl_sync(0xFFFFFFFFU, seen, 3) == b.ticket.picture;
    if (t.failed == 0 && !disarmed && same && now < until) continue;
    if (warp_lane() == 0) show(b.stop, 1U);
    while (look(b.finished) != call) continue;
    return false;
  }
}

/// Done first, then what the record says. The last warp. `rung`: what clearing the bell has found, so that it is
/// cleared before the engine may ring again.
__device__ inline void end_call(const CallBlock& b, Told& t, uint32_t rung) {
  if (warp_lane() != 0) return;
  store_u32(&b.mailbox->done, rung == ~0U ? 2 : 1);
  t.done = global_time();
  t.open = 1;
  const uint64_t sent = t.sent != 0 ? t.sent : t.seen;
  CallRecord& r = t.record;
  r.number = b.now.number;
  r.count = t.count;
  r.kind = b.ticket.kind;
  r.layer = b.ticket.layer;
  r.tokens = b.ticket.tokens;
  r.status = static_cast<uint32_t>(Status::ok);
  r.phase_ns[0] = sent - t.seen;
  r.phase_ns[1] = t.decided > sent ? t.decided - sent : t.done - sent;
  r.phase_ns[2] = t.done - t.seen - r.phase_ns[0] - r.phase_ns[1];
  r.total_ns = t.done - t.seen;
}

/// Everything that the kernels behind the loop need to know of the present call. All threads.
template <class Z>
__device__ void hand_over(const World& w, LaneState& s, uint32_t lane, const CallBlock& b, Mode mode,
                          const uint8_t* tokens) {
  const Told& t = b.told[call_number(b) % 2];
  const bool again = mode == Mode::again;
  for (uint32_t i = threadIdx.x; i < sizeof(DeviceCall) / 16; i += kLoopThreads)
    reinterpret_cast<uint4*>(&s.now)[i] = reinterpret_cast<const uint4*>(&b.now)[i];
  for (uint32_t i = threadIdx.x; i < sizeof(CallRecord) / 4; i += kLoopThreads)
    reinterpret_cast<uint32_t*>(&s.record)[i] = 0;
  for (uint32_t i = threadIdx.x; again && i < w.ranks * (kMaxTokens / 32); i += kLoopThreads) {
    const uint32_t word = i % (kMaxTokens / 32);
    s.bitmap[i / (kMaxTokens / 32)][word] = word < kLoopWords ? b.bits[i / (kMaxTokens / 32)][word] : 0;
  }
  const uint32_t k = w.shape.top_k;
  const uint64_t base = uint64_t{lane} * w.max_call_tokens * k;
  for (uint32_t i = threadIdx.x; again && i < b.ticket.valid * k; i += kLoopThreads) {
    const uint8_t* record = tokens + i / k * Z::routing_bytes(w);
    w.ids[base + i] = reinterpret_cast<const int32_t*>(record)[i % k];
    w.weights[base + i] = reinterpret_cast<const float*>(record + k * 4)[i % k];
  }
  __syncthreads();
  if (threadIdx.x != 0) return;
  s.record.last = kNoRank;
  s.picture = b.ticket.picture;
  s.valid = b.ticket.valid;
  s.done = s.sent = s.broken = s.late = 0;
  s.tokens = again ? b.ticket.valid : 0;
  s.running = 1;
  s.bad = ~0ULL;
  s.ended = Status::pending;
  s.good = Status::ok;
  s.needed = s.waiting = s.in = s.out = s.named = {};
  for (uint32_t r = 0; again && r < w.ranks; ++r) {
    s.awaited[r] = b.peer[r].awaited;
    if (is_needed(b, r)) s.needed.word[r / 64] |= 1ULL << (r % 64);
  }
  s.waiting = s.needed;
  s.seen = s.decided = t.seen;
  s.deadline = s.seen + b.now.timeout_ns;
  s.mode = mode;
  drill(w, w.call_delay_ns);
}

}  // namespace moed::cuda
