// The oracle: the routed part of an MoE layer as dense sums in float64, without lanes, lines, passes or ranges. It
// shares no code with kernels/: formats are decoded with ldexp, MXFP8 scales come from frexp, codes from a search in a
// table. tests/golden/make.py is the same mathematics in numpy; oracle_test.cpp compares the two.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <map>
#include <span>
#include <vector>

namespace moed::oracle {

// ---- number formats

/// BF16 bits -> value.
inline double bf16_value(uint16_t bits) {
  const int exponent = bits >> 7 & 0xFF;
  const int mantissa = bits & 0x7F;
  const double sign = (bits & 0x8000) != 0 ? -1.0 : 1.0;
  if (exponent == 255)
    return mantissa != 0 ? std::numeric_limits<double>::quiet_NaN() : sign * std::numeric_limits<double>::infinity();
  return sign * (exponent == 0 ? std::ldexp(mantissa, -133) : std::ldexp(128 + mantissa, exponent - 134));
}

/// Value -> BF16 bits: round to nearest even, once; NaN becomes 0x7FC0.
inline uint16_t bf16_bits(double x) {
  if (std::isnan(x)) return 0x7FC0;
  const uint16_t sign = std::signbit(x) ? 0x8000 : 0;
  const double magnitude = std::abs(x);
  if (magnitude == 0) return sign;
  if (magnitude >= 0x1.ffp127) return static_cast<uint16_t>(sign | 0x7F80);
  const int exponent = std::max(std::ilogb(magnitude), -126);
  const auto steps =
      static_cast<int>(std::nearbyint(std::ldexp(magnitude, 7 - exponent)));  // 0..256, 2^7 is the hidden bit
  return static_cast<uint16_t>(sign | (((exponent + 126) << 7) + steps));
}

/// E2M1 nibble -> value.
inline double e2m1_value(unsigned nibble) {
  static constexpr std::array<double, 8> kMagnitude{0, 0.5, 1, 1.5, 2, 3, 4, 6};
  return (nibble & 8U) != 0 ? -kMagnitude[nibble & 7U] : kMagnitude[nibble & 7U];
}

/// E4M3 code -> value; the two NaN codes do not occur in what is quantised here.
inline double e4m3_value(uint8_t code) {
  const int exponent = code >> 3 & 15;
  const int mantissa = code & 7;
  const double magnitude = exponent == 0 ? std::ldexp(mantissa, -9) : std::ldexp(8 + mantissa, exponent - 10);
  return (code & 0x80) != 0 ? -magnitude : magnitude;
}

/// Value -> E4M3 code: nearest, ties to the even code, saturating; NaN becomes 0x7E.
inline uint8_t e4m3_code(double x) {
  if (std::isnan(x)) return 0x7E;
  static const std::array<double, 127> table = [] {
    std::array<double, 127> t{};
    for (std::size_t i = 0; i < t.size(); ++i) t[i] = e4m3_value(static_cast<uint8_t>(i));
    return t;
  }();
  const double magnitude = std::min(std::abs(x), 448.0);
  const auto high = static_cast<std::size_t>(std::lower_bound(table.begin(), table.end(), magnitude) - table.begin());
  std::size_t code = high;
  if (high > 0) {
    const double up = table[high] - magnitude;
    const double down = magnitude - table[high - 1];
    if (down < up || (down == up && high % 2 == 1)) code = high - 1;
  }
  return static_cast<uint8_t>(code | (std::signbit(x) ? 0x80U : 0U));
}

/// Packed MXFP4 [rows, columns] (element 2j in the low nibble, one scale byte per 32 columns) -> values, row-major.
inline std::vector<double> mxfp4_values(const uint8_t* packed, const uint8_t* scales, std::size_t rows,
                                        std::size_t columns) {
  std::vector<double> v(rows * columns);
  for (std::size_t i = 0; i < v.size(); ++i)
    v[i] = std::ldexp(e2m1_value(packed[i / 2] >> (i % 2 * 4) & 15U), scales[i / 32] - 127);
  return v;
}

// ---- MXFP8

struct Quantised {
  std::vector<uint8_t> codes, scales;
};

/// Scale byte of a block whose largest magnitude is amax: the least E with amax <= 448 x 2^(E - 127), where the
/// quotient is taken in FP32 as a product with RN(1/448) and a subnormal quotient counts as 0.
inline uint8_t mxfp8_scale(float amax) {
  if (std::isinf(amax)) return 254;
  const float quotient = amax * (1.0F / 448.0F);
  if (quotient < std::numeric_limits<float>::min()) return 0;
  int exponent = 0;
  const double fraction =
      std::frexp(double{quotient}, &exponent);  // quotient = fraction x 2^exponent, 0.5 <= fraction < 1
  return static_cast<uint8_t>(std::min(127 + (fraction == 0.5 ? exponent - 1 : exponent), 254));
}

/// Floats, a multiple of 32 -> codes and scale bytes. NaN is not part of a block's maximum.
inline Quantised mxfp8(std::span<const float> x) {
  Quantised q;
  for (std::size_t block = 0; block < x.size(); block += 32) {
    float amax = 0;
    for (const float v : x.subspan(block, 32))
      if (!std::isnan(v)) amax = std::max(amax, std::abs(v));
    const uint8_t e = mxfp8_scale(amax);
    q.scales.push_back(e);
    for (const float v : x.subspan(block, 32))
      q.codes.push_back(e4m3_code(e == 0 ? double{v} * 0.0 : std::ldexp(double{v}, 127 - e)));
  }
  return q;
}

inline std::vector<double> mxfp8_values(const Quantised& q) {
  std::vector<double> v(q.codes.size());
  for (std::size_t i = 0; i < v.size(); ++i) v[i] = std::ldexp(e4m3_value(q.codes[i]), q.scales[i / 32] - 127);
  return v;
}

// ---- the layer

/// One expert's weights as values, row-major: w1 (gate) and w3 (up) [I, L], w2 (down) [L, I].
struct Expert {
  std::vector<double> w1, w2, w3;
};

struct Layer {
  std::size_t latent = 0, intermediate = 0, experts = 0, top_k = 0;
  std::function<Expert(uint32_t)> expert;  ///< by the model's own id; empty: an identity layer
  std::vector<double> norm;                ///< [L]; empty: 1
  bool silu = false;                       ///< SwiGLU's activation instead of SiTU
  double beta = 4, linear_beta = 25, eps = 1e-5;
};

/// T tokens: x BF16 [T, L], ids [T, K] (-1: no expert), weights [T, K].
struct Rows {
  std::vector<uint16_t> x;
  std::vector<int32_t> ids;
  std::vector<float> weights;
};

/// BF16 [T, L]: the sum of the ranks' partials, and the same after RMSNorm.
struct Result {
  std::vector<uint16_t> latent, out;
};

inline double activation(const Layer& m, double gate, double up) {
  const double sigmoid = 1 / (1 + std::exp(-gate));
  if (m.silu) return gate * sigmoid * up;
  return m.beta * std::tanh(gate / m.beta) * sigmoid * (m.linear_beta * std::tanh(up / m.linear_beta));
}

/// matrix [rows, columns] times a vector.
inline std::vector<double> product(const std::vector<double>& matrix, const std::vector<double>& vector) {
  std::vector<double> out(matrix.size() / vector.size());
  for (std::size_t r = 0; r < out.size(); ++r)
    for (std::size_t c = 0; c < vector.size(); ++c) out[r] += matrix[r * vector.size() + c] * vector[c];
  return out;
}

/// One expert on one dequantised row; the intermediate goes through MXFP8.
inline std::vector<double> apply(const Layer& m, const Expert& e, const std::vector<double>& x) {
  const std::vector<double> gate = product(e.w1, x);
  const std::vector<double> up = product(e.w3, x);
  std::vector<float> h(gate.size());
  for (std::size_t i = 0; i < h.size(); ++i) h[i] = static_cast<float>(activation(m, gate[i], up[i]));
  return product(e.w2, mxfp8_values(mxfp8(h)));
}

/// RMSNorm of a BF16 row. No norm weight: 1.
inline std::vector<uint16_t> rms_norm(const Layer& m, std::span<const uint16_t> row) {
  double squares = 0;
  for (const uint16_t b : row) squares += bf16_value(b) * bf16_value(b);
  const double scale = 1 / std::sqrt(squares / static_cast<double>(row.size()) + m.eps);
  std::vector<uint16_t> out(row.size());
  for (std::size_t i = 0; i < row.size(); ++i)
    out[i] = bf16_bits(static_cast<float>(bf16_value(row[i]) * scale * (m.norm.empty() ? 1.0 : m.norm[i])));
  return out;
}

/// The rank that owns an expert: the one whose range [r * E / N, (r + 1) * E / N) holds it, by search.
inline std::size_t owner(std::size_t expert, std::size_t experts, std::size_t ranks) {
  std::size_t r = 0;
  while ((r + 1) * experts / ranks <= expert) ++r;
  return r;
}

/// Partials [N, L] in BF16 and which ranks have one -> FP32 sum in rank order, one rounding.
inline std::vector<uint16_t> combine(const std::vector<std::vector<uint16_t>>& partials, std::size_t latent) {
  std::vector<float> sum(latent, 0.0F);
  for (const auto& partial : partials)
    for (std::size_t i = 0; i < partial.size(); ++i) sum[i] += static_cast<float>(bf16_value(partial[i]));
  std::vector<uint16_t> out(latent);
  for (std::size_t i = 0; i < latent; ++i) out[i] = bf16_bits(sum[i]);
  return out;
}

/// One token of a call: its dequantised row, its ids and weights.
struct Token {
  std::vector<double> x;
  std::span<const int32_t> ids;
  std::span<const float> weights;
};

/// One rank's partial of one token: FP64 sum over its slots, rounded to FP32 and to BF16; empty: no slot is this
/// rank's. cache keeps the experts that were asked for.
inline std::vector<uint16_t> partial(const Layer& m, const Token& token, std::size_t rank, std::size_t ranks,
                                     std::map<uint32_t, Expert>& cache) {
  std::vector<double> sum(m.latent, 0.0);
  float weight = 0;
  bool used = false;
  for (std::size_t k = 0; k < m.top_k; ++k) {
    if (token.ids[k] < 0 || owner(static_cast<std::size_t>(token.ids[k]), m.experts, ranks) != rank) continue;
    used = true;
    weight += token.weights[k];
    if (!m.expert) continue;
    const auto e = static_cast<uint32_t>(token.ids[k]);
    if (!cache.contains(e)) cache[e] = m.expert(e);
    const std::vector<double> y = apply(m, cache[e], token.x);
    for (std::size_t i = 0; i < y.size(); ++i) sum[i] += double{token.weights[k]} * y[i];
  }
  if (!used) return {};
  std::vector<uint16_t> out(m.latent);
  for (std::size_t i = 0; i < m.latent; ++i) {
    // An identity layer is defined in FP32: the product of two floats, then one rounding to BF16.
    const float value = m.expert ? static_cast<float>(sum[i]) : static_cast<float>(token.x[i]) * weight;
    out[i] = bf16_bits(value);
  }
  return out;
}

/// The routed part of a layer in a world of `ranks`.
inline Result routed(const Layer& m, const Rows& rows, std::size_t ranks) {
  Result result;
  std::map<uint32_t, Expert> cache;
  for (std::size_t t = 0; t * m.latent < rows.x.size(); ++t) {
    std::vector<float> row(m.latent);
    for (std::size_t i = 0; i < m.latent; ++i) row[i] = static_cast<float>(bf16_value(rows.x[t * m.latent + i]));
    const Token token{mxfp8_values(mxfp8(row)), std::span(rows.ids).subspan(t * m.top_k, m.top_k),
                      std::span(rows.weights).subspan(t * m.top_k, m.top_k)};
    std::vector<std::vector<uint16_t>> partials(ranks);
    for (std::size_t r = 0; r < ranks; ++r) partials[r] = partial(m, token, r, ranks, cache);
    const std::vector<uint16_t> latent = combine(partials, m.latent);
    const std::vector<uint16_t> out = rms_norm(m, latent);
    result.latent.insert(result.latent.end(), latent.begin(), latent.end());
    result.out.insert(result.out.end(), out.begin(), out.end());
  }
  return result;
}

}  // namespace moed::oracle
