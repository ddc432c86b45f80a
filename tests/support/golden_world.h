// The golden layers of one data set through a world: every routed set from every rank.
#pragma once

#include <gtest/gtest.h>

#include <cstdio>
#include <string>
#include <vector>

#include "daemon/weights/checkpoint.h"
#include "tests/support/golden.h"
#include "tests/support/tolerance.h"
#include "tests/support/world.h"

namespace moed::test {

/// The experts of one rank, as a daemon would hold them.
inline ModelWeights rank_weights(Checkpoint& checkpoint, uint32_t rank, uint32_t ranks) {
  const Shape& s = checkpoint.shape();
  ModelWeights weights;
  for (uint32_t i = 0; i < s.layers; ++i) {
    LayerWeights& layer = weights.layers.emplace_back();
    for (uint32_t e = first_expert(s, rank, ranks); e < first_expert(s, rank + 1, ranks); ++e) {
      const ExpertTensors t = checkpoint.expert(s.first_layer + i, e);
      layer.experts.push_back(
          {t.w1.data(), t.w1_scale.data(), t.w2.data(), t.w2_scale.data(), t.w3.data(), t.w3_scale.data()});
    }
    layer.norm = checkpoint.norm(s.first_layer + i);
  }
  return weights;
}

/// DIR/routedLAYER from every rank, normed and not, against what make.py says of a world of `ranks`.
inline void run_set(World& world, const std::string& dir, uint32_t layer, uint32_t ranks) {
  const std::string set = "routed" + std::to_string(layer);
  const std::string suffix = "_n" + std::to_string(ranks);
  Job job{.layer = layer,
          .flags = 0,
          .timeout_us = 60'000'000,
          .x = read_array<uint16_t>(dir, set + "_x"),
          .ids = read_array<int32_t>(dir, set + "_ids"),
          .weights = read_array<float>(dir, set + "_weights")};
  std::vector<uint16_t> first;
  for (uint32_t rank = 0; rank < ranks; ++rank) {
    const auto engine = world.engine(rank);
    for (const bool norm : {true, false}) {
      job.flags = norm ? 0 : kFlagNoNorm;
      Reply reply{};
      const std::vector<uint16_t> got = engine->run(job, reply);
      ASSERT_EQ(reply.status, 0U) << name(static_cast<Status>(reply.status));
      const auto want = read_array<uint16_t>(dir, set + (norm ? "_out" : "_latent") + suffix);
      const Closeness c = compare_rows(got, want, got.size() / 8);
      EXPECT_TRUE(c.ok) << dir << " " << set << suffix << " from rank " << rank << ": " << c.text();
      if (rank == 0)
        std::printf("%s%s %s: %s\n", set.c_str(), suffix.c_str(), norm ? "out" : "latent", c.text().c_str());
      if (!norm) continue;
      if (rank == 0) first = got;
      EXPECT_EQ(got, first) << "rank " << rank << " gets other bits than rank 0";
    }
  }
}

}  // namespace moed::test
