// The call loop: in one kernel from bell to done, call after call, for calls that run into nothing unusual. A leading
// block takes the bell, checks the routing and ends the call; it and the others dispatch the tokens and sum up their
// answers. Whatever is not plain - a bad id, a lost rank, a peer that is late, a call of several pieces - is handed to
// the kernels behind the loop, which know all cases.
//
// Blocks speak through lines in GPU memory alone, and nobody waits for a block that has not begun: a loop whose other
// blocks never come hands its call over like any other that takes too long.
#include "kernels/cuda/call_lead.cuh"
#include "kernels/cuda/passes.h"

namespace moed::cuda {
namespace {

/// Empties what a call's routing is collected in. The data warps, while they wait.
template <class Z>
__device__ void clear(const World& w, CallBlock& b, const Room& room) {
#pragma unroll 1
  for (uint32_t i = threadIdx.x; i < w.ranks * kLoopWords; i += kData) b.bits[i / kLoopWords][i % kLoopWords] = 0;
#pragma unroll 1
  for (uint32_t i = threadIdx.x; i < kLoopTokens && i * Z::top_k(w) < kLoopSlots; i += kData)
    ranks_of<Z>(w, room.records + i * record_stride<Z>(w)) = {};
  const uint32_t used = offsetof(CallRecord, peer) / 4 + w.ranks * static_cast<uint32_t>(sizeof(CallRecord::Peer)) / 4;
#pragma unroll 1
  for (uint32_t i = threadIdx.x; i < used; i += kData)
    reinterpret_cast<uint32_t*>(&b.record)[i] = i == offsetof(CallRecord, last) / 4 ? kNoRank : 0;
}

/// Whether the last warp routes a call while the others quantise its first token: there is little to route.
template <class Z>
__device__ bool routes_alone(const World& w, const CallBlock& b) {
  return b.ticket.valid * Z::top_k(w) <= 64;
}

/// The routing of the call, by the leading block's last warp.
template <class Z>
__device__ void route_alone(const World& w, uint32_t lane, CallBlock& b, const Room& room, uint32_t call) {
  fetch_routing<Z>(w, b, room, warp_lane(), 32);
  wait_copies<0>();
  __syncwarp();
  route<Z>(w, b, room, warp_lane(), 32);
  __syncwarp();
  if (b.bad == 0) announce<Z>(w, lane, b, room.records, warp_lane(), 32);
  __threadfence_block();
  if (warp_lane() == 0) show(b.routed, call);
}

/// The same by all the others.
template <class Z>
__device__ void route_together(const World& w, uint32_t lane, CallBlock& b, const Room& room, uint32_t call) {
  wait_copies<kInputs>();
  sync_data();
  route<Z>(w, b, room, threadIdx.x, kData);
  sync_data();
  if (b.bad == 0) announce<Z>(w, lane, b, room.records, threadIdx.x, kData);
  if (threadIdx.x == 0) show(b.routed, call);
}

/// The data warps of any block: one call. The last warp follows by `routed` and `finished`.
template <class Z>
__device__ void do_tokens(const World& w, uint32_t lane, CallBlock& b, const Room& room, uint32_t call) {
  const bool leads = blockIdx.x == 0;
  if (leads || first_token() < b.ticket.tokens) {
    const uint32_t stride = record_stride<Z>(w);
    // The leading block has the routing of all tokens; the others of theirs.
    uint8_t* const routing = room.records + team() * (leads ? gridDim.x : kLoopTokens / 4) * stride;
    const uint32_t each = (leads ? token_step() : 1) * stride;
    const bool alone = routes_alone<Z>(w, b);
    if (leads && !alone) fetch_routing<Z>(w, b, room, threadIdx.x, kData);
    fetch_first<Z>(w, b, room);
    if (leads && !alone) route_together<Z>(w, lane, b, room, call);
    const bool go = dispatch_tokens<Z>(w, lane, b, room, routing, each, [&] {
      if (!leads) return first_token() >= b.ticket.valid || read_tokens<Z>(w, lane, b, routing);
      while (look(b.routed) != call) continue;
      return look(b.bad) == 0;
    });
    wait_copies<0>();
    sync_team();
    if (go) {
      if (threadIdx.x == 0) show(b.sent, cycles());
      sum_up<Z>(w, lane, b, room, routing, each);
      if (!leads && team_thread() == 0 && look(b.stop) == 0) add_u32(&w.lane[lane].arrived, 1);
    }
  }
  if (team_thread() == 0) atomicAdd(&b.finished, 1U);
}

/// The leading block waits for a bell and takes its call; b.turn = 0: the loop ends. The last warp. What is likely to
/// be rung for is at hand before: the record of the last call, and the one behind it.
template <class Z>
__device__ void await_call(const World& w, LaneState& s, uint32_t lane, CallBlock& b, uint64_t turn, uint64_t count,
                           uint64_t until) {
  if (b.picture != ~0U) load_peers(w, b, count);  // most likely those of the call that comes
  const Guess same = guess(b, b.now, b.last_bell, count);
  const Guess next = guess(b, b.ahead, b.ahead_bell, count);
  std::byte* const line = ticket_line<Z>(w, lane);
  uint32_t* const bell_word = &s.mailbox->bell;
  if (warp_lane() == 0) {
    b.turn = turn;
    b.refused = b.bad = b.stop = 0;
    b.sent = 0;
  }
  __syncwarp();
  const uint32_t bell = await_bell(w, s, bell_word, b, until);
  const bool known = bell != 0 && (bell == same.bell || bell == next.bell) && b.ticket.picture == b.picture;
  if (known) take_guess(line, b, bell == same.bell ? same.words : next.words, turn);
  const bool real = bell != 0 && (bell == kHostBell ? is_given(s) : bell <= kMostRecords);
  if (warp_lane() == 0) {
    b.bell = bell;
    b.seen = cycles();
    if (!real) b.turn = 0;
    if (!real) s.mode = Mode::none;
  }
  __syncwarp();
  if (!real || known) return;
  read_call(w, s, lane, b, bell);
  take_call<Z>(w, lane, b, turn, count);
}

/// What is left to do when the other warps are at work.
__device__ void settle_bell(LaneState& s, CallBlock& b) {
  if (warp_lane() == 0) store_u32(&s.mailbox->bell, 0);
  if (b.bell == b.last_bell || b.bell != b.ahead_bell) return;
  const uint32_t part = warp_lane();
  if (part < sizeof(DeviceCall) / 16)
    reinterpret_cast<ulonglong2*>(&b.now)[part] = reinterpret_cast<const ulonglong2*>(&b.ahead)[part];
  if (part == 0) b.last_bell = b.bell;
  __syncwarp();
}

/// What only the leading block does before and after the calls of a loop.
__device__ bool begin_loop(const World& w, LaneState& s, uint32_t lane, CallBlock& b) {
  if (threadIdx.x == kData) b.ticket.picture = begin_pass(w, lane, w.board->lane[lane].begun);
  __syncthreads();
  if (s.running == 0) return true;
  if (threadIdx.x == kData) {  // an earlier pass has begun it: the kernels behind go on
    s.picture = b.ticket.picture;
    s.mode = s.ended != Status::pending ? Mode::fail : s.sent != 0 ? Mode::wait : Mode::piece;
  }
  return false;
}
template <class Z>
__device__ void end_loop(const World& w, uint32_t lane, uint64_t turn) {
  static_assert(offsetof(CallTicket, leave) % 16 == 0);
  __syncthreads();
  if (threadIdx.x >= kLineLanes || gridDim.x == 1) return;
  store_line(ticket_line<Z>(w, lane), {threadIdx.x == offsetof(CallTicket, leave) / 16 ? 1ULL : 0ULL, 0}, turn);
}

/// The last warp of the leading block, once the call is known: until it has ended. False: it has to be handed over.
template <class Z>
__device__ bool end_when_answered(const World& w, LaneState& s, uint32_t lane, CallBlock& b, const Room& room,
                                  uint32_t call, uint32_t& arrived, uint64_t last) {
  if (routes_alone<Z>(w, b)) route_alone<Z>(w, lane, b, room, call);
  read_ahead(w, lane, b);
  const uint32_t teams = min(b.ticket.tokens, token_step());
  arrived += teams - (teams + gridDim.x - 1) / gridDim.x;  // this block's are seen by `finished`
  const uint64_t until = min(b.seen + cycles_of(w, b.now.timeout_ns), last);
  if (!await_answers(w, s, lane, b, call, arrived, until)) return false;
  end_call(s, b);
  return true;
}

/// All calls of one loop, in one flow for the block that leads and for those that follow.
template <class Z>
__device__ void serve_lane(const World& w, uint32_t lane, CallBlock& b, const Room& room) {
  LaneState& s = w.lane[lane];
  const std::byte* const line = ticket_line<Z>(w, lane);
  const bool leads = blockIdx.x == 0;
  const Clocks began = read_clocks();
  const uint64_t last_take = began.cycles + cycles_of(w, kTakeNs);
  const uint64_t last = began.cycles + cycles_of(w, kTakeNs + kStayNs);
  const uint64_t loop = s.loops + 1;
  uint64_t turn = loop << kTurnBits;
  uint64_t count = s.count;
  uint32_t arrived = s.arrived;
  bool open = !leads || begin_loop(w, s, lane, b);
#pragma unroll 1
  for (uint32_t call = 1; open; ++call) {
    ++turn;
    if (is_control()) {
      if (leads)
        await_call<Z>(w, s, lane, b, turn, count + 1, last_take);
      else
        await_ticket(w, line, loop, b, last);
    } else if (leads) {
      if (call > 1 && threadIdx.x < 32) record_call(w, lane, b, began);
      sync_data();
      clear<Z>(w, b, room);
    }
    __syncthreads();
    if (leads && is_control() && b.bell != 0) settle_bell(s, b);
    if (b.turn == 0) break;
    bool good = b.refused == 0;
    if (!good) {
    } else if (!is_control()) {
      do_tokens<Z>(w, lane, b, room, call);
    } else if (leads) {
      good = end_when_answered<Z>(w, s, lane, b, room, call, arrived, last);
    } else {
      watch_leader(line, loop, b, call, last);
    }
    open = __syncthreads_and(good ? 1 : 0) != 0;
    const bool sent = open || (b.routed == call && b.bad == 0);
    if (leads && sent) ++count;
    if (!open) hand_over<Z>(w, s, lane, b, sent ? Mode::again : Mode::start, room.records);
  }
  if (!leads) return;
  if (threadIdx.x == 0) s.count = count;
  end_loop<Z>(w, lane, turn + 1);
}

template <class Z>
__global__ void __launch_bounds__(kLoopThreads, 4) call_loop(const __grid_constant__ World w, uint32_t lane) {
  extern __shared__ __align__(16) uint8_t memory[];
  __shared__ Shared<CallBlock> shared;
  CallBlock& b = in_register(shared.get());
  const Room room = room_in<Z>(w, &in_register(memory[0]));
  if (threadIdx.x == 0) {
    b.arena = w.lane[lane].arena;
    b.picture = ~0U;
    b.finished = b.routed = b.refused = b.last_bell = b.ahead_bell = b.bell = 0;
    b.turn = (w.lane[lane].loops + 1) << kTurnBits;
  }
  for (uint32_t i = 0; i < 2 && !is_control(); ++i) pad_row<Z>(w, room.rows + i * Z::row_stride(w));
  __syncthreads();
  serve_lane<Z>(w, lane, b, room);
}

template <class Z>
uint32_t loop_bytes(const World& w) {
  uint32_t bytes = 0;
  for (uint32_t part = 0; part < 4; ++part) bytes += room_part<Z>(w, part);
  return bytes;
}

}  // namespace

cudaError_t prepare_call_loop(const World& w) {
  return with_sizes(w.shape, [&]<class Z>(Z) {
    return cudaFuncSetAttribute(call_loop<Z>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                static_cast<int>(loop_bytes<Z>(w)));
  });
}

cudaError_t add_call_loops(const World& w, LoopNeeds& needs) {
  return with_sizes(w.shape, [&]<class Z>(Z) {
    const uint64_t blocks = 1 + uint64_t{w.layout.lanes_all - 1} * w.call_blocks;
    return add_needs(call_loop<Z>, blocks, kLoopThreads, loop_bytes<Z>(w), needs);
  });
}

void launch_call_loop(const World& w, uint32_t lane, cudaStream_t stream) {
  with_sizes(w.shape, [&]<class Z>(Z) {
    call_loop<Z><<<lane == 0 ? 1 : w.call_blocks, kLoopThreads, loop_bytes<Z>(w), stream>>>(w, lane);
  });
}

}  // namespace moed::cuda
