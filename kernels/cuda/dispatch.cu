// The call pass behind its loop, up to the wait: routing, admission, rows and call lines. For calls that the loop has
// not ended. Reads top to bottom in time order.
#include "kernels/cuda/passes.h"
#include "kernels/cuda/rows.cuh"

namespace moed::cuda {
namespace {

constexpr uint32_t kRoutingThreads = 256, kAdmitThreads = 256, kRowThreads = kTeam;
constexpr uint32_t kRoutingBlocks = 64, kRowBlocks = 128;
constexpr uint32_t kBitmapWords = kMaxTokens / 32;

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
  if (!has_work(s.working) || s.mode != Mode::start || s.now.forced != Status::ok) return;
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
    if (part == 0 && link.bell != nullptr) ring(link.bell);
  }
}

/// Decides whether the call runs; finds each rank's tokens of the next piece.
__global__ void admit(const __grid_constant__ World w, uint32_t lane) {
  LaneState& s = w.lane[lane];
  if (!has_work(s.working) || (s.mode != Mode::start && s.mode != Mode::piece)) return;
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

/// Copies ids and weights of token `token` of the piece into its row record in shared memory.
__device__ void put_slots(const World& w, const LaneState& s, uint32_t lane, uint32_t token, uint8_t* row) {
  const uint64_t slots = (uint64_t{lane} * w.max_call_tokens + s.done + token) * w.shape.top_k;
  for (uint32_t k = threadIdx.x; k < w.shape.top_k; k += blockDim.x) {
    reinterpret_cast<int32_t*>(row)[k] = w.ids[slots + k];
    reinterpret_cast<float*>(row + w.row.weights)[k] = w.weights[slots + k];
  }
}

__global__ void dispatch(const __grid_constant__ World w, uint32_t lane) {
  extern __shared__ __align__(16) uint8_t memory[];
  __shared__ Peer peer[kMaxRanks];
  LaneState& s = w.lane[lane];
  if (!has_work(s.working) || (s.mode != Mode::piece && s.mode != Mode::again)) return;
  // Announced when this kernel runs, not before: its other blocks store the rows in the meantime.
  if (blockIdx.x == 0) store_call_lines(w, s, lane);
  for (uint32_t r = threadIdx.x; r < w.ranks; r += blockDim.x)
    peer[r] = {w.pictures[s.picture].link[r].theirs, nullptr, nullptr, s.awaited[r], 0, 0};
  uint8_t* const row = memory + input_bytes(w.shape);
  const uint32_t n = w.shape.latent;
  const Call& c = s.now.call;
  for (uint32_t t = blockIdx.x; t < s.tokens; t += gridDim.x) {
    const uint64_t at = uint64_t{s.done} + t;
    TokenInput in = {s.arena + c.x + at * n * 2, nullptr};
    if ((c.flags & kFlagWire) != 0) in = {s.arena + c.x + at * n, s.arena + c.scales + at * (n / kBlock)};
    fetch_input<AnySizes>(w, in, memory);
    commit_copies();
    put_slots(w, s, lane, t, row);
    wait_copies<0>();
    __syncthreads();
    make_codes<AnySizes>(w, in, memory, row);
    pad_row<AnySizes>(w, row);
    RankSet set{};
    for (uint32_t r = 0; r < w.ranks; ++r)
      if (has(s.waiting, r) && (s.bitmap[r][t / 32] >> (t % 32) & 1) != 0) set.word[r / 64] |= 1ULL << (r % 64);
    __syncthreads();
    store_row<AnySizes>(w, peer, lane, t, set, row);
    __syncthreads();
  }
}

uint32_t dispatch_bytes(const World& w) { return input_bytes(w.shape) + (w.row_stride + 15) / 16 * 16; }

}  // namespace

void launch_routing(const World& w, uint32_t lane, cudaStream_t stream) {
  launch(routing, {kRoutingBlocks, kRoutingThreads}, stream, w, lane);
}
void launch_admit(const World& w, uint32_t lane, cudaStream_t stream) {
  launch(admit, {1, kAdmitThreads}, stream, w, lane);
}
void launch_dispatch(const World& w, uint32_t lane, cudaStream_t stream) {
  const uint32_t blocks = min(kRowBlocks, w.layout.max_tokens);
  launch(dispatch, {blocks, kRowThreads, dispatch_bytes(w)}, stream, w, lane);
}

}  // namespace moed::cuda
