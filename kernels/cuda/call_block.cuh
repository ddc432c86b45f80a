// What every block of a call loop does: its tokens' rows and sums, and how blocks hear of calls. See call_loop.cu.
#pragma once

#include "kernels/cuda/loop.cuh"
#include "kernels/cuda/sums.cuh"

namespace moed::cuda {

inline constexpr uint32_t kLoopThreads = kTeam + 32;  // the last warp waits while the others work
inline constexpr uint32_t kCallRegisters = 64;        // with kServeRegisters less than a quarter of an H200's in all
inline constexpr uint32_t kInputs = 2;                // tokens whose x is under way or there
inline constexpr uint32_t kLoopWords = kLoopTokens / 32;
inline constexpr uint32_t kAlone = 64;       // slots that one warp routes while the others quantise
inline constexpr uint32_t kManyBlocks = 16;  // of so many the leading one has no tokens of larger calls
inline constexpr uint32_t kAllRouted = 255;
inline constexpr uint32_t kGoBarrier = 2;        // behind it all warps know the call
inline constexpr uint32_t kHit = 1, kOther = 2;  // CallBlock::known

/// A call as its leading block will tell of it. The return lines of its ranks may come after its end: nothing but their
/// times is missing then.
struct Told {
  RankSet waiting;                     // ranks whose return line has not come
  uint64_t count;                      // of the call
  uint64_t seen, sent, decided, done;  // global_time; decided: when all had answered; done: 0 before its end
  uint32_t slowest, failed;            // ns that the slowest rank took; a rank has not served it
  uint32_t open;                       // it has ended and the host has not been told
  CallRecord record;
};

/// What a block of the loop shares.
struct CallBlock {
  Peer peer[kMaxRanks];
  SumShared sums;
  CallTicket ticket;
  DeviceCall now, ahead;  // the leading block's: the present call, and the record that is likely to be next
  std::byte* arena;
  DeviceMailbox* mailbox;
  uint64_t turn;         // the present ticket's number; 0: the loop ends
  uint32_t picture;      // that `peer` is from; ~0: none
  uint64_t next_count;   // that its sequences are of
  uint64_t take_until;   // global_time until which the loop takes calls
  uint32_t stop;         // the data warps leave what they wait for
  uint32_t worked;       // the pass before has left a call to the kernels behind the loops
  uint32_t index;        // among the blocks that follow, from 1 in the order in which they have begun; 0: it leads
  uint32_t first, step;  // this block's tokens of the present call
  uint32_t routed;       // call of the loop << 8 | tokens whose routing is known, of this block; kAllRouted: of all
  uint32_t finished;     // call of the loop whose part of this block is done
  // The leading block's:
  uint64_t count;    // the lane's calls so far
  uint32_t arrived;  // what LaneState::arrived is when all have summed up the present call
  uint32_t bell, last_bell, ahead_bell;
  uint32_t repeats;  // the last bell was the one before
  uint32_t likely;   // the bell of the call that is likely to come, whose ticket is here; 0: none
  uint32_t all;      // all blocks have begun
  uint32_t rung;     // a data warp has seen the bell of the likely call
  uint32_t known;    // 0: what has come is not known; kHit: the likely call; kOther: something else
  uint32_t refused;  // not for the loop; known before the barrier behind which the call begins
  uint32_t bad;      // an id is out of range, or its rank not ready
  uint32_t cleared;  // call of the loop whose bell has been cleared
  uint32_t verdict;  // of a call that this block sums up alone: 1: it has ended, 2: it is given up
  uint32_t bits[kMaxRanks][kLoopWords];
  Told told[2];  // by the number of the call in this loop
};

__device__ inline bool is_control() { return threadIdx.x >= kTeam; }
/// The same for a whole warp.
__device__ inline bool stopped(const CallBlock& b) { return __any_sync(0xFFFFFFFFU, look(b.stop) != 0) != 0; }

/// Whether the leading block's last warp routes a call while the others quantise its first token: there is little to
/// route.
template <class Z>
__device__ bool routes_alone(const World& w, const CallBlock& b) {
  return b.ticket.valid * Z::top_k(w) <= kAlone;
}

/// Whether this block takes the bell; the same for all of its threads.
__device__ inline bool is_leading(const CallBlock& b) { return look(b.index) == 0; }

/// The present call's number within its loop, from 1.
__device__ inline uint32_t call_number(const CallBlock& b) {
  return static_cast<uint32_t>(b.turn) & ((1U << kTurnBits) - 1);
}

/// Which tokens of the ticket's call are this block's: all blocks that have begun take them in turn. Of larger calls
/// the leading block has none when there are blocks enough: it has the routing of all to check.
template <class Z>
__device__ void share_tokens(const World& w, CallBlock& b) {
  const uint32_t blocks = b.ticket.blocks;
  const bool all = routes_alone<Z>(w, b) || blocks < kManyBlocks;
  b.step = all ? blocks : blocks - 1;
  b.first = b.index >= blocks ? ~0U : all ? b.index : b.index - 1;  // ~0 for the leading one, too
}
/// Blocks beside the leading one that have tokens.
__device__ inline uint32_t busy_followers(const CallBlock& b) {
  const uint32_t blocks = min(b.ticket.tokens, b.step);
  return b.step != b.ticket.blocks ? blocks : blocks == 0 ? 0 : blocks - 1;
}

/// Where everything of the dynamic shared memory lies.
struct Room {
  uint8_t* records;  // routing of tokens: ids, weights (not the leading block's), ranks
  uint8_t* raw;      // the leading block: ids and weights as the engine has them
  uint8_t* rows;     // two row records
  uint8_t* inputs;   // x of kInputs tokens; later two rows of the sum
};
/// Bytes of the parts of Room, in its order, multiples of 16.
template <class Z>
__host__ __device__ uint32_t room_part(const World& w, uint32_t part) {
  const uint32_t most = kLoopSlots / Z::top_k(w);
  const uint32_t tokens = kLoopTokens < most ? kLoopTokens : most;
  const uint32_t bytes = part == 0   ? tokens * Z::routing_bytes(w)
                         : part == 1 ? tokens * Z::top_k(w) * 12 + 16
                         : part == 2 ? 2 * Z::row_stride(w)
                                     : kInputs * Z::latent(w) * 2;
  return (bytes + 15) / 16 * 16;
}
template <class Z>
__device__ Room room_in(const World& w, uint8_t* memory) {
  Room room{};
  room.records = memory;
  room.raw = room.records + room_part<Z>(w, 0);
  room.rows = room.raw + room_part<Z>(w, 1);
  room.inputs = room.rows + room_part<Z>(w, 2);
  return room;
}

template <class Z>
__device__ RankSet& ranks_of(const World& w, uint8_t* record) {
  return *reinterpret_cast<RankSet*>(record + Z::top_k(w) * 8);
}

/// The line of the loop's tickets.
__device__ inline std::byte* ticket_line(const World& w, uint32_t lane) {
  return reinterpret_cast<std::byte*>(w.call_ticket + lane);
}

/// The links of the ticket's picture, when it is another one, and the sequences of call `count`. The last warp.
__device__ inline void load_peers(const World& w, CallBlock& b, uint64_t count) {
  const bool changed = b.picture != b.ticket.picture;
#pragma unroll 1
  for (uint32_t r = warp_lane(); r < w.ranks; r += 32) {
    Peer& peer = b.peer[r];
    if (changed) {
      const DeviceLink& link = w.pictures[b.ticket.picture].link[r];
      peer.theirs = link.theirs;
      peer.mine = link.mine;
      peer.bell = link.bell;
      peer.session = link.session;
      peer.ready = link.state == LinkState::ready ? 1 : 0;
    }
    peer.awaited = sequence(peer.session, count);
  }
  __syncwarp();
  if (warp_lane() == 0) {
    b.picture = b.ticket.picture;
    b.next_count = count;
  }
  __syncwarp();
}

/// x of token t of the present call.
template <class Z>
__device__ TokenInput input_of(const World& w, const CallBlock& b, uint32_t t) {
  const CallTicket& ticket = b.ticket;
  const uint32_t n = Z::latent(w);
  if ((ticket.flags & kFlagWire) == 0) return {b.arena + ticket.x + uint64_t{t} * (n * 2), nullptr};
  return {b.arena + ticket.x + uint64_t{t} * n, b.arena + ticket.scales + uint64_t{t} * (n / kBlock)};
}

/// Starts copying x of this block's first tokens, the very first one's unless it is under way; one group of copies
/// each, with tokens or without.
template <class Z>
__device__ void fetch_first(const World& w, const CallBlock& b, const Room& room, bool started) {
  uint32_t t = b.first + (started ? b.step : 0);
#pragma unroll 1
  for (uint32_t i = started ? 1 : 0; i < kInputs; ++i, t += b.step) {
    if (t < b.ticket.valid) fetch_input<Z>(w, input_of<Z>(w, b, t), room.inputs + i * (Z::latent(w) * 2));
    commit_copies();
  }
}

/// Dispatches this block's tokens; routing: of the first one, the others' `each` bytes apart. await_routing(i) is
/// called when the i-th token is quantised; false: nothing more is sent. put_header(token, routing, row): ids and
/// weights into a row.
template <class Z, class Await, class PutHeader>
__device__ bool dispatch_tokens(const World& w, uint32_t lane, const CallBlock& b, const Room& room, uint8_t* routing,
                                uint32_t each, Await await_routing, PutHeader put_header) {
  uint32_t i = 0;
#pragma unroll 1
  for (uint32_t t = b.first; t < b.ticket.valid; t += b.step, ++i, routing += each) {
    uint8_t* const row = room.rows + i % 2 * Z::row_stride(w);
    uint8_t* const slot = room.inputs + i % kInputs * (Z::latent(w) * 2);
    const TokenInput in = input_of<Z>(w, b, t);
    wait_copies<kInputs - 1>();
    if (in.scales != nullptr) sync_team();  // else every thread has copied itself what it reads
    make_codes<Z>(w, in, slot, row);
    if (!await_routing(i)) return false;
    put_header(t, routing, row);
    sync_team();
    const uint32_t later = t + kInputs * b.step;
    if (later < b.ticket.valid) fetch_input<Z>(w, input_of<Z>(w, b, later), slot);
    commit_copies();
    store_row<Z>(w, b.peer, lane, t, ranks_of<Z>(w, routing), row);
  }
  return i != 0 || await_routing(0);
}

/// Zeros for padding among this block's tokens.
template <class Z>
__device__ __noinline__ uint32_t zero_padding(const World& w, const CallBlock& b, bool settle) {
  const uint32_t n = Z::latent(w);
  uint32_t before = 0;
  for (uint32_t token = b.first; token < b.ticket.tokens; token += b.step) {
    if (token < b.ticket.valid) continue;
    auto* const to = reinterpret_cast<uint16_t*>(b.arena + b.ticket.out) + uint64_t{token} * n;
    for (uint32_t p = team_thread(); p < n / 8; p += kTeam) before |= put_16(to + p * 8, {0, 0}, settle);
  }
  return before;
}

/// Sums up this block's tokens and writes out, padding as zeros. Nothing of this thread's is under way when it returns.
template <class Z>
__device__ void sum_up(const World& w, uint32_t lane, CallBlock& b, const Room& room, uint8_t* routing, uint32_t each) {
  const CallTicket& t = b.ticket;
  const bool settle = w.settle == kSettleConfirm;
  uint32_t before = sum_tokens<Z>(
      w, b.peer, lane, b.first, b.step, t.valid, reinterpret_cast<uint16_t*>(room.inputs), b.sums,
      [&](uint32_t i) -> const RankSet& { return ranks_of<Z>(w, routing + i * each); },
      [&](uint32_t token) -> SumCall {
        const bool real = layer_experts(w, t.layer) != nullptr;
        return {real ? w.layers[t.layer - w.shape.first_layer].norm : nullptr,
                reinterpret_cast<uint16_t*>(b.arena + t.out) + uint64_t{token} * Z::latent(w),
                w.shape.reduce == Reduce::sum_rmsnorm && (t.flags & kFlagNoNorm) == 0, settle};
      },
      [&](uint32_t, uint32_t, uint64_t, bool) { return stopped(b); });
  if (t.valid < t.tokens) before |= zero_padding<Z>(w, b, settle);
  if (w.settle == kSettleFence) fence_gpu();
  if (before == 0x12345678U) show(b.stop, look(b.stop));  // so that what was there before is waited for
}

/// A rank of one slot of a token: into the token's ranks.
template <class Z>
__device__ void note_rank(const World& w, uint8_t* record, uint32_t r) {
  atomicOr(reinterpret_cast<uint32_t*>(&ranks_of<Z>(w, record)) + r / 32, 1U << (r % 32));
}

/// The ranks of all slots of a token that neighbouring lanes have: K is a power of two and there are 32 ranks at most.
template <class Z>
__device__ uint32_t all_ranks(const World& w, uint32_t ranks) {
  const uint32_t k = Z::top_k(w);
  const uint32_t slots = k == 32 ? 0xFFFFFFFFU : ((1U << k) - 1) << (warp_lane() & ~(k - 1));
  return __reduce_or_sync(slots, ranks);
}
template <class Z>
__device__ bool routes_together(const World& w) {
  return (Z::top_k(w) & (Z::top_k(w) - 1)) == 0 && w.ranks <= 32;
}

/// A slot's id and weight into its token's record.
template <class Z>
__device__ void put_slot(const World& w, uint8_t* record, uint32_t slot, int64_t id, float weight) {
  reinterpret_cast<int32_t*>(record)[slot] = static_cast<int32_t>(id);
  reinterpret_cast<float*>(record + Z::top_k(w) * 4)[slot] = weight;
}

/// The routing of this block's own tokens, read where the engine has it: the leading block checks that of all, and what
/// is bad there ends the call for all. The last warp of a block that follows; the others go on token by token.
template <class Z>
__device__ void route_own(const World& w, CallBlock& b, const Room& room, uint32_t call) {
  const uint32_t k = Z::top_k(w);
  const uint32_t own = b.first < b.ticket.valid ? (b.ticket.valid - b.first + b.step - 1) / b.step : 0;
#pragma unroll 1
  for (uint32_t base = 0; base < own * k; base += 32) {
    const uint32_t s = base + warp_lane();
    const uint32_t i = s * w.per_slot >> 16;
    const uint32_t slot = s - i * k;
    const uint64_t at = uint64_t{b.first + i * b.step} * k + slot;
    uint8_t* const record = room.records + i * Z::routing_bytes(w);
    uint32_t r = kMaxRanks;
    if (s < own * k) {
      const std::byte* const id = b.arena + b.ticket.ids;
      const std::byte* const weight = b.arena + b.ticket.weights;
      const bool wide = (b.ticket.flags & kFlagIds64) != 0;
      const bool half = (b.ticket.flags & kFlagWeights16) != 0;
      const float value = half ? bf16_to_float(load_u16(weight + at * 2))
                               : float_of(load_u32(reinterpret_cast<const uint32_t*>(weight) + at));
      const int64_t e = wide ? static_cast<int64_t>(load_u64(reinterpret_cast<const uint64_t*>(id) + at))
                             : static_cast<int32_t>(load_u32(reinterpret_cast<const uint32_t*>(id) + at));
      put_slot<Z>(w, record, slot, e, value);
      if (e >= 0 && e < static_cast<int64_t>(w.shape.experts)) r = owner_of(w, static_cast<uint32_t>(e));
      if (r < kMaxRanks && b.peer[r].ready == 0) r = kMaxRanks;
      if (slot == 0) ranks_of<Z>(w, record) = {};
    }
    __syncwarp();
    if (routes_together<Z>(w)) {
      const uint32_t ranks = all_ranks<Z>(w, r < 32 ? 1U << r : 0);
      if (s < own * k && slot == 0) ranks_of<Z>(w, record).word[0] = ranks;
    } else if (r < kMaxRanks) {
      note_rank<Z>(w, record, r);
    }
    __threadfence_block();
    __syncwarp();
    if (warp_lane() == 0) show(b.routed, call << 8 | min((base + 32) / k, kAllRouted));
  }
}

// ---- How the blocks that follow hear of calls.

/// A ticket after b.turn, of this loop or a later one, by the last warp's first eight lanes; 0: there is none yet.
__device__ inline uint64_t read_ticket(const std::byte* line, CallBlock& b, bool take) {
  const uint32_t part = warp_lane();
  ulonglong2 words = {0, 0};
  if (part < kLineLanes) words = load_16(line + part * 16);
  const uint64_t found = __shfl_sync(0xFFFFFFFFU, words.y, kLineLanes - 1);
  if (found <= b.turn) return 0;
  if (take && part < sizeof(CallTicket) / 16) reinterpret_cast<ulonglong2*>(&b.ticket)[part] = words;
  __syncwarp();
  return found;
}

/// The last warp, while the others work: they stop when the leading block has gone on, or when it is too late.
__device__ inline void watch_leader(const std::byte* line, CallBlock& b, uint32_t call) {
  const uint64_t until = b.take_until + kStayNs;
  while (__any_sync(0xFFFFFFFFU, look(b.finished) != call) != 0) {
    if (read_ticket(line, b, false) == 0 && !is_late(until)) continue;
    if (warp_lane() == 0) show(b.stop, 1U);
  }
}

/// A following block waits for the next ticket; b.turn = 0: the loop ends. The last warp.
template <class Z>
__device__ void await_ticket(const World& w, const std::byte* line, CallBlock& b) {
  const uint64_t until = b.take_until + kStayNs;
  const uint64_t loop = b.turn >> kTurnBits;
  uint64_t found = 0;
  while (found == 0 && !is_late(until)) found = read_ticket(line, b, true);
  const bool go = found >> kTurnBits == loop && b.ticket.leave == 0;
  if (warp_lane() == 0) {
    b.stop = 0;
    b.turn = go ? found : 0;
    share_tokens<Z>(w, b);
  }
  __syncwarp();
  if (go) load_peers(w, b, b.ticket.count);
}

}  // namespace moed::cuda
