// Sorts the pass's (row, slot) pairs whose expert is local by (layer, local expert): count, sum up, place.
#include <cub/block/block_scan.cuh>

#include "kernels/cuda/device.cuh"
#include "kernels/cuda/passes.h"

namespace moed::cuda {
namespace {

constexpr uint32_t kPlanThreads = 256;

/// The key of a pair: layer and local expert; kNoPair: nothing to multiply.
__device__ uint32_t key_of(const World& w, uint32_t pair) {
  const uint32_t row = pair / w.shape.top_k;
  const DeviceSource& source = w.source[w.place[row].source];
  if (!served(source) || layer_experts(w, source.call.layer) == nullptr) return kNoPair;
  const auto* ids = reinterpret_cast<const int32_t*>(w.gathered + uint64_t{row} * w.row_stride);
  const int32_t id = ids[pair % w.shape.top_k];
  if (!is_local(w, id)) return kNoPair;
  return (source.call.layer - w.shape.first_layer) * w.local + static_cast<uint32_t>(id) - w.first;
}

/// Groups and their first pairs, from the counts by key.
__device__ void sum_up(const World& w, uint32_t keys) {
  using Scan = cub::BlockScan<uint32_t, kPlanThreads>;
  __shared__ typename Scan::TempStorage storage;
  const uint32_t each = (keys + kPlanThreads - 1) / kPlanThreads;
  const uint32_t from = min(threadIdx.x * each, keys);
  const uint32_t to = min(from + each, keys);
  uint32_t pairs = 0;
  uint32_t groups = 0;
  for (uint32_t k = from; k < to; ++k) {
    pairs += w.key_count[k];
    groups += w.key_count[k] != 0 ? 1 : 0;
  }
  uint32_t all_pairs = 0;
  uint32_t all_groups = 0;
  Scan(storage).ExclusiveSum(pairs, pairs, all_pairs);
  __syncthreads();
  Scan(storage).ExclusiveSum(groups, groups, all_groups);
  for (uint32_t k = from; k < to; ++k) {
    const uint32_t count = w.key_count[k];
    if (count == 0) continue;
    w.key_first[k] = pairs;
    w.group[groups++] = {k / w.local, k % w.local, pairs, count};
    pairs += count;
  }
  if (threadIdx.x != 0) return;
  w.serve->pairs = all_pairs;
  w.serve->groups = all_groups;
}

__global__ void plan(const __grid_constant__ World w) {
  ServeState& s = *w.serve;
  if (!has_work(s.working) || s.sources == 0) return;
  const uint32_t slots = s.rows * w.shape.top_k;
  for (uint32_t p = threadIdx.x; p < slots; p += blockDim.x) {
    const uint32_t key = key_of(w, p);
    w.pair_key[p] = key;
    w.pair_of[p] = kNoPair;
    if (key != kNoPair) w.pair_rank[p] = atomicAdd(&w.key_count[key], 1U);
  }
  __syncthreads();
  if (w.model_layers != 0) {
    sum_up(w, w.model_layers * w.local);
    __syncthreads();
    for (uint32_t p = threadIdx.x; p < slots; p += blockDim.x) {
      const uint32_t key = w.pair_key[p];
      if (key == kNoPair) continue;
      const uint32_t pair = w.key_first[key] + w.pair_rank[p];
      w.pair_of[p] = pair;
      w.pair[pair] = {p / w.shape.top_k, p % w.shape.top_k};
      w.key_count[key] = 0;
    }
  }
  if (threadIdx.x != 0) return;
  s.experts = global_time();
  drill(w, w.experts_delay_ns);
}

}  // namespace

void launch_plan(const World& w, cudaStream_t stream) { launch(plan, {1, kPlanThreads}, stream, w); }

}  // namespace moed::cuda
