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
__global__ void __maxnreg__(kServeRegisters) serve_loop(const __grid_constant__ World w, uint64_t loop, bool first) {
  extern __shared__ __align__(16) uint8_t rows[];
  __shared__ Shared<ServeBlock> shared;
  ServeBlock& b = in_register(shared.get());
  ServeState& s = *w.serve;
  for (uint32_t i = threadIdx.x; i < kEnded; i += kServeThreads) b.ended[i].number = 0;
  if (threadIdx.x == 0) {
    b.index = begin_block(s.checked, loop) - 1;
    b.worked = load_u32_acquire(&s.working);  // what this L1 has of earlier loops is old
    b.pushed = b.told = b.general = b.closing = b.given_up = b.counted = b.done = 0;
  }
  __syncthreads();
  if (b.worked != 0) {
    await_kernels_ahead();
    if (!first) {  // a loop of this pass has left sources to the kernels behind
      if (blockIdx.x == 0 && threadIdx.x == 0) begin_pass(w, w.layout.lanes_all, w.board->begun);
      return;
    }
    if (blockIdx.x == 0 && threadIdx.x == 0) static_cast<void>(exchange_u32(&s.working, 0));
  }
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

void launch_serve_loops(const World& w, uint64_t loop, uint32_t loops, cudaStream_t stream) {
  with_sizes(w.shape, [&]<class Z>(Z) {
    const Grid grid = {w.serve_blocks, kServeThreads, kBatch * w.row_stride};
    for (uint32_t i = 0; i < loops; ++i) launch(serve_loop<Z>, grid, stream, w, loop + i, i == 0);
  });
}

}  // namespace moed::cuda
