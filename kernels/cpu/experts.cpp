// The experts' two products and the activation in plain loops, as design.md section 6 has it: operands dequantised
// exactly, FP32 accumulation, the intermediate through MXFP8. A row meets no other row: its sums have one order
// whatever else is in the pass.
#include <algorithm>
#include <array>
#include <cmath>

#include "kernels/steps.h"

namespace moed::cpu {
namespace {

constexpr uint32_t kSumLanes = 16;  // sums run in 16 interleaved parts, added in ascending order at the end

float dot(const float* a, const float* b, uint32_t n) {
  std::array<float, kSumLanes> part{};
  for (uint32_t k = 0; k < n; k += kSumLanes)
    for (uint32_t j = 0; j < kSumLanes; ++j) part[j] += a[k + j] * b[k + j];
  float sum = 0.0F;
  for (const float p : part) sum += p;
  return sum;
}

/// The two values of every byte of packed E2M1 codes, low nibble first.
const std::array<std::array<float, 2>, 256>& e2m1_pairs() {
  static const auto table = [] {
    std::array<std::array<float, 2>, 256> t{};
    for (uint32_t b = 0; b < 256; ++b)
      t[b] = {e2m1_to_float(static_cast<uint8_t>(b & 15)), e2m1_to_float(static_cast<uint8_t>(b >> 4))};
    return t;
  }();
  return table;
}

/// Dequantises one row of a weight matrix: n columns.
void decode_weights(const uint8_t* packed, const uint8_t* scale, uint32_t n, float* out) {
  const auto& pairs = e2m1_pairs();
  for (uint32_t block = 0; block < n / kBlock; ++block) {
    const float s = e8m0_to_float(scale[block]);
    for (uint32_t j = 0; j < kBlock / 2; ++j) {
      const auto& pair = pairs[packed[block * (kBlock / 2) + j]];
      out[block * kBlock + 2 * j] = pair[0] * s;
      out[block * kBlock + 2 * j + 1] = pair[1] * s;
    }
  }
}

/// Sends n floats through MXFP8 and back, in place: the general (FP32) rule, a NaN does not count for the maximum.
void through_mxfp8(float* h, uint32_t n) {
  for (uint32_t block = 0; block < n; block += kBlock) {
    float amax = 0.0F;
    for (uint32_t j = 0; j < kBlock; ++j) amax = std::fmax(amax, std::fabs(h[block + j]));
    const uint8_t e = mxfp8_scale_float(amax);
    const float multiplier = mxfp8_multiplier(e);
    const float scale = e8m0_to_float(e);
    for (uint32_t j = 0; j < kBlock; ++j) h[block + j] = e4m3_to_float(mxfp8_code(h[block + j], multiplier)) * scale;
  }
}

float activate(const Shape& s, float g, float u) {
  return s.activation == Activation::situ ? situ(g, u, s.act_beta, s.act_linear_beta) : silu_gated(g, u);
}

/// One expert on at most kExpertsTile rows; pairs[i] gives row i, out[i * L] takes its result.
void run_tile(const ExpertsArgs& a, const ExpertWeights& w, std::span<const Pair> pairs, float* out) {
  const Shape& s = *a.shape;
  const uint32_t latent = s.latent;
  const uint32_t inter = s.intermediate;
  float* x = a.scratch;
  float* h = x + uint64_t{kExpertsTile} * latent;
  float* first = h + uint64_t{kExpertsTile} * inter;
  float* second = first + std::max(latent, inter);
  for (uint32_t i = 0; i < pairs.size(); ++i) {
    const uint64_t row = pairs[i].row;
    for (uint32_t k = 0; k < latent; ++k)
      x[uint64_t{i} * latent + k] = e4m3_to_float(a.rows->codes[row * latent + k]) *
                                    e8m0_to_float(a.rows->scales[row * (latent / kBlock) + k / kBlock]);
  }
  for (uint64_t j = 0; j < inter; ++j) {
    decode_weights(w.w1 + j * (latent / 2), w.w1_scale + j * (latent / kBlock), latent, first);
    decode_weights(w.w3 + j * (latent / 2), w.w3_scale + j * (latent / kBlock), latent, second);
    for (uint64_t i = 0; i < pairs.size(); ++i)
      h[i * inter + j] = activate(s, dot(x + i * latent, first, latent), dot(x + i * latent, second, latent));
  }
  for (uint64_t i = 0; i < pairs.size(); ++i) through_mxfp8(h + i * inter, inter);
  for (uint64_t j = 0; j < latent; ++j) {
    decode_weights(w.w2 + j * (inter / 2), w.w2_scale + j * (inter / kBlock), inter, first);
    for (uint64_t i = 0; i < pairs.size(); ++i) out[i * latent + j] = dot(h + i * inter, first, inter);
  }
}

}  // namespace

void experts(const ExpertsArgs& a) {
  const std::span<const Pair> pairs = a.plan->pairs;
  size_t at = 0;
  while (at < pairs.size()) {
    size_t end = at + 1;
    while (end < pairs.size() && end - at < kExpertsTile && pairs[end].layer == pairs[at].layer &&
           pairs[end].local == pairs[at].local)
      ++end;
    const LayerWeights& layer = a.model->layers[pairs[at].layer - a.shape->first_layer];
    run_tile(a, layer.experts[pairs[at].local], pairs.subspan(at, end - at), a.out + uint64_t{at} * a.shape->latent);
    at = end;
  }
}

}  // namespace moed::cpu
