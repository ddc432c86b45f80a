// What every block of a call loop does: its tokens' rows and sums, and how blocks hear of calls. See call_loop.cu.
#pragma once

#include "kernels/cuda/loop.cuh"
#include "kernels/cuda/sums.cuh"

namespace moed::cuda {

inline constexpr uint32_t kTeams = 1, kData = kTeams * kTeam;  // a block has as many tokens in hand
inline constexpr uint32_t kLoopThreads = kData + 32;           // the last warp waits while the others work
inline constexpr uint32_t kInputs = 2;                         // tokens whose x is under way or there
inline constexpr uint32_t kLoopWords = kLoopTokens / 32;

/// What a block of the loop shares.
struct CallBlock {
  Peer peer[kMaxRanks];
  SumShared sums[kTeams];
  CallTicket ticket;
  DeviceCall now, ahead;  // the leading block's: the present call, and the record that is likely to be next
  std::byte* arena;
  uint64_t turn;        // the present ticket's number; 0: the loop ends
  uint32_t picture;     // that `peer` is from; ~0: none
  uint64_t next_count;  // that its sequences are of
  uint32_t stop;        // the data warps leave what they wait for
  uint32_t finished;    // teams that have ended their part of a call, over all calls of this loop
  // The leading block's:
  uint32_t bell, last_bell, ahead_bell;
  uint32_t refused;              // not for the loop; known before the barrier behind which the call begins
  uint32_t routed;               // call number of the loop whose routing is known
  uint32_t bad;                  // an id is out of range, or its rank not ready
  uint64_t seen, sent, decided;  // cycles
  uint32_t bits[kMaxRanks][kLoopWords];
  CallRecord record;
};

__device__ inline bool is_control() { return threadIdx.x >= kData; }
/// The same for a whole warp.
__device__ inline bool stopped(const CallBlock& b) { return __any_sync(0xFFFFFFFFU, look(b.stop) != 0) != 0; }

/// This thread's team, and the token that it begins with: teams of all blocks take them in turn.
__device__ inline uint32_t team() { return threadIdx.x / kTeam; }
__device__ inline uint32_t first_token() { return blockIdx.x + team() * gridDim.x; }
__device__ inline uint32_t token_step() { return kTeams * gridDim.x; }
/// All data warps.
__device__ inline void sync_data() { sync_some(1 + kTeams, kData); }

/// Where everything of the dynamic shared memory lies; rows and inputs are of this thread's team.
struct Room {
  uint8_t* records;  // routing of tokens: ids, weights, ranks; whole lines' payload each
  uint8_t* raw;      // the leading block: ids and weights as the engine has them
  uint8_t* rows;     // two row records
  uint8_t* inputs;   // x of kInputs tokens; later two rows of the sum
};
/// Bytes of the parts of Room, in its order, multiples of 16.
template <class Z>
__host__ __device__ uint32_t room_part(const World& w, uint32_t part) {
  const uint32_t most = kLoopSlots / Z::top_k(w);
  const uint32_t tokens = kLoopTokens < most ? kLoopTokens : most;
  const uint32_t bytes = part == 0   ? tokens * Z::token_lines(w) * kLinePayload
                         : part == 1 ? tokens * Z::top_k(w) * 12 + 16
                         : part == 2 ? 2 * Z::row_stride(w)
                                     : kInputs * Z::latent(w) * 2;
  return (bytes + 15) / 16 * 16 * (part < 2 ? 1 : kTeams);
}
template <class Z>
__device__ Room room_in(const World& w, uint8_t* memory) {
  Room room{};
  room.records = memory;
  room.raw = room.records + room_part<Z>(w, 0);
  room.rows = room.raw + room_part<Z>(w, 1);
  room.inputs = room.rows + room_part<Z>(w, 2);
  if (is_control()) return room;
  room.rows += team() * (room_part<Z>(w, 2) / kTeams);
  room.inputs += team() * (room_part<Z>(w, 3) / kTeams);
  return room;
}

/// Bytes of a token's record in shared memory.
template <class Z>
__device__ uint32_t record_stride(const World& w) {
  return Z::token_lines(w) * kLinePayload;
}
template <class Z>
__device__ RankSet& ranks_of(const World& w, uint8_t* record) {
  return *reinterpret_cast<RankSet*>(record + Z::top_k(w) * 8);
}

/// The line of the loop's tickets; the token records lie behind it.
template <class Z>
__device__ std::byte* ticket_line(const World& w, uint32_t lane) {
  return reinterpret_cast<std::byte*>(w.call_ticket + uint64_t{lane} * (1 + kLoopTokens * Z::token_lines(w)));
}
template <class Z>
__device__ std::byte* token_line(const World& w, uint32_t lane, uint32_t token, uint32_t l) {
  return ticket_line<Z>(w, lane) + (1 + token * Z::token_lines(w) + l) * kLineBytes;
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

/// Starts copying x of this team's first tokens; one group of copies each, with tokens or without.
template <class Z>
__device__ void fetch_first(const World& w, const CallBlock& b, const Room& room) {
  uint32_t t = first_token();
#pragma unroll 1
  for (uint32_t i = 0; i < kInputs; ++i, t += token_step()) {
    if (t < b.ticket.valid) fetch_input<Z>(w, input_of<Z>(w, b, t), room.inputs + i * (Z::latent(w) * 2));
    commit_copies();
  }
}

/// Dispatches this team's tokens; routing: of the first one, the others' `each` bytes apart. await_routing() is called
/// when the first token is quantised; false: nothing is sent.
template <class Z, class Await>
__device__ bool dispatch_tokens(const World& w, uint32_t lane, const CallBlock& b, const Room& room, uint8_t* routing,
                                uint32_t each, Await await_routing) {
  uint32_t i = 0;
#pragma unroll 1
  for (uint32_t t = first_token(); t < b.ticket.valid; t += token_step(), ++i, routing += each) {
    uint8_t* const row = room.rows + i % 2 * Z::row_stride(w);
    uint8_t* const slot = room.inputs + i % kInputs * (Z::latent(w) * 2);
    const TokenInput in = input_of<Z>(w, b, t);
    wait_copies<kInputs - 1>();
    sync_team();
    make_codes<Z>(w, in, slot, row);
    if (i == 0 && !await_routing()) return false;
    if (team_thread() < Z::top_k(w))  // ids and weights
      reinterpret_cast<uint64_t*>(row)[team_thread()] = reinterpret_cast<const uint64_t*>(routing)[team_thread()];
    sync_team();
    const uint32_t later = t + kInputs * token_step();
    if (later < b.ticket.valid) fetch_input<Z>(w, input_of<Z>(w, b, later), slot);
    commit_copies();
    store_row<Z>(w, b.peer, lane, t, ranks_of<Z>(w, routing), row);
  }
  return i != 0 || await_routing();
}

/// Zeros for padding among this team's tokens.
template <class Z>
__device__ __noinline__ void zero_padding(const World& w, const CallBlock& b) {
  const uint32_t n = Z::latent(w);
  for (uint32_t token = first_token(); token < b.ticket.tokens; token += token_step()) {
    if (token < b.ticket.valid) continue;
    auto* const to = reinterpret_cast<uint16_t*>(b.arena + b.ticket.out) + uint64_t{token} * n;
    for (uint32_t p = team_thread(); p < n / 8; p += kTeam) store_16(to + p * 8, {0, 0});
  }
}

/// Sums up this team's tokens and writes out, padding as zeros. Nothing is left under way when it returns.
template <class Z>
__device__ void sum_up(const World& w, uint32_t lane, CallBlock& b, const Room& room, uint8_t* routing, uint32_t each) {
  const CallTicket& t = b.ticket;
  const bool real = layer_experts(w, t.layer) != nullptr;
  const SumCall call = {real ? w.layers[t.layer - w.shape.first_layer].norm : nullptr,
                        w.shape.reduce == Reduce::sum_rmsnorm && (t.flags & kFlagNoNorm) == 0};
  auto* const out = reinterpret_cast<uint16_t*>(b.arena + t.out);
  sum_tokens<Z>(
      w, b.peer, lane, first_token(), token_step(), t.valid, call, out, reinterpret_cast<uint16_t*>(room.inputs),
      b.sums[team()], [&](uint32_t i) { return ranks_of<Z>(w, routing + i * each); },
      [&](uint32_t, uint32_t, uint64_t, bool) { return stopped(b); });
  if (t.valid < t.tokens) zero_padding<Z>(w, b);
  uint32_t all = 0;
#pragma unroll 1
  for (uint32_t token = first_token(); w.settle == kSettleTouch && token < t.tokens; token += token_step())
    all |= touch_row(out + uint64_t{token} * Z::latent(w), Z::latent(w));
  if (w.settle == kSettleFence) fence_gpu();
  if (all == 0x12345678U) show(b.stop, look(b.stop));  // so that what was touched is waited for
  sync_team();
}

// ---- How the blocks that follow hear of calls.

/// A new ticket of this loop after b.turn, by the last warp's first eight lanes; 0: there is none yet.
__device__ inline uint64_t read_ticket(const std::byte* line, uint64_t loop, CallBlock& b, bool take) {
  const uint32_t part = warp_lane();
  ulonglong2 words = {0, 0};
  if (part < kLineLanes) words = load_16(line + part * 16);
  const uint64_t found = __shfl_sync(0xFFFFFFFFU, words.y, kLineLanes - 1);
  if (found >> kTurnBits != loop || found <= b.turn) return 0;
  if (take && part < sizeof(CallTicket) / 16) reinterpret_cast<ulonglong2*>(&b.ticket)[part] = words;
  __syncwarp();
  return found;
}

/// The last warp, while the others work: they stop when the leading block has gone on, or when it is too late.
__device__ inline void watch_leader(const std::byte* line, uint64_t loop, CallBlock& b, uint32_t call, uint64_t until) {
  while (__any_sync(0xFFFFFFFFU, look(b.finished) != call * kTeams) != 0) {
    if (read_ticket(line, loop, b, false) == 0 && __any_sync(0xFFFFFFFFU, cycles() >= until) == 0) continue;
    if (warp_lane() == 0) show(b.stop, 1U);
  }
}

/// The routing of this team's tokens, as the leading block publishes it: eight lanes a line. False: stopped.
template <class Z>
__device__ bool read_tokens(const World& w, uint32_t lane, const CallBlock& b, uint8_t* records) {
  const uint32_t part = threadIdx.x % kLineLanes;
  const uint32_t lines = Z::token_lines(w);
  const uint32_t step = token_step();
  const uint32_t own = b.ticket.valid <= step ? 1 : (b.ticket.valid - first_token() + step - 1) / step;
#pragma unroll 1
  for (uint32_t base = team_thread() / 32 * 4; base < own * lines; base += kTeamGroups) {
    const uint32_t i = base + warp_lane() / kLineLanes;
    const bool mine = i < own * lines;
    const uint32_t which = i / lines;
    const std::byte* const line = token_line<Z>(w, lane, first_token() + which * step, i - which * lines) + part * 16;
    ulonglong2 words = {0, 0};
    for (;;) {
      if (mine) words = load_16(line);
      const bool there = __shfl_sync(0xFFFFFFFFU, words.y, kLineLanes - 1, kLineLanes) == b.turn;
      if (__all_sync(0xFFFFFFFFU, there || !mine) != 0 || stopped(b)) break;
    }
    if (!mine) continue;
    auto* const to = reinterpret_cast<uint64_t*>(records + i * kLinePayload) + part * 2;
    to[0] = words.x;
    if (part < kLineLanes - 1) to[1] = words.y;
  }
  return !any_of_some(1 + team(), kTeam, look(b.stop) != 0);
}

/// A following block waits for the next ticket; b.turn = 0: the loop ends. The last warp.
__device__ inline void await_ticket(const World& w, const std::byte* line, uint64_t loop, CallBlock& b,
                                    uint64_t until) {
  uint64_t found = 0;
  while (found == 0 && __any_sync(0xFFFFFFFFU, cycles() >= until) == 0) found = read_ticket(line, loop, b, true);
  if (warp_lane() == 0) {
    b.stop = 0;
    b.turn = found == 0 || b.ticket.leave != 0 ? 0 : found;
  }
  if (found != 0) load_peers(w, b, b.ticket.count);
}

}  // namespace moed::cuda
