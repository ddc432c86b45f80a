// The CUDA back end's passes against the CPU back end and the float64 oracle, with equal input: every shape and routing
// of cases.h, ranks on one GPU and spread over two. The tests of CudaSmall take few calls: they run under
// compute-sanitizer.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdio>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "tests/support/composition.h"
#include "tests/support/gpu.h"
#include "tests/support/synthetic.h"
#include "tests/support/tolerance.h"

namespace moed {
namespace {

using test::Engine;
using test::Job;
using test::job_of;
using test::SyntheticModel;
using test::World;
using test::WorldOptions;

/// How many of the elements that two back ends computed alike have the same bits.
struct Share {
  uint64_t equal = 0, all = 0;
  void add(const std::vector<uint16_t>& a, const std::vector<uint16_t>& b) {
    for (size_t i = 0; i < a.size(); ++i) equal += a[i] == b[i] ? 1 : 0;
    all += a.size();
  }
};

/// Two worlds of one shape, CUDA and CPU, with the same synthetic experts, and an engine at every rank of both.
class Pair {
 public:
  Pair(const Shape& shape, uint32_t ranks, int gpus) : shape_(shape), ranks_(ranks), model_(shape, 7) {
    cuda_ = std::make_unique<World>(test::on_gpus(options(), gpus));
    cpu_ = std::make_unique<World>(options());
    for (uint32_t r = 0; r < ranks; ++r) {
      cuda_engines_.push_back(cuda_->engine(r));
      cpu_engines_.push_back(cpu_->engine(r));
    }
  }

  /// Both answers to one job from one rank.
  std::pair<std::vector<uint16_t>, std::vector<uint16_t>> run(const Job& job, uint32_t rank) {
    Reply cuda{};
    Reply cpu{};
    auto got = cuda_engines_[rank]->run(job, cuda);
    auto reference = cpu_engines_[rank]->run(job, cpu);
    EXPECT_EQ(test::status_of(cuda), Status::ok) << name(test::status_of(cuda));
    EXPECT_EQ(test::status_of(cpu), Status::ok) << name(test::status_of(cpu));
    return {std::move(got), std::move(reference)};
  }

  const SyntheticModel& model() const { return model_; }

 private:
  WorldOptions options() const {
    WorldOptions o;
    o.shape = shape_;
    o.ranks = ranks_;
    o.lanes = 1;
    o.max_tokens = 40;
    o.weights = [this](uint32_t r) { return model_.of_rank(r, ranks_); };
    return o;
  }

