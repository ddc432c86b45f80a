// The kernels of the two passes, in the order in which they run. Every kernel may begin before the one ahead of it has
// ended (programmatic launch): beside kernels that stream memory a plain step from one kernel to the next takes 250 to
// 800 us, this one 0.6 (H200, tests/bench/RESULTS.md). What is not to be done costs nothing more: a kernel behind the
// loops ends at once unless a loop has said that there is work, and only then waits until all before it have ended.
#pragma once

#include <cuda_runtime.h>

#include "kernels/cuda/state.h"

namespace moed::cuda {

/// Blocks, threads of a block and bytes of its dynamic shared memory.
struct Grid {
  uint32_t blocks, threads, bytes = 0;
};

/// A kernel that has not been launched on this device yet: multiprocessors shall give all they can to shared memory
/// where it runs. One that is never empty keeps the division with which its first block came: with that of a small
/// kernel the loops find no room for as long as anybody's long kernel runs there.
void make_roomy(const void* kernel);

/// The first error of launch() on this thread since the last one was taken.
cudaError_t take_launch_error();
void note_launch_error(cudaError_t error);

/// Launches a kernel that does not wait for the one ahead of it to end. Errors: take_launch_error().
template <class... Parameters, class... Arguments>
void launch(void (*kernel)(Parameters...), const Grid& grid, cudaStream_t stream, const Arguments&... arguments) {
  make_roomy(reinterpret_cast<const void*>(kernel));
  cudaLaunchAttribute early{};
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = grid.blocks;
  config.blockDim = grid.threads;
  config.dynamicSmemBytes = grid.bytes;
  config.stream = stream;
  config.attrs = &early;
  config.numAttrs = 1;
  note_launch_error(cudaLaunchKernelEx(&config, kernel, Parameters(arguments)...));
}

// Call pass of one lane.
/// bell -> done, where nothing is unusual; `loop`: its number on this lane, from 1, and the first of `loops`.
void launch_call_loops(const World& w, uint32_t lane, uint64_t loop, uint32_t loops, cudaStream_t stream);
void launch_routing(const World& w, uint32_t lane, cudaStream_t stream);   ///< private, checked ids and weights
void launch_admit(const World& w, uint32_t lane, cudaStream_t stream);     ///< may it run; call lines of a piece
void launch_dispatch(const World& w, uint32_t lane, cudaStream_t stream);  ///< rows of a piece
void launch_wait(const World& w, uint32_t lane, cudaStream_t stream);      ///< return lines
void launch_reduce(const World& w, uint32_t lane, cudaStream_t stream);    ///< sum, norm, out; zeros
void launch_finish(const World& w, uint32_t lane, cudaStream_t stream);    ///< next piece, or record and done

// Serve pass.
/// call lines -> return lines, or sources; `loop`: as above.
void launch_serve_loops(const World& w, uint64_t loop, uint32_t loops, cudaStream_t stream);
void launch_gather(const World& w, cudaStream_t stream);   ///< rows -> private copies
void launch_plan(const World& w, cudaStream_t stream);     ///< pairs by (layer, local expert)
void launch_experts(const World& w, cudaStream_t stream);  ///< two products and the activation
void launch_send(const World& w, cudaStream_t stream);     ///< weighted partials
void launch_returns(const World& w, cudaStream_t stream);  ///< return lines, record

/// Once before the first pass.
cudaError_t prepare_call_pass(const World& w);
cudaError_t prepare_serve_pass(const World& w);
/// Queues one pass of `loops` loops, the first of which is number `loop`: the kernels behind them run only so often,
/// but a loop that leaves something to those kernels is followed by the others, which end at once.
cudaError_t launch_call_pass(const World& w, uint32_t lane, uint64_t loop, uint32_t loops, cudaStream_t stream);
cudaError_t launch_serve_pass(const World& w, uint64_t loop, uint32_t loops, cudaStream_t stream);
/// Stores `value` to a word of the host when all that was queued before has ended.
cudaError_t launch_marker(uint64_t* word, uint64_t value, cudaStream_t stream);

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
