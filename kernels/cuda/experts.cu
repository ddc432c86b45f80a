// The experts' two products and the activation, plainly: exactly dequantised operands, FP32, sums in the same order as
// the CPU back end's (16 interleaved parts, added in ascending order), the intermediate through MXFP8. A row meets no
// other row, so its bits do not depend on what else is in the pass.
#include "kernels/cuda/device.cuh"
#include "kernels/cuda/passes.h"

namespace moed::cuda {
namespace {

constexpr uint32_t kThreads = 256, kBlocks = 528;
constexpr uint32_t kRowsTile = 4;  ///< rows that share one decoding of a weight
constexpr uint32_t kDotLanes = 4;  ///< threads of one dot product, each with four of the 16 parts
constexpr uint32_t kDots = kThreads / kDotLanes;
constexpr uint32_t kWidest = 8192;  ///< columns of a tile that shared memory holds

/// Four neighbouring weights from column k of a row of packed codes and its scales.
__device__ void decode(const uint8_t* packed, const uint8_t* scale, uint32_t k, float (&out)[4]) {
  const float s = e8m0_to_float(scale[k / kBlock]);
  const uint32_t bits = *reinterpret_cast<const uint16_t*>(packed + k / 2);
  for (uint32_t i = 0; i < 4; ++i) out[i] = e2m1_to_float(static_cast<uint8_t>(bits >> (4 * i) & 15)) * s;
}

/// Dot products of one weight row with kRowsTile rows of n columns in shared memory. Four threads together; all get the
/// results.
__device__ void dot(const uint8_t* packed, const uint8_t* scale, const float* x, uint32_t n, float (&out)[kRowsTile]) {
  const uint32_t part = threadIdx.x % kDotLanes;
  float sum[kRowsTile][4] = {};
  for (uint32_t k = part * 4; k < n; k += 16) {
    float weight[4];
    decode(packed, scale, k, weight);
    for (uint32_t r = 0; r < kRowsTile; ++r)
      for (uint32_t i = 0; i < 4; ++i) sum[r][i] += x[r * n + k + i] * weight[i];
  }
  for (uint32_t r = 0; r < kRowsTile; ++r) {
    float total = 0.0F;
    for (uint32_t p = 0; p < kDotLanes; ++p) {  // ascending over the 16 parts: thread after thread
      float mine = total;
      for (uint32_t i = 0; i < 4; ++i) mine += sum[r][i];
      total = __shfl_sync(0xFFFFFFFFU, mine, p, kDotLanes);
    }
    out[r] = total;
  }
}

__device__ float activate(const Shape& s, float g, float u) {
  return s.activation == Activation::situ ? situ(g, u, s.act_beta, s.act_linear_beta) : silu_gated(g, u);
}

/// Rows of pairs [first, first + count) as floats in shared memory; what is beyond count is zero.
__device__ void load_rows(const World& w, uint32_t first, uint32_t count, float* x) {
  const uint32_t n = w.shape.latent;
  for (uint32_t i = threadIdx.x; i < kRowsTile * n; i += blockDim.x) {
    const uint32_t r = i / n;
    const uint32_t k = i % n;
    x[i] = 0.0F;
    if (r >= count) continue;
    const uint8_t* row = w.gathered + uint64_t{w.pair[first + r].row} * w.row_stride;
    x[i] = e4m3_to_float(row[w.row.codes + k]) * e8m0_to_float(row[w.row.scales + k / kBlock]);
  }
}

/// The intermediate of pairs [first, first + count) as floats in shared memory.
__device__ void load_middle(const World& w, uint32_t first, uint32_t count, float* h) {
  const uint32_t n = w.shape.intermediate;
  for (uint32_t i = threadIdx.x; i < kRowsTile * n; i += blockDim.x) {
    const uint32_t r = i / n;
    const uint32_t k = i % n;
    const uint64_t pair = first + r;
    h[i] = r < count
               ? e4m3_to_float(w.middle[pair * n + k]) * e8m0_to_float(w.middle_scale[pair * (n / kBlock) + k / kBlock])
               : 0.0F;
  }
}

/// One block of 32 columns of the intermediate of one row: activation, then MXFP8 by the general rule. One warp.
__device__ void store_middle(const World& w, uint32_t pair, uint32_t block, float g, float u) {
  const uint32_t lane = threadIdx.x % 32;
  const float h = activate(w.shape, g, u);
  const float magnitude = fabsf(h);  // a NaN does not count for the maximum
  const uint32_t greatest = __reduce_max_sync(0xFFFFFFFFU, magnitude == magnitude ? bits_of(magnitude) : 0U);
  const uint8_t e = mxfp8_scale_float(float_of(greatest));
  const uint32_t n = w.shape.intermediate;
  w.middle[uint64_t{pair} * n + block * kBlock + lane] = mxfp8_code(h, mxfp8_multiplier(e));
  if (lane == 0) w.middle_scale[uint64_t{pair} * (n / kBlock) + block] = e;
}

/// Gate and up products of one expert for 32 columns of the intermediate, then the activation.
__device__ void up_block(const World& w, const Group& g, uint32_t block, float* x, float (*values)[kDots]) {
  const uint32_t n = w.shape.latent;
  const uint8_t* expert = w.layers[g.layer].experts + g.expert * expert_bytes(w.shape);
  const ExpertOffsets at = expert_offsets(w.shape);
  const uint32_t which = threadIdx.x / kDotLanes;  // 0..31: gate, 32..63: up
  const bool up = which >= kBlock;
  const uint64_t row = block * kBlock + which % kBlock;
  const uint8_t* packed = expert + (up ? at.w3 : at.w1) + row * (n / 2);
  const uint8_t* scale = expert + (up ? at.w3_scale : at.w1_scale) + row * (n / kBlock);
  for (uint32_t done = 0; done < g.count; done += kRowsTile) {
    const uint32_t count = min(kRowsTile, g.count - done);
    __syncthreads();
    load_rows(w, g.first + done, count, x);
    __syncthreads();
    float out[kRowsTile];
    dot(packed, scale, x, n, out);
    if (threadIdx.x % kDotLanes == 0)
      for (uint32_t r = 0; r < kRowsTile; ++r) values[r][which] = out[r];
    __syncthreads();
    const uint32_t r = threadIdx.x / 32;
    const uint32_t lane = threadIdx.x % 32;
    if (r < count) store_middle(w, g.first + done + r, block, values[r][lane], values[r][kBlock + lane]);
  }
}

/// The down product of one expert for 64 columns of the latent.
__device__ void down_block(const World& w, const Group& g, uint32_t block, float* h) {
  const uint32_t n = w.shape.intermediate;
  const uint8_t* expert = w.layers[g.layer].experts + g.expert * expert_bytes(w.shape);
  const ExpertOffsets at = expert_offsets(w.shape);
  const uint64_t column = block * kDots + threadIdx.x / kDotLanes;
  const uint8_t* packed = expert + at.w2 + column * (n / 2);
  const uint8_t* scale = expert + at.w2_scale + column * (n / kBlock);
  for (uint32_t done = 0; done < g.count; done += kRowsTile) {
    const uint32_t count = min(kRowsTile, g.count - done);
    __syncthreads();
    load_middle(w, g.first + done, count, h);
    __syncthreads();
    float out[kRowsTile];
    dot(packed, scale, h, n, out);
    if (threadIdx.x % kDotLanes != 0) continue;
    for (uint32_t r = 0; r < count; ++r) w.product[(uint64_t{g.first} + done + r) * w.shape.latent + column] = out[r];
  }
}

__global__ void experts_up(const __grid_constant__ World w) {
  extern __shared__ __align__(16) float tile[];
  __shared__ float values[kRowsTile][kDots];
  if (!has_work(w.serve->working)) return;
  const uint32_t blocks = w.shape.intermediate / kBlock;
  for (uint32_t i = blockIdx.x; i < w.serve->groups * blocks; i += gridDim.x)
    up_block(w, w.group[i / blocks], i % blocks, tile, values);
}

__global__ void experts_down(const __grid_constant__ World w) {
  extern __shared__ __align__(16) float tile[];
  if (!has_work(w.serve->working)) return;
  const uint32_t blocks = w.shape.latent / kDots;
  for (uint32_t i = blockIdx.x; i < w.serve->groups * blocks; i += gridDim.x)
    down_block(w, w.group[i / blocks], i % blocks, tile);
}

uint32_t tile_bytes(uint32_t columns) { return kRowsTile * columns * static_cast<uint32_t>(sizeof(float)); }

}  // namespace

ShapeFault kernel_fault(const Shape& s) {
  if (s.latent > kWidest) return {"latent", s.latent, "at most 8192, the widest row that a kernel is built for"};
  if (s.intermediate > kWidest)
    return {"intermediate", s.intermediate, "at most 8192, the widest expert that a kernel is built for"};
  return {};
}

cudaError_t prepare_experts(const Shape& s) {
  const auto allow = [](auto* kernel, uint32_t bytes) {
    return cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes));
  };
  if (const cudaError_t e = allow(experts_up, tile_bytes(s.latent)); e != cudaSuccess) return e;
  return allow(experts_down, tile_bytes(s.intermediate));
}

void launch_experts(const World& w, cudaStream_t stream) {
  if (w.model_layers == 0) return;  // identity layers only
  launch(experts_up, {kBlocks, kThreads, tile_bytes(w.shape.latent)}, stream, w);
  launch(experts_down, {kBlocks, kThreads, tile_bytes(w.shape.intermediate)}, stream, w);
}

}  // namespace moed::cuda
