// What the blocks of a serve loop share, and what those do that follow: rows in, partials out. See serve_loop.cu.
#pragma once

#include "kernels/cuda/loop.cuh"
#include "kernels/cuda/sums.cuh"

namespace moed::cuda {

inline constexpr uint32_t kServeWorkers = 256;
inline constexpr uint32_t kServeThreads = kServeWorkers + 32;  // the last warp speaks with other blocks
inline constexpr uint32_t kGroups = kServeWorkers / kLineLanes;
inline constexpr uint32_t kBatch = 2;                 // rows in shared memory
inline constexpr uint64_t kLongestPause = 5'000'000;  // between looks at a source whose rows are incomplete

inline constexpr uint32_t kBad = 3;

/// A ticket that is under way, as the leading block remembers it.
struct Under {
  uint64_t sequence, seen, queue_ns;
  uint32_t watch, rows;
  uint32_t number;  // 1 + the ticket's, written last
};

/// A source as a following block has it.
struct alignas(128) Taken {
  CallLine call;
  uint8_t pad[16];
  ServeTicket ticket;
  uint32_t number;         // of the ticket, from 0
  uint32_t offset;         // its first token that may be this block's
  uint64_t mask;           // bit k: token offset + k * (blocks that follow) is a row of this block
  uint32_t state[kBatch];  // of a row: 0 good, kMissing, kOvertaken, or kBad
};
static_assert(offsetof(Taken, ticket) == kLineBytes && sizeof(ServeTicket) == 64);

struct ServeBlock {
  Under under[kServeTickets];
  uint32_t next, oldest;  // tickets given out, and the oldest that is under way; from 0
  uint32_t present;
  uint64_t last_look;
  uint32_t general;  // a source that is not for the loop
  uint32_t closing;  // no ticket is given out any more
  Taken taken[2];    // a follower's: the source that it serves, and the next one
};

__device__ inline bool is_control() { return threadIdx.x >= kServeWorkers; }

/// Which tokens of a source are this block's rows: every (blocks)th, from one that turns with the tickets. The last
/// warp.
__device__ inline bool find_rows(Taken& taken, uint32_t ticket) {
  const uint32_t followers = gridDim.x - 1;
  const uint32_t offset = (blockIdx.x - 1 + ticket) % followers;
  const auto* bits = bitmap_words(taken.call);
  const uint32_t tokens = taken.call.tokens;
  const auto has_row = [&](uint32_t k) {
    const uint32_t t = offset + k * followers;
    return t < tokens && (bits[t / 32] >> (t % 32) & 1) != 0;
  };
  uint64_t mask = __ballot_sync(0xFFFFFFFFU, has_row(warp_lane()));
  if (offset + 32 * followers < tokens) mask |= uint64_t{__ballot_sync(0xFFFFFFFFU, has_row(32 + warp_lane()))} << 32;
  if (warp_lane() == 0) {
    taken.offset = offset;
    taken.mask = mask;
    taken.number = ticket;
  }
  return mask != 0;
}

/// Waits for the next source of which this block has rows; ticket.leave: the loop ends. The last warp.
__device__ inline void next_source(const World& w, Taken& taken, uint64_t loop, uint64_t until, uint32_t& ticket) {
  const uint32_t lane = warp_lane();
  if (lane < kBatch) taken.state[lane] = 0;
#pragma unroll 1
  for (bool found = false; !found; ++ticket) {
    const uint64_t turn = (loop << kTurnBits) + ticket + 1;
    const auto* at = reinterpret_cast<const std::byte*>(w.serve_ticket + ticket % kServeTickets * 2) + lane * 16;
    const bool last = lane == kLineLanes - 1 || lane == 2 * kLineLanes - 1;
    ulonglong2 words = {0, 0};
    for (;;) {
      if (lane < 2 * kLineLanes) words = load_16(at);
      const uint64_t there = __shfl_sync(0xFFFFFFFFU, words.y, kLineLanes - 1);
      if (there >= turn && there >> kTurnBits == loop && __all_sync(0xFFFFFFFFU, !last || words.y == there) != 0) {
        // A slot that is used again says that what it held before has been served, without this block.
        ticket = static_cast<uint32_t>(there & ((1ULL << kTurnBits) - 1)) - 1;
        break;
      }
      if (__any_sync(0xFFFFFFFFU, cycles() >= until) == 0) continue;
      if (lane == 0) taken.ticket.leave = 1;
      __syncwarp();
      return;
    }
    // The call line's last 16 bytes are padding; of the ticket's line the last 64 are.
    if (lane < 2 * kLineLanes - 4) reinterpret_cast<ulonglong2*>(&taken)[lane] = words;
    __syncwarp();
    found = taken.ticket.leave != 0 || find_rows(taken, ticket);
  }
  __syncwarp();
}

/// A row that is not there: why, once.
static __device__ __noinline__ void miss_row(const World& w, Taken& taken, uint32_t which, uint32_t token,
                                             bool overtaken, uint64_t found) {
  if (atomicMax(&taken.state[which], overtaken ? kOvertaken : kMissing) != 0) return;
  const ServeTicket& t = taken.ticket;
  report_fault(w, {Awaited::row, t.rank, t.lane, token, t.sequence, found, global_time() - t.seen});
}

/// Takes one row into shared memory, eight lanes a line, and waits for its lines a little; two lines under way a
/// thread. The warps from `warp` on, `warps` of them.
template <class Z>
__device__ void take_row(const World& w, Taken& taken, uint32_t which, uint32_t token, uint32_t warp, uint32_t warps,
                         uint64_t until, uint8_t* row) {
  const uint32_t lines = Z::row_lines(w);
  const uint32_t part = threadIdx.x % kLineLanes;
  const uint64_t awaited = taken.ticket.sequence;
  const std::byte* const first = taken.ticket.rows_segment + Z::row_at(w, taken.ticket.lane, token) + part * 16;
#pragma unroll 1
  for (uint32_t base = warp * 4; base < lines; base += 2 * warps * 4) {
    const uint32_t l[2] = {base + warp_lane() / kLineLanes, base + warps * 4 + warp_lane() / kLineLanes};
    ulonglong2 words[2] = {};
    bool bad[2];
    for (;;) {
#pragma unroll
      for (uint32_t k = 0; k < 2; ++k)
        if (l[k] < lines) words[k] = load_16(first + l[k] * kLineBytes);
#pragma unroll
      for (uint32_t k = 0; k < 2; ++k)
        bad[k] = __shfl_sync(0xFFFFFFFFU, words[k].y, kLineLanes - 1, kLineLanes) != awaited && l[k] < lines;
      if (__any_sync(0xFFFFFFFFU, bad[0] || bad[1]) == 0) break;
      const bool newer = (bad[0] && words[0].y > awaited) || (bad[1] && words[1].y > awaited);  // of the last lanes
      if (__any_sync(0xFFFFFFFFU, (newer && part == kLineLanes - 1) || cycles() >= until) == 0) continue;
      for (uint32_t k = 0; k < 2; ++k)
        if (bad[k] && part == kLineLanes - 1) miss_row(w, taken, which, token, words[k].y > awaited, words[k].y);
      break;
    }
#pragma unroll
    for (uint32_t k = 0; k < 2; ++k) {
      if (l[k] >= lines) continue;
      auto* const to = reinterpret_cast<uint64_t*>(row + l[k] * kLinePayload) + part * 2;
      to[0] = words[k].x;
      if (part < kLineLanes - 1) to[1] = words[k].y;
    }
  }
}

/// The sum of a row's local weights in slot order. False: an id is out of range. A warp.
template <class Z>
__device__ bool weigh_row(const World& w, const uint8_t* row, float& sum) {
  const uint32_t k = warp_lane();
  const bool slot = k < Z::top_k(w);
  const int32_t id = slot ? reinterpret_cast<const int32_t*>(row)[k] : -1;
  const float weight = slot ? reinterpret_cast<const float*>(row + Z::weights(w))[k] : 0.0F;
  const uint32_t local = __ballot_sync(0xFFFFFFFFU, is_local(w, id));
  const bool bad = __any_sync(0xFFFFFFFFU, id < -1 || id >= static_cast<int32_t>(w.shape.experts)) != 0;
  sum = 0.0F;
#pragma unroll 1
  for (uint32_t i = 0; i < Z::top_k(w); i += 8)  // beyond K nothing is local
#pragma unroll
    for (uint32_t j = 0; j < 8; ++j) {
      const float one = __shfl_sync(0xFFFFFFFFU, weight, static_cast<int>(i + j));
      if ((local >> (i + j) & 1) != 0) sum += one;
    }
  return !bad;
}

/// Four neighbouring values of a partial: x times the weight, each rounded once.
template <class Z>
__device__ uint64_t identity_4(const World& w, const uint8_t* row, float weight, uint32_t column) {
  const float scale = e8m0_to_float(row[Z::scales(w) + column / kBlock]);
  const auto* const codes = reinterpret_cast<const uint16_t*>(row + Z::codes(w) + column);
  uint32_t pair[2];
#pragma unroll
  for (uint32_t i = 0; i < 2; ++i) {
    const uint32_t halves = e4m3_halves(codes[i]);
    pair[i] = bf16_pair(half_to_float(static_cast<uint16_t>(halves)) * scale * weight,
                        half_to_float(static_cast<uint16_t>(halves >> 16)) * scale * weight);
  }
  return pair[0] | uint64_t{pair[1]} << 32;
}

/// The partial of a row in shared memory, as lines to its source. The warps from `warp` on, `warps` of them.
template <class Z>
__device__ void send_row(const World& w, const Taken& taken, uint32_t token, float weight, uint32_t warp,
                         uint32_t warps, const uint8_t* row) {
  const uint32_t lines = Z::partial_lines(w);
  const uint32_t part = threadIdx.x % kLineLanes;
  std::byte* const first = taken.ticket.answer_segment + Z::partial_at(w, taken.ticket.lane, token);
#pragma unroll 2
  for (uint32_t l = warp * 4 + warp_lane() / kLineLanes; l < lines; l += warps * 4) {
    const uint32_t column = l * kLineValues + part * 8;
    ulonglong2 words = {0, 0};
    if (column < Z::latent(w)) words.x = identity_4<Z>(w, row, weight, column);
    if (column + 4 < Z::latent(w) && part < kLineLanes - 1) words.y = identity_4<Z>(w, row, weight, column + 4);
    store_line(first + l * kLineBytes, words, taken.ticket.sequence);
  }
}

/// Rows of a whole source, and whether none lies beyond its tokens. A warp.
__device__ inline uint32_t all_rows(const Taken& taken, bool& sound) {
  const uint32_t lane = warp_lane();
  const uint32_t bits = lane < kCallWords ? bitmap_words(taken.call)[lane] : 0;
  const int32_t left = static_cast<int32_t>(taken.call.tokens) - static_cast<int32_t>(lane * 32);
  const uint32_t within = left >= 32 ? bits : left <= 0 ? 0 : bits & ((1U << left) - 1);
  sound = __all_sync(0xFFFFFFFFU, within == bits) != 0;
  return __reduce_add_sync(0xFFFFFFFFU, __popc(within));
}

/// Adds this block's rows to what has been done of the source; whoever does the last sends the return line. One warp.
__device__ inline void end_rows(const World& w, const Taken& taken, uint64_t mine) {
  uint64_t all = 0;
  if (warp_lane() == 0) all = fetch_add_u64(&w.result[taken.number % kServeTickets], mine) + mine;
  bool sound = true;
  const uint32_t rows = all_rows(taken, sound);
  all = __shfl_sync(0xFFFFFFFFU, all, 0);
  if ((all & 0xFFFF) != rows || warp_lane() >= kLineLanes) return;
  if ((all >> 16 & 0xFFFFFFFF) != 0) return;  // rows are missing or overtaken: not answered now
  const uint32_t part = warp_lane();
  const uint64_t sent = global_time();
  const uint64_t send = sent > taken.ticket.seen ? saturated(sent - taken.ticket.seen) : 0;
  const auto status = static_cast<uint64_t>(!sound           ? Status::bad_call
                                            : all >> 48 != 0 ? Status::bad_route
                                                             : Status::ok);
  const uint64_t good = status == 0 ? rows : 0;
  ulonglong2 words = {0, 0};  // ReturnLine: status, rows, pass_rows, pass_sources | queue, experts, send
  if (part == 0) words = {status | good << 32, good | uint64_t{1} << 32};
  if (part == 1) words = {saturated(taken.ticket.queue_ns), send};
  store_line(taken.ticket.answer_segment + w.layout.return_line(taken.ticket.lane), words, taken.ticket.sequence);
}

/// This block's rows of a source, kBatch at a time. The worker warps: all for a row alone, or half of them each.
template <class Z>
__device__ void serve_rows(const World& w, Taken& taken, uint8_t* rows) {
  const uint64_t until = cycles() + cycles_of(w, kRowsNs);
  const uint32_t warp = threadIdx.x / 32;
  uint64_t left = taken.mask;
  uint64_t mine = __popcll(left);  // rows done | missing << 16 | overtaken << 32 | bad << 48
#pragma unroll 1
  while (left != 0) {
    const auto count = static_cast<uint32_t>(min(static_cast<int>(kBatch), __popcll(left)));
    const uint32_t warps = count == 1 ? kServeWorkers / 32 : kServeWorkers / 32 / kBatch;
    const uint32_t which = warp / warps;
    const uint32_t own = warp % warps;
    uint64_t rest = left;
    for (uint32_t i = 0; i < which; ++i) rest &= rest - 1;
    const bool busy = rest != 0;
    const uint32_t token = taken.offset + (__ffsll(static_cast<long long>(rest)) - 1) * (gridDim.x - 1);
    uint8_t* const row = rows + which * Z::row_stride(w);
    if (busy) take_row<Z>(w, taken, which, token, own, warps, until, row);
    sync_some(1, kServeWorkers);
    if (busy && taken.state[which] == 0) {
      float weight = 0.0F;
      if (weigh_row<Z>(w, row, weight))
        send_row<Z>(w, taken, token, weight, own, warps, row);
      else
        show(taken.state[which], kBad);
    }
    sync_some(1, kServeWorkers);
    for (uint32_t i = 0; i < count; ++i) {
      if (look(taken.state[i]) != 0) mine += uint64_t{1} << (16 * look(taken.state[i]));
      left &= left - 1;
    }
    if (left == 0) break;
    sync_some(1, kServeWorkers);
    if (threadIdx.x < kBatch) taken.state[threadIdx.x] = 0;
    sync_some(1, kServeWorkers);
  }
  if (threadIdx.x < 32) end_rows(w, taken, mine);
}

/// While a source is served, the last warp has its eyes on the next one.
template <class Z>
__device__ void follow(const World& w, ServeBlock& b, uint8_t* rows) {
  const uint64_t loop = w.serve->loops + 1;
  const uint64_t until = cycles() + cycles_of(w, kTakeNs + kStayNs);
  uint32_t ticket = 0;
#pragma unroll 1
  for (uint32_t turn = 0;; ++turn) {
    if (is_control()) next_source(w, b.taken[turn % 2], loop, until, ticket);
    __syncthreads();
    Taken& taken = b.taken[turn % 2];
    if (taken.ticket.leave != 0) return;
    if (!is_control()) serve_rows<Z>(w, taken, rows);
  }
}

}  // namespace moed::cuda
