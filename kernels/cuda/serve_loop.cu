// The serve loop: in one kernel from a call line to the partials and the return line, source after source, for layers
// whose experts are the identity. A leading block looks at the call lines of all lanes and hands every source to the
// others, which take its rows line by line and store the partials. When a source needs real experts, the loop ends and
// leaves it to the kernels behind, chosen by choose.cuh.
//
// A source is under way once at a time, so whoever follows keeps its order; different ones overlap.
#include "kernels/cuda/passes.h"
#include "kernels/cuda/serve_lead.cuh"

namespace moed::cuda {
namespace {

template <class Z>
__global__ void __launch_bounds__(kServeThreads, 4) serve_loop(const __grid_constant__ World w) {
  extern __shared__ __align__(16) uint8_t rows[];
  __shared__ Shared<ServeBlock> shared;
  ServeBlock& b = in_register(shared.get());
  for (uint32_t slot = threadIdx.x; slot < kServeTickets; slot += kServeThreads) b.under[slot].number = 0;
  if (threadIdx.x == 0) {
    b.next = b.oldest = b.general = b.closing = 0;
  }
  __syncthreads();
  if (blockIdx.x == 0)
    lead(w, b);
  else
    follow<Z>(w, b, &in_register(rows[0]));
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

void launch_serve_loop(const World& w, cudaStream_t stream) {
  with_sizes(w.shape,
             [&]<class Z>(Z) { serve_loop<Z><<<w.serve_blocks, kServeThreads, kBatch * w.row_stride, stream>>>(w); });
}

}  // namespace moed::cuda
