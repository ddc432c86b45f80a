// What the leading block of a call loop does beside its tokens: bell, routing, call lines, the end. See call_loop.cu.
#pragma once

#include "kernels/cuda/call_block.cuh"

namespace moed::cuda {

/// The last warp waits for a bell; 0: none came, or a word says that the loop has to end.
__device__ inline uint32_t await_bell(const World& w, const LaneState& s, const uint32_t* bell_word, CallBlock& b,
                                      uint64_t until) {
  const uint32_t lane = warp_lane();
  const uint32_t* const word = lane == 0 ? bell_word : lane == 1 ? w.disarm : lane == 2 ? &s.disarm : w.present;
  for (;;) {
    const uint32_t seen = lane < 4 ? load_u32(word) : 0;
    const uint32_t bell = __shfl_sync(0xFFFFFFFFU, seen, 0);
    const uint32_t present = __shfl_sync(0xFFFFFFFFU, seen, 3);
    const bool disarmed = (__ballot_sync(0xFFFFFFFFU, seen != 0) & 6U) != 0;
    if (bell == 0 && !disarmed && __any_sync(0xFFFFFFFFU, cycles() >= until) == 0) continue;
    if (lane == 0) b.ticket.picture = present;
    __syncwarp();
    return disarmed ? 0 : bell;
  }
}

/// An engine can write the bell, too: what the host has not given is not taken, and nothing is taken twice.
__device__ inline bool is_given(LaneState& s) {
  const uint32_t number = load_u32(&s.host_number);
  const bool given = number != s.host_taken;
  __syncwarp();
  if (warp_lane() == 0) s.host_taken = number;
  return given;
}

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
__device__ inline void take_guess(std::byte* line, CallBlock& b, const ulonglong2& words, uint64_t turn) {
  const uint32_t part = warp_lane();
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
template <class Z>
__device__ void take_call(const World& w, uint32_t lane, CallBlock& b, uint64_t turn, uint64_t count) {
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
  const bool plain = b.now.plain != 0;
  if (plain && gridDim.x > 1 && part < kLineLanes) store_line(ticket_line<Z>(w, lane), words, turn);
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

/// A rank of one slot of a token: into the token's ranks and the rank's bitmap.
template <class Z>
__device__ void note_rank(const World& w, CallBlock& b, uint8_t* record, uint32_t token, uint32_t r) {
  atomicOr(reinterpret_cast<uint32_t*>(&ranks_of<Z>(w, record)) + r / 32, 1U << (r % 32));
  atomicOr(&b.bits[r][token / 32], 1U << (token % 32));
}

/// The same for all slots of a token that neighbouring lanes have, up to 32 ranks: one of them writes.
template <class Z>
__device__ void note_ranks(const World& w, CallBlock& b, uint8_t* record, uint32_t token, uint32_t slot,
                           uint32_t ranks) {
  const uint32_t k = Z::top_k(w);
#pragma unroll
  for (uint32_t i = 1; i < 32; i *= 2)
    if (i < k) ranks |= __shfl_xor_sync(0xFFFFFFFFU, ranks, i);
  if (slot != 0) return;
  ranks_of<Z>(w, record).word[0] = ranks;
#pragma unroll 1
  for (; ranks != 0; ranks &= ranks - 1)
    atomicOr(&b.bits[__ffs(static_cast<int>(ranks)) - 1][token / 32], 1U << (token % 32));
}

/// Makes token records of it and each rank's bitmap; b.bad: an id is out of range, or its rank is not ready. Whole
/// warps of `threads` threads, of which this is `thread`.
template <class Z>
__device__ void route(const World& w, CallBlock& b, const Room& room, uint32_t thread, uint32_t threads) {
  const uint32_t k = Z::top_k(w);
  const RawBytes bytes = raw_bytes<Z>(w, b);
  const uint8_t* const weights = raw_weights(room, bytes);
  const uint32_t slots = b.ticket.valid * k;
  const bool together = (k & (k - 1)) == 0 && w.ranks <= 32;
#pragma unroll 1
  for (uint32_t base = thread - warp_lane(); base < slots; base += threads) {
    const uint32_t i = base + warp_lane();
    const uint32_t token = i * w.per_slot >> 16;
    const uint32_t slot = i - token * k;
    uint8_t* const record = room.records + token * record_stride<Z>(w);
    int64_t id = -1;
    if (i < slots) {
      if ((b.ticket.flags & kFlagIds64) != 0)
        id = reinterpret_cast<const int64_t*>(room.raw)[i];
      else
        id = reinterpret_cast<const int32_t*>(room.raw)[i];
      reinterpret_cast<int32_t*>(record)[slot] = static_cast<int32_t>(id);
      reinterpret_cast<float*>(record + k * 4)[slot] =
          (b.ticket.flags & kFlagWeights16) != 0 ? bf16_to_float(reinterpret_cast<const uint16_t*>(weights)[i])
                                                 : reinterpret_cast<const float*>(weights)[i];
    }
    const bool good = id >= 0 && id < static_cast<int64_t>(w.shape.experts);
    const uint32_t r = good ? owner_of(w, static_cast<uint32_t>(id)) : 0;
    if (id != -1 && (!good || b.peer[r].ready == 0)) b.bad = 1;
    if (together)
      note_ranks<Z>(w, b, record, token, i < slots ? slot : 1, good ? 1U << r : 0);
    else if (good)
      note_rank<Z>(w, b, record, token, r);
  }
}

__device__ inline bool is_needed(const CallBlock& b, uint32_t r) {
  uint32_t any = 0;
  for (const uint32_t word : b.bits[r]) any |= word;
  return any != 0;
}

/// Call lines to the ranks, and the other blocks' tokens to them. `threads` threads, of which this is `thread`.
template <class Z>
__device__ void announce(const World& w, uint32_t lane, const CallBlock& b, const uint8_t* records, uint32_t thread,
                         uint32_t threads) {
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
  if (gridDim.x == 1 || b.ticket.valid <= 1) return;
  const uint32_t lines = Z::token_lines(w);
#pragma unroll 1
  for (uint32_t i = group; i < b.ticket.valid * lines; i += groups)
    store_line(token_line<Z>(w, lane, 0, i), record_words(reinterpret_cast<const uint64_t*>(records), i), b.turn);
}

/// What the last warp of the leading block finds while it waits.
struct Answers {
  RankSet waiting;
  bool failed;
};

/// One look at the return lines of the ranks that have not answered.
__device__ inline void look_at_returns(const World& w, uint32_t lane, CallBlock& b, uint64_t now, Answers& a) {
  const uint32_t part = warp_lane() % kLineLanes;
  uint32_t slowest = 0;
  for (uint32_t base = 0; base < w.ranks; base += 32 / kLineLanes) {
    const uint32_t r = base + warp_lane() / kLineLanes;
    const bool wanted = r < w.ranks && ((r < 64 ? a.waiting.word[0] : a.waiting.word[1]) >> (r % 64) & 1) != 0;
    ulonglong2 words = {0, 0};
    if (wanted) words = load_16(b.peer[r].mine + w.layout.return_line(lane) + part * 16);
    const uint64_t found = __shfl_sync(0xFFFFFFFFU, words.y, kLineLanes - 1, kLineLanes);
    const bool came = wanted && found == b.peer[r].awaited;
    const uint64_t sent = look(b.sent);
    // ReturnLine: status, rows, pass_rows, pass_sources | queue, experts, send.
    uint32_t took = 0;
    if (came && part == 1) {
      CallRecord::Peer& peer = b.record.peer[r];
      peer = {sent != 0 && now > sent ? saturated(now - sent) : 0, static_cast<uint32_t>(words.x),
              static_cast<uint32_t>(words.x >> 32), static_cast<uint32_t>(words.y)};
      took = saturated(uint64_t{peer.queue} + peer.experts + peer.send);
    }
    a.failed = a.failed || __any_sync(0xFFFFFFFFU, came && part == 0 && static_cast<uint32_t>(words.x) != 0) != 0;
    for (uint32_t left = __ballot_sync(0xFFFFFFFFU, came && part == 1); left != 0; left &= left - 1) {
      const uint32_t from = __ffs(static_cast<int>(left)) - 1;
      const uint32_t one = base + from / kLineLanes;
      if (one < 64)
        a.waiting.word[0] &= ~(1ULL << one);
      else
        a.waiting.word[1] &= ~(1ULL << (one - 64));
      const uint32_t its = __shfl_sync(0xFFFFFFFFU, took, static_cast<int>(from));
      if (its < slowest) continue;
      slowest = its;
      if (warp_lane() == 0) b.record.last = one;
    }
  }
}

/// The last warp waits until every rank has answered and every block has summed up. False: the kernels behind the loop
/// have to go on.
__device__ inline bool await_answers(const World& w, LaneState& s, uint32_t lane, CallBlock& b, uint32_t call,
                                     uint32_t expected, uint64_t until) {
  while (look(b.routed) != call) continue;
  if (look(b.bad) != 0) return false;
  Answers a{{}, false};
  for (uint32_t base = 0; base < w.ranks; base += 32) {
    const uint32_t r = base + warp_lane();
    const uint32_t mine = __ballot_sync(0xFFFFFFFFU, r < w.ranks && is_needed(b, r));
    if (base < 64)
      a.waiting.word[0] |= uint64_t{mine} << base;
    else
      a.waiting.word[1] |= uint64_t{mine} << (base - 64);
  }
  const uint32_t* const words[4] = {&s.arrived, w.disarm, &s.disarm, w.present};
  const uint32_t* const word = words[warp_lane() % 4];
  bool answered = false;
  for (;;) {
    const uint32_t seen = load_u32(word);
    const uint64_t now = __shfl_sync(0xFFFFFFFFU, cycles(), 0);
    if (!empty(a.waiting)) look_at_returns(w, lane, b, now, a);
    if (empty(a.waiting) && !answered) {
      answered = true;
      if (warp_lane() == 0) b.decided = now;
    }
    const bool all = __shfl_sync(0xFFFFFFFFU, seen, 0) == expected && look(b.finished) == call * kTeams;
    if (answered && all && !a.failed) return true;
    const bool disarmed = (__ballot_sync(0xFFFFFFFFU, seen != 0) & 6U) != 0;
    if (!a.failed && !disarmed && __shfl_sync(0xFFFFFFFFU, seen, 3) == b.ticket.picture && now < until) continue;
    if (warp_lane() == 0) show(b.stop, 1U);
    while (look(b.finished) != call * kTeams) continue;
    return false;
  }
}

/// Done first, then what the record says, in cycles still. The last warp.
__device__ inline void end_call(LaneState& s, CallBlock& b) {
  if (warp_lane() != 0) return;
  store_u32(&s.mailbox->done, 1);
  const uint64_t now = cycles();
  const uint64_t sent = b.sent != 0 ? b.sent : b.seen;
  const uint64_t decided = max(b.decided, sent);
  CallRecord& r = b.record;
  r.number = b.now.number;
  r.count = b.ticket.count;
  r.kind = b.ticket.kind;
  r.layer = b.ticket.layer;
  r.tokens = b.ticket.tokens;
  r.status = static_cast<uint32_t>(Status::ok);
  r.phase_ns[0] = sent - b.seen;
  r.phase_ns[1] = decided - sent;
  r.phase_ns[2] = now > decided ? now - decided : 0;
  r.total_ns = now - b.seen;
}

/// The record of the call that ended last, for the host. Cycles become nanoseconds by what has passed since the loop
/// began. A warp that has nothing else to do: the last one looks for the next bell.
__device__ inline void record_call(const World& w, uint32_t lane, CallBlock& b, const Clocks& began) {
  const Clocks now = read_clocks();
  const float each = static_cast<float>(now.ns - began.ns) / static_cast<float>(now.cycles - began.cycles);
  const auto scale = [&](uint64_t v) { return static_cast<uint64_t>(static_cast<float>(v) * each); };
  CallRecord& r = b.record;
  for (uint32_t k = warp_lane(); k < w.ranks; k += 32) r.peer[k].wait = saturated(scale(r.peer[k].wait));
  if (warp_lane() < 3) r.phase_ns[warp_lane()] = scale(r.phase_ns[warp_lane()]);
  if (warp_lane() == 3) r.total_ns = scale(r.total_ns);
  __syncwarp();
  HostLane& host = w.board->lane[lane];
  const uint32_t used = offsetof(CallRecord, peer) + w.ranks * static_cast<uint32_t>(sizeof(CallRecord::Peer));
  store_tagged(host.record, r, r.count, used);
  if (warp_lane() == 0) store_u64(&host.done, r.count << 32 | (r.number & 0xFFFFFFFFU));
}

/// Everything that the kernels behind the loop need to know of the present call. All threads.
template <class Z>
__device__ void hand_over(const World& w, LaneState& s, uint32_t lane, const CallBlock& b, Mode mode,
                          const uint8_t* tokens) {
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
    const uint8_t* record = tokens + i / k * record_stride<Z>(w);
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
  // How long ago the bell was seen, by the clock at its highest: if it is lower, the deadline comes a little late.
  s.seen = s.decided = global_time() - (cycles() - b.seen) * 1000 / w.megahertz;
  s.deadline = s.seen + b.now.timeout_ns;
  s.mode = mode;
  drill(w, w.call_delay_ns);
}

}  // namespace moed::cuda
