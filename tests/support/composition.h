// The promise that a row has the same bits alone and among others.
#pragma once

#include <gtest/gtest.h>

#include <atomic>
#include <cstring>
#include <memory>
#include <random>
#include <thread>
#include <utility>
#include <vector>

#include "tests/support/jobs.h"
#include "tests/support/synthetic.h"
#include "tests/support/world.h"

namespace moed::test {

/// The bits of every row of a job when it is called alone, one behind the other; empty after a call that was not ok.
inline std::vector<uint16_t> rows_alone(Engine& engine, const Shape& s, const Job& all) {
  std::vector<uint16_t> alone;
  for (uint32_t t = 0; t < all.ids.size() / s.top_k; ++t) {
    Reply reply{};
    const auto row = engine.run(pick_rows(all, s, {t}), reply);
    EXPECT_EQ(status_of(reply), Status::ok) << name(status_of(reply)) << " for row " << t;
    if (status_of(reply) != Status::ok) return {};
    alone.insert(alone.end(), row.begin(), row.end());
  }
  return alone;
}

/// Calls a random choice of a job's rows, with repetitions, and compares each row with its bits alone. False: a call
/// was not ok, had no answer in 10 s or gave other bits; said as a failure.
inline bool call_subset(Engine& engine, const Shape& s, const Job& all, const std::vector<uint16_t>& alone,
                        std::mt19937_64& random) {
  const auto tokens = static_cast<uint32_t>(all.ids.size() / s.top_k);
  std::vector<uint32_t> pick(1 + random() % (2 * tokens));
  for (uint32_t& t : pick) t = static_cast<uint32_t>(random() % tokens);
  const Call call = engine.lay_out(pick_rows(all, s, pick));
  engine.submit(call);
  Reply reply{};
  const bool answered = engine.wait(reply, 10'000'000'000);
  EXPECT_TRUE(answered) << "a call has no answer after 10 s";
  if (!answered) return false;
  EXPECT_EQ(status_of(reply), Status::ok) << name(status_of(reply));
  const std::vector<uint16_t> got = engine.out(call);
  for (size_t p = 0; p < pick.size(); ++p) {
    if (std::memcmp(&got[p * s.latent], &alone[uint64_t{pick[p]} * s.latent], s.latent * 2) == 0) continue;
    ADD_FAILURE() << "row " << pick[p] << " at position " << p << " of " << pick.size() << " has other bits than alone";
    return false;
  }
  return status_of(reply) == Status::ok;
}

/// All engines at once, each on a thread of its own, until so many calls each or the first failure.
inline void call_subsets(const std::vector<std::unique_ptr<Engine>>& engines, const Shape& s, const Job& all,
                         const std::vector<uint16_t>& alone, uint32_t calls_each) {
  std::atomic<bool> failed{false};
  std::vector<std::thread> threads;
  for (size_t i = 0; i < engines.size(); ++i)
    threads.emplace_back([&, i] {
      std::mt19937_64 random(100 + i);
      for (uint32_t call = 0; call < calls_each && !failed; ++call)
        if (!call_subset(*engines[i], s, all, alone, random)) failed = true;
    });
  for (std::thread& t : threads) t.join();
}

/// Three ranks of two lanes each, all calling random choices of the same rows at once. `options` says on what.
inline void expect_same_bits_in_every_pass(WorldOptions options, uint32_t layer) {
  constexpr uint32_t kRows = 20;
  const SyntheticModel model(make_shape(128, 128, 64, 12, 4), 11);
  options.shape = make_shape(128, 128, 64, 12, 4);
  options.ranks = 3;
  options.lanes = 2;
  // One call nearly fills a pass and the linger is long: passes are cut and mixed in many ways.
  options.max_tokens = 24;
  options.linger_us = 300;
  options.max_pairs = 32;
  options.weights = [&](uint32_t r) { return model.of_rank(r, 3); };
  const Shape shape = options.shape;
  World world(std::move(options));
  const Job all = job_of(make_rows(Routing::random, shape, 3, kRows, 9), layer, 0);
  const std::vector<uint16_t> alone = rows_alone(*world.engine(1), shape, all);
  ASSERT_EQ(alone.size(), uint64_t{kRows} * shape.latent);
  std::vector<std::unique_ptr<Engine>> engines;
  for (uint32_t rank = 0; rank < 3; ++rank)
    for (uint32_t lane = 1; lane <= 2; ++lane) engines.push_back(world.engine(rank, lane));
  call_subsets(engines, shape, all, alone, 40);
}

}  // namespace moed::test
