// How the leading block of a call loop hears of a call and tells the others: bell, record, ticket. What is likely to be
// rung for is at hand before. See call_loop.cu.
#pragma once

#include "kernels/cuda/call_route.cuh"

namespace moed::cuda {

/// A bell as it was found, the picture of the links, and how many blocks share a call.
struct Rung {
  uint32_t bell, picture, blocks;
};

inline constexpr uint32_t kEagerPolls = 8;  ///< looks at the bell after a call before anything else is done: some 4 us

/// The last warp waits for a bell; 0: none came, or a word says that the loop has to end. When none comes at once, or
/// the last call was the host's, the host is told of it as soon as all have answered; else it is told during the next
/// one.
__device__ inline Rung await_bell(const World& w, const LaneState& s, uint32_t n, CallBlock& b, Told& last) {
  const uint64_t until = b.take_until;
  const uint32_t lane = warp_lane();
  const uint32_t* const word = lane == 0   ? &b.mailbox->bell
                               : lane == 1 ? w.disarm
                               : lane == 2 ? &s.disarm
                               : lane == 3 ? w.present
                                           : &s.checked;
  const auto before = static_cast<uint32_t>(((b.turn >> kTurnBits) - 1) * (gridDim.x - 1));
  const uint32_t eager = b.last_bell == kHostBell ? 0 : kEagerPolls;
  uint32_t polls = 0;
  Rung before_it = {0, b.picture, b.all != 0 ? gridDim.x : 0};  // what the last look has shown beside a bell
  for (uint32_t base = 0;; base = base + 32 < w.ranks ? base + 32 : 0) {
    const uint32_t seen = load_u32(word);
    const bool tells = last.open != 0 && ++polls > eager;
    const uint64_t found = tells ? ask_return(w, n, b, last, base) : 0;
    // What was asked for takes its time; meanwhile a data warp may see the likely bell.
    for (uint32_t i = 0; i < 8 && before_it.blocks == gridDim.x; ++i)
      if (__any_sync(0xFFFFFFFFU, look(b.rung) != 0) != 0) return {b.likely, before_it.picture, before_it.blocks};
    const uint32_t bell = __shfl_sync(0xFFFFFFFFU, seen, 0);
    const uint32_t present = __shfl_sync(0xFFFFFFFFU, seen, 3);
    const bool disarmed = (__ballot_sync(0xFFFFFFFFU, seen != 0) & 6U) != 0;
    const uint32_t blocks = 1 + __shfl_sync(0xFFFFFFFFU, seen, 4) - before;
    const bool ready = blocks == gridDim.x || is_late(until - kTakeNs + kComeNs);
    if (lane == 0 && blocks == gridDim.x) b.all = 1;
    if ((bell == 0 || !ready) && !disarmed && !is_late(until)) {
      before_it = {0, present, blocks};
      if (!tells) continue;
      take_returns(w, n, b, last, base, found, last.done);
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
  const bool whole = call.number != 0 && call.plain != 0;  // else it is being registered, or not for the loop
  if (bell == 0 || bell > kMostRecords || !whole || call.call.valid != 0) return {0, {0, 0}};
  constexpr uint32_t kOwn = offsetof(CallTicket, count) / 16;
  const uint32_t part = warp_lane();
  if (part < kOwn) return {bell, reinterpret_cast<const ulonglong2*>(&call.call)[part]};
  if (part == kOwn) return {bell, {count, call.call.tokens | uint64_t{b.picture} << 32}};
  return {bell, {0, 0}};
}

/// The ticket of a guess, for blocks that all have begun.
template <class Z>
__device__ void put_guess(const World& w, CallBlock& b, const Guess& guess) {
  const uint32_t part = warp_lane();
  ulonglong2 words = guess.words;
  if (part == kTicketBlocks) words.x = uint64_t{gridDim.x} << 32;
  if (part < sizeof(CallTicket) / 16) reinterpret_cast<ulonglong2*>(&b.ticket)[part] = words;
  __syncwarp();
  if (part == 0) share_tokens<Z>(w, b);
  __syncwarp();
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
  if (part == 0 && b.now.number == 0) {  // not registered
    b.now.forced = Status::bad_call;
    b.now.plain = 0;
  }
  if (part == 0) b.last_bell = bell;
  __syncwarp();
}

/// A captured graph names its records in turn: the next one is read ahead. Records of an attach do not change; one that
/// is being registered has its number last, so what is read after a number was seen is whole.
static __device__ __noinline__ void read_ahead(const World& w, uint32_t lane, CallBlock& b) {
  if (b.last_bell >= kMostRecords || b.ahead_bell == b.last_bell + 1) return;  // the host's, too
  const uint32_t part = warp_lane();
  const auto* const from = reinterpret_cast<const std::byte*>(w.calls + uint64_t{lane} * kMostRecords + b.last_bell);
#pragma unroll 1
  for (uint32_t times = 0; times < 2; ++times) {
    if (part < sizeof(DeviceCall) / 16) reinterpret_cast<ulonglong2*>(&b.ahead)[part] = load_16(from + part * 16);
    __syncwarp();
    if (__any_sync(0xFFFFFFFFU, look(b.ahead.number) == 0) != 0) break;
  }
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

/// Takes a call that was not guessed, or none. The last warp.
template <class Z>
__device__ __noinline__ void take_rung(const World& w, LaneState& s, uint32_t lane, CallBlock& b, const Rung& rung) {
  const bool real = rung.bell != 0 && (rung.bell == kHostBell ? is_given(s) : rung.bell <= kMostRecords);
  if (warp_lane() == 0) {
    b.bell = rung.bell;
    b.repeats = rung.bell == b.last_bell ? 1 : 0;
    b.ticket.picture = rung.picture;
    b.ticket.blocks = rung.blocks;
    if (!real) b.turn = 0;
  }
  __syncwarp();
  if (!real) return;
  read_call(w, s, lane, b, rung.bell);
  Told& before = b.told[(call_number(b) + 1) % 2];
  if (rung.picture != b.picture && before.open != 0)
    tell(w, lane, before);  // its return lines lie where the old one says
  take_call(w, lane, b, b.turn, b.count + 1);
  if (warp_lane() == 0) share_tokens<Z>(w, b);
}

/// What is likely to be rung for is at hand before: the call of the last bell, or of the one behind it, whichever it
/// was last time. The leading block's last warp; b.likely: the bell of that call, whose ticket b.ticket is then; 0:
/// none.
template <class Z>
__device__ void expect_call(const World& w, CallBlock& b, uint64_t turn) {
  __syncwarp();
  const uint64_t count = b.count + 1;
  if (b.picture != ~0U) load_peers(w, b, count);  // most likely those of the call that comes
  Guess likely = b.repeats != 0 ? guess(b, b.now, b.last_bell, count) : guess(b, b.ahead, b.ahead_bell, count);
  if (b.picture == ~0U) likely.bell = 0;
  Told& told = b.told[turn % 2];
  if (warp_lane() == 0) {
    b.turn = turn;
    b.likely = likely.bell;
    b.refused = b.bad = b.stop = b.verdict = b.rung = b.known = 0;
    told.count = count;
    told.sent = told.decided = told.done = 0;
    told.slowest = told.failed = told.open = 0;
  }
  __syncwarp();
  if (likely.bell != 0) put_guess<Z>(w, b, likely);
}

/// The ticket to the other blocks. The last warp.
__device__ void tell_blocks(const World& w, uint32_t lane, const CallBlock& b, uint64_t turn) {
  ulonglong2 words = {0, 0};
  if (warp_lane() < sizeof(CallTicket) / 16) words = reinterpret_cast<const ulonglong2*>(&b.ticket)[warp_lane()];
  if (warp_lane() < kLineLanes) store_line(ticket_line(w, lane), words, turn);
}

/// The leading block waits for a bell and takes its call; b.turn = 0: the loop ends. The last warp.
template <class Z>
__device__ void await_call(const World& w, LaneState& s, uint32_t lane, CallBlock& b, const Room& room, uint64_t turn) {
  const uint32_t likely = b.likely;
  const bool shared = likely != 0 && busy_followers(b) != 0;
  const SmallRouting routing = likely != 0 && routes_alone<Z>(w, b) ? small_routing<Z>(w, b) : SmallRouting{};
  const Rung rung = await_bell(w, s, lane, b, b.told[(turn - 1) % 2]);
  if (rung.bell == likely) fetch_small(room, routing);
  const bool hit = rung.bell != 0 && rung.bell == likely && rung.picture == b.picture && rung.blocks == gridDim.x;
  if (hit) {
    if (warp_lane() == 0) show(b.known, kHit);
    if (shared) tell_blocks(w, lane, b, turn);
    if (warp_lane() == 0) b.bell = rung.bell;
    __syncwarp();
    arrive_some(kGoBarrier, kLoopThreads);  // it needs nothing of the others
    if (warp_lane() == 0) b.told[turn % 2].seen = global_time();
    __syncwarp();
    return;
  }
  if (warp_lane() == 0) show(b.known, kOther);
  if (warp_lane() == 0) b.told[turn % 2].seen = global_time();
  wait_copies<0>();                     // of another call
  sync_some(kGoBarrier, kLoopThreads);  // nobody goes by the ticket of the likely call any more
  take_rung<Z>(w, s, lane, b, rung);
  __syncwarp();
  sync_some(kGoBarrier, kLoopThreads);
  if (b.turn != 0 && b.refused == 0 && routes_alone<Z>(w, b)) fetch_routing<Z>(w, b, room, warp_lane(), 32);
  __syncwarp();
}

/// Starts copying what the likely call needs first, x of the first token or what has to be routed, as soon as this warp
/// sees the bell itself. False: something else has come, or it is not known what comes. The leading block's data warps.
template <class Z>
__device__ bool start_early(const World& w, CallBlock& b, const Room& room) {
  const uint32_t likely = b.likely;
  const bool alone = routes_alone<Z>(w, b);
  if (likely == 0 || (alone && (b.first >= b.ticket.valid || (b.ticket.flags & kFlagWire) != 0))) return false;
  const TokenInput x = alone ? input_of<Z>(w, b, b.first) : TokenInput{};
  const uint32_t* const bell = &b.mailbox->bell;
  for (bool rung = false; !rung;) {
    rung = __any_sync(0xFFFFFFFFU, load_u32(bell) == likely) != 0;
    if (!rung && __any_sync(0xFFFFFFFFU, look(b.known) != 0) != 0) return false;
  }
  if (warp_lane() == 0) show(b.rung, 1U);
  if (!alone) {
    fetch_routing<Z>(w, b, room, threadIdx.x, kTeam);
    return true;
  }
  fetch_input<Z>(w, {x.x, nullptr}, room.inputs);
  commit_copies();
  return true;
}

/// What is left to do with the bell when the other warps are at work. What was found in it, to be waited for later.
__device__ __noinline__ uint32_t settle_bell(CallBlock& b) {
  uint32_t rung = 0;
  if (warp_lane() == 0) rung = exchange_u32(&b.mailbox->bell, 0);
  if (b.bell == b.last_bell || b.bell != b.ahead_bell) return rung;
  const uint32_t part = warp_lane();
  if (part < sizeof(DeviceCall) / 16)
    reinterpret_cast<ulonglong2*>(&b.now)[part] = reinterpret_cast<const ulonglong2*>(&b.ahead)[part];
  if (part == 0) b.last_bell = b.bell;
  __syncwarp();
  return rung;
}

}  // namespace moed::cuda
