// What the blocks of a serve loop share, and what those do that follow: rows in, partials out. See serve_loop.cu.
#pragma once

#include "kernels/cuda/loop.cuh"
#include "kernels/cuda/sums.cuh"

namespace moed::cuda {

inline constexpr uint32_t kServeWorkers = 256;
inline constexpr uint32_t kServeThreads = kServeWorkers + 32;  // the last warp watches
inline constexpr uint32_t kServeRegisters = 48;
inline constexpr uint32_t kGroups = kServeWorkers / kLineLanes;
inline constexpr uint32_t kBatch = 2;                 // rows in shared memory
inline constexpr uint32_t kMostRows = 32;             // of a source, by one block
inline constexpr uint32_t kMostEyes = 64;             // call lines that a block watches
inline constexpr uint64_t kLongestPause = 5'000'000;  // between looks at a source whose rows are incomplete

/// A call line that a following block watches, and where its rows and answers lie.
struct Eye {
  const std::byte* line;
  const std::byte* mine;
  std::byte* theirs;
  uint64_t floor;  // what is above it and of the same session is new; ~0: nothing is
  uint32_t at;     // its Watch
  uint32_t rank, lane;
  uint32_t token;  // the first that is this block's
};

/// A source as a following block has it.
struct alignas(128) Taken {
  CallLine call;
  uint8_t pad[16];
  uint64_t sequence;
  uint64_t seen;  // global_time
  uint32_t eye;
  uint32_t mask;           // bit k: the eye's token + k * share is a row of this block; 0: the loop ends
  uint32_t state[kBatch];  // of a row: 0 good, kMissing, kOvertaken, or kBad
  uint64_t until;          // what is missing of its rows is waited for so long; 0: nothing was missing yet
};

/// A row of a source and the warps that take and answer it: from `warp` on, `warps` of them.
struct RowJob {
  uint32_t which, token, warp, warps;
  uint8_t* row;  // room for it in shared memory
};

/// What a source whose rows have been served leaves to tell the host.
struct Ended {
  uint64_t queue_ns, gather_ns;
  uint32_t rows, refused;
  uint32_t number;  // 1 + its own, written last
};
inline constexpr uint32_t kEnded = 32;  // at least as many groups of eight as may push at once

/// How the blocks that follow share call lines: group g has every groups-th from g on, and of a source each of the
/// `share` blocks of a group has every share-th token.
struct Shares {
  uint32_t groups, share;
};
__device__ inline Shares share_calls(const World& w, uint32_t blocks) {
  if (blocks == 0) return {1, 0};
  const uint32_t groups = min((w.ranks * w.layout.lanes_all + kWatched - 1) / kWatched, blocks);
  return {groups, blocks / groups};
}

__device__ inline uint32_t serving_blocks(const Shares& s) { return s.groups * s.share; }

struct ServeBlock {
  Shares shares;
  uint32_t worked;   // the pass before has left sources to the kernels behind the loops
  uint32_t index;    // among the blocks that follow, in the order in which they have begun
  uint32_t counted;  // the leading block waits for this one to leave
  // A following block's:
  Eye eye[kMostEyes];
  uint32_t eyes;
  Taken taken[2];  // the source that it serves, and the next one
  // The leading block's:
  Ended ended[kEnded];
  uint32_t pushed, told;  // entries of `ended`, ever
  uint32_t present;
  uint64_t last_look;
  uint32_t general;   // a source that is not for the loop
  uint32_t given_up;  // blocks that follow may still be at sources of this loop
  uint32_t closing;   // no source is taken any more
  uint32_t done;      // worker warps that look no more
  uint32_t begun;     // blocks that follow and were there when the loop began
  uint32_t left;      // ServeState::left at that time
};

__device__ inline bool is_control() { return threadIdx.x >= kServeWorkers; }

/// Where this block looks for calls. The last warp. Sources whose rows were incomplete are for the kernels behind the
/// loop.
__device__ inline void open_eyes(const World& w, ServeBlock& b, uint32_t present) {
  const uint32_t watches = w.ranks * w.layout.lanes_all;
  const uint32_t groups = b.shares.groups;
  const uint32_t group = b.index % groups;
  const uint32_t eyes = group < watches ? min((watches - group + groups - 1) / groups, kMostEyes) : 0;
#pragma unroll 1
  for (uint32_t i = warp_lane(); i < eyes; i += 32) {
    const uint32_t at = group + i * groups;
    const uint32_t rank = at / w.layout.lanes_all;
    const uint32_t lane = at - rank * w.layout.lanes_all;
    const DeviceLink& link = w.pictures[present].link[rank];
    const Watch& watch = w.watch[at];
    const bool open = link.state == LinkState::ready && load_u32(&watch.retries) == 0;
    const uint64_t served = load_u64(&watch.served);
    const uint64_t least = sequence(link.session, 0);
    Eye& eye = b.eye[i];
    eye.mine = link.mine;
    eye.theirs = link.theirs;
    eye.line = open ? link.mine + w.layout.call(lane) : reinterpret_cast<const std::byte*>(w.serve_go);
    eye.floor = !open ? ~0ULL : served >> kSessionShift == link.session ? served : least;
    eye.at = at;
    eye.rank = rank;
    eye.lane = lane;
    eye.token =
        (b.index / groups + at * 17) % b.shares.share;  // so that small calls of several sources meet no one block
  }
  if (warp_lane() == 0) b.eyes = eyes;
  __syncwarp();
}

/// Which tokens of a source are this block's rows. False: none, or the source is not for the loop. The last warp.
__device__ inline bool find_rows(const World& w, const Eye& eye, Taken& taken, uint32_t share) {
  const uint32_t tokens = taken.call.tokens;
  const uint32_t t = eye.token + warp_lane() * share;
  const bool row = t < min(tokens, kMaxTokens) && (bitmap_words(taken.call)[t / 32] >> (t % 32) & 1) != 0;
  const uint32_t mask = __ballot_sync(0xFFFFFFFFU, row);
  if (mask == 0 || tokens > min(w.layout.max_tokens, kMostRows * share) || !is_identity(w, taken.call.layer))
    return false;
  if (warp_lane() == 0) {
    taken.mask = mask;
    taken.seen = global_time();
  }
  return true;
}

/// One look at all eyes. True: a source has rows of this block. The last warp.
__device__ inline bool look_around(const World& w, ServeBlock& b, Taken& taken) {
  const uint32_t part = warp_lane() % kLineLanes;
  const uint32_t group = warp_lane() / kLineLanes;
#pragma unroll 1
  for (uint32_t base = 0; base < b.eyes; base += 32 / kLineLanes) {
    const uint32_t i = min(base + group, b.eyes - 1);
    Eye& eye = b.eye[i];
    const uint64_t floor = look(eye.floor);
    const ulonglong2 words = load_16(eye.line + part * 16);
    const uint64_t found = __shfl_sync(0xFFFFFFFFU, words.y, kLineLanes - 1, kLineLanes);
    const uint32_t fresh = __ballot_sync(0xFFFFFFFFU, found > floor && (found ^ floor) >> kSessionShift == 0);
    if (fresh == 0) continue;
    const uint32_t first = (__ffs(static_cast<int>(fresh)) - 1) / kLineLanes;
    if (group == first) reinterpret_cast<ulonglong2*>(&taken)[part] = words;  // the last 16 bytes are padding
    if (group == first && part == 0) {
      show(eye.floor, found);
      taken.sequence = found;
      taken.eye = i;
    }
    __syncwarp();
    if (find_rows(w, b.eye[taken.eye], taken, b.shares.share)) return true;
    __syncwarp();
    base -= 32 / kLineLanes;  // others may be new beside it
  }
  return false;
}

/// Waits for the next source of which this block has rows; mask = 0: the loop ends. The last warp.
__device__ inline void next_source(const World& w, ServeBlock& b, Taken& taken, uint64_t loop, uint64_t until) {
  if (warp_lane() < kBatch) taken.state[warp_lane()] = 0;
  if (warp_lane() == 0) taken.until = 0;
  for (;;) {
    const ulonglong2 go = load_16(w.serve_go);
    const bool found = look_around(w, b, taken);
    const bool stays = go.x == loop << 1 && !is_late(until);
    if (found && stays) break;
    if (stays) continue;
    if (warp_lane() == 0) taken.mask = 0;  // what was found the next loop finds again
    break;
  }
  __syncwarp();
}

/// A row that is not there: why, once a source.
static __device__ __noinline__ void miss_row(const World& w, const Eye& eye, Taken& taken, uint32_t which,
                                             uint32_t token, uint64_t found) {
  const bool overtaken = found > taken.sequence;
  if (atomicMax(&taken.state[which], overtaken ? kOvertaken : kMissing) != 0 || overtaken) return;
  if (exchange_u64(&w.watch[eye.at].reported, taken.sequence) == taken.sequence) return;
  report_fault(w, {Awaited::row, eye.rank, eye.lane, token, taken.sequence, found, global_time() - taken.seen});
}

/// Whether what is missing of a source has been waited for long enough, counted from when a warp first asked.
__device__ inline bool is_too_late(Taken& taken) {
  const uint64_t now = global_time();
  const uint64_t until = look(taken.until);
  if (until == 0 && warp_lane() == 0)
    atomicCAS(reinterpret_cast<unsigned long long*>(&taken.until), 0ULL,
              static_cast<unsigned long long>(now + kRowsNs));
  return until != 0 && now >= until;
}

/// Takes one row into shared memory, eight lanes a line, and waits for its lines a little; two lines under way a
/// thread. The warps from `warp` on, `warps` of them.
template <class Z>
__device__ void take_row(const World& w, const Eye& eye, Taken& taken, const RowJob& job) {
  const uint32_t lines = Z::row_lines(w);
  const uint32_t part = threadIdx.x % kLineLanes;
  const uint64_t awaited = taken.sequence;
  const std::byte* const first = eye.mine + Z::row_at(w, eye.lane, job.token) + part * 16;
#pragma unroll 1
  for (uint32_t base = job.warp * 4; base < lines; base += 2 * job.warps * 4) {
    const uint32_t l[2] = {base + warp_lane() / kLineLanes, base + job.warps * 4 + warp_lane() / kLineLanes};
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
      if (__any_sync(0xFFFFFFFFU, (newer && part == kLineLanes - 1) || is_too_late(taken)) == 0) continue;
      const uint64_t found = bad[0] ? words[0].y : words[1].y;
      if ((bad[0] || bad[1]) && part == kLineLanes - 1) miss_row(w, eye, taken, job.which, job.token, found);
      return;
    }
#pragma unroll
    for (uint32_t k = 0; k < 2; ++k) {
      if (l[k] >= lines) continue;
      auto* const to = reinterpret_cast<uint64_t*>(job.row + l[k] * kLinePayload) + part * 2;
      to[0] = words[k].x;
      if (part < kLineLanes - 1) to[1] = words[k].y;
    }
  }
}

