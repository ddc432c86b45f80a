// Every shape and routing of cases.h through a world in this process, against the float64 oracle; and the promise that
// a row has the same bits alone and among others.
#include <gtest/gtest.h>

#include <thread>

#include "tests/support/cases.h"
#include "tests/support/synthetic.h"
#include "tests/support/tolerance.h"
#include "tests/support/world.h"

namespace moed {
namespace {

using test::Engine;
using test::Job;
using test::SyntheticModel;
using test::World;

Job job_of(const oracle::Rows& rows, uint32_t layer, uint32_t flags) {
  Job job;
  job.layer = layer;
  job.flags = flags;
  job.x = rows.x;
  job.ids = rows.ids;
  job.weights = rows.weights;
  return job;
}

TEST(Cases, EveryShapeAndRoutingAgainstTheOracle) {
  for (const CaseShape& c : case_shapes()) {
    const SyntheticModel model(c.shape, 7);
    World world({.shape = c.shape, .ranks = c.ranks, .max_tokens = 40, .weights = [&](uint32_t r) {
                   return model.of_rank(r, c.ranks);
                 }});
    const auto engine = world.engine(c.ranks - 1);
    oracle::Layer layer = oracle_layer(c.shape);
    layer.expert = [&](uint32_t e) { return model.values(1, e); };
    for (const Routing routing : kRoutings) {
      const oracle::Rows rows = make_rows(routing, c.shape, c.ranks, c.tokens, 3);
      const oracle::Result want = oracle::routed(layer, rows, c.ranks);
      Reply reply{};
      for (const bool norm : {true, false}) {
        const auto got = engine->run(job_of(rows, 1, norm ? 0 : kFlagNoNorm), reply);
        ASSERT_EQ(reply.status, 0U);
        const bool normed = norm && c.shape.reduce == Reduce::sum_rmsnorm;
        const Closeness close = compare_rows(got, normed ? want.out : want.latent, c.shape.latent);
        EXPECT_TRUE(close.ok) << c.name << ", " << name(routing) << (norm ? "" : " without norm") << ": "
                              << close.text();
      }
    }
  }
}

TEST(Cases, IdentityLayerBitForBit) {
  for (const CaseShape& c : case_shapes()) {
    World world({.shape = c.shape, .ranks = c.ranks, .max_tokens = 40});
    const auto engine = world.engine(0);
    const oracle::Layer layer = oracle_layer(c.shape);
    for (const Routing routing : kRoutings) {
      const oracle::Rows rows = make_rows(routing, c.shape, c.ranks, c.tokens, 5);
      const oracle::Result want = oracle::routed(layer, rows, c.ranks);
      Reply reply{};
      EXPECT_EQ(engine->run(job_of(rows, kIdentityLayer, kFlagNoNorm), reply), want.latent)
          << c.name << ", " << name(routing);
      EXPECT_EQ(reply.status, 0U);
      const auto normed = engine->run(job_of(rows, 1, 0), reply);  // a world without weights: every layer is identity
      ASSERT_EQ(reply.status, 0U);
      if (c.shape.reduce != Reduce::sum_rmsnorm) continue;
      for (size_t i = 0; i < normed.size(); ++i)
        ASSERT_LE(bf16_ulps(normed[i], want.out[i]), kNormUlps) << c.name << ", " << name(routing) << ", element " << i;
    }
  }
}

/// Rows whose squares leave FP32's range at either end are normalised like any other.
TEST(Cases, TheNormHoldsForVerySmallAndVeryLargeRows) {
  const Shape shape = make_shape(64, 64, 32, 8, 2);
  World world({.shape = shape, .ranks = 1, .max_tokens = 16});
  const auto engine = world.engine(0);
  for (const float scale : {1e-35F, 1e-24F, 1e-12F, 1e12F, 1e25F, 1e36F}) {
    oracle::Rows rows = make_rows(Routing::random, shape, 1, 5, 8);
    for (float& w : rows.weights) w *= scale;
    const oracle::Result want = oracle::routed(oracle_layer(shape), rows, 1);
    Reply reply{};
    const auto got = engine->run(job_of(rows, kIdentityLayer, 0), reply);
    ASSERT_EQ(reply.status, 0U);
    for (size_t i = 0; i < got.size(); ++i)
      ASSERT_LE(bf16_ulps(got[i], want.out[i]), kNormUlps) << scale << ", element " << i;
  }
}

/// Takes rows `pick` of a job.
Job pick_rows(const Job& all, const Shape& s, const std::vector<uint32_t>& pick) {
  Job job;
  job.layer = all.layer;
  job.flags = all.flags;
  for (const uint32_t t : pick) {
    job.x.insert(job.x.end(), all.x.begin() + t * s.latent, all.x.begin() + (t + 1) * s.latent);
    job.ids.insert(job.ids.end(), all.ids.begin() + t * s.top_k, all.ids.begin() + (t + 1) * s.top_k);
    job.weights.insert(job.weights.end(), all.weights.begin() + t * s.top_k, all.weights.begin() + (t + 1) * s.top_k);
  }
  return job;
}

/// Calls with random subsets of the rows, from `engine`, each row compared with its bits alone.
void call_subsets(Engine& engine, const Shape& s, const Job& all, const std::vector<uint16_t>& alone, uint64_t seed,
                  int calls) {
  std::mt19937_64 random(seed);
  const auto tokens = static_cast<uint32_t>(all.ids.size() / s.top_k);
  for (int i = 0; i < calls; ++i) {
    std::vector<uint32_t> pick(1 + random() % (2 * tokens));
    for (uint32_t& t : pick) t = static_cast<uint32_t>(random() % tokens);
    Reply reply{};
    const std::vector<uint16_t> got = engine.run(pick_rows(all, s, pick), reply);
    ASSERT_EQ(reply.status, 0U) << name(static_cast<Status>(reply.status));
    for (size_t p = 0; p < pick.size(); ++p)
      ASSERT_TRUE(std::equal(got.begin() + static_cast<ptrdiff_t>(p * s.latent),
                             got.begin() + static_cast<ptrdiff_t>((p + 1) * s.latent),
                             alone.begin() + static_cast<ptrdiff_t>(pick[p] * s.latent)))
          << "row " << pick[p] << " at position " << p << " of " << pick.size() << " in call " << i;
  }
}

class Composition : public testing::TestWithParam<uint32_t> {};

TEST_P(Composition, ARowHasTheSameBitsInEveryPass) {
  const Shape shape = make_shape(128, 128, 64, 12, 4);
  const SyntheticModel model(shape, 11);
  constexpr uint32_t kRanks = 3;
  // One call nearly fills a pass and the linger is long: passes are cut and mixed in many ways.
  World world({.shape = shape,
               .ranks = kRanks,
               .lanes = 2,
               .max_tokens = 24,
               .linger_us = 300,
               .max_pairs = 32,
               .weights = [&](uint32_t r) { return model.of_rank(r, kRanks); }});
  const Job all = job_of(make_rows(Routing::random, shape, kRanks, 20, 9), GetParam(), 0);
  std::vector<uint16_t> alone;
  {
    const auto engine = world.engine(1);
    for (uint32_t t = 0; t < 20; ++t) {
      Reply reply{};
      const auto row = engine->run(pick_rows(all, shape, {t}), reply);
      ASSERT_EQ(reply.status, 0U);
      alone.insert(alone.end(), row.begin(), row.end());
    }
  }
  std::vector<std::unique_ptr<Engine>> engines;
  std::vector<std::thread> threads;
  for (uint32_t rank = 0; rank < kRanks; ++rank)
    for (uint32_t lane = 1; lane <= 2; ++lane) engines.push_back(world.engine(rank, lane));
  for (size_t i = 0; i < engines.size(); ++i)
    threads.emplace_back([&, i] { call_subsets(*engines[i], shape, all, alone, 100 + i, 40); });
  for (std::thread& t : threads) t.join();
}

INSTANTIATE_TEST_SUITE_P(Layers, Composition, testing::Values(1U, kIdentityLayer));

}  // namespace
}  // namespace moed
