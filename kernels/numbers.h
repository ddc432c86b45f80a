// Number formats and the activation, one scalar at a time, the same on host and device. The rules are those of
// design.md section 6 and the OCP Microscaling Formats specification 1.0; tests/golden fixes every byte.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>

#ifdef __CUDACC__
#define MOED_HD __host__ __device__
#else
#define MOED_HD
#endif

namespace moed {

inline constexpr float kE4m3Max = 448.0F;
inline constexpr uint8_t kE4m3MaxCode = 0x7E;
inline constexpr float kRcpE4m3Max = 0x1.24924ap-9F;  ///< RN(1 / 448), bits 0x3B124925

MOED_HD inline uint32_t bits_of(float x) { return std::bit_cast<uint32_t>(x); }
MOED_HD inline float float_of(uint32_t bits) { return std::bit_cast<float>(bits); }

/// BF16 bits -> float, exact.
MOED_HD inline float bf16_to_float(uint16_t bits) { return float_of(uint32_t{bits} << 16); }

/// float -> BF16 bits, round to nearest even; a NaN becomes 0x7FC0.
MOED_HD inline uint16_t float_to_bf16(float x) {
  const uint32_t u = bits_of(x);
  if ((u & 0x7FFFFFFFU) > 0x7F800000U) return 0x7FC0;
  return static_cast<uint16_t>((u + 0x7FFFU + ((u >> 16) & 1U)) >> 16);
}

/// float -> E4M3 (e4m3fn) bits: round to nearest even, saturating at +-448; a NaN becomes 0x7E.
MOED_HD inline uint8_t float_to_e4m3(float x) {
  const uint32_t u = bits_of(x);
  const uint32_t magnitude = u & 0x7FFFFFFFU;
  if (magnitude > 0x7F800000U) return kE4m3MaxCode;
  const auto sign = static_cast<uint8_t>(u >> 24 & 0x80U);
  if (magnitude >= 0x43E00000U) return sign | kE4m3MaxCode;  // 448 and above
  if (magnitude < 0x3C800000U)                               // below 2^-6: subnormal, steps of 2^-9
    return sign | static_cast<uint8_t>(rintf(float_of(magnitude) * 512.0F));
  const uint32_t rounded = magnitude + 0x7FFFFU + ((magnitude >> 20) & 1U);
  const uint32_t code = (rounded >> 20) - (120U << 3);
  return sign | static_cast<uint8_t>(code < kE4m3MaxCode ? code : kE4m3MaxCode);
}

/// E4M3 bits -> float, exact; 0x7F and 0xFF are NaN.
MOED_HD inline float e4m3_to_float(uint8_t code) {
  const uint32_t magnitude = code & 0x7FU;
  if (magnitude == 0x7F) return float_of(0x7FC00000U);
  const float value =
      magnitude < 8 ? static_cast<float>(magnitude) * 0x1p-9F : float_of((magnitude << 20) + (120U << 23));
  return (code & 0x80U) != 0 ? -value : value;
}

/// E2M1 nibble -> float: 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives.
MOED_HD inline float e2m1_to_float(uint8_t nibble) {
  const uint32_t m = nibble & 7U;
  const float value = m < 2 ? static_cast<float>(m) * 0.5F : float_of(((m >> 1) + 126U) << 23 | (m & 1U) << 22);
  return (nibble & 8U) != 0 ? -value : value;
}

/// E8M0 byte -> float: 2^(byte - 127); 255 is NaN. Byte 0 is the subnormal 2^-127.
MOED_HD inline float e8m0_to_float(uint8_t byte) {
  if (byte == 255) return float_of(0x7FC00000U);
  return byte == 0 ? float_of(0x00400000U) : float_of(uint32_t{byte} << 23);
}

/// What quantisation multiplies by for scale byte E: 2^(127 - E), and 0 for E = 0.
MOED_HD inline float mxfp8_multiplier(uint8_t e) {
  if (e == 0) return 0.0F;
  return e == 254 ? float_of(0x00400000U) : float_of((254U - e) << 23);
}

/// Scale byte of a block of BF16 values, from the largest magnitude that is not NaN (its 15 bits): the round-up rule.
MOED_HD inline uint8_t mxfp8_scale_bf16(uint16_t amax_bits) {
  const uint32_t e8 = amax_bits >> 7;
  const uint32_t m7 = amax_bits & 0x7FU;
  if (e8 == 255) return 254;
  return e8 > 9 || (e8 == 9 && m7 >= 0x60) ? static_cast<uint8_t>(e8 - 8 + (m7 > 0x60 ? 1 : 0)) : uint8_t{0};
}

/// Scale byte of a block of floats, from its largest magnitude that is not NaN: ceil(log2(amax / 448)) + 127, where the
/// product with RN(1/448) is rounded to float first and a subnormal product counts as 0.
MOED_HD inline uint8_t mxfp8_scale_float(float amax) {
  const uint32_t q = bits_of(amax * kRcpE4m3Max);
  const uint32_t exponent = q >> 23 & 0xFFU;
  if (exponent == 0) return 0;
  const uint32_t e = exponent + ((q & 0x7FFFFFU) != 0 ? 1U : 0U);
  return static_cast<uint8_t>(e < 254 ? e : 254);
}

/// One element of a block with multiplier m = mxfp8_multiplier(E).
MOED_HD inline uint8_t mxfp8_code(float x, float multiplier) { return float_to_e4m3(x * multiplier); }

/// SiTU: [b tanh(g / b) sigmoid(g)] [l tanh(u / l)]; g the gate (w1), u the up value (w3). Accurate tanh, FP32.
MOED_HD inline float situ(float g, float u, float beta, float linear_beta) {
  const float gate = beta * tanhf(g / beta) * (1.0F / (1.0F + expf(-g)));
  return gate * (linear_beta * tanhf(u / linear_beta));
}

/// SwiGLU's activation: g sigmoid(g) u.
MOED_HD inline float silu_gated(float g, float u) { return g * (1.0F / (1.0F + expf(-g))) * u; }

}  // namespace moed
