// The C++ oracle against the golden data, which another program made; and the comparison against wrong rows, which it
// must notice.
#include "tests/support/oracle.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

#include "tests/support/cases.h"
#include "tests/support/golden.h"
#include "tests/support/tolerance.h"

namespace moed {
namespace {

oracle::Rows golden_rows(int layer) {
  const std::string base = "routed" + std::to_string(layer);
  return {read_array<uint16_t>(MOED_GOLDEN, base + "_x"), read_array<int32_t>(MOED_GOLDEN, base + "_ids"),
          read_array<float>(MOED_GOLDEN, base + "_weights")};
}

oracle::Layer golden_layer(const GoldenShard& shard) {
  oracle::Layer m = oracle_layer(make_shape(512, 256, 128, 32, 4));
  m.expert = [&shard](uint32_t id) { return shard.expert(id, 256, 128); };
  m.norm = shard.norm(256);
  return m;
}

TEST(Oracle, Bf16RoundTrip) {
  for (uint32_t bits = 0; bits < 0x10000; ++bits) {
    const double v = oracle::bf16_value(static_cast<uint16_t>(bits));
    if (std::isnan(v)) continue;
    ASSERT_EQ(oracle::bf16_bits(v), bits);
  }
  EXPECT_EQ(oracle::bf16_bits(std::nan("")), 0x7FC0);
  EXPECT_EQ(oracle::bf16_bits(0x1.fep127 + 0x1p119), 0x7F80);
  EXPECT_EQ(oracle::bf16_bits(1.0 + 0x1p-8), 0x3F80) << "a tie goes to the even neighbour";
  EXPECT_EQ(oracle::bf16_bits(1.0 + 0x3p-8), 0x3F82) << "a tie goes to the even neighbour";
}

TEST(Oracle, GoldenMxfp8EveryByte) {
  const auto bits = read_array<uint16_t>(MOED_GOLDEN, "mxfp8_x");
  std::vector<float> x;
  for (const uint16_t b : bits) x.push_back(static_cast<float>(oracle::bf16_value(b)));
  const oracle::Quantised q = oracle::mxfp8(x);
  EXPECT_EQ(q.codes, read_array<uint8_t>(MOED_GOLDEN, "mxfp8_codes"));
  EXPECT_EQ(q.scales, read_array<uint8_t>(MOED_GOLDEN, "mxfp8_scales"));
}

TEST(Oracle, GoldenCombine) {
  const auto partials = read_array<uint16_t>(MOED_GOLDEN, "combine_partials");
  const auto used = read_array<uint8_t>(MOED_GOLDEN, "combine_used");
  const auto latent = read_array<uint16_t>(MOED_GOLDEN, "combine_latent");
  const auto normed = read_array<uint16_t>(MOED_GOLDEN, "combine_normed");
  const GoldenShard shard(MOED_GOLDEN, 1, 2);
  const oracle::Layer m = golden_layer(shard);
  for (std::size_t t = 0; t < 6; ++t) {
    std::vector<std::vector<uint16_t>> of(8);
    for (std::size_t r = 0; r < 8; ++r) {
      const auto at = partials.begin() + static_cast<std::ptrdiff_t>((t * 8 + r) * 256);
      if (used[t * 8 + r] != 0) of[r].assign(at, at + 256);
    }
    const std::vector<uint16_t> sum = oracle::combine(of, 256);
    const std::vector<uint16_t> norm = oracle::rms_norm(m, sum);
    for (std::size_t i = 0; i < 256; ++i) {
      ASSERT_EQ(sum[i], latent[t * 256 + i]) << t << " " << i;
      ASSERT_LE(bf16_ulps(norm[i], normed[t * 256 + i]), kNormUlps) << t << " " << i;
    }
  }
}

TEST(Oracle, GoldenRoutedLayers) {
  for (int layer = 1; layer <= 2; ++layer) {
    const GoldenShard shard(MOED_GOLDEN, layer, 2);
    const oracle::Layer m = golden_layer(shard);
    for (std::size_t ranks = 1; ranks <= 5; ++ranks) {
      const oracle::Result got = oracle::routed(m, golden_rows(layer), ranks);
      const std::string base = "routed" + std::to_string(layer);
      const std::string n = "_n" + std::to_string(ranks);
      const auto latent = read_array<uint16_t>(MOED_GOLDEN, base + "_latent" + n);
      const auto out = read_array<uint16_t>(MOED_GOLDEN, base + "_out" + n);
      const Closeness sum = compare_rows(got.latent, latent, 256);
      const Closeness norm = compare_rows(got.out, out, 256);
      EXPECT_TRUE(sum.ok) << base << n << ": " << sum.text();
      EXPECT_TRUE(norm.ok) << base << n << ": " << norm.text();
      // Both are float64 and differ in the order of sums only, so all but a rare rounding agrees.
      std::size_t different = 0;
      for (std::size_t i = 0; i < out.size(); ++i) different += bf16_ulps(got.latent[i], latent[i]) != 0;
      EXPECT_LE(different, out.size() / 500) << base << n;
    }
  }
}

TEST(Oracle, IdentityIsTheQuantisedRowTimesItsWeights) {
  oracle::Layer m = oracle_layer(make_shape(64, 64, 32, 4, 2));
  oracle::Rows rows;
  for (int i = 0; i < 64; ++i) rows.x.push_back(oracle::bf16_bits(i % 8));  // exact in E4M3
  rows.ids = {1, 3};
  rows.weights = {0.25F, 0.5F};
  const oracle::Result one = oracle::routed(m, rows, 1);
  const oracle::Result two = oracle::routed(m, rows, 2);
  for (std::size_t i = 0; i < 64; ++i) {
    EXPECT_EQ(oracle::bf16_value(one.latent[i]), static_cast<double>(i % 8) * 0.75);
    EXPECT_EQ(one.latent[i], two.latent[i]);
  }
  rows.ids = {-1, -1};
  for (const uint16_t bits : oracle::routed(m, rows, 2).out) EXPECT_EQ(bits, 0);
}

TEST(Cases, EveryShapeIsValidAndEveryIdInRange) {
  for (const CaseShape& c : case_shapes()) {
    ASSERT_EQ(check(c.shape, c.ranks, c.tokens).field, nullptr) << c.name;
    for (const Routing routing : kRoutings) {
      const oracle::Rows rows = make_rows(routing, c.shape, c.ranks, c.tokens, 1);
      ASSERT_EQ(rows.x.size(), std::size_t{c.tokens} * c.shape.latent) << c.name << " " << name(routing);
      ASSERT_EQ(rows.ids.size(), std::size_t{c.tokens} * c.shape.top_k);
      ASSERT_EQ(rows.weights.size(), rows.ids.size());
      for (const int32_t id : rows.ids) {
        ASSERT_GE(id, -1) << c.name << " " << name(routing);
        ASSERT_LT(id, static_cast<int32_t>(c.shape.experts)) << c.name << " " << name(routing);
      }
    }
  }
}

// A comparison that lets a wrong row pass is worse than none, so each kind of fault is put in on purpose.

std::vector<uint16_t> golden_out() { return read_array<uint16_t>(MOED_GOLDEN, "routed1_out_n1"); }

TEST(Tolerance, EqualRowsPass) {
  const Closeness c = compare_rows(golden_out(), golden_out(), 256);
  EXPECT_TRUE(c.ok) << c.text();
  EXPECT_EQ(c.norm, 0);
  EXPECT_EQ(c.element, 0);
}

TEST(Tolerance, OneWrongElementIsFound) {
  auto got = golden_out();
  got[2 * 256 + 17] ^= 0x8000;
  const Closeness c = compare_rows(got, golden_out(), 256);
  EXPECT_FALSE(c.ok);
  EXPECT_EQ(c.row, 2U);
  EXPECT_EQ(c.column, 17U);
}

TEST(Tolerance, OneWrongRowAmongManyIsFound) {
  auto got = golden_out();
  for (std::size_t i = 0; i < 256; ++i) got[4 * 256 + i] = got[5 * 256 + i];
  EXPECT_FALSE(compare_rows(got, golden_out(), 256).ok);
  EXPECT_EQ(compare_rows(got, golden_out(), 256).norm_row, 4U);
}

TEST(Tolerance, ASmallBiasOfAWholeRowIsFound) {
  auto got = golden_out();
  for (std::size_t i = 0; i < 256; ++i) got[256 + i] = oracle::bf16_bits(oracle::bf16_value(got[256 + i]) * 1.01);
  EXPECT_FALSE(compare_rows(got, golden_out(), 256).ok);
}

TEST(Tolerance, AZeroRowMustBePositiveZeros) {
  auto got = golden_out();  // token 6 has absent experts only
  for (std::size_t i = 0; i < 256; ++i) ASSERT_EQ(got[6 * 256 + i], 0);
  got[6 * 256 + 100] = 0x8000;
  EXPECT_FALSE(compare_rows(got, golden_out(), 256).ok);
  got[6 * 256 + 100] = 1;
  EXPECT_FALSE(compare_rows(got, golden_out(), 256).ok);
}

TEST(Tolerance, NanInfinityAndSizesAreFound) {
  auto got = golden_out();
  got[5] = 0x7FC0;
  EXPECT_FALSE(compare_rows(got, golden_out(), 256).ok);
  got[5] = 0x7F80;
  EXPECT_FALSE(compare_rows(got, golden_out(), 256).ok);
  got.resize(256);
  EXPECT_FALSE(compare_rows(got, golden_out(), 256).ok);
  const std::vector<uint16_t> nan(256, 0x7FC1);
  EXPECT_TRUE(compare_rows(nan, std::vector<uint16_t>(256, 0x7FC0), 256).ok);
  EXPECT_FALSE(compare_rows(std::vector<uint16_t>(256, 0x3F80), nan, 256).ok);
}

TEST(Tolerance, Bf16Ulps) {
  EXPECT_EQ(bf16_ulps(0x3F80, 0x3F81), 1);
  EXPECT_EQ(bf16_ulps(0x0000, 0x8000), 0);
  EXPECT_EQ(bf16_ulps(0x0001, 0x8001), 2);
  EXPECT_EQ(bf16_ulps(0x7FC0, 0x7FC1), 0);
  EXPECT_GT(bf16_ulps(0x7FC0, 0x3F80), 1000000);
}

}  // namespace
}  // namespace moed
