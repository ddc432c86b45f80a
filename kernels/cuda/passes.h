// The kernels of the two passes, in the order in which they run, and their graphs. Every kernel ends at once when the
// state says that nothing is to be done, so a pass that met nothing costs microseconds.
#pragma once

#include <cuda_runtime.h>

#include "kernels/cuda/state.h"

namespace moed::cuda {

/// The kernel, to be launched where multiprocessors give all they can to shared memory. One that is never empty keeps
/// the division with which its first block came: with the default of a small kernel the loops find no room for as long
/// as anybody's long kernel runs there (measured: calls of milliseconds, tests/bench/RESULTS.md).
template <class Kernel>
Kernel* roomy(Kernel* kernel) {
  static_cast<void>(
      cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared));
  return kernel;
}

// Call pass of one lane.
void launch_call_loops(const World& w, uint32_t lane, cudaStream_t stream);  ///< bell -> done, where nothing is unusual
void launch_routing(const World& w, uint32_t lane, cudaStream_t stream);     ///< private, checked ids and weights
void launch_admit(const World& w, uint32_t lane, cudaStream_t stream);       ///< may it run; call lines of a piece
void launch_dispatch(const World& w, uint32_t lane, cudaStream_t stream);    ///< rows of a piece
void launch_wait(const World& w, uint32_t lane, cudaStream_t stream);        ///< return lines
void launch_reduce(const World& w, uint32_t lane, cudaStream_t stream);      ///< sum, norm, out; zeros
void launch_finish(const World& w, uint32_t lane, cudaStream_t stream);      ///< next piece, or record and done

// Serve pass.
void launch_serve_loops(const World& w, cudaStream_t stream);  ///< call lines -> return lines, or sources
void launch_gather(const World& w, cudaStream_t stream);       ///< rows -> private copies
void launch_plan(const World& w, cudaStream_t stream);         ///< pairs by (layer, local expert)
void launch_experts(const World& w, cudaStream_t stream);      ///< two products and the activation
void launch_send(const World& w, cudaStream_t stream);         ///< weighted partials
void launch_returns(const World& w, cudaStream_t stream);      ///< return lines, record

/// Copies of the passes, captured once. Throws nothing; an error names the call that failed.
cudaError_t capture_call_pass(const World& w, uint32_t lane, cudaStream_t stream, cudaGraphExec_t& out);
cudaError_t capture_serve_pass(const World& w, cudaStream_t stream, cudaGraphExec_t& out);

/// A kernel that does nothing but note in *word that it ran: the start-up proof of streams.
void launch_note(uint32_t* word, cudaStream_t stream);

/// The line test of a link: one block writes `rounds` versions of `count` lines (at most kTestLines), another reads
/// them meanwhile. counts[0]: lines read whole, counts[1]: torn, counts[2]: versions seen.
inline constexpr uint32_t kTestLines = 64;
void launch_line_test(std::byte* lines, uint32_t count, uint32_t rounds, unsigned long long* counts,
                      cudaStream_t stream);

/// Raise the shared memory that kernels may take.
cudaError_t prepare_experts(const Shape& s);
cudaError_t prepare_call_loop(const World& w);
cudaError_t prepare_serve_loop(const World& w);

/// Registers, threads and bytes of shared memory that all blocks of loops take when all lanes call.
struct LoopNeeds {
  uint64_t blocks = 0, registers = 0, threads = 0, shared = 0;
};
cudaError_t add_call_loops(const World& w, LoopNeeds& needs);
cudaError_t add_serve_loop(const World& w, LoopNeeds& needs);

/// What speaks against a shape on this back end: a shape without a kernel.
ShapeFault kernel_fault(const Shape& s);

}  // namespace moed::cuda
