// The canary of a rank whose world computes on GPUs: a bit that flips in the memory of one is named.
#include <gtest/gtest.h>

#include <chrono>
#include <memory>
#include <string>

#include "daemon/canary.h"
#include "tests/support/cases.h"
#include "tests/support/gpu.h"
#include "tests/support/synthetic.h"

namespace moed {
namespace {

class CudaCanary : public test::GpusTest {};

TEST_P(CudaCanary, AFlippedBitInGpuMemoryIsNamed) {
  Shape shape = make_shape(128, 128, 64, 8, 4);
  shape.layers = 2;
  const test::SyntheticModel model(shape, 7);
  test::WorldOptions o;
  o.shape = shape;
  o.ranks = 2;
  o.lanes = 1;
  o.drills.flip_layer = 2;
  o.drills.flip_expert = 6;
  o.drills.flip_after_ms = 2'000;
  o.weights = [&](uint32_t r) { return model.of_rank(r, 2); };
  test::World world(spread(o));
  boost::asio::io_context io{1};
  CanaryOptions c;
  c.shape = shape;
  c.ranks = 2;
  c.period_ms = 10;
  Canary canary(io, c, world.backend(0), world.service(0), world.metrics(0));
  canary.start([] { return std::vector<uint64_t>{1, 1}; }, [] {});
  const auto run = [&](auto done) {
    for (const Nanos until = now_ns() + 10'000'000'000; !done() && now_ns() < until;)
      io.run_one_for(std::chrono::milliseconds(20));
  };
  run([&] { return canary.missing().empty(); });
  EXPECT_TRUE(canary.missing().empty()) << canary.missing().front();
  run([&] { return !canary.missing().empty(); });
  ASSERT_EQ(canary.missing().size(), 1U);
  EXPECT_EQ(canary.missing().front(), "canary 1: wrong at layer 2, experts 4 to 7");
  canary.stop();
  world.service(0).stop();
}

INSTANTIATE_TEST_SUITE_P(On, CudaCanary, testing::Values(1, 2), test::gpus_name);

}  // namespace
}  // namespace moed
