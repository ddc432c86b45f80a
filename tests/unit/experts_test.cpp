// Synthetic weights: the same bytes on every machine and back end. The literals were computed by a separate program in
// Python's integers, from the words of interfaces.md section 9; mix(0x9e3779b97f4a7c15) is also the published first
// output of splitmix64 from seed 0.
#include "kernels/experts.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <set>
#include <vector>

namespace moed {
namespace {

/// FNV-1a with 64 bits: one number for a whole tensor.
uint64_t fnv(const std::vector<uint8_t>& bytes) {
  uint64_t h = 0xcbf29ce484222325ULL;
  for (const uint8_t b : bytes) h = (h ^ b) * 0x100000001b3ULL;
  return h;
}

std::vector<uint8_t> tensor(std::size_t bytes, uint64_t key, bool scales, uint64_t columns) {
  std::vector<uint8_t> out(bytes);
  fill_synthetic(out, key, scales, columns);
  return out;
}

TEST(Experts, MixIsTheFinaliserOfSplitmix64) {
  EXPECT_EQ(mix(0), 0U);
  EXPECT_EQ(mix(1), 0x5692161d100b05e5ULL);
  EXPECT_EQ(mix(0x9e3779b97f4a7c15ULL), 0xe220a8397b1dcdafULL);
  EXPECT_EQ(mix(~uint64_t{0}), 0xb4d055fcf2cbbd7bULL);
}

TEST(Experts, KeysAreFixed) {
  EXPECT_EQ(synthetic_key(1, 1, 0, Matrix::w1), 0x9d75944221866e23ULL);
  EXPECT_EQ(synthetic_key(1, 1, 0, Matrix::w1_scale), 0x00ab4daf7c2673f8ULL);
  EXPECT_EQ(synthetic_key(1, 1, 0, Matrix::w3_scale), 0x5ac4afa5ed013506ULL);
  EXPECT_EQ(synthetic_key(1, 92, 895, Matrix::w3), 0x837d0164d1573b5cULL);
  EXPECT_EQ(synthetic_key(~uint64_t{0}, 3, 64999, Matrix::w2), 0x65c823eb5be4365dULL);
}

TEST(Experts, KeysOfOneModelDiffer) {
  std::set<uint64_t> seen;
  for (uint32_t layer = 1; layer <= 3; ++layer)
    for (uint32_t expert = 0; expert < 896; ++expert)
      for (uint32_t matrix = 0; matrix < 6; ++matrix)
        ASSERT_TRUE(seen.insert(synthetic_key(1, layer, expert, static_cast<Matrix>(matrix))).second);
}

TEST(Experts, BytesAreFixed) {
  const std::vector<uint8_t> first = {0x16, 0x92, 0x5c, 0x06, 0xca, 0x8b, 0xb6, 0x10, 0x19, 0x73,
                                      0xbd, 0xd1, 0xbf, 0x1a, 0xc8, 0x4f, 0x61, 0x1f, 0xfa, 0xd4};
  EXPECT_EQ(tensor(20, synthetic_key(1, 1, 0, Matrix::w1), false, 256), first);
  const std::vector<uint8_t> odd = {0xd8, 0x58, 0xe5, 0x67, 0x65, 0x5a, 0x72, 0x12, 0x31, 0xe9, 0x34, 0xed, 0x69};
  EXPECT_EQ(tensor(13, synthetic_key(1, 92, 895, Matrix::w3), false, 256), odd);
  EXPECT_EQ(fnv(tensor(16384, synthetic_key(1, 1, 0, Matrix::w1), false, 256)), 0xd44ef3084ae842dcULL);
}

TEST(Experts, ScalesAreFixed) {
  EXPECT_EQ(tensor(12, synthetic_key(1, 1, 0, Matrix::w1_scale), true, 256),
            (std::vector<uint8_t>{122, 122, 122, 122, 121, 122, 121, 122, 121, 121, 121, 121}));
  EXPECT_EQ(tensor(12, synthetic_key(2, 2, 31, Matrix::w2_scale), true, 128),
            (std::vector<uint8_t>{121, 121, 122, 122, 121, 121, 121, 122, 121, 121, 122, 121}));
  EXPECT_EQ(fnv(tensor(1024, synthetic_key(1, 1, 0, Matrix::w1_scale), true, 256)), 0x17a3f58645d44193ULL);
}

TEST(Experts, ScaleFollowsTheNumberOfColumns) {
  const std::vector<std::array<uint64_t, 2>> even = {{32, 122},   {128, 121},  {256, 121},
                                                     {3072, 119}, {3584, 119}, {16384, 118}};
  for (const auto& [columns, want] : even) {
    for (int random = 0; random < 256; ++random)
      ASSERT_EQ(synthetic_scale(static_cast<uint8_t>(random), columns), want + random % 2) << columns << " " << random;
  }
}

TEST(Experts, AnyByteAlone) {
  const uint64_t key = synthetic_key(7, 2, 11, Matrix::w2);
  const std::vector<uint8_t> whole = tensor(1000, key, false, 128);
  for (std::size_t i = 0; i < whole.size(); ++i) ASSERT_EQ(synthetic_byte(key, i), whole[i]) << i;
  for (std::size_t bytes = 1; bytes < 40; ++bytes) {
    std::vector<uint8_t> part(bytes + 8, 0xEE);
    fill_synthetic(std::span(part).first(bytes), key, false, 128);
    ASSERT_TRUE(std::equal(part.begin(), part.begin() + static_cast<std::ptrdiff_t>(bytes), whole.begin())) << bytes;
    ASSERT_EQ(std::count(part.end() - 8, part.end(), 0xEE), 8) << bytes;
  }
}

TEST(Experts, RepeatedFillsAreEqualAndSeedsMatter) {
  const uint64_t key = synthetic_key(1, 1, 5, Matrix::w3);
  EXPECT_EQ(tensor(4096, key, false, 256), tensor(4096, key, false, 256));
  EXPECT_NE(tensor(4096, key, false, 256), tensor(4096, synthetic_key(2, 1, 5, Matrix::w3), false, 256));
}

/// The reason for the scale rule: a row of `columns` weights has a squared length near 1, so products stay in range.
TEST(Experts, RowsHaveALengthNearOne) {
  const std::array<double, 8> magnitude{0, 0.5, 1, 1.5, 2, 3, 4, 6};
  for (const uint64_t columns : {32U, 128U, 256U, 3584U, 16384U}) {
    const uint64_t rows = 64;
    const auto codes = tensor(packed_bytes(rows, columns), synthetic_key(1, 1, 0, Matrix::w1), false, columns);
    const auto scales = tensor(scale_bytes(rows, columns), synthetic_key(1, 1, 0, Matrix::w1_scale), true, columns);
    double squares = 0;
    for (uint64_t i = 0; i < rows * columns; ++i) {
      const uint32_t nibble = i % 2 == 0 ? codes[i / 2] & 15U : codes[i / 2] >> 4;
      const double value = std::ldexp(magnitude[nibble & 7U], scales[i / 32] - 127);
      squares += value * value;
    }
    EXPECT_GT(std::sqrt(squares / rows), 0.5) << columns;
    EXPECT_LT(std::sqrt(squares / rows), 2.0) << columns;
  }
}

TEST(Experts, BytesOfOneExpert) {
  Shape s;
  s.latent = 3584;
  s.intermediate = 3072;
  EXPECT_EQ(packed_bytes(3072, 3584), 5505024U);
  EXPECT_EQ(scale_bytes(3072, 3584), 344064U);
  EXPECT_EQ(expert_bytes(s), 17547264U);
  s.latent = kMaxWidth;
  s.intermediate = 65536;
  EXPECT_EQ(expert_bytes(s), 1711276032U);
}

}  // namespace
}  // namespace moed
