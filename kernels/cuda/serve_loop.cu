// The serve loop: in one kernel from a call line to the partials and the return line, source after source, for layers
// whose experts are the identity. Every block that follows watches the call lines of its group, takes the rows of its
// tokens line by line and stores the partials; then it leaves a mark. A leading block looks at the marks and sends the
// return line when all rows of a source have been served. Since the same block has the same token of a lane in every
// call, what it writes for one call is never behind what it writes for the next. When a source needs real experts, the
// loop ends and leaves it to the kernels behind, chosen by choose.cuh.
#include "kernels/cuda/passes.h"
#include "kernels/cuda/serve_lead.cuh"

namespace moed::cuda {
namespace {

template <class Z>
__global__ void __launch_bounds__(kServeThreads, 4) serve_loop(const __grid_constant__ World w, uint32_t index) {
  extern __shared__ __align__(16) uint8_t rows[];
  __shared__ Shared<ServeBlock> shared;
  ServeBlock& b = in_register(shared.get());
  ServeState& s = *w.serve;
  const uint64_t loop = s.loops * kLoopsPerPass + index + 1;
  if (blockIdx.x != 0 && threadIdx.x == 0)
    b.index = fetch_add_u32(&s.checked, 1) - static_cast<uint32_t>((loop - 1) * (gridDim.x - 1));
  if (index != 0 && s.sources != 0) return;  // a loop before this one has left them to the kernels behind
  for (uint32_t i = threadIdx.x; i < kEnded; i += kServeThreads) b.ended[i].number = 0;
  if (threadIdx.x == 0) b.pushed = b.told = b.general = b.closing = 0;
  __syncthreads();
  if (blockIdx.x == 0)
    lead(w, b, loop);
  else
    follow<Z>(w, b, loop, &in_register(rows[0]));
}

}  // namespace

cudaError_t prepare_serve_loop(const World& w) {
  return with_sizes(w.shape, [&]<class Z>(Z) {
    return cudaFuncSetAttribute(serve_loop<Z>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                static_cast<int>(kBatch * w.row_stride));
  });
}

cudaError_t add_serve_loop(const World& w, LoopNeeds& needs) {
  return with_sizes(w.shape, [&]<class Z>(Z) {
    return add_needs(serve_loop<Z>, w.serve_blocks, kServeThreads, kBatch * w.row_stride, needs);
  });
}

void launch_serve_loops(const World& w, cudaStream_t stream) {
  with_sizes(w.shape, [&]<class Z>(Z) {
    for (uint32_t i = 0; i < kLoopsPerPass; ++i)
      roomy(serve_loop<Z>)<<<w.serve_blocks, kServeThreads, kBatch * w.row_stride, stream>>>(w, i);
  });
}

}  // namespace moed::cuda
