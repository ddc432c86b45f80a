// Golden layers on CUDA worlds of 1 to 5 ranks; and Kimi K3's own sizes with synthetic experts: those that a few tokens
// name against the float64 oracle, a larger sample against the CPU back end.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "tests/support/cases.h"
#include "tests/support/golden_world.h"
#include "tests/support/gpu.h"

namespace moed {
namespace {

using test::Job;
using test::job_of;
using test::status_of;
using test::World;
using test::WorldOptions;

class CudaGolden : public test::GpusTest {};

TEST_P(CudaGolden, EveryRoutedSetFromEveryRank) {
  Checkpoint checkpoint(golden_dir() + "/checkpoint");
  const Shape& shape = checkpoint.shape();
  for (uint32_t ranks = 1; ranks <= 5; ++ranks) {
    WorldOptions o;
    o.shape = shape;
    o.ranks = ranks;
    o.lanes = 1;
    o.max_tokens = 16;
    o.weights = [&](uint32_t rank) { return test::rank_weights(checkpoint, rank, ranks); };
    World world(spread(o));
    for (uint32_t m = 0; m < shape.layers; ++m) test::run_set(world, golden_dir(), shape.first_layer + m, ranks);
  }
}

INSTANTIATE_TEST_SUITE_P(On, CudaGolden, testing::Values(1, 2), test::gpus_name);

/// Runs work(0) .. work(count - 1) on all cores.
void on_all_cores(uint32_t count, const std::function<void(uint32_t)>& work) {
  std::atomic<uint32_t> next{0};
  std::vector<std::thread> threads;
  for (uint32_t i = 0; i < std::max(std::thread::hardware_concurrency(), 1U); ++i)
    threads.emplace_back([&] {
      for (uint32_t at = next++; at < count; at = next++) work(at);
    });
  for (std::thread& t : threads) t.join();
}

/// One layer of synthetic experts, each in one block of memory of its own: 17.5 MB at Kimi K3's sizes.
class LargeModel {
 public:
  LargeModel(const Shape& shape, uint64_t seed) : shape_(shape), memory_(shape.experts), experts_(shape.experts) {
    on_all_cores(shape.experts, [&](uint32_t e) { fill(seed, e); });
  }

  ModelWeights of_rank(uint32_t rank, uint32_t ranks) const {
    ModelWeights w;
    w.layers.resize(1);
    w.layers[0].experts.assign(experts_.begin() + first_expert(shape_, rank, ranks),
                               experts_.begin() + first_expert(shape_, rank + 1, ranks));
    return w;
  }

  oracle::Expert values(uint32_t expert) const {
    const ExpertWeights& w = experts_[expert];
    return {oracle::mxfp4_values(w.w1, w.w1_scale, shape_.intermediate, shape_.latent),
            oracle::mxfp4_values(w.w2, w.w2_scale, shape_.latent, shape_.intermediate),
            oracle::mxfp4_values(w.w3, w.w3_scale, shape_.intermediate, shape_.latent)};
  }

 private:
  void fill(uint64_t seed, uint32_t e) {
    memory_[e] = std::make_unique_for_overwrite<uint8_t[]>(expert_bytes(shape_));
    uint8_t* at = memory_[e].get();
    const auto take = [&](Matrix m, uint64_t rows, uint64_t columns) {
      const bool scales = static_cast<uint32_t>(m) % 2 == 1;
      const uint64_t bytes = scales ? scale_bytes(rows, columns) : packed_bytes(rows, columns);
      fill_synthetic({at, bytes}, synthetic_key(seed, shape_.first_layer, e, m), scales, columns);
      return std::exchange(at, at + bytes);
    };
    const uint64_t l = shape_.latent;
    const uint64_t n = shape_.intermediate;
    ExpertWeights& w = experts_[e];
    w.w1 = take(Matrix::w1, n, l);
    w.w1_scale = take(Matrix::w1_scale, n, l);
    w.w2 = take(Matrix::w2, l, n);
    w.w2_scale = take(Matrix::w2_scale, l, n);
    w.w3 = take(Matrix::w3, n, l);
    w.w3_scale = take(Matrix::w3_scale, n, l);
  }

  Shape shape_;
  std::vector<std::unique_ptr<uint8_t[]>> memory_;
  std::vector<ExpertWeights> experts_;
};

/// Kimi K3's routed experts, as many of them as asked for.
Shape k3_shape(uint32_t experts) { return make_shape(7168, 3584, 3072, experts, 16); }

/// The experts at the ends of both ranks' ranges and others from all over, `count` distinct ones.
std::vector<int32_t> sample(const Shape& s, uint32_t count, std::mt19937_64& random) {
  const auto at = [](uint32_t e) { return static_cast<int32_t>(e); };
  std::vector<int32_t> picked{at(0), at(s.experts / 2 - 1), at(s.experts / 2), at(s.experts - 1)};
  while (picked.size() < count) {
    const auto e = static_cast<int32_t>(random() % s.experts);
    if (std::find(picked.begin(), picked.end(), e) == picked.end()) picked.push_back(e);
  }
  return picked;
}

/// A few tokens, each naming the sampled experts in an order of its own; every third with some slots empty.
oracle::Rows sampled_rows(const Shape& s, uint32_t tokens, std::vector<int32_t> picked, std::mt19937_64& random) {
  oracle::Rows rows = make_rows(Routing::random, s, 2, tokens, 17);
  for (uint32_t t = 0; t < tokens; ++t) {
    std::shuffle(picked.begin(), picked.end(), random);
    for (uint32_t k = 0; k < s.top_k; ++k)
      rows.ids[t * s.top_k + k] = t % 3 == 2 && k % 2 == 1 ? -1 : picked[k % picked.size()];
  }
  return rows;
}

class CudaKimiK3 : public test::GpuTest {
 protected:
  static WorldOptions options(const LargeModel& model, const Shape& shape) {
    WorldOptions o;
    o.shape = shape;
    o.ranks = 2;
    o.lanes = 1;
    o.weights = [&model](uint32_t r) { return model.of_rank(r, 2); };
    return o;
  }