  Shape shape_;
  uint32_t ranks_;
  SyntheticModel model_;
  std::unique_ptr<World> cuda_, cpu_;
  std::vector<std::unique_ptr<Engine>> cuda_engines_, cpu_engines_;
};

int worst_ulps(const std::vector<uint16_t>& a, const std::vector<uint16_t>& b) {
  int worst = 0;
  for (size_t i = 0; i < a.size(); ++i) worst = std::max(worst, bf16_ulps(a[i], b[i]));
  return worst;
}

/// The identity layer: latents bit for bit, the norm within one ulp of the oracle's and of the CPU's.
void check_identity(Pair& pair, const Shape& shape, const oracle::Rows& rows, uint32_t ranks, uint32_t rank) {
  const oracle::Result want = oracle::routed(oracle_layer(shape), rows, ranks);
  const auto [latent, cpu_latent] = pair.run(job_of(rows, kIdentityLayer, kFlagNoNorm), rank);
  EXPECT_EQ(latent, want.latent);
  EXPECT_EQ(latent, cpu_latent);
  const auto [out, cpu_out] = pair.run(job_of(rows, kIdentityLayer, 0), rank);
  const bool normed = shape.reduce == Reduce::sum_rmsnorm;
  EXPECT_LE(worst_ulps(out, normed ? want.out : want.latent), normed ? kNormUlps : 0);
  EXPECT_LE(worst_ulps(out, cpu_out), normed ? kNormUlps : 0);
}

/// Real experts: close to the oracle and to the CPU; the norm within one ulp of the oracle's norm of these latents.
void check_experts(Pair& pair, const Shape& shape, const oracle::Rows& rows, uint32_t ranks, uint32_t rank,
                   Share& share) {
  oracle::Layer layer = oracle_layer(shape);
  layer.expert = [&](uint32_t e) { return pair.model().values(1, e); };
  const oracle::Result want = oracle::routed(layer, rows, ranks);
  const auto [latent, cpu_latent] = pair.run(job_of(rows, 1, kFlagNoNorm), rank);
  const Closeness to_oracle = compare_rows(latent, want.latent, shape.latent);
  EXPECT_TRUE(to_oracle.ok) << "against the oracle: " << to_oracle.text();
  const Closeness to_cpu = compare_rows(latent, cpu_latent, shape.latent);
  EXPECT_TRUE(to_cpu.ok) << "against the CPU: " << to_cpu.text();
  share.add(latent, cpu_latent);
  const auto [out, cpu_out] = pair.run(job_of(rows, 1, 0), rank);
  if (shape.reduce != Reduce::sum_rmsnorm) {
    EXPECT_EQ(out, latent);
    return;
  }
  const Closeness normed = compare_rows(out, want.out, shape.latent);
  EXPECT_TRUE(normed.ok) << "normed, against the oracle: " << normed.text();
  for (size_t at = 0; at < latent.size(); at += shape.latent) {
    const auto own = oracle::rms_norm(layer, std::span(latent).subspan(at, shape.latent));
    const std::vector<uint16_t> got(out.begin() + static_cast<ptrdiff_t>(at),
                                    out.begin() + static_cast<ptrdiff_t>(at + shape.latent));
    EXPECT_LE(worst_ulps(got, own), kNormUlps) << "norm of token " << at / shape.latent;
  }
}

/// All routings of one shape; every rank is the source of some.
void check_case(const CaseShape& c, int gpus) {
  Pair pair(c.shape, c.ranks, gpus);
  Share share;
  for (size_t i = 0; i < kRoutings.size(); ++i) {
    SCOPED_TRACE(std::string(c.name) + ", " + name(kRoutings[i]) + ", " + std::to_string(c.ranks) + " ranks, source " +
                 std::to_string(i % c.ranks));
    const oracle::Rows rows = make_rows(kRoutings[i], c.shape, c.ranks, c.tokens, 3);
    const auto rank = static_cast<uint32_t>(i % c.ranks);
    check_identity(pair, c.shape, rows, c.ranks, rank);
    check_experts(pair, c.shape, rows, c.ranks, rank, share);
    if (testing::Test::HasFailure()) return;  // one case is enough to read
  }
  std::printf("%s, %u ranks, %d GPUs: latents of experts with the CPU's bits: %llu of %llu\n", c.name, c.ranks, gpus,
              static_cast<unsigned long long>(share.equal), static_cast<unsigned long long>(share.all));
}

class CudaPasses : public test::GpusTest {};

TEST_P(CudaPasses, EveryShapeAndRoutingAgainstTheOracleAndTheCpu) {
  for (const CaseShape& c : case_shapes()) check_case(c, GetParam());
}

TEST_P(CudaPasses, OneTwoFourAndEightRanks) {
  for (const uint32_t ranks : {1U, 2U, 4U, 8U})
    check_case({"golden", make_shape(512, 256, 128, 32, 4), ranks, 11}, GetParam());
}

/// The most tokens that one call line can announce, and every number of tokens around a warp and a block.
TEST_P(CudaPasses, IdentityAtEveryNumberOfTokens) {
  const Shape shape = make_shape(512, 192, 96, 32, 4);
  WorldOptions o;
  o.shape = shape;
  o.ranks = 2;
  o.lanes = 1;
  o.max_tokens = kMaxTokens;
  World world(spread(o));
  const auto engine = world.engine(1);
  for (const uint32_t tokens : {1U, 2U, 7U, 8U, 9U, 31U, 32U, 33U, 63U, 64U, 65U, 128U, 129U, 255U, 257U, 831U, 832U}) {
    const oracle::Rows rows = make_rows(Routing::random, shape, 2, tokens, 4);
    Reply reply{};
    const auto got = engine->run(job_of(rows, kIdentityLayer, kFlagNoNorm), reply);
    ASSERT_EQ(test::status_of(reply), Status::ok) << tokens << " tokens";
    ASSERT_EQ(got, oracle::routed(oracle_layer(shape), rows, 2).latent) << tokens << " tokens";
  }
}

TEST_P(CudaPasses, TheNormHoldsForVerySmallAndVeryLargeRows) {
  const Shape shape = make_shape(64, 64, 32, 8, 2);
  Pair pair(shape, 2, GetParam());
  for (const float scale : {1e-35F, 1e-24F, 1e-12F, 1e12F, 1e25F, 1e36F}) {
    SCOPED_TRACE(scale);
    oracle::Rows rows = make_rows(Routing::random, shape, 2, 5, 8);
    for (float& w : rows.weights) w *= scale;
    check_identity(pair, shape, rows, 2, 0);
  }
}

TEST_P(CudaPasses, ARowOfExpertsHasTheSameBitsInEveryPass) { test::expect_same_bits_in_every_pass(spread({}), 1); }

TEST_P(CudaPasses, ARowOfTheIdentityHasTheSameBitsInEveryPass) {
  test::expect_same_bits_in_every_pass(spread({}), kIdentityLayer);
}

/// The answer does not depend on who asks, nor on how often: every rank, several times.
TEST_P(CudaPasses, EveryRankGetsTheSameBits) {
  const Shape shape = make_shape(128, 128, 64, 12, 4);
  Pair pair(shape, 4, GetParam());
  const Job job = job_of(make_rows(Routing::random, shape, 4, 13, 21), 1, 0);
  std::set<std::vector<uint16_t>> answers;
  for (int round = 0; round < 3; ++round)
    for (uint32_t rank = 0; rank < 4; ++rank) answers.insert(pair.run(job, rank).first);
  EXPECT_EQ(answers.size(), 1U);
}

INSTANTIATE_TEST_SUITE_P(On, CudaPasses, testing::Values(1, 2), test::gpus_name);

class CudaSmall : public test::GpuTest {};

/// Few calls that touch every step of both passes: no token, one, several, pieces; identity and experts; norm or not.
void check_small(uint32_t ranks) {
  const Shape shape = make_shape(64, 64, 32, 8, 2);
  const SyntheticModel model(shape, 7);
  WorldOptions o;
  o.shape = shape;
  o.ranks = ranks;
  o.lanes = 1;
  o.max_tokens = 8;
  o.deadline_ms = 60'000;
  o.weights = [&](uint32_t r) { return model.of_rank(r, ranks); };
  World world(test::on_gpus(o, 1));
  const auto engine = world.engine(ranks - 1, 1, 1 << 20);
  for (const uint32_t layer : {kIdentityLayer, 1U})
    for (const uint32_t tokens : {0U, 1U, 5U, 11U}) {
      oracle::Layer m = oracle_layer(shape);
      if (layer == 1) m.expert = [&](uint32_t e) { return model.values(1, e); };
      const oracle::Rows rows = make_rows(Routing::random, shape, ranks, tokens, 6);
      Job job = job_of(rows, layer, layer == 1 ? 0 : kFlagNoNorm);
      job.timeout_us = 60'000'000;  // under a checker a call takes its time
      Reply reply{};
      const auto got = engine->run(job, reply);
      ASSERT_EQ(test::status_of(reply), Status::ok) << name(test::status_of(reply)) << ", " << tokens << " tokens";
      const oracle::Result want = oracle::routed(m, rows, ranks);
      if (layer == kIdentityLayer) {
        EXPECT_EQ(got, want.latent) << tokens << " tokens";
        continue;
      }
      const Closeness c = compare_rows(got, want.out, shape.latent);
      EXPECT_TRUE(c.ok) << tokens << " tokens: " << c.text();
    }
}

TEST_F(CudaSmall, OneRank) { check_small(1); }
TEST_F(CudaSmall, TwoRanksOnOneGpu) { check_small(2); }

}  // namespace
}  // namespace moed
