// The two passes: straight chains of kernels. What a pass has to do is read from GPU memory when it runs. Also the
// small kernels of the start-up tests.
#include <set>
#include <utility>

#include "kernels/cuda/device.cuh"
#include "kernels/cuda/passes.h"

namespace moed::cuda {
namespace {

thread_local cudaError_t launch_error = cudaSuccess;

__global__ void note(uint32_t* word) { store_u32_release(word, 1); }
__global__ void mark(uint64_t* word, uint64_t value) { store_u64_release(word, value); }

/// Block 0 writes version after version of each line, block 1 reads them: in a line that is whole, all words are equal.
__global__ void line_test(std::byte* lines, uint32_t rounds, unsigned long long* counts) {
  const uint32_t group = threadIdx.x / kLineLanes;
  const uint32_t part = threadIdx.x % kLineLanes;
  std::byte* line = lines + group * kLineBytes;
  unsigned long long whole = 0;
  unsigned long long torn = 0;
  unsigned long long versions = 0;
  uint64_t before = 0;
  for (uint32_t i = 1; i <= rounds; ++i) {
    if (blockIdx.x == 0) {
      store_16(line + part * 16, {i, i});
      continue;
    }
    const ulonglong2 words = load_16(line + part * 16);
    const uint64_t sequence = __shfl_sync(line_mask(), words.y, kLineLanes - 1, kLineLanes);
    const bool odd = words.x != sequence || words.y != sequence;
    const bool any = (__ballot_sync(line_mask(), odd) & line_mask()) != 0;
    (any ? torn : whole) += 1;
    versions += sequence != before ? 1 : 0;
    before = sequence;
  }
  if (blockIdx.x == 0 || part != 0) return;
  atomicAdd(&counts[0], whole);
  atomicAdd(&counts[1], torn);
  atomicAdd(&counts[2], versions);
}

}  // namespace

cudaError_t take_launch_error() { return std::exchange(launch_error, cudaSuccess); }
void note_launch_error(cudaError_t error) {
  if (launch_error == cudaSuccess) launch_error = error;
}

void make_roomy(const void* kernel) {
  thread_local std::set<std::pair<int, const void*>> known;
  int device = 0;
  static_cast<void>(cudaGetDevice(&device));
  if (!known.emplace(device, kernel).second) return;
  static_cast<void>(
      cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared));
}

cudaError_t prepare_call_pass(const World& w) { return prepare_call_loop(w); }
cudaError_t prepare_serve_pass(const World& w) {
  const cudaError_t e = prepare_experts(w.shape);
  return e != cudaSuccess ? e : prepare_serve_loop(w);
}

cudaError_t launch_call_pass(const World& w, uint32_t lane, uint64_t loop, uint32_t loops, cudaStream_t stream) {
  launch_call_loops(w, lane, loop, loops, stream);
  launch_routing(w, lane, stream);
  launch_admit(w, lane, stream);
  launch_dispatch(w, lane, stream);
  launch_wait(w, lane, stream);
  launch_reduce(w, lane, stream);
  launch_finish(w, lane, stream);
  return take_launch_error();
}

cudaError_t launch_serve_pass(const World& w, uint64_t loop, uint32_t loops, cudaStream_t stream) {
  launch_serve_loops(w, loop, loops, stream);
  launch_gather(w, stream);
  launch_plan(w, stream);
  launch_experts(w, stream);
  launch_send(w, stream);
  launch_returns(w, stream);
  return take_launch_error();
}

cudaError_t launch_marker(uint64_t* word, uint64_t value, cudaStream_t stream) {
  mark<<<1, 1, 0, stream>>>(word, value);
  return cudaGetLastError();
}

void launch_note(uint32_t* word, cudaStream_t stream) { note<<<1, 1, 0, stream>>>(word); }

void launch_line_test(std::byte* lines, uint32_t count, uint32_t rounds, unsigned long long* counts,
                      cudaStream_t stream) {
  line_test<<<2, count * kLineLanes, 0, stream>>>(lines, rounds, counts);
}

}  // namespace moed::cuda
