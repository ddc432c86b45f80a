// What the leading block of a serve loop does: looks at call lines, hands their calls out, and closes what is served.
// See serve_loop.cu.
#pragma once

#include "kernels/cuda/choose.cuh"
#include "kernels/cuda/serve_block.cuh"

namespace moed::cuda {

/// Rows that a call line announces; 0: none, or a bit lies beyond its tokens. Eight lanes with its words.
__device__ inline uint32_t count_rows(const World& w, uint32_t tokens, const ulonglong2& words) {
  const uint32_t part = threadIdx.x % kLineLanes;
  const uint64_t bits[2] = {part == 0 || part == kLineLanes - 1 ? 0 : words.x, part == kLineLanes - 1 ? 0 : words.y};
  const auto beyond = [&](uint64_t word, int32_t first) {  // bits from tokens - first on
    const int32_t left = static_cast<int32_t>(tokens) - first;
    return left >= 64 ? 0 : left <= 0 ? word : word >> left;
  };
  const uint64_t wrong =
      beyond(bits[0], static_cast<int32_t>(2 * part - 1) * 64) | beyond(bits[1], static_cast<int32_t>(part) * 128);
  uint32_t rows = __popcll(bits[0]) + __popcll(bits[1]);
#pragma unroll
  for (uint32_t i = 1; i < kLineLanes; i *= 2) rows += __shfl_xor_sync(line_mask(), rows, i, kLineLanes);
  const bool sound = tokens <= w.layout.max_tokens && (__ballot_sync(line_mask(), wrong != 0) & line_mask()) == 0;
  return sound ? rows : 0;
}

/// Hands a source to the other blocks: its call line and where its rows and answers lie; then notes it. Eight lanes.
/// False: too many are under way.
__device__ inline bool publish(const World& w, ServeBlock& b, uint32_t at, const DeviceLink& link,
                               const ulonglong2& words, uint32_t tokens, uint64_t sequence, uint64_t now,
                               uint64_t loop) {
  const uint32_t part = threadIdx.x % kLineLanes;
  Watch& watch = w.watch[at];
  uint32_t ticket = kServeTickets;
  // All groups of the block may take one at once, so half of the slots stay free.
  if (part == 0 && look(b.next) - look(b.oldest) <= kServeTickets - kGroups)
    ticket = atomicAdd(&b.next, 1U);
  else if (part == 0)
    ticket = ~0U;
  ticket = __shfl_sync(line_mask(), ticket, 0, kLineLanes);
  if (ticket == ~0U) return false;
  const uint32_t slot = ticket % kServeTickets;
  const uint64_t turn = (loop << kTurnBits) + ticket + 1;
  const uint32_t lane = at % w.layout.lanes_all;
  const uint64_t queue_ns = now > watch.since ? now - watch.since : 0;
  auto* const lines = reinterpret_cast<std::byte*>(w.serve_ticket + slot * 2);
  ulonglong2 facts = {0, 0};
  if (part == 0) facts = {reinterpret_cast<uint64_t>(link.mine), reinterpret_cast<uint64_t>(link.theirs)};
  if (part == 1) facts = {sequence, now};
  if (part == 2) facts = {queue_ns, lane | uint64_t{at / w.layout.lanes_all} << 32};
  store_line(lines, words, turn);
  store_line(lines + kLineBytes, facts, turn);
  // Checked behind it: who follows serves no token beyond, and whoever ends a source looks, too.
  const uint32_t rows = count_rows(w, tokens, words);
  if (part != 0) return true;
  watch.pending = 0;
  watch.served = sequence;
  watch.recent = kMayMiss;
  watch.ticket = slot + 1;
  b.under[slot] = {sequence, now, queue_ns, at, rows, 0};
  __threadfence_block();
  show(b.under[slot].number, ticket + 1);
  return true;
}

/// Eight lanes look at one lane's call line and hand its call out, or note that it is not for the loop.
__device__ inline void look_at_line(const World& w, ServeBlock& b, uint32_t at, const DeviceLink& link,
                                    const ulonglong2& words, uint64_t last_look, uint64_t loop) {
  const uint32_t part = threadIdx.x % kLineLanes;
  const uint64_t found = __shfl_sync(line_mask(), words.y, kLineLanes - 1, kLineLanes);
  Watch& watch = w.watch[at];
  const bool fresh = found >> kSessionShift == link.session && found > watch.served && found != watch.pending;
  if (!fresh && watch.pending == 0) return;
  const uint64_t now = last_look;
  if (fresh && part == 0) {
    watch.pending = found;
    watch.since = last_look;
    watch.again = 0;
    watch.retries = 0;
  }
  __syncwarp(line_mask());
  if (!is_due(watch, now) || look(watch.ticket) != 0 || look(b.closing) != 0) return;
  const uint64_t first = __shfl_sync(line_mask(), words.x, 0, kLineLanes);
  const auto layer = static_cast<uint32_t>(first);
  const auto tokens = static_cast<uint32_t>(first >> 32) & 0xFFFFU;
  const bool identity =
      layer == kIdentityLayer || (layer >= w.shape.first_layer && layer - w.shape.first_layer < w.shape.layers &&
                                  layer_experts(w, layer) == nullptr);
  if (identity && found == watch.pending && w.long_way == 0 && tokens <= 64 * (gridDim.x - 1) &&
      tokens <= w.layout.max_tokens && tokens != 0)
    publish(w, b, at, link, words, tokens, found, now, loop);
  else if (part == 0)
    show(b.general, 1U);
}

/// Looks at all call lines again and again, until the last warp says that the loop closes. The worker warps, each at
/// its own pace.
__device__ inline void look_at_calls(const World& w, ServeBlock& b, uint64_t loop) {
  const uint32_t watches = w.ranks * w.layout.lanes_all;
  const uint32_t warp_first = threadIdx.x / 32 * 4;
  if (warp_first >= watches) return;
#pragma unroll 1
  while (look(b.closing) == 0) {
    const uint64_t last_look = look(b.last_look);
    const Picture& picture = w.pictures[look(b.present)];
#pragma unroll 1
    for (uint32_t at = threadIdx.x / kLineLanes; at < watches; at += kGroups) {
      const DeviceLink& link = picture.link[at / w.layout.lanes_all];
      if (link.state != LinkState::ready) continue;
      const std::byte* const line = link.mine + w.layout.call(at % w.layout.lanes_all);
      const ulonglong2 words = load_16(line + threadIdx.x % kLineLanes * 16);
      look_at_line(w, b, at, link, words, last_look, loop);
    }
    __syncwarp();
  }
}

/// A source whose rows were not complete is looked at again, ever more seldom; one whose call line announces none, or
/// is not what a sound peer sends, is for the kernels behind the loop.
__device__ inline void close_ticket(const World& w, ServeBlock& b, const Under& u, uint64_t result, uint64_t now) {
  Watch& watch = w.watch[u.watch];
  const bool missing = (result >> 16 & 0xFFFF) != 0 && (result >> 32 & 0xFFFF) == 0;
  if (u.rows == 0) {
    watch.pending = u.sequence;
    show(b.general, 1U);
  } else if (missing && watch.served == u.sequence && watch.pending == 0) {
    watch.since = u.seen;
    watch.again = now + min(kRowsNs << min(watch.retries, 10U), kLongestPause);
    ++watch.retries;
    watch.pending = u.sequence;
  }
  if (!missing) watch.retries = 0;
  __threadfence_block();
  show(watch.ticket, 0U);
}

/// What the host is told of one source. The last warp.
__device__ inline void record_source(const World& w, const Under& u, uint64_t result, uint64_t now) {
  ServeState& s = *w.serve;
  const uint64_t number = s.records + 1;
  ServeRecord r{};
  const bool refused = result >> 48 != 0 || ((result >> 16 & 0xFFFF) != 0 && (result >> 32 & 0xFFFF) == 0);
  r.rows = refused ? 0 : u.rows;
  r.sources = 1;
  r.refused = refused ? 1 : 0;
  r.wait_ns = u.queue_ns;
  r.gather_ns = now - u.seen;
  __syncwarp();
  store_tagged(w.board->served[number % kServeRecords], r, number, offsetof(ServeRecord, reserved));
  if (warp_lane() == 0) s.records = number;
  __syncwarp();
  if (warp_lane() == 0) store_u64(&w.board->records, number);
}

/// What the last warp of the leading block knows of tickets; the same for all lanes.
struct Tickets {
  uint32_t known = 0, oldest = 0;  // how many it knows, and the oldest that is under way
  uint64_t busy = 0;               // slots under way
};

/// Tickets that have been served, of the lower or the upper half of the slots: closed, and told to the host.
__device__ inline void close_tickets(const World& w, ServeBlock& b, Tickets& t, uint32_t half, uint64_t now) {
  const uint32_t slot = half * 32 + warp_lane();
  const bool busy = (t.busy >> slot & 1) != 0;
  const uint64_t result = busy ? load_u64(&w.result[slot]) : 0;
  const bool done = busy && (result & 0xFFFF) == b.under[slot].rows;
  if (done) {
    close_ticket(w, b, b.under[slot], result, now);
    static_cast<void>(exchange_u64(&w.result[slot], 0));
  }
  const uint32_t all = __ballot_sync(0xFFFFFFFFU, done);
#pragma unroll 1
  for (uint32_t left = all; left != 0; left &= left - 1) {
    const uint32_t from = __ffs(static_cast<int>(left)) - 1;
    const uint64_t its = __shfl_sync(0xFFFFFFFFU, result, static_cast<int>(from));
    if (b.under[half * 32 + from].rows != 0) record_source(w, b.under[half * 32 + from], its, now);
  }
  t.busy &= ~(uint64_t{all} << (half * 32));
}

/// One look at what is under way. True: a word says that the loop has to end.
__device__ inline bool look_at_tickets(const World& w, ServeBlock& b, Tickets& t) {
  const uint32_t lane = warp_lane();
  const uint32_t word = lane < 2 ? load_u32(lane == 0 ? w.present : w.disarm) : 0;
  while (t.known != look(b.next) && look(b.under[t.known % kServeTickets].number) == t.known + 1)
    t.busy |= 1ULL << (t.known++ % kServeTickets);
  const uint64_t now = global_time();
  if (static_cast<uint32_t>(t.busy) != 0) close_tickets(w, b, t, 0, now);
  if (t.busy >> 32 != 0) close_tickets(w, b, t, 1, now);
  while (t.oldest != t.known && (t.busy >> (t.oldest % kServeTickets) & 1) == 0) ++t.oldest;
  const uint32_t present = __shfl_sync(0xFFFFFFFFU, word, 0);
  if (lane == 0) {
    show(b.last_look, now);
    show(b.present, present);
    show(b.oldest, t.oldest);
  }
  return __shfl_sync(0xFFFFFFFFU, word, 1) != 0;
}

/// The last warp while the others look: until the time is up or a source is not for the loop, and what is under way has
/// been served.
__device__ inline void lead_tickets(const World& w, ServeBlock& b, Tickets& t, uint64_t start) {
  bool closing = false;
#pragma unroll 1
  while (!closing) {
    const bool disarmed = look_at_tickets(w, b, t);
    closing =
        disarmed || __any_sync(0xFFFFFFFFU, look(b.general) != 0 || cycles() >= start + cycles_of(w, kTakeNs)) != 0;
  }
  if (warp_lane() == 0) show(b.closing, 1U);
  __syncwarp();
  sync_some(2, kServeThreads);  // the others have given out their last tickets
#pragma unroll 1
  do {  // once at least: what nobody knows of is never given up either
    static_cast<void>(look_at_tickets(w, b, t));
  } while (t.oldest != look(b.next) &&
           __any_sync(0xFFFFFFFFU, cycles() >= start + cycles_of(w, kTakeNs + kStayNs)) == 0);
}

/// Tickets that nobody has served in time: their sources are looked at again by the kernels behind the loop.
__device__ inline void abandon(const World& w, ServeBlock& b, const Tickets& t) {
  for (uint32_t slot = warp_lane(); slot < kServeTickets; slot += 32) {
    if ((t.busy >> slot & 1) == 0) continue;
    const Under& u = b.under[slot];
    Watch& watch = w.watch[u.watch];
    watch.ticket = 0;
    if (watch.pending == 0) watch.pending = u.sequence;
    show(b.general, 1U);
  }
}

__device__ inline void lead(const World& w, ServeBlock& b) {
  ServeState& s = *w.serve;
  const uint64_t began = cycles();
  const uint64_t start = global_time();
  const uint64_t loop = s.loops + 1;
  if (is_control()) {
    for (uint32_t slot = warp_lane(); slot < kServeTickets; slot += 32)
      static_cast<void>(exchange_u64(&w.result[slot], 0));
    if (warp_lane() == 0) {
      // Whoever rings from here on is seen by this loop, or rings again what the next one waits for.
      store_u64(&w.board->rung, load_u32(w.doorbell));
      b.present = begin_pass(w, w.layout.lanes_all, w.board->begun);
      b.last_look = s.started == 0 ? start : s.last_look;
      s.sources = s.rows = s.pairs = s.groups = 0;
      if (s.started == 0) s.started = s.last_look = start;
    }
  }
  __syncthreads();
  Tickets tickets;
  if (is_control()) {
    lead_tickets(w, b, tickets, began);
    if (warp_lane() == 0) s.last_look = b.last_look;
  } else {
    look_at_calls(w, b, loop);
    arrive_some(2, kServeThreads);
  }
  __syncthreads();
  if (is_control()) abandon(w, b, tickets);
  if (is_control() && warp_lane() < kLineLanes) {
    const uint32_t ticket = b.next;
    auto* const lines = reinterpret_cast<std::byte*>(w.serve_ticket + ticket % kServeTickets * 2);
    const uint64_t turn = (loop << kTurnBits) + ticket + 1;
    store_line(lines, {0, 0}, turn);
    store_line(lines + kLineBytes, {warp_lane() == 3 ? uint64_t{1} : uint64_t{0}, 0}, turn);
  }
  __syncthreads();
  if (b.general != 0) choose_sources(w, global_time() + kStayNs);
}

}  // namespace moed::cuda
