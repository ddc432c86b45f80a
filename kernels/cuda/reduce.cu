// The call pass from the wait to its end: return lines, the sum in rank order, the norm, the record.
#include "kernels/cuda/passes.h"
#include "kernels/cuda/sums.cuh"

namespace moed::cuda {
namespace {

constexpr uint32_t kWaitThreads = 128, kReduceBlocks = 264, kFinishThreads = 32;
constexpr unsigned long long kNobody = ~0ULL;

__device__ void add_saturating(uint32_t& total, uint64_t v) { total = saturated(uint64_t{total} + v); }

/// Whether what was sent with `awaited` can still be answered over the link as it is now.
__device__ bool still_there(const DeviceLink& now, uint64_t awaited) {
  return now.session == awaited >> kSessionShift && (now.state == LinkState::ready || now.state == LinkState::mapped);
}

/// What a look of the waiting block has found out.
struct Look {
  RankSet waiting, in, out;
  uint32_t took[kMaxRanks];    ///< of the ranks whose line came in this look: what they say it took them
  RankSet came, departed;      ///< in this look
  unsigned long long refused;  ///< rank << 32 | status of the first rank that answered with one of its own; ~0: none
};

/// Eight lanes look at rank r's return line and take it when it is the one awaited.
__device__ void look_at(const World& w, LaneState& s, uint32_t lane, uint32_t r, uint64_t now, Look& look) {
  const uint32_t part = threadIdx.x % kLineLanes;
  const DeviceLink& link = w.pictures[s.picture].link[r];
  const uint64_t awaited = s.awaited[r];
  const Picture& present = w.pictures[load_u32_acquire(w.present)];
  const bool there = still_there(link, awaited) && still_there(present.link[r], awaited);
  ulonglong2 words = {0, 0};
  uint64_t found = 0;
  if (still_there(link, awaited) &&
      wait_line(link.mine + w.layout.return_line(lane), awaited, 0, words, found) == Seen::same) {
    // ReturnLine: status, rows, pass_rows, pass_sources | queue, experts, send.
    const auto status = static_cast<uint32_t>(__shfl_sync(line_mask(), words.x, 0, kLineLanes));
    if (part != 1) return;
    CallRecord::Peer& peer = s.record.peer[r];
    const auto queue = static_cast<uint32_t>(words.x);
    const auto experts = static_cast<uint32_t>(words.x >> 32);
    const auto send = static_cast<uint32_t>(words.y);
    add_saturating(peer.wait, now > s.waited_from ? now - s.waited_from : 0);
    add_saturating(peer.queue, queue);
    add_saturating(peer.experts, experts);
    add_saturating(peer.send, send);
    look.took[r] = saturated(uint64_t{queue} + experts + send);
    add_atomic(look.came, r);
    remove_atomic(look.waiting, r);
    add_atomic(look.in, r);
    if (status != 0) atomicMin(&look.refused, static_cast<unsigned long long>(r) << 32 | status);
  } else if (!there && part == 0) {
    remove_atomic(look.waiting, r);
    add_atomic(look.out, r);
    add_atomic(look.departed, r);
    add_saturating(s.record.peer[r].wait, now > s.waited_from ? now - s.waited_from : 0);
  }
}

/// Of several return lines that a look finds at once, the one that says it was slowest counts as the last; a rank that
/// is gone was last in any case.
__device__ void note_last(const World& w, LaneState& s, Look& look) {
  if (empty(look.came) && empty(look.departed)) return;
  uint32_t slowest = 0;
  for (uint32_t r = 0; r < w.ranks; ++r) {
    if (has(look.departed, r)) s.record.last = r;
    if (!has(look.came, r) || look.took[r] < slowest) continue;
    slowest = look.took[r];
    s.record.last = r;
  }
  look.came = look.departed = {};
}

/// Every rank that did not answer was last, too, and leaves a fault.
__device__ void give_up(const World& w, LaneState& s, uint32_t lane, const Look& look, uint64_t now) {
  for (uint32_t r = 0; r < w.ranks; ++r) {
    if (!has(look.waiting, r)) continue;
    add_saturating(s.record.peer[r].wait, now - s.waited_from);
    s.record.last = r;
    const DeviceLink& link = w.pictures[s.picture].link[r];
    const uint64_t seen =
        still_there(link, s.awaited[r])
            ? load_u64(reinterpret_cast<const uint64_t*>(link.mine + w.layout.return_line(lane) + kLinePayload))
            : 0;
    report_fault(w, {Awaited::return_line, r, lane, 0, s.awaited[r], seen, now - s.waited_from});
  }
}

/// The decision, by one thread, once: what the call does from here. False: it goes on waiting.
__device__ bool decide(const World& w, LaneState& s, uint32_t lane, Look& look, uint64_t now) {
  note_last(w, s, look);
  if (look.refused != kNobody) {
    s.named = {};
    add_atomic(s.named, static_cast<uint32_t>(look.refused >> 32));
    s.record.value = static_cast<uint32_t>(look.refused);  // a peer's word is reported, never taken for our own status
    s.ended = Status::internal;
  } else if (!empty(look.out) && w.drop == 0) {
    s.named = look.out;
    s.ended = Status::peer_lost;
  } else if (empty(look.waiting)) {
    s.mode = Mode::reduce;
    if (s.late == 0) s.decided = now;
    return true;
  } else if (now >= s.deadline) {
    s.named = look.waiting;
    s.ended = Status::peer_timeout;
    give_up(w, s, lane, look, now);
  } else {
    return false;
  }
  s.mode = Mode::fail;
  s.decided = now;
  return true;
}

/// A rank that answered in an earlier pass and is gone since has taken its partials along.
__device__ void drop_departed(const World& w, const LaneState& s, Look& look) {
  for (uint32_t r = 0; r < w.ranks; ++r) {
    if (!has(look.in, r) || still_there(w.pictures[s.picture].link[r], s.awaited[r])) continue;
    remove_atomic(look.in, r);
    add_atomic(look.out, r);
  }
}

/// Waits for the return lines of the present piece; alone decides which ranks are in and which are out.
__global__ void wait_returns(const __grid_constant__ World w, uint32_t lane) {
  LaneState& s = w.lane[lane];
  if (!has_work(s.working) || (s.mode != Mode::piece && s.mode != Mode::again && s.mode != Mode::wait)) return;
  __shared__ Shared<Look> shared;
  Look& look = shared.get();
  const uint64_t started = global_time();
  if (threadIdx.x == 0) {
    look.waiting = s.waiting;
    look.in = s.in;
    look.out = s.out;
    look.came = look.departed = {};
    drop_departed(w, s, look);
    look.refused = kNobody;
    if (s.sent == 0) {
      s.sent = 1;
      s.waited_from = started;
      s.record.phase_ns[0] += started - (s.done == 0 ? s.seen : s.decided);
    }
    s.mode = Mode::wait;
  }
  __syncthreads();
  wait_block(started + kGateNs, w.disarm, &s.disarm, [&](uint64_t now) {
    for (uint32_t r = threadIdx.x / kLineLanes; r < w.ranks; r += blockDim.x / kLineLanes)
      if (has(look.waiting, r)) look_at(w, s, lane, r, now, look);
    __syncthreads();
    const bool decided = threadIdx.x == 0 && decide(w, s, lane, look, now);
    return decided;
  });
  __syncthreads();
  if (threadIdx.x != 0) return;
  s.waiting = look.waiting;
  s.in = look.in;
  s.out = look.out;
  if (load_u32(&s.disarm) != 0 || load_u32(w.disarm) != 0) s.mode = Mode::none;  // abandoned: out is nobody's any more
}

__device__ void zero_rows(const World& w, LaneState& s, uint64_t first, uint64_t end) {
  auto* out = reinterpret_cast<uint4*>(s.arena + s.now.call.out);
  const uint64_t row = uint64_t{w.shape.latent} * 2 / sizeof(uint4);
  for (uint64_t i = first * row + uint64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < end * row;
       i += uint64_t{gridDim.x} * blockDim.x)
    out[i] = uint4{0, 0, 0, 0};
}

__global__ void __launch_bounds__(kTeam) reduce(const __grid_constant__ World w, uint32_t lane) {
  extern __shared__ __align__(16) uint16_t rows[];
  __shared__ SumShared shared;
  __shared__ Peer peer[kMaxRanks];
  LaneState& s = w.lane[lane];
  if (!has_work(s.working)) return;
  if (s.mode == Mode::fail && s.now.may_zero != 0) zero_rows(w, s, 0, s.now.call.tokens);
  if (s.mode != Mode::reduce) return;
  for (uint32_t r = threadIdx.x; r < w.ranks; r += blockDim.x)
    peer[r] = {nullptr, w.pictures[s.picture].link[r].mine, nullptr, s.awaited[r], 0, 0};
  __syncthreads();
  const Call& c = s.now.call;
  const uint32_t n = w.shape.latent;
  const bool real = layer_experts(w, c.layer) != nullptr;
  const uint16_t* const gamma = real ? w.layers[c.layer - w.shape.first_layer].norm : nullptr;
  const bool norm = w.shape.reduce == Reduce::sum_rmsnorm && (c.flags & kFlagNoNorm) == 0;
  const uint64_t until = global_time() + kPartialsNs;
  auto* const out = reinterpret_cast<uint16_t*>(s.arena + c.out) + uint64_t{s.done} * n;
  sum_tokens<AnySizes>(
      w, peer, lane, blockIdx.x, gridDim.x, s.tokens, rows, shared,
      [&](uint32_t i) {
        const uint32_t t = blockIdx.x + i * gridDim.x;
        RankSet set{};
        for (uint32_t r = 0; r < w.ranks && t < s.tokens; ++r)
          if (has(s.in, r) && (s.bitmap[r][t / 32] >> (t % 32) & 1) != 0) set.word[r / 64] |= 1ULL << (r % 64);
        return set;
      },
      [&](uint32_t token) -> SumCall {
        return {gamma, out + uint64_t{token} * n, norm, false};
      },
      [&](uint32_t t, uint32_t r, uint64_t found, bool missing) {
        if (__all_sync(0xFFFFFFFFU, global_time() >= until) == 0) return false;
        if (missing && threadIdx.x % kLineLanes == 0 && atomicCAS(&s.broken, 0U, r + 1) == 0)
          s.missing = {Awaited::partial, r, lane, t, s.awaited[r], found, global_time() - s.decided};
        return true;
      });
  if (s.done + s.tokens == s.valid) zero_rows(w, s, s.valid, s.now.call.tokens);
}

/// (token, rank) contributions that the ranks out would have given.
__device__ uint32_t count_dropped(const World& w, const LaneState& s) {
  uint32_t n = 0;
  for (uint32_t r = 0; r < w.ranks; ++r)
    for (uint32_t k = 0; has(s.out, r) && k < kMaxTokens / 32; ++k) n += __popc(s.bitmap[r][k]);
  return n;
}

/// What the record says beyond times; fields that a status does not name are 0.
__device__ void settle_record(LaneState& s, uint64_t now) {
  CallRecord& r = s.record;
  const Status status = s.ended;
  const bool names_route = status == Status::bad_route || status == Status::masked;
  if (!names_route) r.token = r.slot = 0;
  if (!names_route) r.limit = 0;
  if (!names_route && status != Status::internal) r.value = 0;
  if (status != Status::degraded) r.dropped = 0;
  r.ranks[0] = s.named.word[0];
  r.ranks[1] = s.named.word[1];
  r.number = s.now.number;
  r.count = s.count;
  r.kind = s.now.call.kind;
  r.layer = s.now.call.layer;
  r.tokens = s.now.call.tokens;
  r.status = static_cast<uint32_t>(status);
  r.total_ns = now - s.seen;
}

/// Whether a partial was missing, and what follows. Between two GPUs that were idle a partial can come more than 100 us
/// after its return line (measured on H200s), so the next pass reduces again; up to a limit, after which the next pass
/// writes zeros and ends the call.
__device__ bool settle_missing(const World& w, LaneState& s, uint64_t now) {
  s.late = s.broken;
  if (s.broken == 0 || now < min(s.deadline, s.decided + kLateNs)) {
    s.broken = 0;
    return s.late != 0;
  }
  s.named = {};
  add_atomic(s.named, s.broken - 1);
  s.ended = Status::internal;
  report_fault(w, s.missing);
  return true;
}

/// After a piece: whether another follows or the call has ended.
__device__ void settle_piece(const World& w, LaneState& s, uint64_t now) {
  if (settle_missing(w, s, now)) return;
  s.sent = 0;
  s.record.phase_ns[1] += s.decided - s.waited_from;
  s.record.phase_ns[2] += now - s.decided;
  s.decided = now;
  if (!empty(s.out)) {
    s.good = Status::degraded;
    s.record.dropped += count_dropped(w, s);
    s.named.word[0] |= s.out.word[0];
    s.named.word[1] |= s.out.word[1];
  }
  s.done += s.tokens;
  if (s.done == s.valid) s.ended = s.good;
}

/// Ends the pass, and the call when it has come to its end: record to the host, then done.
__global__ void finish(const __grid_constant__ World w, uint32_t lane) {
  LaneState& s = w.lane[lane];
  HostLane& host = w.board->lane[lane];
  if (!has_work(s.working)) return;
  __shared__ bool ended;
  if (threadIdx.x == 0) {
    const uint64_t now = global_time();
    const bool failed = s.mode == Mode::fail;
    if (s.mode == Mode::reduce) settle_piece(w, s, now);
    ended = failed || (s.mode == Mode::reduce && s.ended != Status::pending && s.broken == 0);
    if (ended) {
      settle_record(s, now);
      s.running = s.sent = 0;
    }
  }
  __syncthreads();
  if (!ended) return;
  if (threadIdx.x == 0) store_u32(&s.mailbox->done, 1);
  const uint32_t used = offsetof(CallRecord, peer) + w.ranks * static_cast<uint32_t>(sizeof(CallRecord::Peer));
  store_tagged(host.record, s.record, s.count, used);
  if (threadIdx.x == 0) store_u64(&host.done, s.count << 32 | (s.now.number & 0xFFFFFFFFU));
}

}  // namespace

void launch_wait(const World& w, uint32_t lane, cudaStream_t stream) {
  launch(wait_returns, {1, kWaitThreads}, stream, w, lane);
}
void launch_reduce(const World& w, uint32_t lane, cudaStream_t stream) {
  const auto bytes = static_cast<uint32_t>(2 * w.shape.latent * sizeof(uint16_t));
  launch(reduce, {kReduceBlocks, kTeam, bytes}, stream, w, lane);
}
void launch_finish(const World& w, uint32_t lane, cudaStream_t stream) {
  launch(finish, {1, kFinishThreads}, stream, w, lane);
}

}  // namespace moed::cuda