/// The sum of a row's local weights in slot order. False: an id is out of range. A warp.
template <class Z>
__device__ bool weigh_row(const World& w, const uint8_t* row, float& sum) {
  const uint32_t k = warp_lane();
  const int32_t id = k < Z::top_k(w) ? reinterpret_cast<const int32_t*>(row)[k] : -1;
  const auto* const weight = reinterpret_cast<const float*>(row + Z::weights(w));
  const uint32_t local = __ballot_sync(0xFFFFFFFFU, is_local(w, id));
  const bool bad = __any_sync(0xFFFFFFFFU, id < -1 || id >= static_cast<int32_t>(w.shape.experts)) != 0;
  sum = 0.0F;
  if (Z::top_k(w) % 2 == 0) {
#pragma unroll 8
    for (uint32_t i = 0; i < Z::top_k(w) / 2; ++i) {
      const float2 two = reinterpret_cast<const float2*>(weight)[i];
      if ((local >> (2 * i) & 1) != 0) sum += two.x;
      if ((local >> (2 * i + 1) & 1) != 0) sum += two.y;
    }
    return !bad;
  }
#pragma unroll 1
  for (uint32_t i = 0; i < Z::top_k(w); ++i)
    if ((local >> i & 1) != 0) sum += weight[i];
  return !bad;
}

