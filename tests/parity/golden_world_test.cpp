// The golden layers through worlds of 1 to 5 ranks in this process: every set of a manifest, from every rank, compared
// element by element with what make.py says. MOED_GOLDEN_SETS (colon-separated directories) names further data sets.
#include <gtest/gtest.h>

#include <cstdlib>
#include <sstream>
#include <string>
#include <vector>

#include "kernels/steps.h"
#include "tests/support/golden_world.h"

namespace moed {
namespace {

using test::World;

std::vector<std::string> data_sets() {
  std::vector<std::string> dirs{golden_dir()};
  const char* more = std::getenv("MOED_GOLDEN_SETS");
  std::stringstream list(more == nullptr ? "" : more);
  for (std::string dir; std::getline(list, dir, ':');)
    if (!dir.empty()) dirs.push_back(dir);
  return dirs;
}

TEST(GoldenWorld, EveryRoutedSetFromEveryRank) {
  uint32_t sets = 0;
  for (const std::string& dir : data_sets()) {
    Checkpoint checkpoint(dir + "/checkpoint");
    for (uint32_t ranks = 1; ranks <= 5; ++ranks) {
      World world({.shape = checkpoint.shape(), .ranks = ranks, .max_tokens = 16, .weights = [&](uint32_t rank) {
                     return test::rank_weights(checkpoint, rank, ranks);
                   }});
      for (uint32_t m = 0; m < checkpoint.shape().layers; ++m, ++sets)
        test::run_set(world, dir, checkpoint.shape().first_layer + m, ranks);
    }
  }
  EXPECT_GE(sets, 10U);
}

/// combine_*: partials written as peers would, summed and normalised by the reduce step alone.
TEST(GoldenWorld, CombineEveryBit) {
  const std::string dir = golden_dir();
  Checkpoint checkpoint(dir + "/checkpoint");
  Shape shape = checkpoint.shape();
  constexpr uint32_t kRanks = 8;
  constexpr uint32_t kTokens = 6;
  const auto partials = read_array<uint16_t>(dir, "combine_partials");
  const auto used = read_array<uint8_t>(dir, "combine_used");
  shape.top_k = kRanks;  // slot r names an expert of rank r, or none
  const SegmentLayout layout = segment_layout(shape, 0, kTokens);
  std::vector<int32_t> ids(kTokens * kRanks, -1);
  std::vector<std::vector<Line>> memory(kRanks, std::vector<Line>(layout.bytes / kLineBytes));
  std::vector<Destination> from(kRanks);
  for (uint32_t r = 0; r < kRanks; ++r) {
    auto* base = reinterpret_cast<std::byte*>(memory[r].data());
    from[r] = {base, sequence(1, 7)};
    for (uint32_t t = 0; t < kTokens; ++t) {
      if (used[t * kRanks + r] == 0) continue;
      ids[t * kRanks + r] = static_cast<int32_t>(first_expert(shape, r, kRanks));
      store_record(reinterpret_cast<Line*>(base + layout.partial(0, t)),
                   &partials[(uint64_t{t} * kRanks + r) * shape.latent], shape.latent * 2, sequence(1, 7));
    }
  }
  const std::vector<uint16_t> gamma = checkpoint.norm(1);
  std::vector<uint16_t> out(uint64_t{kTokens} * shape.latent);
  for (const bool norm : {false, true}) {
    uint32_t culprit = 0;
    ASSERT_TRUE(cpu::reduce({.shape = &shape,
                             .layout = &layout,
                             .ranks = kRanks,
                             .lane = 0,
                             .tokens = kTokens,
                             .norm = norm,
                             .ids = ids.data(),
                             .gamma = gamma.data(),
                             .from = from,
                             .out = out.data()},
                            culprit));
    const auto want = read_array<uint16_t>(dir, norm ? "combine_normed" : "combine_latent");
    for (size_t i = 0; i < out.size(); ++i)
      ASSERT_LE(bf16_ulps(out[i], want[i]), norm ? kNormUlps : 0)
          << "token " << i / shape.latent << " column " << i % shape.latent;
  }
  from[3].sequence = sequence(1, 8);  // a partial of another call is not taken
  uint32_t culprit = 0;
  EXPECT_FALSE(cpu::reduce({.shape = &shape,
                            .layout = &layout,
                            .ranks = kRanks,
                            .lane = 0,
                            .tokens = kTokens,
                            .norm = false,
                            .ids = ids.data(),
                            .gamma = nullptr,
                            .from = from,
                            .out = out.data()},
                           culprit));
  EXPECT_EQ(culprit, 3U);
}

}  // namespace
}  // namespace moed