  static std::vector<uint16_t> answer(World& world, uint32_t rank, const Job& job) {
    Reply reply{};
    auto rows = world.engine(rank)->run(job, reply);
    EXPECT_EQ(status_of(reply), Status::ok) << name(status_of(reply));
    return rows;
  }

  /// Sampled experts against the oracle: latents and normed rows from both ranks.
  static void check_sample(World& world, const LargeModel& model, const Shape& shape, uint32_t count) {
    std::mt19937_64 random(23);
    const std::vector<int32_t> picked = sample(shape, count, random);
    const oracle::Rows rows = sampled_rows(shape, 5, picked, random);
    std::vector<oracle::Expert> values(picked.size());  // decoded on all cores: a quarter of a gigabyte each
    on_all_cores(count, [&](uint32_t i) { values[i] = model.values(static_cast<uint32_t>(picked[i])); });
    oracle::Layer layer = oracle_layer(shape);
    layer.expert = [&](uint32_t e) {
      const auto at = std::find(picked.begin(), picked.end(), static_cast<int32_t>(e)) - picked.begin();
      return std::move(values[static_cast<size_t>(at)]);  // asked for once: the oracle keeps it
    };
    const oracle::Result want = oracle::routed(layer, rows, 2);
    for (const uint32_t rank : {0U, 1U})
      for (const bool norm : {false, true}) {
        const auto got = answer(world, rank, job_of(rows, 1, norm ? 0 : kFlagNoNorm));
        const Closeness c = compare_rows(got, norm ? want.out : want.latent, shape.latent);
        EXPECT_TRUE(c.ok) << c.text();
        std::printf("%u experts, rank %u, %s against the oracle: %s\n", shape.experts, rank, norm ? "out" : "latent",
                    c.text().c_str());
      }
  }

  /// `tokens` x 16 experts, each named once, against the CPU back end over the same bytes.
  static void check_many(World& world, const LargeModel& model, const Shape& shape, uint32_t tokens) {
    oracle::Rows rows = make_rows(Routing::random, shape, 2, tokens, 29);
    const uint32_t slots = tokens * shape.top_k;
    for (uint32_t i = 0; i < slots; ++i)
      rows.ids[i] = static_cast<int32_t>((uint64_t{i} * shape.experts / slots + i % shape.top_k * 5) % shape.experts);
    World cpu(options(model, shape));
    Job job = job_of(rows, 1, kFlagNoNorm);
    job.timeout_us = kMaxTimeoutUs;
    const auto want = answer(cpu, 0, job);
    const Closeness c = compare_rows(answer(world, 0, job), want, shape.latent);
    EXPECT_TRUE(c.ok) << c.text();
    std::printf("%u experts, %u of them against the CPU: %s\n", shape.experts, slots, c.text().c_str());
  }
};

TEST_F(CudaKimiK3, IdentityBitForBit) {
  const Shape shape = k3_shape(896);
  WorldOptions o;
  o.shape = shape;
  o.ranks = 2;
  o.lanes = 1;
  World world(test::on_gpus(o, test::gpus_to_use()));
  for (const uint32_t tokens : {1U, 5U, 16U, 64U, 128U}) {
    const oracle::Rows rows = make_rows(Routing::random, shape, 2, tokens, 2);
    const oracle::Result want = oracle::routed(oracle_layer(shape), rows, 2);
    EXPECT_EQ(answer(world, tokens % 2, job_of(rows, kIdentityLayer, kFlagNoNorm)), want.latent) << tokens << " tokens";
    const auto out = answer(world, 1 - tokens % 2, job_of(rows, kIdentityLayer, 0));
    for (size_t i = 0; i < out.size(); ++i)
      ASSERT_LE(bf16_ulps(out[i], want.out[i]), kNormUlps) << tokens << " tokens, element " << i;
  }
}

/// K3's widths with few experts: the same kernels in a fifteenth of the memory.
TEST_F(CudaKimiK3, FewExperts) {
  const Shape shape = k3_shape(48);
  const LargeModel model(shape, 3);
  World world(test::on_gpus(options(model, shape), test::gpus_to_use()));
  check_sample(world, model, shape, 6);
  check_many(world, model, shape, 3);
}

TEST_F(CudaKimiK3, AllExperts) {
  const Shape shape = k3_shape(896);
  const LargeModel model(shape, 3);
  World world(test::on_gpus(options(model, shape), test::gpus_to_use()));
  check_sample(world, model, shape, 16);
  check_many(world, model, shape, 10);
}

}  // namespace
}  // namespace moed