/// Four neighbouring values of a partial, two a word: x times the weight, each rounded once; a NaN as bf16_pair_raw has
/// it.
template <class Z>
__device__ void identity_4(const World& w, const uint8_t* row, float weight, uint32_t column, uint32_t* pair) {
  const float scale = e8m0_to_float(row[Z::scales(w) + column / kBlock]);
  const auto* const codes = reinterpret_cast<const uint16_t*>(row + Z::codes(w) + column);
#pragma unroll
  for (uint32_t i = 0; i < 2; ++i) {
    const uint32_t halves = e4m3_halves(codes[i]);
    pair[i] = bf16_pair_raw(half_to_float(static_cast<uint16_t>(halves)) * scale * weight,
                            half_to_float(static_cast<uint16_t>(halves >> 16)) * scale * weight);
  }
}

/// The partial of a row in shared memory, as lines to its source, two at a time, whether there are two or not. The
/// warps from `warp` on, `warps` of them.
template <class Z>
__device__ void send_row(const World& w, const Eye& eye, const Taken& taken, const RowJob& job, float weight) {
  const uint32_t lines = Z::partial_lines(w);
  const uint32_t part = threadIdx.x % kLineLanes;
  std::byte* const first = eye.theirs + Z::partial_at(w, eye.lane, job.token);
  const uint32_t step = job.warps * 4;
#pragma unroll 1
  for (uint32_t l = job.warp * 4 + warp_lane() / kLineLanes; l < lines; l += 2 * step) {
    uint32_t pair[2][4];
#pragma unroll
    for (uint32_t j = 0; j < 2; ++j) {
      const uint32_t column = (l + j * step) * kLineValues + part * 8;
      identity_4<Z>(w, job.row, weight, column < Z::latent(w) ? column : 0, pair[j]);
      identity_4<Z>(w, job.row, weight, column + 4 < Z::latent(w) ? column + 4 : 0, pair[j] + 2);
      if (column >= Z::latent(w)) pair[j][0] = pair[j][1] = 0;
      if (column + 4 >= Z::latent(w) || part == kLineLanes - 1) pair[j][2] = pair[j][3] = 0;
    }
    if (max(greatest_of(pair[0]), greatest_of(pair[1])) > 0x7F80U) {
      settle_nans(pair[0]);
      settle_nans(pair[1]);
    }
#pragma unroll
    for (uint32_t j = 0; j < 2; ++j)
      if (l + j * step < lines) store_line(first + (l + j * step) * kLineBytes, from_pairs(pair[j]), taken.sequence);
  }
}

