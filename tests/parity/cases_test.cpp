// Every shape and routing of cases.h through a world in this process, against the float64 oracle; and the promise that
// a row has the same bits alone and among others.
#include <gtest/gtest.h>

#include "tests/support/cases.h"
#include "tests/support/composition.h"
#include "tests/support/jobs.h"
#include "tests/support/synthetic.h"
#include "tests/support/tolerance.h"
#include "tests/support/world.h"

namespace moed {
namespace {

using test::job_of;
using test::SyntheticModel;
using test::World;

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

class Composition : public testing::TestWithParam<uint32_t> {};

TEST_P(Composition, ARowHasTheSameBitsInEveryPass) {
  test::expect_same_bits_in_every_pass(test::WorldOptions{}, GetParam());
}

INSTANTIATE_TEST_SUITE_P(Layers, Composition, testing::Values(1U, kIdentityLayer));

}  // namespace
}  // namespace moed
