// How expert weights lie in memory, and the synthetic ones: the same bytes on every back end, any expert alone.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <span>
#include <vector>

#include "daemon/abi/shape.h"
#include "kernels/numbers.h"

namespace moed {

/// One expert's six tensors in the checkpoint's own layout. w1 (gate), w3 (up): [I, L]; w2 (down): [L, I]. packed: two
/// E2M1 codes a byte, element 2j in the low nibble; scale: one E8M0 byte per 32 columns. Row-major, no padding.
struct ExpertWeights {
  const uint8_t* w1 = nullptr;
  const uint8_t* w1_scale = nullptr;
  const uint8_t* w2 = nullptr;
  const uint8_t* w2_scale = nullptr;
  const uint8_t* w3 = nullptr;
  const uint8_t* w3_scale = nullptr;
};

/// One layer of one rank. experts is indexed by the local number (id - first_expert); empty: an identity layer.
struct LayerWeights {
  std::vector<ExpertWeights> experts;
  std::vector<uint16_t> norm;  ///< BF16 [L]; empty: 1
};

/// What a back end serves; layer m of the model is layers[m - shape.first_layer]. Whoever made it keeps the bytes
/// alive.
struct ModelWeights {
  std::vector<LayerWeights> layers;
};

/// Bytes of one matrix [rows, columns]: packed codes and scales.
constexpr uint64_t packed_bytes(uint64_t rows, uint64_t columns) { return rows * columns / 2; }
constexpr uint64_t scale_bytes(uint64_t rows, uint64_t columns) { return rows * columns / kBlock; }

/// Bytes of one expert: three matrices.
constexpr uint64_t expert_bytes(const Shape& s) {
  return 3 * (packed_bytes(s.intermediate, s.latent) + scale_bytes(s.intermediate, s.latent));
}

/// Matrices of an expert as synthetic weights number them.
enum class Matrix : uint32_t { w1 = 0, w1_scale = 1, w2 = 2, w2_scale = 3, w3 = 4, w3_scale = 5 };

/// Finaliser of splitmix64 (Steele, Lea, Flood 2014).
MOED_HD constexpr uint64_t mix(uint64_t z) {
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ULL;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebULL;
  return z ^ (z >> 31);
}

MOED_HD constexpr uint64_t synthetic_key(uint64_t seed, uint32_t layer, uint32_t expert, Matrix matrix) {
  return mix(seed ^ (uint64_t{layer} << 40) ^ (uint64_t{expert} << 8) ^ static_cast<uint64_t>(matrix));
}

/// Byte `at` of a synthetic tensor.
MOED_HD constexpr uint8_t synthetic_byte(uint64_t key, uint64_t at) {
  return static_cast<uint8_t>(mix(key + at / 8) >> (8 * (at % 8)));
}

/// The scale byte that a random byte becomes: products of `columns` terms then have a standard deviation near 1.
inline uint8_t synthetic_scale(uint8_t random, uint64_t columns) {
  const auto shift = static_cast<int>(std::ceil(std::log2(3.0 * std::sqrt(static_cast<double>(columns)))));
  return static_cast<uint8_t>(127 - shift + (random & 1));
}

/// Fills one tensor: packed codes, or scales (columns: of the matrix).
inline void fill_synthetic(std::span<uint8_t> out, uint64_t key, bool scales, uint64_t columns) {
  for (uint64_t i = 0; i < out.size(); i += 8) {
    const uint64_t word = mix(key + i / 8);
    const uint64_t count = out.size() - i < 8 ? out.size() - i : 8;
    std::memcpy(out.data() + i, &word, count);
  }
  if (!scales) return;
  for (uint8_t& b : out) b = synthetic_scale(b, columns);
}

}  // namespace moed
