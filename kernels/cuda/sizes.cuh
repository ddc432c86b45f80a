// Sizes of rows and partials, known when a kernel is compiled for the shapes that have one of their own, and read from
// World for all others. With constants the loops of a call are straight, which at these latencies is a third of the
// time.
#pragma once

#include "kernels/cuda/passes.h"
#include "kernels/cuda/state.h"

namespace moed::cuda {

/// Latent and slots of a shape; 0: any.
template <uint32_t kLatent, uint32_t kTopK>
struct Sizes {
  static __host__ __device__ uint32_t latent(const World& w) { return kLatent != 0 ? kLatent : w.shape.latent; }
  static __host__ __device__ uint32_t top_k(const World& w) { return kTopK != 0 ? kTopK : w.shape.top_k; }
  // RowLayout
  static __host__ __device__ uint32_t weights(const World& w) { return top_k(w) * 4; }
  static __host__ __device__ uint32_t scales(const World& w) { return top_k(w) * 8; }
  static __host__ __device__ uint32_t codes(const World& w) { return scales(w) + latent(w) / kBlock; }
  static __host__ __device__ uint32_t row_bytes(const World& w) { return codes(w) + latent(w); }
  static __host__ __device__ uint32_t row_lines(const World& w) {
    return kLatent != 0 ? (row_bytes(w) + kLinePayload - 1) / kLinePayload : static_cast<uint32_t>(w.layout.row_lines);
  }
  static __host__ __device__ uint32_t row_stride(const World& w) { return row_lines(w) * kLinePayload; }
  static __host__ __device__ uint32_t partial_lines(const World& w) {
    return kLatent != 0 ? (latent(w) * 2 + kLinePayload - 1) / kLinePayload
                        : static_cast<uint32_t>(w.layout.partial_lines);
  }
  // SegmentLayout
  static __device__ uint64_t row_at(const World& w, uint32_t lane, uint32_t token) {
    return w.layout.rows + uint64_t{lane * w.layout.max_tokens + token} * (row_lines(w) * kLineBytes);
  }
  static __device__ uint64_t partial_at(const World& w, uint32_t lane, uint32_t token) {
    return w.layout.partials + uint64_t{lane * w.layout.max_tokens + token} * (partial_lines(w) * kLineBytes);
  }
  /// Bytes of a token's private routing: ids, weights, ranks.
  static __host__ __device__ uint32_t routing_bytes(const World& w) {
    return top_k(w) * 8 + static_cast<uint32_t>(sizeof(RankSet));
  }
};
using AnySizes = Sizes<0, 0>;

/// Adds what `blocks` blocks of a kernel take.
template <class Kernel>
cudaError_t add_needs(Kernel* kernel, uint64_t blocks, uint32_t threads, uint32_t dynamic, LoopNeeds& needs) {
  cudaFuncAttributes a{};
  const cudaError_t e = cudaFuncGetAttributes(&a, kernel);
  needs.blocks += blocks;
  needs.threads += blocks * threads;
  needs.registers += blocks * threads * static_cast<uint64_t>(a.numRegs);
  needs.shared += blocks * (a.sharedSizeBytes + dynamic);
  return e;
}

/// Calls f(Sizes) with what fits a shape best.
template <class F>
auto with_sizes(const Shape& s, F f) {
  if (s.latent == 3584 && s.top_k == 16) return f(Sizes<3584, 16>());  // Kimi K3
  if (s.latent == 7168 && s.top_k == 8) return f(Sizes<7168, 8>());    // DeepSeek V3
  return f(AnySizes());
}

}  // namespace moed::cuda
