// One token's answer from its partials: the sum in rank order, one rounding, RMSNorm. One order of all sums whichever
// kernel does it, so that a token's bits do not depend on the way its call took.
#pragma once

#include "kernels/cuda/rows.cuh"

namespace moed::cuda {

inline constexpr uint32_t kTeamWarps = kTeam / 32;
inline constexpr uint32_t kLineValues = kLinePayload / 2;  ///< BF16 values of one line of a partial

/// What a token's sum needs beside its partials.
struct SumCall {
  const uint16_t* gamma;  ///< nullptr: 1
  uint16_t* out;
  bool norm;
  bool settle;  ///< out is in the GPU's L2 when what sum_tokens returns is known
};

/// Shared memory of sum_token, beside the rows.
struct alignas(16) SumShared {
  double squares[2][kTeamWarps];
};

/// The lines of the first two ranks of a token at one place, asked for ahead of their turn.
struct Ahead {
  ulonglong2 words[2];
};

/// Ranks of a set in ascending order, 32 at a time: there are seldom more.
struct RankWalk {
  const uint32_t* word;
  uint32_t words, at, left;
  __device__ RankWalk(const RankSet& set, uint32_t ranks)
      : word(reinterpret_cast<const uint32_t*>(&set)), words((ranks + 31) / 32), at(0), left(word[0]) {}
  __device__ bool more() {
    while (left == 0 && at + 1 < words) left = word[++at];
    return left != 0;
  }
  __device__ uint32_t next() {  // after more()
    const uint32_t r = at * 32 + __ffs(static_cast<int>(left)) - 1;
    left &= left - 1;
    return r;
  }
};

/// Asks for the lines of a token's first two ranks. `mine`: this group of eight has a line at `offset`.
__device__ inline void ask(const Peer* peers, RankWalk walk, uint64_t offset, bool mine, Ahead& ahead) {
  for (auto& words : ahead.words) {
    words = {0, 0};
    if (!walk.more()) continue;
    const std::byte* const line = peers[walk.next()].mine + offset + threadIdx.x % kLineLanes * 16;
    if (mine) words = load_16(line);
  }
}

__device__ inline void add_values(const ulonglong2& words, float (&sum)[8]) {
  uint32_t pair[4];
  to_pairs(words, pair);
#pragma unroll
  for (uint32_t i = 0; i < 4; ++i) {
    sum[2 * i] += float_of(pair[i] << 16);
    sum[2 * i + 1] += float_of(pair[i] & 0xFFFF0000U);
  }
}

/// Adds up the ranks' lines at `offset` of their segments in rank order, two under way at a time; a whole warp, whose
/// groups of eight have a line each where `mine`. Eight values a thread, of which four are padding in the last thread
/// of a line. `stop(rank, found, missing)` is asked by the whole warp while a line is missing. False: stopped.
template <class Stop>
__device__ bool sum_lines(const Peer* peers, RankWalk walk, uint64_t offset, bool mine, Ahead& ahead, float (&sum)[8],
                          Stop stop) {
  const uint32_t part = threadIdx.x % kLineLanes;
  for (float& v : sum) v = 0.0F;
#pragma unroll 1
  for (bool asked = true; walk.more(); asked = false) {
    const uint32_t first = walk.next();
    const bool two = walk.more();
    const uint32_t second = two ? walk.next() : first;
    const std::byte* const line[2] = {peers[first].mine + offset + part * 16, peers[second].mine + offset + part * 16};
    const uint64_t awaited[2] = {peers[first].awaited, peers[second].awaited};
#pragma unroll 1
    for (;; asked = false) {
      if (!asked && mine) {
        ahead.words[0] = load_16(line[0]);
        if (two) ahead.words[1] = load_16(line[1]);
      }
      const uint64_t found = __shfl_sync(0xFFFFFFFFU, ahead.words[0].y, kLineLanes - 1, kLineLanes);
      const uint64_t other = __shfl_sync(0xFFFFFFFFU, ahead.words[1].y, kLineLanes - 1, kLineLanes);
      const bool there = found == awaited[0];
      const bool missing = mine && !(there && (!two || other == awaited[1]));
      if (__any_sync(0xFFFFFFFFU, missing) == 0) break;
      if (stop(there ? second : first, there ? other : found, missing)) return false;
    }
    add_values(ahead.words[0], sum);
    if (two) add_values(ahead.words[1], sum);
  }
  return true;
}

/// The sum of the squares of eight BF16 values, of which NaNs are as bf16_pair_raw makes them, and afterwards as
/// bf16_pair does. In FP32 the squares of very small and very large values would be lost: those are added in FP64,
/// which takes its time.
__device__ inline double squares_of(uint32_t (&pair)[4]) {
  const uint32_t greatest = greatest_of(pair);
  if (greatest == 0 ||
      (greatest >= 0x2F80U && greatest < 0x4F80U)) {  // 2^-32 to 2^32: what is lost beside it is no matter
    float sum = 0.0F;
#pragma unroll
    for (uint32_t i = 0; i < 4; ++i) {
      const float low = float_of(pair[i] << 16);
      const float high = float_of(pair[i] & 0xFFFF0000U);
      sum += low * low + high * high;
    }
    return sum;
  }
  settle_nans(pair);
  double sum = 0.0;
#pragma unroll 1
  for (uint32_t i = 0; i < 8; ++i) {
    const uint32_t two = i < 2 ? pair[0] : i < 4 ? pair[1] : i < 6 ? pair[2] : pair[3];
    const double d = float_of(i % 2 == 0 ? two << 16 : two & 0xFFFF0000U);
    sum += d * d;
  }
  return sum;
}

/// Adds up one value per thread of a team in a fixed order; each gets the sum. `turn` alternates, which
/// saves a barrier.
__device__ inline double sum_squares(double v, SumShared& shared, uint32_t turn) {
#pragma unroll
  for (uint32_t i = 16; i > 0; i /= 2) v += __shfl_xor_sync(0xFFFFFFFFU, v, i);
  double* const all = shared.squares[turn % 2];
  if (threadIdx.x % 32 == 0) all[team_thread() / 32] = v;
  sync_team();
  static_assert(kTeamWarps == 8);
  double2 two[4];
#pragma unroll
  for (uint32_t i = 0; i < 4; ++i) two[i] = reinterpret_cast<const double2*>(all)[i];
  return ((two[0].x + two[2].x) + (two[1].x + two[3].x)) + ((two[0].y + two[2].y) + (two[1].y + two[3].y));
}

/// Eight values times rstd. A row with a NaN has no rstd that FP32 holds, so there is none here.
__device__ inline ulonglong2 scale_8(const ulonglong2& words, float rstd) {
  uint32_t pair[4];
  to_pairs(words, pair);
#pragma unroll
  for (uint32_t& two : pair) two = bf16_pair_raw(float_of(two << 16) * rstd, float_of(two & 0xFFFF0000U) * rstd);
  return from_pairs(pair);
}

/// The same, then times gamma.
__device__ inline ulonglong2 scale_8(const ulonglong2& words, float rstd, const uint16_t* gamma) {
  uint32_t pair[4];
  uint32_t by[4];
  to_pairs(words, pair);
  to_pairs(*reinterpret_cast<const ulonglong2*>(gamma), by);
#pragma unroll
  for (uint32_t i = 0; i < 4; ++i)
    pair[i] = bf16_pair(float_of(pair[i] << 16) * rstd * float_of(by[i] << 16),
                        float_of(pair[i] & 0xFFFF0000U) * rstd * float_of(by[i] & 0xFFFF0000U));
  return from_pairs(pair);
}

/// Stores 16 bytes of out. What it returns is known, where `settle` is set, when they are in the L2, where every
/// multiprocessor, copy engine and peer finds them. A fence, or a load behind the store, says no more and waits for all
/// that the multiprocessor has under way: beside kernels that stream memory 50 to 150 us (design.md section 8).
__device__ inline uint32_t put_16(uint16_t* at, const ulonglong2& words, bool settle) {
  if (settle) return static_cast<uint32_t>(exchange_16(at, words).x);
  store_16(at, words);
  return 0;
}

/// The same for 16 bytes that this thread has stored just now, as its neighbours have the rest of their line: what
/// eight lanes store to a line is one, so one addition of nothing by one of them comes back when all of it is there. An
/// SM has one atomic a cycle, which for every thread's would be a quarter of a microsecond a row.
__device__ inline uint32_t settle_line(uint16_t* at) {
  const bool first = reinterpret_cast<uint64_t>(at) / 16 % kLineLanes == 0 || threadIdx.x % kLineLanes == 0;
  return first ? fetch_add_u32(reinterpret_cast<uint32_t*>(at), 0) : 0;
}

/// put_row with a norm where FP32 does not hold the mean of the squares or rstd well; rare.
static __device__ __noinline__ uint32_t put_row_slowly(const uint16_t* row, uint32_t columns, const SumCall& call,
                                                       double mean) {
  const double rstd = rsqrt(mean);
  uint32_t before = 0;
#pragma unroll 1
  for (uint32_t p = team_thread(); p < columns / 8; p += kTeam) {
    uint32_t pair[4];
    for (uint32_t i = 0; i < 8; ++i) {
      const double v = bf16_to_float(row[p * 8 + i]);
      const double g = call.gamma != nullptr ? bf16_to_float(call.gamma[p * 8 + i]) : 1.0F;
      const uint32_t bits = bf16_pair(static_cast<float>(v * rstd * g), 0.0F) & 0xFFFFU;
      pair[i / 2] = i % 2 == 0 ? bits : pair[i / 2] | bits << 16;
    }
    before |= put_16(call.out + p * 8, from_pairs(pair), call.settle);
  }
  return before;
}

/// 1 / sqrt(x) to about 23 bits, x between 1e-30 and 1e30.
__device__ inline float inverse_root(float x) {
  const float y = rsqrtf(x);
  return __fmaf_rn(__fmaf_rn(-x * y, y, 1.0F), 0.5F * y, y);
}

/// Writes one token's row: `row`, L BF16 values in shared memory whose squares add up to `total`, times rstd and gamma
/// where there is a norm.
__device__ inline uint32_t put_row(const World& w, const uint16_t* row, uint32_t columns, const SumCall& call,
                                   double total) {
  const bool norm = call.norm && total != 0.0;
  const double mean = total * w.per_latent + static_cast<double>(w.shape.norm_eps);
  const auto x = static_cast<float>(mean);
  if (norm && !(x > 1e-30F && x < 1e30F)) return put_row_slowly(row, columns, call, mean);
  const float rstd = inverse_root(x);
  uint32_t before = 0;
#pragma unroll 1
  for (uint32_t at = team_thread() * 8; at < columns; at += 2 * kTeam * 8) {
    const uint32_t other = at + kTeam * 8 < columns ? at + kTeam * 8 : at;  // the same twice, where there is one
    ulonglong2 words[2] = {*reinterpret_cast<const ulonglong2*>(row + at),
                           *reinterpret_cast<const ulonglong2*>(row + other)};
    if (norm && call.gamma != nullptr) {
      words[0] = scale_8(words[0], rstd, call.gamma + at);
      words[1] = scale_8(words[1], rstd, call.gamma + other);
    } else if (norm) {
      words[0] = scale_8(words[0], rstd);
      words[1] = scale_8(words[1], rstd);
    }
    store_16(call.out + at, words[0]);
    store_16(call.out + other, words[1]);
    if (call.settle) before |= settle_line(call.out + at) | settle_line(call.out + other);
  }
  return before;
}

/// Tokens first, first + step, ... below `end`, by a team. set(i): a reference to the ranks whose partials the i-th
/// has, which holds until the next one; the same for all threads. rows: room for two rows of L BF16 values in shared
/// memory. call(token): its SumCall. stop(token, rank, found, missing): as in sum_lines; what has stopped leaves
/// rubbish in its out.
template <class Z, class Set, class CallOf, class Stop>
__device__ uint32_t sum_tokens(const World& w, const Peer* peers, uint32_t lane, uint32_t first, uint32_t step,
                               uint32_t end, uint16_t* rows, SumShared& shared, Set set, CallOf call, Stop stop) {
  if (first >= end) return 0;
  const uint32_t n = Z::latent(w);
  uint32_t before = 0;
  const uint32_t lines = Z::partial_lines(w);
  const uint32_t group = team_thread() / kLineLanes;
  const uint32_t part = threadIdx.x % kLineLanes;
  const auto offset = [&](uint32_t token, uint32_t l) { return Z::partial_at(w, lane, token) + l * kLineBytes; };
  Ahead ahead;
  ask(peers, RankWalk(set(0), w.ranks), offset(first, group), group < lines, ahead);
  double squares = 0.0;
  uint32_t turn = 0;
  uint32_t token = first;
#pragma unroll 1
  for (uint32_t base = 0;;) {
    const uint32_t l = base + group;
    float sum[8];
    const bool good =
        sum_lines(peers, RankWalk(set(turn), w.ranks), offset(token, l), l < lines, ahead, sum,
                  [&](uint32_t r, uint64_t found, bool missing) { return stop(token, r, found, missing); });
    uint16_t* const row = rows + turn % 2 * n;
    base += kTeamGroups;
    const bool whole = base >= lines;
    const uint32_t next = whole ? token + step : token;
    const uint32_t next_base = whole ? 0 : base;
    if (next < end)  // what comes next is under way while this is rounded
      ask(peers, RankWalk(set(whole ? turn + 1 : turn), w.ranks), offset(next, next_base + group),
          next_base + group < lines, ahead);
    const uint32_t column = l * kLineValues + part * 8;
    if (good && l < lines && column < n) {  // n and column are multiples of four
      uint32_t pair[4];
#pragma unroll
      for (uint32_t i = 0; i < 4; ++i) pair[i] = bf16_pair_raw(sum[2 * i], sum[2 * i + 1]);
      const bool half = part == kLineLanes - 1 || column + 4 >= n;
      if (half) pair[2] = pair[3] = 0;
      squares += squares_of(pair);
      auto* const to = reinterpret_cast<uint64_t*>(row + column);
      to[0] = pair[0] | uint64_t{pair[1]} << 32;
      if (!half) to[1] = pair[2] | uint64_t{pair[3]} << 32;
    }
    if (!whole) continue;
    const SumCall how = call(token);  // what it reads has the time of the squares
    before |= put_row(w, row, n, how, sum_squares(squares, shared, turn));
    squares = 0.0;
    base = 0;
    token = next;
    ++turn;
    if (token >= end) return before;
  }
}

}  // namespace moed::cuda
