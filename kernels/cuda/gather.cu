// Rows into private copies, checked there. Nothing after gather reads what peers can write.
#include "kernels/cuda/device.cuh"
#include "kernels/cuda/passes.h"

namespace moed::cuda {
namespace {

constexpr uint32_t kGatherThreads = 256, kGatherBlocks = 128;

/// Copies one row, eight lanes a line, and waits for its lines a little. What is not there drops its source.
__device__ void gather_row(const World& w, uint32_t row, uint64_t until) {
  const Place place = w.place[row];
  DeviceSource& source = w.source[place.source];
  const std::byte* lines = source.rows_segment + w.layout.row(source.lane, place.token);
  auto* to = reinterpret_cast<uint64_t*>(w.gathered + uint64_t{row} * w.row_stride);
  const uint32_t part = threadIdx.x % kLineLanes;
  const uint64_t began = w.serve->gather;
  for (uint32_t l = threadIdx.x / kLineLanes; l < w.layout.row_lines; l += blockDim.x / kLineLanes) {
    ulonglong2 words;
    uint64_t found = 0;
    const Seen seen = wait_line(lines + l * kLineBytes, source.sequence, until, words, found);
    if (seen != Seen::same) {
      if (part != 0) return;
      if (atomicMax(&source.incomplete, seen == Seen::newer ? kOvertaken : kMissing) == 0)
        report_fault(
            w, {Awaited::row, source.rank, source.lane, place.token, source.sequence, found, global_time() - began});
      return;
    }
    uint64_t* at = to + l * (kLinePayload / 8) + part * 2;
    at[0] = words.x;
    if (part < kLineLanes - 1) at[1] = words.y;
  }
}

__global__ void gather(const __grid_constant__ World w) {
  const ServeState& s = *w.serve;
  if (!has_work(s.working)) return;
  const uint64_t until = global_time() + kRowsNs;
  for (uint32_t row = blockIdx.x; row < s.rows; row += gridDim.x) {
    gather_row(w, row, until);
    __syncthreads();
    DeviceSource& source = w.source[w.place[row].source];
    const auto* ids = reinterpret_cast<const int32_t*>(w.gathered + uint64_t{row} * w.row_stride);
    if (threadIdx.x < w.shape.top_k && source.incomplete == 0) {
      const int32_t id = ids[threadIdx.x];
      if (id < -1 || id >= static_cast<int32_t>(w.shape.experts))
        source.status = static_cast<uint32_t>(Status::bad_route);
    }
  }
}

}  // namespace

void launch_gather(const World& w, cudaStream_t stream) { launch(gather, {kGatherBlocks, kGatherThreads}, stream, w); }

}  // namespace moed::cuda
