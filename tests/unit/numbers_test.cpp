// Number formats and the activation against golden data and against tables and formulas in double, which share no code
// with kernels/numbers.h.
#include "kernels/numbers.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "tests/support/golden.h"
#include "tests/support/tolerance.h"

namespace moed {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

/// The 127 finite magnitudes of E4M3 in ascending order: the index is the code.
std::array<double, 127> e4m3_table() {
  std::array<double, 127> t{};
  for (int code = 0; code < 127; ++code) {
    const int exponent = code / 8;
    const int mantissa = code % 8;
    t[static_cast<std::size_t>(code)] =
        exponent == 0 ? std::ldexp(mantissa, -9) : std::ldexp(8 + mantissa, exponent - 10);
  }
  return t;
}

/// Nearest entry of the table, ties to the even code, 448 for all above.
uint8_t e4m3_nearest(double x) {
  static const std::array<double, 127> table = e4m3_table();
  if (std::isnan(x)) return 0x7E;
  const uint8_t sign = std::signbit(x) ? 0x80 : 0;
  const double magnitude = std::abs(x);
  if (magnitude >= table.back()) return sign | 0x7E;
  const auto above = std::upper_bound(table.begin(), table.end(), magnitude);
  const auto high = static_cast<int>(above - table.begin());
  const int low = high - 1;
  const double down = magnitude - table[static_cast<std::size_t>(low)];
  const double up = *above - magnitude;
  const int code = down < up || (down == up && low % 2 == 0) ? low : high;
  return static_cast<uint8_t>(sign | code);
}

/// x rounded to 8 significant bits (fewer below 2^-126) as a value.
double bf16_nearest(float x) {
  if (x == 0.0F || !std::isfinite(x)) return x;
  const int exponent = std::max(std::ilogb(x), -126);
  const double rounded = std::ldexp(std::nearbyint(std::ldexp(double{x}, 7 - exponent)), exponent - 7);
  return std::abs(rounded) < 0x1p128 ? rounded : std::copysign(kInf, x);
}

/// ceil(log2(amax / 448)) + 127, and 0 where the quotient is below the least normal float.
int scale_exponent(double amax) {
  const double q = amax / 448.0;
  if (q < 0x1p-126) return 0;
  int exponent = 0;
  const double fraction = std::frexp(q, &exponent);
  return std::min(127 + (fraction > 0.5 ? exponent : exponent - 1), 254);
}

TEST(Numbers, GoldenMxfp8EveryByte) {
  const auto x = read_array<uint16_t>(MOED_GOLDEN, "mxfp8_x");
  const auto codes = read_array<uint8_t>(MOED_GOLDEN, "mxfp8_codes");
  const auto scales = read_array<uint8_t>(MOED_GOLDEN, "mxfp8_scales");
  ASSERT_EQ(x.size(), codes.size());
  ASSERT_EQ(x.size(), scales.size() * 32);
  for (std::size_t block = 0; block < scales.size(); ++block) {
    uint16_t amax = 0;
    for (std::size_t i = 0; i < 32; ++i) amax = std::max<uint16_t>(amax, x[block * 32 + i] & 0x7FFF);
    const uint8_t e = mxfp8_scale_bf16(amax);
    ASSERT_EQ(e, scales[block]) << "block " << block;
    ASSERT_EQ(mxfp8_scale_float(bf16_to_float(amax)), scales[block]) << "block " << block;
    for (std::size_t i = block * 32; i < block * 32 + 32; ++i)
      ASSERT_EQ(mxfp8_code(bf16_to_float(x[i]), mxfp8_multiplier(e)), codes[i]) << "element " << i;
  }
}

TEST(Numbers, GoldenSitu) {
  const auto gu = read_array<float>(MOED_GOLDEN, "situ_gu");
  const auto out = read_array<float>(MOED_GOLDEN, "situ_out");
  ASSERT_EQ(gu.size(), out.size() * 2);
  for (std::size_t i = 0; i < out.size(); ++i) {
    const float got = situ(gu[2 * i], gu[2 * i + 1], 4.0F, 25.0F);
    ASSERT_LE(std::abs(double{got} - out[i]), kSituAbsolute + kSituRelative * std::abs(double{out[i]}))
        << "gate " << gu[2 * i] << " up " << gu[2 * i + 1] << " got " << got << " want " << out[i];
  }
}

TEST(Numbers, ActivationsOfExtremeInputsAreFinite) {
  EXPECT_EQ(situ(0.0F, 5.0F, 4.0F, 25.0F), 0.0F);
  EXPECT_EQ(situ(-1e30F, 7.0F, 4.0F, 25.0F), 0.0F);
  EXPECT_NEAR(situ(1e30F, 1e30F, 4.0F, 25.0F), 100.0F, kSituRelative * 100);
  EXPECT_NEAR(situ(1e30F, -1e30F, 4.0F, 25.0F), -100.0F, kSituRelative * 100);
  for (const float g : {-90.0F, -3.0F, -0.25F, 0.0F, 0.5F, 2.0F, 80.0F}) {
    const double want = double{g} / (1.0 + std::exp(-double{g})) * 1.5;
    EXPECT_NEAR(silu_gated(g, 1.5F), want, kSituAbsolute + kSituRelative * std::abs(want)) << g;
  }
}

TEST(Numbers, E4m3DecodesEveryCode) {
  const auto table = e4m3_table();
  for (int code = 0; code < 127; ++code) {
    const float value = e4m3_to_float(static_cast<uint8_t>(code));
    EXPECT_EQ(value, table[static_cast<std::size_t>(code)]);
    const float negative = e4m3_to_float(static_cast<uint8_t>(code | 0x80));
    EXPECT_EQ(negative, -table[static_cast<std::size_t>(code)]);
    EXPECT_TRUE(std::signbit(negative));
  }
  EXPECT_TRUE(std::isnan(e4m3_to_float(0x7F)));
  EXPECT_TRUE(std::isnan(e4m3_to_float(0xFF)));
}

TEST(Numbers, E4m3EncodesEveryBf16) {
  for (uint32_t bits = 0; bits < 0x10000; ++bits) {
    const float x = bf16_to_float(static_cast<uint16_t>(bits));
    ASSERT_EQ(float_to_e4m3(x), e4m3_nearest(x)) << std::hex << bits;
  }
}

TEST(Numbers, E4m3EncodesEveryMidpointAndItsNeighbours) {
  const auto table = e4m3_table();
  for (std::size_t code = 0; code + 1 < table.size(); ++code) {
    const auto middle = static_cast<float>((table[code] + table[code + 1]) / 2);
    for (const float x :
         {static_cast<float>(table[code]), std::nextafter(middle, 0.0F), middle, std::nextafter(middle, kInf)}) {
      ASSERT_EQ(float_to_e4m3(x), e4m3_nearest(x)) << x;
      ASSERT_EQ(float_to_e4m3(-x), e4m3_nearest(-x)) << -x;
    }
  }
}

TEST(Numbers, E4m3EncodesFloatsOfEveryExponent) {
  for (uint64_t bits = 0; bits < uint64_t{1} << 32; bits += 4099) {
    const float x = float_of(static_cast<uint32_t>(bits));
    ASSERT_EQ(float_to_e4m3(x), e4m3_nearest(x)) << std::hex << bits;
  }
}

TEST(Numbers, E4m3Extremes) {
  EXPECT_EQ(float_to_e4m3(kNan), 0x7E);
  EXPECT_EQ(float_to_e4m3(-kNan), 0x7E);
  EXPECT_EQ(float_to_e4m3(kInf), 0x7E);
  EXPECT_EQ(float_to_e4m3(-kInf), 0xFE);
  EXPECT_EQ(float_to_e4m3(464.0F), 0x7E);
  EXPECT_EQ(float_to_e4m3(3.4e38F), 0x7E);
  EXPECT_EQ(float_to_e4m3(0.0F), 0x00);
  EXPECT_EQ(float_to_e4m3(-0.0F), 0x80);
}

TEST(Numbers, Bf16RoundsEveryHighHalfWithCornersOfTheLow) {
  for (uint32_t high = 0; high < 0x10000; ++high) {
    for (const uint32_t low : {0U, 1U, 0x7FFFU, 0x8000U, 0x8001U, 0xFFFFU}) {
      const float x = float_of(high << 16 | low);
      const uint16_t got = float_to_bf16(x);
      if (std::isnan(x)) {
        ASSERT_EQ(got, 0x7FC0);
        continue;
      }
      ASSERT_EQ(double{bf16_to_float(got)}, bf16_nearest(x)) << std::hex << (high << 16 | low);
      ASSERT_EQ(got >> 15, std::signbit(x) ? 1 : 0) << std::hex << (high << 16 | low);
    }
  }
}

TEST(Numbers, Bf16RoundsSampledFloats) {
  for (uint64_t bits = 0; bits < uint64_t{1} << 32; bits += 4093) {
    const float x = float_of(static_cast<uint32_t>(bits));
    if (std::isnan(x)) continue;
    ASSERT_EQ(double{bf16_to_float(float_to_bf16(x))}, bf16_nearest(x)) << std::hex << bits;
  }
}

TEST(Numbers, E2m1DecodesEveryNibble) {
  const std::array<float, 8> magnitudes{0.0F, 0.5F, 1.0F, 1.5F, 2.0F, 3.0F, 4.0F, 6.0F};
  for (uint8_t nibble = 0; nibble < 16; ++nibble) {
    const float value = e2m1_to_float(nibble);
    EXPECT_EQ(std::abs(value), magnitudes[nibble & 7U]);
    EXPECT_EQ(std::signbit(value), nibble >= 8);
  }
}

TEST(Numbers, E8m0DecodesEveryByte) {
  for (int byte = 0; byte < 255; ++byte)
    EXPECT_EQ(double{e8m0_to_float(static_cast<uint8_t>(byte))}, std::ldexp(1.0, byte - 127)) << byte;
  EXPECT_TRUE(std::isnan(e8m0_to_float(255)));
}

TEST(Numbers, MultiplierIsTheInverseOfTheScale) {
  EXPECT_EQ(mxfp8_multiplier(0), 0.0F);
  for (int e = 1; e < 255; ++e)
    EXPECT_EQ(double{mxfp8_multiplier(static_cast<uint8_t>(e))}, std::ldexp(1.0, 127 - e)) << e;
}

TEST(Numbers, ScaleOfEveryFiniteBf16Maximum) {
  int seen = 0;
  for (uint16_t bits = 0; bits < 0x7F80; ++bits, ++seen) {
    const float amax = bf16_to_float(bits);
    const uint8_t got = mxfp8_scale_bf16(bits);
    ASSERT_EQ(got, mxfp8_scale_float(amax)) << std::hex << bits;
    ASSERT_EQ(got, scale_exponent(amax)) << std::hex << bits;
  }
  EXPECT_EQ(seen, 32640);
}

TEST(Numbers, ScaleIsTheLeastThatKeepsTheMaximumInRange) {
  for (uint16_t bits = 0x0080; bits < 0x7F80; ++bits) {
    const double amax = bf16_to_float(bits);
    const int e = mxfp8_scale_bf16(bits);
    if (e == 0) continue;
    ASSERT_LE(std::ldexp(amax, 127 - e), 448.0) << std::hex << bits;
    ASSERT_GT(std::ldexp(amax, 128 - e), 448.0) << std::hex << bits;
  }
}

// The general rule rounds the product with RN(1/448) to float first, so only floats whose quotient is not within one
// rounding of a power of two have to agree with exact division.
TEST(Numbers, ScaleOfSampledFloatMaxima) {
  int compared = 0;
  for (uint32_t bits = 0; bits < 0x7F800000U; bits += 1021) {
    const float amax = float_of(bits);
    const double q = double{amax} / 448.0;
    int unused = 0;
    const double fraction = std::frexp(q, &unused);
    if (q != 0 && (fraction < 0.5 * (1 + 0x1p-22) || fraction > 1 - 0x1p-22)) continue;
    ASSERT_EQ(mxfp8_scale_float(amax), scale_exponent(amax)) << std::hex << bits;
    ++compared;
  }
  EXPECT_GT(compared, 2'000'000);
}

TEST(Numbers, InfinityTakesTheLargestScale) {
  EXPECT_EQ(mxfp8_scale_bf16(0x7F80), 254);
  EXPECT_EQ(mxfp8_scale_float(kInf), 254);
  const float m = mxfp8_multiplier(254);
  EXPECT_EQ(double{m}, 0x1p-127);
  EXPECT_EQ(mxfp8_code(kInf, m), 0x7E);
  EXPECT_EQ(mxfp8_code(-kInf, m), 0xFE);
  EXPECT_EQ(mxfp8_code(bf16_to_float(0x7F7F), m), e4m3_nearest(std::ldexp(double{bf16_to_float(0x7F7F)}, -127)));
  EXPECT_EQ(mxfp8_code(-1.0F, m), 0x80);
}

TEST(Numbers, NanIsTheLargestCodeWithoutASign) {
  for (const uint8_t e : {uint8_t{0}, uint8_t{1}, uint8_t{127}, uint8_t{254}}) {
    EXPECT_EQ(mxfp8_code(kNan, mxfp8_multiplier(e)), 0x7E) << int{e};
    EXPECT_EQ(mxfp8_code(bf16_to_float(0xFFC0), mxfp8_multiplier(e)), 0x7E) << int{e};
  }
}

TEST(Numbers, ScaleZeroKeepsSignsOnly) {
  EXPECT_EQ(mxfp8_scale_bf16(0), 0);
  EXPECT_EQ(mxfp8_scale_float(0.0F), 0);
  const float m = mxfp8_multiplier(0);
  for (const float x : {0.0F, 1e-38F, 0x1p-126F}) {
    EXPECT_EQ(mxfp8_code(x, m), 0x00);
    EXPECT_EQ(mxfp8_code(-x, m), 0x80);
  }
}

}  // namespace
}  // namespace moed