/// This block's rows of a source, kBatch at a time. The worker warps: all for a row alone, or half of them each.
template <class Z>
__device__ void serve_rows(const World& w, ServeBlock& b, Taken& taken, uint64_t loop, uint8_t* rows) {
  const uint32_t warp = threadIdx.x / 32;
  Eye& eye = b.eye[taken.eye];
  uint32_t left = taken.mask;
  uint32_t mine = __popc(left);  // as Mark has it
#pragma unroll 1
  while (left != 0) {
    const auto count = static_cast<uint32_t>(min(static_cast<int>(kBatch), __popc(left)));
    static_assert(kBatch == 2);
    const uint32_t warps = count == 1 ? kServeWorkers / 32 : kServeWorkers / 64;
    const uint32_t which = warp >= warps ? 1 : 0;
    const uint32_t rest = which == 0 ? left : left & (left - 1);
    const bool busy = rest != 0;
    const uint32_t token = eye.token + (__ffs(static_cast<int>(rest)) - 1) * b.shares.share;
    const RowJob job = {which, token, warp - which * warps, warps, rows + which * Z::row_stride(w)};
    if (busy) take_row<Z>(w, eye, taken, job);
    sync_some(1, kServeWorkers);
    if (busy && look(taken.state[which]) == 0) {
      float weight = 0.0F;
      if (weigh_row<Z>(w, job.row, weight))
        send_row<Z>(w, eye, taken, job, weight);
      else
        show(taken.state[which], kBad);
    }
    sync_some(1, kServeWorkers);
    for (uint32_t i = 0; i < count; ++i) {
      if (look(taken.state[i]) != 0) mine |= 1U << (16 + look(taken.state[i]));
      left &= left - 1;
    }
    if (left == 0) break;
    sync_some(1, kServeWorkers);
    if (threadIdx.x < kBatch) taken.state[threadIdx.x] = 0;
    sync_some(1, kServeWorkers);
  }
  if (threadIdx.x != 0) return;
  if ((mine >> (16 + kMissing) & 1) != 0) show(eye.floor, ~uint64_t{0});  // what follows it is not for the loop either
  Mark* const mark = w.mark + eye.at * b.shares.share + b.index / b.shares.groups;
  store_16(mark, {taken.sequence, mine | loop << 32});
}

/// Waits until the leading block says that the loop has begun. False: it does so without this block, or says that the
/// loop ends, or nothing. The last warp.
__device__ inline bool await_go(const World& w, ServeBlock& b, uint64_t loop, uint64_t until) {
  for (;;) {
    const ulonglong2 go = load_16(w.serve_go);
    if (go.x >> 1 == loop) {
      if (warp_lane() == 0) {
        b.shares = share_calls(w, static_cast<uint32_t>(go.y >> 32));
        b.counted = b.index < serving_blocks(b.shares) ? 1 : 0;  // else begun too late, or one too many
      }
      __syncwarp();
      if (b.counted == 0 || (go.x & 1) != 0) return false;
      open_eyes(w, b, static_cast<uint32_t>(go.y));
      return true;
    }
    if (go.x > loop << 1 || is_late(until)) return false;
  }
}

/// While a source is served, the last warp has its eyes on the next one.
template <class Z>
__device__ void follow(const World& w, ServeBlock& b, uint64_t loop, uint8_t* rows) {
  const uint64_t until = global_time() + kTakeNs + kStayNs;
  bool open = false;
  if (is_control()) open = await_go(w, b, loop, until);
#pragma unroll 1
  for (uint32_t turn = 0;; ++turn) {
    Taken& taken = b.taken[turn % 2];
    if (is_control() && open) next_source(w, b, taken, loop, until);
    if (is_control() && !open && warp_lane() == 0) taken.mask = 0;
    __syncthreads();
    if (taken.mask == 0) break;
    if (!is_control()) serve_rows<Z>(w, b, taken, loop, rows);
  }
  if (threadIdx.x == 0 && b.counted != 0) add_u32(&w.serve->left, 1);
}

}  // namespace moed::cuda
