// What the leading block of a serve loop does: looks at call lines, too, sees by their marks what the other blocks have
// done of each source, and answers with the return line. See serve_loop.cu.
#pragma once

#include "kernels/cuda/choose.cuh"
#include "kernels/cuda/serve_block.cuh"

namespace moed::cuda {

inline constexpr uint64_t kLongestFlight = 100'000;  // ns that a source may be under way in a loop
inline constexpr uint64_t kDrainNs = 20'000;         // what is under way when the loop closes may take so long
inline constexpr uint64_t kLeaveNs = 140'000;        // and blocks that follow so long to leave: two sources, late rows

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

/// What is told of a source that has been served, or refused. One lane.
__device__ inline void push_ended(ServeBlock& b, const Watch& watch, uint32_t rows, uint64_t now) {
  const uint32_t number = atomicAdd(&b.pushed, 1U);
  while (number - look(b.told) >= kEnded) continue;  // the last warp tells until all others have ended
  Ended& e = b.ended[number % kEnded];
  e.queue_ns = watch.seen > watch.since ? watch.seen - watch.since : 0;
  e.gather_ns = now - watch.seen;
  e.rows = rows;
  e.refused = rows == 0 ? 1 : 0;
  __threadfence_block();
  show(e.number, number + 1);
}

/// The answer to a source all of whose rows have been served. Eight lanes.
__device__ inline void answer(const World& w, const Watch& watch, uint32_t at, const DeviceLink& link, bool good,
                              uint64_t now) {
  const uint32_t part = threadIdx.x % kLineLanes;
  const uint64_t queue = watch.seen > watch.since ? watch.seen - watch.since : 0;
  const uint64_t rows = good ? watch.rows : 0;
  const auto status = static_cast<uint64_t>(good ? Status::ok : Status::bad_route);
  ulonglong2 words = {0, 0};  // ReturnLine: status, rows, pass_rows, pass_sources | queue, experts, send
  if (part == 0) words = {status | rows << 32, rows | uint64_t{1} << 32};
  if (part == 1) words = {saturated(queue), saturated(now - watch.seen)};
  store_line(link.theirs + w.layout.return_line(at % w.layout.lanes_all), words, watch.flight);
}

/// A source is not under way any more. One lane.
__device__ inline void give_up(Watch& watch) {
  watch.pending = watch.flight;
  watch.flight = 0;
}

/// Looks what the marks say of the source under way, and ends it when all of its rows have been served, or when they
/// cannot be. Eight lanes.
__device__ inline void follow_flight(const World& w, ServeBlock& b, uint32_t at, const DeviceLink& link, uint64_t now,
                                     uint64_t loop) {
  Watch& watch = w.watch[at];
  const uint32_t part = threadIdx.x % kLineLanes;
  const Mark* const marks = w.mark + at * b.shares.share;
  const uint64_t flight = watch.flight;
  uint32_t rows = 0;
  uint32_t flags = 0;
  bool gone = false;  // its source is at a newer one: it had all it needed, or has given it up
#pragma unroll 8
  for (uint32_t i = part; i < b.shares.share; i += kLineLanes) {
    const ulonglong2 mark = load_16(marks + i);
    if (mark.y >> 32 != (loop & 0xFFFFFFFFU)) continue;  // another loop's, perhaps of another call line
    if (mark.x == flight) {
      rows += static_cast<uint32_t>(mark.y) & 0xFFFFU;
      flags |= static_cast<uint32_t>(mark.y) >> 16;
    }
    gone = gone || (mark.x > flight && (mark.x ^ flight) >> kSessionShift == 0);
  }
  gone = (__ballot_sync(line_mask(), gone) & line_mask()) != 0;
#pragma unroll
  for (uint32_t i = 1; i < kLineLanes; i *= 2) {
    rows += __shfl_xor_sync(line_mask(), rows, i, kLineLanes);
    flags |= __shfl_xor_sync(line_mask(), flags, i, kLineLanes);
  }
  if (rows != watch.rows && !gone) {
    if (now < watch.seen + kLongestFlight) return;
    if (part == 0) give_up(watch);
    if (part == 0) show(b.general, 1U);
    return;
  }
  const bool missing = (flags >> kMissing & 1) != 0;
  const bool overtaken = (flags >> kOvertaken & 1) != 0;
  const bool answers = !missing && !overtaken && !gone;
  if (answers) answer(w, watch, at, link, (flags >> kBad & 1) == 0, now);
  __syncwarp(line_mask());
  if (part != 0) return;
  if (answers) watch.answered = 1;
  if (overtaken) {
    watch.served = flight;  // its source has gone on, and never needs it again
    watch.flight = 0;
  } else if (missing && !gone) {
    give_up(watch);
    watch.again = now + min(kRowsNs << min(watch.retries, 10U), kLongestPause);
    ++watch.retries;
  } else {
    watch.served = flight;
    watch.flight = 0;
    watch.recent = kMayMiss;
  }
  if (!overtaken) push_ended(b, watch, flags == 0 ? watch.rows : 0, now);
}

/// Notes a call line that is new, and takes it when it is for the loop. Eight lanes.
__device__ inline void look_at_line(const World& w, ServeBlock& b, uint32_t at, const DeviceLink& link,
                                    const ulonglong2& words, uint64_t now) {
  const uint32_t part = threadIdx.x % kLineLanes;
  Watch& watch = w.watch[at];
  const uint64_t found = __shfl_sync(line_mask(), words.y, kLineLanes - 1, kLineLanes);
  const bool fresh = found >> kSessionShift == link.session && found > watch.served && found != watch.pending;
  if (fresh && part == 0) {
    watch.pending = found;
    watch.since = look(b.last_look);
    watch.again = min(watch.again, now + kNewerNs);
  }
  __syncwarp(line_mask());
  if (!is_due(watch, now)) return;
  const uint64_t first = __shfl_sync(line_mask(), words.x, 0, kLineLanes);
  const auto layer = static_cast<uint32_t>(first);
  const auto tokens = static_cast<uint32_t>(first >> 32) & 0xFFFFU;
  const uint32_t rows = count_rows(w, tokens, words);
  const bool fits = found == watch.pending && watch.retries == 0 && w.long_way == 0 && rows != 0 &&
                    tokens <= kMostRows * b.shares.share && at / b.shares.groups < kMostEyes && is_identity(w, layer);
  if (part != 0) return;
  if (!fits) return show(b.general, 1U);
  watch.rows = rows;
  watch.seen = now;
  watch.flight = found;
  watch.pending = 0;
}

/// One look at all call lines and marks. True: sources are under way. A warp, whose groups of eight have a line each.
__device__ inline bool look_once(const World& w, ServeBlock& b, uint64_t now, uint64_t loop, bool closing) {
  const uint32_t watches = w.ranks * w.layout.lanes_all;
  const Picture& picture = w.pictures[b.present];
  bool flying = false;
#pragma unroll 1
  for (uint32_t at = threadIdx.x / kLineLanes; at < watches; at += kGroups) {
    const DeviceLink& link = picture.link[at / w.layout.lanes_all];
    if (link.state != LinkState::ready) continue;
    if (w.watch[at].flight != 0) {
      flying = true;
      follow_flight(w, b, at, link, now, loop);
    } else if (!closing) {
      const std::byte* const line = link.mine + w.layout.call(at % w.layout.lanes_all);
      look_at_line(w, b, at, link, load_16(line + threadIdx.x % kLineLanes * 16), now);
    }
  }
  __syncwarp();
  return __any_sync(0xFFFFFFFFU, flying) != 0;
}

/// What is known of call lines goes where the next loop finds it, which may begin before this one has ended. Nor may it
/// answer before this one's return lines have arrived: additions of nothing by who stored them come back when they
/// have. The worker warps, each what it has looked at.
__device__ inline void settle_watches(const World& w, const ServeBlock& b) {
  const uint32_t part = threadIdx.x % kLineLanes;
  static_assert(offsetof(Watch, reported) == kLineLanes * sizeof(uint64_t));
  __syncwarp();
  const uint32_t watches = w.ranks * w.layout.lanes_all;
  uint64_t before = 0;
#pragma unroll 2
  for (uint32_t at = threadIdx.x / kLineLanes; at < watches; at += kGroups) {
    if (w.watch[at].answered == 0) continue;
    std::byte* const line = w.pictures[b.present].link[at / w.layout.lanes_all].theirs;
    std::byte* const mine = line + w.layout.return_line(at % w.layout.lanes_all) + part * 16 + 8;
    before |= fetch_add_u64(reinterpret_cast<uint64_t*>(mine), 0);
  }
  __syncwarp();
  for (uint32_t at = threadIdx.x / kLineLanes; at < watches; at += kGroups) {
    if (part == 0) w.watch[at].answered = 0;
    __syncwarp(line_mask());
    auto* const word = reinterpret_cast<uint64_t*>(&w.watch[at]) + part;
    before |= exchange_u64(word, *word);
  }
  if (before == ~0ULL) __nanosleep(0);  // it has come back
}

/// Looks at calls until the loop closes and what is under way has been served, or has no more time. The worker warps,
/// each at its own pace, that have a call line.
__device__ inline void look_at_calls(const World& w, ServeBlock& b, uint64_t loop) {
  const uint32_t watches = w.ranks * w.layout.lanes_all;
#pragma unroll 1
  for (uint64_t closed = 0;;) {
    const bool closing = __any_sync(0xFFFFFFFFU, look(b.closing) != 0) != 0;
    const uint64_t now = __shfl_sync(0xFFFFFFFFU, global_time(), 0);
    if (closing && closed == 0) closed = now;
    const bool flying = look_once(w, b, now, loop, closing);
    if (closing && (!flying || now > closed + kDrainNs)) break;
  }
  for (uint32_t at = threadIdx.x / kLineLanes; at < watches; at += kGroups)
    if (threadIdx.x % kLineLanes == 0 && w.watch[at].flight != 0) {
      give_up(w.watch[at]);
      show(b.given_up, 1U);
    }
  settle_watches(w, b);
}

/// Tells the host of sources that have been served. The last warp.
__device__ inline void tell_ended(const World& w, ServeBlock& b) {
  ServeState& s = *w.serve;
  for (uint32_t told = b.told; told != look(b.pushed) && look(b.ended[told % kEnded].number) == told + 1;) {
    const Ended& e = b.ended[told % kEnded];
    const uint64_t number = s.records + 1;
    ServeRecord r{};
    r.rows = e.rows;
    r.sources = 1;
    r.refused = e.refused;
    r.wait_ns = e.queue_ns;
    r.gather_ns = e.gather_ns;
    __syncwarp();
    store_tagged(w.board->served[number % kServeRecords], r, number, offsetof(ServeRecord, reserved));
    if (warp_lane() == 0) {
      s.records = number;
      store_u64(&w.board->records, number);
      show(b.told, ++told);
    }
    told = __shfl_sync(0xFFFFFFFFU, told, 0);
    __syncwarp();
  }
}

/// The last warp while the others look: until the time is up, the picture of the links is another one, or a source is
/// not for the loop.
__device__ inline void lead_loop(const World& w, ServeBlock& b, uint64_t until) {
  const uint32_t lane = warp_lane();
  for (bool closing = false; !closing;) {
    const uint32_t word = lane < 2 ? load_u32(lane == 0 ? w.present : w.disarm) : 0;
    const uint64_t now = __shfl_sync(0xFFFFFFFFU, global_time(), 0);
    const bool changed = __shfl_sync(0xFFFFFFFFU, word, 0) != b.present;
    const bool disarmed = __shfl_sync(0xFFFFFFFFU, word, 1) != 0;
    if (lane == 0) show(b.last_look, now);
    tell_ended(w, b);
    closing = changed || disarmed || now >= until || look(b.general) != 0;
  }
  if (lane == 0) show(b.closing, 1U);
  __syncwarp();
}

/// Counts the loop and begins it with the blocks that are there: beside kernels that
/// fill multiprocessors some may find no room. One thread.
__device__ inline void open_loop(const World& w, ServeBlock& b, uint64_t loop, uint64_t start) {
  ServeState& s = *w.serve;
  // Whoever rings from here on is seen by this loop, or rings again what the next one waits for.
  store_u64(&w.board->rung, load_u32(w.doorbell));
  b.present = begin_pass(w, w.layout.lanes_all, w.board->begun);
  if (s.started == 0) s.started = s.last_look = start;
  b.last_look = s.last_look;
  s.sources = s.rows = s.pairs = s.groups = 0;
  const uint32_t all = gridDim.x - 1;
  const auto before = static_cast<uint32_t>((loop - 1) * all);
  uint32_t blocks = load_u32(&s.checked) - before;
  while (blocks < all && global_time() < start + kComeNs) blocks = load_u32(&s.checked) - before;
  b.shares = share_calls(w, blocks);
  b.begun = blocks;
  b.left = load_u32(&s.left);
  store_16(w.serve_go, {loop << 1, b.present | uint64_t{blocks} << 32});
}

/// The next kernel may begin: it finds what it reads of this loop's where all look for it. Where that is not enough,
/// because sources have been chosen or a block that follows may still be at one, kernels wait until this one has ended.
/// One thread.
__device__ inline void close_loop(const World& w, const ServeBlock& b, uint64_t loop) {
  ServeState& s = *w.serve;
  const uint64_t records = exchange_u64(&s.records, s.records);
  const uint64_t last = exchange_u64(&s.last_look, s.last_look);
  const bool handed = (b.general | b.given_up) != 0;
  if (handed) store_u64(&w.board->handed, loop);
  const uint32_t worked = handed ? exchange_u32(&s.working, 1) : 0;
  if (records != ~0ULL && last != ~0ULL && worked != ~0U) let_next_begin();
}

/// The blocks that follow leave when they have served what they have taken, be it known here or not. The next loop
/// begins behind that, so that what this one still stores, for a source that is known to nobody here, lies microseconds
/// before what the next one stores for the same source. One thread.
__device__ inline void await_leaving(const World& w, ServeBlock& b, uint64_t loop, uint64_t start) {
  const uint32_t blocks = serving_blocks(b.shares);
  store_16(w.serve_go, {loop << 1 | 1, b.present | uint64_t{b.begun} << 32});
  if ((b.general | b.given_up) != 0) return;  // kernels wait until they have left
  for (const uint64_t until = min(global_time() + kLeaveNs, start + kTakeNs + kStayNs);
       load_u32(&w.serve->left) - b.left != blocks;)
    if (global_time() >= until) return show(b.given_up, 1U);
}

__device__ inline void lead(const World& w, ServeBlock& b, uint64_t loop) {
  const uint64_t start = global_time();
  if (threadIdx.x == kServeWorkers) open_loop(w, b, loop, start);
  __syncthreads();
  if (is_control()) {
    lead_loop(w, b, start + kTakeNs);
    while (__any_sync(0xFFFFFFFFU, look(b.done) != kServeWorkers / 32) != 0) tell_ended(w, b);
    if (warp_lane() == 0) w.serve->last_look = b.last_look;
  } else {
    if (threadIdx.x / 32 * (32 / kLineLanes) < w.ranks * w.layout.lanes_all) look_at_calls(w, b, loop);
    if (warp_lane() == 0) atomicAdd(&b.done, 1U);
  }
  __syncthreads();
  if (threadIdx.x == kServeWorkers) await_leaving(w, b, loop, start);
  if (is_control()) tell_ended(w, b);
  __syncthreads();
  if (b.general != 0) choose_sources(w, loop, start + kTakeNs + kStayNs);
  __syncthreads();
  if (threadIdx.x == kServeWorkers) close_loop(w, b, loop);
}

}  // namespace moed::cuda
