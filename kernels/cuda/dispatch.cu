// The call pass up to the wait: bell, routing, admission with its call lines, rows. Reads top to bottom in time order.
#include "kernels/cuda/device.cuh"
#include "kernels/cuda/passes.h"

namespace moed::cuda {
namespace {

constexpr uint32_t kGateThreads = 128, kRoutingThreads = 256, kAdmitThreads = 1024, kRowThreads = 256;
constexpr uint32_t kRoutingBlocks = 64, kRowBlocks = 128;
constexpr uint32_t kBitmapWords = kMaxTokens / 32;

/// Takes a call over: from here it ends exactly once.
__device__ void take_call(const World& w, LaneState& s) {
  const auto* from = reinterpret_cast<const uint4*>(&s.host_call);
  for (uint32_t i = threadIdx.x; i < sizeof(DeviceCall) / 16; i += blockDim.x)
    reinterpret_cast<uint4*>(&s.now)[i] = from[i];
  for (uint32_t i = threadIdx.x; i < sizeof(CallRecord) / 4; i += blockDim.x)
    reinterpret_cast<uint32_t*>(&s.record)[i] = 0;
  __syncthreads();
  if (threadIdx.x != 0) return;
  const Call& c = s.now.call;
  const uint64_t now = global_time();
  int32_t valid = static_cast<int32_t>(c.tokens);
  if (s.now.forced == Status::ok && c.valid != 0) valid = *reinterpret_cast<const int32_t*>(s.arena + c.valid);
  s.valid = valid < 0 ? 0 : min(static_cast<uint32_t>(valid), c.tokens);
  s.done = s.tokens = s.sent = s.broken = s.late = 0;
  s.running = 1;
  s.bad = ~0ULL;
  s.ended = Status::pending;
  s.good = Status::ok;
  s.needed = s.waiting = s.in = s.out = s.named = {};
  s.seen = now;
  s.deadline = now + s.now.timeout_ns;
  s.record.last = kNoRank;
  s.mode = Mode::start;
  drill(w, w.call_delay_ns);
}

/// An engine can write the bell, too: what the host has not given is not taken, and nothing is taken twice.
__device__ bool is_given(LaneState& s) {
  const uint32_t number = load_u32_acquire(&s.host_number);
  if (number == s.host_taken) return false;
  s.host_taken = number;
  return true;
}

__global__ void call_gate(const __grid_constant__ World w, uint32_t lane) {
  LaneState& s = w.lane[lane];
  __shared__ uint32_t bell;
  if (threadIdx.x == 0) {
    s.picture = begin_pass(w, s.passes, w.board->lane[lane].begun);
    bell = 0;
    if (s.running != 0) {
      s.mode = s.ended != Status::pending ? Mode::fail : s.sent != 0 ? Mode::wait : Mode::piece;
    } else {
      s.mode = Mode::none;
      bell = wait_word(&s.mailbox->bell, global_time() + kGateNs, w.disarm, &s.disarm);
      s.picture = load_u32_acquire(w.present);  // links may have become ready since the gate began
      if (bell != 0) store_u32(&s.mailbox->bell, 0);
      if (load_u32(&s.disarm) != 0 || (bell == kHostBell && !is_given(s))) bell = 0;
    }
  }
  __syncthreads();
  if (bell == kHostBell) take_call(w, s);
}

/// One slot: copies id and weight, notes a bad id, names the rank that owns it.
__device__ void route_slot(const World& w, LaneState& s, uint64_t i, int32_t* ids, float* weights, RankSet& needed) {
  const Call& c = s.now.call;
  int64_t id;
  if ((c.flags & kFlagIds64) != 0)
    id = reinterpret_cast<const int64_t*>(s.arena + c.ids)[i];
  else
    id = reinterpret_cast<const int32_t*>(s.arena + c.ids)[i];
  if (id < -1 || id >= static_cast<int64_t>(w.shape.experts)) {
    atomicMin(&s.bad, static_cast<unsigned long long>(i));
    id = -1;
  }
  ids[i] = static_cast<int32_t>(id);
  if (id >= 0) add_atomic(needed, owner(w.shape, static_cast<uint32_t>(id), w.ranks));
  weights[i] = (c.flags & kFlagWeights16) != 0
                   ? bf16_to_float(reinterpret_cast<const uint16_t*>(s.arena + c.weights)[i])
                   : reinterpret_cast<const float*>(s.arena + c.weights)[i];
}

/// Copies the routing of the whole call once into private memory and checks it there, before anything is sent.
__global__ void routing(const __grid_constant__ World w, uint32_t lane) {
  LaneState& s = w.lane[lane];
  if (s.mode != Mode::start || s.now.forced != Status::ok) return;
  __shared__ Shared<RankSet> set;
  RankSet& needed = set.get();
  if (threadIdx.x == 0) needed = {};
  __syncthreads();
  const uint64_t slots = uint64_t{s.valid} * w.shape.top_k;
  const uint64_t base = uint64_t{lane} * w.max_call_tokens * w.shape.top_k;
  for (uint64_t i = uint64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < slots; i += uint64_t{gridDim.x} * blockDim.x)
    route_slot(w, s, i, w.ids + base, w.weights + base, needed);
  __syncthreads();
  if (threadIdx.x < 2 && needed.word[threadIdx.x] != 0)
    atomicOr(reinterpret_cast<unsigned long long*>(&s.needed.word[threadIdx.x]), needed.word[threadIdx.x]);
}

/// Why a new call ends before anything is sent; pending: it does not.
__device__ Status objection(const World& w, LaneState& s) {
  const Call& c = s.now.call;
  if (s.now.forced != Status::ok) return s.now.forced;
  if (s.bad != ~0ULL) {
    s.record.token = static_cast<uint32_t>(s.bad / w.shape.top_k);
    s.record.slot = static_cast<uint32_t>(s.bad % w.shape.top_k);
    // Read again for the reply's sake alone; the private copy has -1 in its place.
    s.record.value = (c.flags & kFlagIds64) != 0 ? reinterpret_cast<const int64_t*>(s.arena + c.ids)[s.bad]
                                                 : reinterpret_cast<const int32_t*>(s.arena + c.ids)[s.bad];
    s.record.limit = w.shape.experts - 1;
    if ((c.flags & kFlagMask) == 0) return Status::bad_route;
    s.good = Status::masked;
  }
  if (s.now.dry != 0) return Status::dry;
  RankSet missing{};
  RankSet lost{};
  const Picture& picture = w.pictures[s.picture];
  for (uint32_t r = 0; r < w.ranks; ++r) {
    if (!has(s.needed, r) || picture.link[r].state == LinkState::ready) continue;
    RankSet& set = picture.link[r].seen != 0 ? lost : missing;
    set.word[r / 64] |= 1ULL << (r % 64);
  }
  if (empty(missing) && (empty(lost) || w.drop != 0)) return Status::pending;
  s.named = empty(missing) ? lost : missing;
  return empty(missing) ? Status::peer_lost : Status::not_ready;
}

/// Stores the call lines of a piece: eight lanes a rank. Every call begins with another rank.
__device__ void store_call_lines(const World& w, const LaneState& s, uint32_t lane) {
  const uint32_t part = threadIdx.x % kLineLanes;
  for (uint32_t i = threadIdx.x / kLineLanes; i < w.ranks; i += blockDim.x / kLineLanes) {
    const uint32_t r = (static_cast<uint32_t>(s.count % w.ranks) + i) % w.ranks;
    if (!has(s.waiting, r)) continue;
    const DeviceLink& link = w.pictures[s.picture].link[r];
    // CallLine as words: layer, tokens | generation << 16, bitmap.
    uint32_t word[4];
    for (uint32_t k = 0; k < 4; ++k) {
      const uint32_t at = part * 4 + k;
      word[k] = at == 0 ? s.now.call.layer : at == 1 ? s.tokens : at - 2 < kBitmapWords ? s.bitmap[r][at - 2] : 0;
    }
    const ulonglong2 words = {word[0] | uint64_t{word[1]} << 32, word[2] | uint64_t{word[3]} << 32};
    store_line(link.theirs + w.layout.call(lane), words, s.awaited[r]);
  }
}

/// Decides whether the call runs; finds each rank's tokens of the next piece.
__global__ void admit(const __grid_constant__ World w, uint32_t lane) {
  LaneState& s = w.lane[lane];
  if (s.mode != Mode::start && s.mode != Mode::piece) return;
  __shared__ uint32_t bits[kMaxRanks][kBitmapWords];
  for (uint32_t i = threadIdx.x; i < kMaxRanks * kBitmapWords; i += blockDim.x)
    bits[i / kBitmapWords][i % kBitmapWords] = 0;
  if (threadIdx.x == 0) {
    if (s.mode == Mode::start) s.ended = objection(w, s);
    ++s.count;  // a refused call consumes its count, too
    s.mode = s.ended == Status::pending ? Mode::piece : Mode::fail;
    s.tokens = min(s.valid - s.done, w.layout.max_tokens);
    s.waiting = s.in = s.out = {};
  }
  __syncthreads();
  if (s.mode == Mode::fail) return;
  const int32_t* ids = w.ids + (uint64_t{lane} * w.max_call_tokens + s.done) * w.shape.top_k;
  for (uint32_t i = threadIdx.x; i < s.tokens * w.shape.top_k; i += blockDim.x) {
    const uint32_t token = i / w.shape.top_k;
    if (ids[i] >= 0)
      atomicOr(&bits[owner(w.shape, static_cast<uint32_t>(ids[i]), w.ranks)][token / 32], 1U << (token % 32));
  }
  __syncthreads();
  for (uint32_t r = threadIdx.x; r < w.ranks; r += blockDim.x) {
    uint32_t any = 0;
    for (uint32_t k = 0; k < kBitmapWords; ++k) any |= s.bitmap[r][k] = bits[r][k];
    const DeviceLink& link = w.pictures[s.picture].link[r];
    s.awaited[r] = sequence(link.session, s.count);
    if (any != 0) add_atomic(link.state == LinkState::ready ? s.waiting : s.out, r);
  }
}

/// Quantises token `token` of the piece into a row record in shared memory; x in wire format is copied.
__device__ void make_row(const World& w, const LaneState& s, uint32_t lane, uint32_t token, uint8_t* row) {
  const Call& c = s.now.call;
  const uint32_t n = w.shape.latent;
  const uint64_t at = uint64_t{s.done} + token;
  const uint64_t slots = (uint64_t{lane} * w.max_call_tokens + at) * w.shape.top_k;
  for (uint32_t k = threadIdx.x; k < w.shape.top_k; k += blockDim.x) {
    reinterpret_cast<int32_t*>(row)[k] = w.ids[slots + k];
    reinterpret_cast<float*>(row + w.row.weights)[k] = w.weights[slots + k];
  }
  uint8_t* scales = row + w.row.scales;
  uint8_t* codes = row + w.row.codes;
  if ((c.flags & kFlagWire) != 0) {
    const auto* x = reinterpret_cast<const uint8_t*>(s.arena + c.x) + at * n;
    const auto* e = reinterpret_cast<const uint8_t*>(s.arena + c.scales) + at * (n / kBlock);
    for (uint32_t i = threadIdx.x; i < n; i += blockDim.x) codes[i] = x[i];
    for (uint32_t i = threadIdx.x; i < n / kBlock; i += blockDim.x) scales[i] = e[i];
    return;
  }
  const auto* x = reinterpret_cast<const uint16_t*>(s.arena + c.x) + at * n;
  for (uint32_t i = threadIdx.x; i < n; i += blockDim.x) {  // a warp has one block of 32
    const uint16_t bits = x[i];
    const uint32_t magnitude = bits & 0x7FFFU;
    const uint32_t greatest = __reduce_max_sync(0xFFFFFFFFU, magnitude <= 0x7F80U ? magnitude : 0U);
    const uint8_t e = mxfp8_scale_bf16(static_cast<uint16_t>(greatest));
    codes[i] = mxfp8_code(bf16_to_float(bits), mxfp8_multiplier(e));
    if (i % kBlock == 0) scales[i / kBlock] = e;
  }
}

__global__ void dispatch(const __grid_constant__ World w, uint32_t lane) {
  extern __shared__ __align__(16) uint8_t row[];
  LaneState& s = w.lane[lane];
  if (s.mode != Mode::piece) return;
  // Announced when this kernel runs, not before: its other blocks store the rows in the meantime.
  if (blockIdx.x == 0) store_call_lines(w, s, lane);
  const uint32_t group = threadIdx.x / kLineLanes;
  for (uint32_t i = threadIdx.x; i < w.row_stride; i += blockDim.x) row[i] = 0;
  for (uint32_t t = blockIdx.x; t < s.tokens; t += gridDim.x) {
    __syncthreads();
    make_row(w, s, lane, t, row);
    __syncthreads();
    for (uint32_t r = 0; r < w.ranks; ++r) {
      if (!has(s.waiting, r) || (s.bitmap[r][t / 32] >> (t % 32) & 1) == 0) continue;
      const DeviceLink& link = w.pictures[s.picture].link[r];
      std::byte* lines = link.theirs + w.layout.row(lane, t);
      for (uint32_t l = group; l < w.layout.row_lines; l += blockDim.x / kLineLanes)
        store_line(lines + l * kLineBytes, record_words(reinterpret_cast<const uint64_t*>(row), l), s.awaited[r]);
    }
  }
}

}  // namespace

void launch_call_gate(const World& w, uint32_t lane, cudaStream_t stream) {
  call_gate<<<1, kGateThreads, 0, stream>>>(w, lane);
}
void launch_routing(const World& w, uint32_t lane, cudaStream_t stream) {
  routing<<<kRoutingBlocks, kRoutingThreads, 0, stream>>>(w, lane);
}
void launch_admit(const World& w, uint32_t lane, cudaStream_t stream) {
  admit<<<1, kAdmitThreads, 0, stream>>>(w, lane);
}
void launch_dispatch(const World& w, uint32_t lane, cudaStream_t stream) {
  const uint32_t blocks = min(kRowBlocks, w.layout.max_tokens);
  dispatch<<<blocks, kRowThreads, (w.row_stride + 15) / 16 * 16, stream>>>(w, lane);
}

}  // namespace moed::cuda
