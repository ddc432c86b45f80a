// The identity layer from its definition: MXFP8 (OCP Microscaling 1.0, scale rounded up), sum of a rank's weights,
// BF16.
#include "daemon/moectl/identity.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <random>

namespace moed::ctl {
namespace {

constexpr uint32_t kBlockSize = 32;
constexpr double kLargestE4m3 = 448;

double from_bf16(uint16_t bits) {
  const double significand = (bits >> 7 & 0xFF) != 0 ? 128 + (bits & 0x7F) : 2 * (bits & 0x7F);
  const double magnitude = std::ldexp(significand, (bits >> 7 & 0xFF) - 134);
  return (bits & 0x8000) != 0 ? -magnitude : magnitude;
}

uint16_t to_bf16(double value) {
  int exponent = 0;
  double significand = std::nearbyint(std::ldexp(std::frexp(std::fabs(value), &exponent), 8));  // 8 bits, ties to even
  if (significand == 256) significand = 128, ++exponent;
  const int biased = exponent + 126;
  const uint16_t sign = std::signbit(value) ? 0x8000 : 0;
  if (significand == 0 || biased <= 0) return sign;
  return static_cast<uint16_t>(sign | biased << 7 | (static_cast<int>(significand) - 128));
}

/// The nearest E4M3 number (4 significant bits down to 2^-6, steps of 2^-9 below, at most 448), ties to even.
double round_e4m3(double value) {
  int exponent = 0;
  std::frexp(value, &exponent);
  const double step = std::ldexp(1, std::max(exponent - 4, -9));
  return std::clamp(std::nearbyint(value / step) * step, -kLargestE4m3, kLargestE4m3);
}

/// Replaces a block by what is left of it after MXFP8: codes times the smallest power of two that keeps them in range.
void through_mxfp8(double* block) {
  double largest = 0;
  for (uint32_t i = 0; i < kBlockSize; ++i) largest = std::max(largest, std::fabs(block[i]));
  int exponent = 0;
  const double significand = std::frexp(largest, &exponent);
  const int scale = exponent - 9 + (significand > kLargestE4m3 / 512 ? 1 : 0);
  for (uint32_t i = 0; i < kBlockSize; ++i) {
    if (largest == 0 || scale <= -127)
      block[i] = 0;
    else
      block[i] = std::ldexp(round_e4m3(std::ldexp(block[i], -scale)), scale);
  }
}

}  // namespace

bool same_number(uint16_t a, uint16_t b) { return a == b || ((a | b) & 0x7FFF) == 0; }

Inputs random_inputs(uint32_t tokens, uint32_t width, uint32_t top_k, uint32_t experts, uint64_t seed) {
  std::mt19937_64 random(seed);
  std::normal_distribution<double> normal;
  std::uniform_real_distribution<float> weight(0.01F, 1.0F);
  std::uniform_int_distribution<int32_t> expert(0, static_cast<int32_t>(experts) - 1);
  std::uniform_int_distribution<int> power(-6, 6);
  Inputs in{tokens, width, top_k, {}, {}, {}};
  for (uint32_t t = 0; t < tokens; ++t) {
    int scale = 0;
    for (uint32_t i = 0; i < width; ++i) {
      if (i % kBlockSize == 0) scale = power(random);
      in.x.push_back(to_bf16(std::ldexp(normal(random), scale)));
    }
    for (uint32_t k = 0; k < top_k; ++k) {
      const auto chosen = in.ids.end() - k;
      int32_t id = expert(random);
      while (top_k <= experts && std::find(chosen, in.ids.end(), id) != in.ids.end()) id = expert(random);
      in.ids.push_back(id);
      in.weights.push_back(weight(random));
    }
  }
  return in;
}

std::vector<uint16_t> identity_answer(const Inputs& in, uint32_t experts, uint32_t ranks) {
  std::vector<uint16_t> out;
  std::vector<double> row(in.width);
  for (uint32_t t = 0; t < in.tokens; ++t) {
    for (uint32_t i = 0; i < in.width; ++i) row[i] = from_bf16(in.x[std::size_t{t} * in.width + i]);
    for (uint32_t i = 0; i < in.width; i += kBlockSize) through_mxfp8(&row[i]);
    std::vector<float> sum(in.width, 0.0F);
    for (uint64_t rank = 0; rank < ranks; ++rank) {
      const auto first = static_cast<int64_t>(rank * experts / ranks);
      const auto end = static_cast<int64_t>((rank + 1) * experts / ranks);
      float weight = 0;
      for (uint32_t k = 0; k < in.top_k; ++k) {
        const std::size_t at = std::size_t{t} * in.top_k + k;
        if (in.ids[at] >= first && in.ids[at] < end) weight += in.weights[at];
      }
      for (uint32_t i = 0; i < in.width; ++i) {
        const float product = static_cast<float>(row[i]) * weight;
        sum[i] += static_cast<float>(from_bf16(to_bf16(static_cast<double>(product))));
      }
    }
    for (const float s : sum) out.push_back(to_bf16(static_cast<double>(s)));
  }
  return out;
}

}  // namespace moed::ctl
