// The call loop: in one kernel from bell to done, call after call, for calls that run into nothing unusual. A leading
// block takes the bell, checks the routing and ends the call; it and the others dispatch the tokens and sum up their
// answers. Whatever is not plain - a bad id, a lost rank, a peer that is late, a call of several pieces - is handed to
// the kernels behind the loop, which know all cases.
//
// Blocks speak through lines in GPU memory alone, and nobody waits for a block that has not begun: a loop whose other
// blocks never come hands its call over like any other that takes too long.
#include "kernels/cuda/call_bell.cuh"
#include "kernels/cuda/passes.h"

namespace moed::cuda {
namespace {

/// Empties what a call's routing is collected in, and what will be told of it. The data warps, while they wait.
template <class Z>
__device__ void clear(const World& w, CallBlock& b, Told& told, const Room& room) {
#pragma unroll 1
  for (uint32_t i = threadIdx.x; i < w.ranks * kLoopWords; i += kTeam) b.bits[i / kLoopWords][i % kLoopWords] = 0;
#pragma unroll 1
  for (uint32_t i = threadIdx.x; i < kLoopTokens && i * Z::top_k(w) < kLoopSlots; i += kTeam)
    ranks_of<Z>(w, room.records + i * Z::routing_bytes(w)) = {};
  const uint32_t used = offsetof(CallRecord, peer) / 4 + w.ranks * static_cast<uint32_t>(sizeof(CallRecord::Peer)) / 4;
#pragma unroll 1
  for (uint32_t i = threadIdx.x; i < used; i += kTeam)
    reinterpret_cast<uint32_t*>(&told.record)[i] = i == offsetof(CallRecord, last) / 4 ? kNoRank : 0;
}

/// A token's ids and weights into its row. The leading block has them as the engine has, the others in their routing.
template <class Z>
__device__ void put_header(const World& w, const CallBlock& b, const Room& room, uint32_t token, const uint8_t* routing,
                           uint8_t* row) {
  const uint32_t slot = team_thread();
  if (slot >= Z::top_k(w)) return;
  const uint32_t i = token * Z::top_k(w) + slot;
  if (is_leading(b))
    put_slot<Z>(w, row, slot, raw_id(b, room, i), raw_weight<Z>(w, b, room, i));
  else
    reinterpret_cast<uint64_t*>(row)[slot] = reinterpret_cast<const uint64_t*>(routing)[slot];
}

/// This block's tokens have been summed up. Where nobody else has any, the call has ended, unless the last warp has
/// given it up.
__device__ void end_tokens(const World& w, uint32_t lane, CallBlock& b, uint32_t call) {
  const bool leads = is_leading(b);
  const bool alone = leads && threadIdx.x == 0 && busy_followers(b) == 0;
  uint32_t* const done = alone ? &b.mailbox->done : nullptr;
  while (alone && look(b.cleared) != call) continue;
  sync_team();
  if (done != nullptr && atomicCAS(&b.verdict, 0U, 1U) == 0) store_u32(done, 1);
  if (!leads && threadIdx.x == 0 && look(b.stop) == 0) add_u32(&w.lane[lane].arrived, 1);
}

/// The data warps of any block: one call. `started`: as next_call says.
template <class Z>
__device__ void do_tokens(const World& w, uint32_t lane, CallBlock& b, const Room& room, uint32_t call, bool started) {
  const bool leads = is_leading(b);
  const bool alone = routes_alone<Z>(w, b);
  if (leads && !alone) route_together<Z>(w, lane, b, room, call, started);
  if (b.first < b.ticket.tokens) {
    // The leading block has the routing of all tokens; the others of theirs.
    const uint32_t stride = Z::routing_bytes(w);
    const uint32_t each = (leads ? b.step : 1) * stride;
    fetch_first<Z>(w, b, room, started && alone);
    const bool go = dispatch_tokens<Z>(
        w, lane, b, room, room.records, each,
        [&](uint32_t i) {
          const uint32_t wanted = is_leading(b) ? kAllRouted : b.first >= b.ticket.valid ? 0 : i + 1;
          while (look(b.routed) < (call << 8 | wanted) && wanted != 0) continue;
          return !is_leading(b) || look(b.bad) == 0;
        },
        [&](uint32_t token, const uint8_t* routing, uint8_t* row) { put_header<Z>(w, b, room, token, routing, row); });
    wait_copies<0>();
    sync_team();
    if (go) {
      if (is_leading(b) && threadIdx.x == 0) show(b.told[call % 2].sent, global_time());
      sum_up<Z>(w, lane, b, room, room.records, each);
      end_tokens(w, lane, b, call);
    }
  }
  wait_copies<0>();  // of a leading block without tokens: weights
  if (threadIdx.x == 0) show(b.finished, call);
}

/// What only the leading block does before and after the calls of a loop. False: a call of an earlier pass goes on
/// behind the loop.
__device__ bool begin_loop(const World& w, LaneState& s, uint32_t lane, CallBlock& b) {
  if (threadIdx.x == kTeam) b.ticket.picture = begin_pass(w, lane, w.board->lane[lane].begun);
  __syncthreads();
  if (b.worked == 0 || s.running == 0) return true;
  if (threadIdx.x == kTeam) {
    s.picture = b.ticket.picture;
    s.mode = s.ended != Status::pending ? Mode::fail : s.sent != 0 ? Mode::wait : Mode::piece;
  }
  return false;
}

/// The others leave, and the next kernel may begin: it finds what it reads of this loop's where all look for it. What
/// was handed over is more: for that, kernels wait until this one has ended.
__device__ void end_loop(const World& w, LaneState& s, uint32_t lane, uint64_t turn, const CallBlock& b, bool handed) {
  static_assert(offsetof(CallTicket, leave) % 16 == 0);
  __syncthreads();
  if (threadIdx.x < kLineLanes && gridDim.x != 1)
    store_line(ticket_line(w, lane), {threadIdx.x == offsetof(CallTicket, leave) / 16 ? 1ULL : 0ULL, 0}, turn);
  if (threadIdx.x != 0) return;
  if (handed) store_u64(&w.board->lane[lane].handed, turn >> kTurnBits);
  const uint64_t before = exchange_u64(&s.count, b.count);
  const uint32_t worked = handed ? exchange_u32(&s.working, 1) : 0;
  if (before != ~0ULL && worked != ~0U) let_next_begin();
}

/// The last warp of the leading block, once the call is known: until it has ended. False: it has to be handed over.
template <class Z>
__device__ bool end_when_answered(const World& w, LaneState& s, uint32_t lane, CallBlock& b, const Room& room) {
  const uint32_t call = call_number(b);
  Told& told = b.told[call % 2];
  Told& before = b.told[(call + 1) % 2];
  if (b.refused == 0 && routes_alone<Z>(w, b)) route_alone<Z>(w, lane, b, room, call);
  const uint32_t rung = settle_bell(b);
  if (before.open != 0) {  // its answers have come meanwhile, or they never do
    look_at_returns(w, lane, b, before, before.done);
    tell(w, lane, before);
  }
  if (b.refused != 0) return false;
  read_ahead(w, lane, b);
  if (rung == ~0U) __nanosleep(0);  // what was found is waited for: the engine may ring again from here on
  if (warp_lane() == 0) show(b.cleared, call);
  while (look(b.routed) >> 8 != call) continue;
  if (look(b.bad) != 0) return false;
  const RankSet needed = needed_ranks(w, b);
  if (warp_lane() == 0) {
    told.waiting = needed;
    b.arrived += busy_followers(b);
  }
  __syncwarp();
  if (!await_sums(w, s, lane, b, told, min(told.seen + b.now.timeout_ns, b.take_until + kStayNs))) return false;
  end_call(b, told);
  return true;
}

/// One call of a loop, once all warps know it. False: the leading block has to hand it over.
template <class Z>
__device__ bool do_call(const World& w, uint32_t lane, CallBlock& b, const Room& room, bool started) {
  const bool leads = is_leading(b);
  const uint32_t call = call_number(b);
  bool good = true;
  if (!is_control()) {
    if (b.refused == 0) do_tokens<Z>(w, lane, b, room, call, started);
  } else if (leads) {
    good = end_when_answered<Z>(w, w.lane[lane], lane, b, room);
  } else {
    route_own<Z>(w, b, room, call);
    watch_leader(ticket_line(w, lane), b, call);
  }
  return __syncthreads_and(good ? 1 : 0) != 0;
}

/// Until all warps know the next call, or that the loop ends. True: what it needs first is under way (start_early).
template <class Z>
__device__ bool next_call(const World& w, LaneState& s, uint32_t lane, CallBlock& b, const Room& room, uint64_t turn) {
  const bool leads = is_leading(b);
  bool started = false;
  if (leads) {
    if (is_control())
      expect_call<Z>(w, b, turn);
    else
      clear<Z>(w, b, b.told[turn % 2], room);
    __syncthreads();
    if (!is_control()) started = start_early<Z>(w, b, room);
  }
  if (leads && is_control()) {
    await_call<Z>(w, s, lane, b, room, turn);
    return false;
  }
  if (is_control()) await_ticket<Z>(w, ticket_line(w, lane), b);
  sync_some(kGoBarrier, kLoopThreads);
  if (!leads || look(b.known) == kHit) return started;
  wait_copies<0>();  // of another call, before anything else is copied there
  sync_some(kGoBarrier, kLoopThreads);
  return false;
}

/// All calls of one loop, in one flow for the block that leads and for those that follow.
template <class Z>
__device__ void serve_lane(const World& w, uint32_t lane, uint64_t loop, CallBlock& b, const Room& room) {
  LaneState& s = w.lane[lane];
  bool open = !is_leading(b) || begin_loop(w, s, lane, b);
  uint32_t call = 0;
#pragma unroll 1
  while (open) {
    ++call;
    const bool started = next_call<Z>(w, s, lane, b, room, loop << kTurnBits | call);
    if (b.turn == 0) {  // the loop ends, or it was rung by a word that names no call
      if (!is_leading(b) || !is_control()) break;
      Told& before = b.told[(call + 1) % 2];
      if (before.open != 0) tell(w, lane, before);
      if (b.bell != 0) settle_bell(b);
      break;
    }
    open = do_call<Z>(w, lane, b, room, started);
    const bool told = b.refused == 0;  // to the others, who may have sent rows
    if (told && threadIdx.x == kTeam) ++b.count;
    if (!open) hand_over<Z>(w, s, lane, b, told && b.bad == 0 ? Mode::again : Mode::start, room);
  }
  if (is_leading(b)) end_loop(w, s, lane, loop << kTurnBits | (call + 1), b, !open);
}

/// What the kernels before have left. One thread.
__device__ void read_lane(const LaneState& s, CallBlock& b) {
  b.count = load_u64(&s.count);
  b.arrived = load_u32(&s.arrived);
  b.take_until = global_time() + kTakeNs;
}

template <class Z>
__global__ void __maxnreg__(kCallRegisters)
    call_loop(const __grid_constant__ World w, uint32_t lane, uint64_t loop, bool first) {
  extern __shared__ __align__(16) uint8_t memory[];
  __shared__ Shared<CallBlock> shared;
  CallBlock& b = in_register(shared.get());
  const Room room = room_in<Z>(w, &in_register(memory[0]));
  LaneState& s = w.lane[lane];
  if (threadIdx.x == 0) {
    b.index = begin_block(s.checked, loop);
    b.worked = load_u32_acquire(&s.working);  // what this L1 has of earlier loops is old
    b.arena = reinterpret_cast<std::byte*>(load_u64(reinterpret_cast<const uint64_t*>(&s.arena)));
    b.mailbox = reinterpret_cast<DeviceMailbox*>(load_u64(reinterpret_cast<const uint64_t*>(&s.mailbox)));
    b.picture = ~0U;
    b.finished = b.routed = b.cleared = b.refused = b.last_bell = b.ahead_bell = b.bell = 0;
    b.told[0].open = b.told[1].open = b.repeats = b.all = 0;
    b.turn = loop << kTurnBits;
    read_lane(s, b);
  }
  __syncthreads();
  if (b.worked != 0) {
    await_kernels_ahead();
    if (!first) {  // a loop of this pass has left a call to the kernels behind
      if (blockIdx.x == 0 && threadIdx.x == 0) begin_pass(w, lane, w.board->lane[lane].begun);
      return;
    }
    if (threadIdx.x == 0) read_lane(s, b);
    if (blockIdx.x == 0 && threadIdx.x == 0) static_cast<void>(exchange_u32(&s.working, 0));
  }
  for (uint32_t i = 0; i < 2 && !is_control(); ++i) pad_row<Z>(w, room.rows + i * Z::row_stride(w));
  __syncthreads();
  serve_lane<Z>(w, lane, loop, b, room);
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

void launch_call_loops(const World& w, uint32_t lane, uint64_t loop, uint32_t loops, cudaStream_t stream) {
  with_sizes(w.shape, [&]<class Z>(Z) {
    const Grid grid = {lane == 0 ? 1 : w.call_blocks, kLoopThreads, loop_bytes<Z>(w)};
    for (uint32_t i = 0; i < loops; ++i) launch(call_loop<Z>, grid, stream, w, lane, loop + i, i == 0);
  });
}

}  // namespace moed::cuda
