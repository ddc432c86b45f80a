// How a call of the loop ends: return lines, sums, done, what the host is told, or what the kernels behind the loop
// need. See call_loop.cu.
#pragma once

#include "kernels/cuda/call_block.cuh"

namespace moed::cuda {

inline constexpr uint64_t kTellNs = 20'000;  ///< the record of a call waits for its return lines for so long

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
/// Where the weights are in Room::raw.
__device__ inline uint32_t weights_at(const RawBytes& bytes) { return (bytes.ids + 15) / 16 * 16; }
__device__ inline uint8_t* raw_weights(const Room& room, const RawBytes& bytes) { return room.raw + weights_at(bytes); }

/// A slot of what fetch_routing has brought.
__device__ inline int64_t raw_id(const CallBlock& b, const Room& room, uint32_t i) {
  return (b.ticket.flags & kFlagIds64) != 0 ? reinterpret_cast<const int64_t*>(room.raw)[i]
                                            : int64_t{reinterpret_cast<const int32_t*>(room.raw)[i]};
}

inline constexpr uint32_t kNoExpert = 0xFFFFFFFF;
/// The same as an expert: kNoExpert for an empty slot; what is out of range stays so.
__device__ inline uint32_t raw_expert(const CallBlock& b, const Room& room, uint32_t i) {
  if ((b.ticket.flags & kFlagIds64) == 0) return reinterpret_cast<const uint32_t*>(room.raw)[i];
  const uint2 id = reinterpret_cast<const uint2*>(room.raw)[i];
  if (id.y == 0) return min(id.x, 0x7FFFFFFFU);
  return (id.x & id.y) == kNoExpert ? kNoExpert : 0x7FFFFFFFU;
}
template <class Z>
__device__ float raw_weight(const World& w, const CallBlock& b, const Room& room, uint32_t i) {
  const uint8_t* const weights = raw_weights(room, raw_bytes<Z>(w, b));
  return (b.ticket.flags & kFlagWeights16) != 0 ? bf16_to_float(reinterpret_cast<const uint16_t*>(weights)[i])
                                                : reinterpret_cast<const float*>(weights)[i];
}

__device__ inline bool is_needed(const CallBlock& b, uint32_t r) {
  uint32_t any = 0;
  for (const uint32_t word : b.bits[r]) any |= word;
  return any != 0;
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
static __device__ __noinline__ void look_at_returns(const World& w, uint32_t lane, const CallBlock& b, Told& t,
                                                    uint64_t now) {
#pragma unroll 1
  for (uint32_t base = 0; base < w.ranks; base += 32)
    take_returns(w, lane, b, t, base, ask_return(w, lane, b, t, base), now);
}

/// Tells the host of the call that has ended. The last warp.
static __device__ __noinline__ void tell(const World& w, uint32_t lane, Told& t) {
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

/// The last warp waits until every block has summed up: `arrived` is at b.arrived. A sum has all its partials, so
/// nobody waits for return lines; they say how long the ranks took, or that one does not serve the call. False: the
/// kernels behind the loop have to go on.
__device__ inline bool await_sums(const World& w, LaneState& s, uint32_t lane, CallBlock& b, Told& t, uint64_t until) {
  const uint32_t expected = b.arrived;
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
    const uint32_t verdict = __shfl_sync(0xFFFFFFFFU, part == 0 ? atomicCAS(&b.verdict, 0U, 2U) : 0, 0);
    if (part == 0 && verdict == 0) show(b.stop, 1U);
    while (look(b.finished) != call) continue;
    return verdict == 1;
  }
}

/// Done first, if nobody has said so, then what the record says. The last warp, after the bell has been cleared.
__device__ inline void end_call(const CallBlock& b, Told& t) {
  if (warp_lane() != 0) return;
  if (look(b.verdict) == 0) store_u32(&b.mailbox->done, 1);
  t.done = global_time();
  t.open = 1;
  const uint64_t sent = max(t.sent, t.seen);
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
__device__ __noinline__ void hand_over(const World& w, LaneState& s, uint32_t lane, const CallBlock& b, Mode mode,
                                       const Room& room) {
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
    w.ids[base + i] = static_cast<int32_t>(raw_id(b, room, i));
    w.weights[base + i] = raw_weight<Z>(w, b, room, i);
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
