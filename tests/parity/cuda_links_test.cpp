// Links of CUDA worlds that are not there yet, are lost, and come back, in one process. A peer that does not answer is
// one whose end of the link was never told that it is ready: it looks at no call line.
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <memory>
#include <random>
#include <thread>
#include <vector>

#include "tests/support/gpu.h"

namespace moed {
namespace {

using test::Engine;
using test::expect_all;
using test::Job;
using test::simple_job;
using test::small_shape;
using test::status_of;
using test::World;
using test::WorldOptions;

constexpr Nanos kMs = 1'000'000;

class CudaLinks : public test::GpuTest {
 protected:
  static WorldOptions options(uint32_t ranks) {
    WorldOptions o;
    o.shape = small_shape();
    o.ranks = ranks;
    o.lanes = 2;
    o.max_tokens = 16;
    return test::on_gpus(o, test::gpus_to_use());
  }

  /// One call whose rows all hold `value`. False: it was otherwise, said as a failure.
  static bool expect_answer(Engine& engine, const Job& job, float value, Status status = Status::ok) {
    Reply reply{};
    const auto rows = engine.run(job, reply);
    EXPECT_EQ(status_of(reply), status) << name(status_of(reply));
    const std::vector<uint16_t> right(rows.size(), oracle::bf16_bits(double{value}));
    EXPECT_EQ(rows, right);
    return status_of(reply) == status && rows == right;
  }
};

TEST_F(CudaLinks, AWorldThatFormsSaysWhichRanksAreMissing) {
  WorldOptions o = options(4);
  o.linked = false;
  World world(o);
  const auto engine = world.engine(1);
  expect_answer(*engine, simple_job(3, {1}, 2), 4);  // what it owns itself is served
  Reply reply{};
  expect_all(engine->run(simple_job(3, {1, 3}, 2), reply), 0);
  EXPECT_EQ(status_of(reply), Status::not_ready);
  EXPECT_EQ(reply.ranks[0], 1ULL << 3);
  world.link(1, 3, 5);
  expect_answer(*engine, simple_job(3, {1, 3}, 2), 4);
}

/// On two GPUs of one process, too: a copy by the driver out of the other GPU's memory would wait for its lanes.
TEST_F(CudaLinks, LinksAreMadeWhileTheLanesOfBothEndsWaitForBells) {
  WorldOptions o = options(2);
  o.linked = false;
  World world(o);
  const auto first = world.engine(0);
  const auto second = world.engine(1);
  world.link(0, 1, 1);
  expect_answer(*first, simple_job(5, {0, 1}, 3), 6);
  expect_answer(*second, simple_job(5, {0, 1}, 4), 8);
}

TEST_F(CudaLinks, ALostRankEndsTheCallsThatNeedItAndNoOthers) {
  World world(options(4));
  const auto engine = world.engine(0);
  expect_answer(*engine, simple_job(5, {1, 2}, 3), 6);
  world.lose(0, 2);
  Reply reply{};
  expect_all(engine->run(simple_job(5, {1, 2}, 3), reply), 0);
  EXPECT_EQ(status_of(reply), Status::peer_lost);
  EXPECT_EQ(reply.ranks[0], 1ULL << 2);
  for (int i = 0; i < 50; ++i) expect_answer(*engine, simple_job(5, {1, 3}, 3), 6);
  world.link(0, 2, 9);  // a new session over new segments
  expect_answer(*engine, simple_job(5, {1, 2}, 4), 8);
}

TEST_F(CudaLinks, DropLeavesALostRankOutAndCountsIt) {
  WorldOptions o = options(4);
  o.on_lost_rank = OnLostRank::drop;
  World world(o);
  const auto engine = world.engine(0);
  world.lose(0, 2);
  Reply reply{};
  expect_all(engine->run(simple_job(5, {1, 2}, 3), reply), 3);
  EXPECT_EQ(status_of(reply), Status::degraded);
  EXPECT_EQ(reply.ranks[0], 1ULL << 2);
  EXPECT_EQ(reply.dropped, 5U);
  expect_all(engine->run(simple_job(40, {1, 2}, 3), reply), 3);  // the pieces' droppings add up
  EXPECT_EQ(status_of(reply), Status::degraded);
  EXPECT_EQ(reply.dropped, 40U);
  expect_answer(*engine, simple_job(5, {2}, 3), 0, Status::degraded);
  Job job = simple_job(5, {1, 2}, 3);
  job.flags |= kFlagMask;
  job.ids[0] = 99;  // masked and degraded together: degraded
  const Reply both = engine->call(engine->lay_out(job));
  EXPECT_EQ(status_of(both), Status::degraded);
  EXPECT_EQ(both.dropped, 5U);
}

/// Both lanes of rank 0 wait for rank 1, which does not answer; then the link is lost.
void wait_and_lose(World& world, std::vector<std::unique_ptr<Engine>>& engines, uint32_t session, Status status,
                   float value) {
  world.map(0, 1);
  world.ready(0, 1, session);
  std::vector<Call> calls;
  for (const auto& engine : engines) {
    calls.push_back(engine->lay_out(simple_job(7, {0, 1}, 2)));
    engine->submit(calls.back());
  }
  std::this_thread::sleep_for(std::chrono::milliseconds(session % 8));
  Reply reply{};
  for (const auto& engine : engines) ASSERT_FALSE(engine->wait(reply, kMs)) << name(status_of(reply));
  world.lose(0, 1);
  for (size_t i = 0; i < engines.size(); ++i) {
    ASSERT_TRUE(engines[i]->wait(reply, 500 * kMs)) << "a call goes on waiting after its peer was lost";
    EXPECT_EQ(status_of(reply), status) << name(status_of(reply));
    EXPECT_EQ(reply.ranks[0], 2ULL);
    expect_all(engines[i]->out(calls[i]), value);
  }
}

/// small_shape() has eight experts: in a world of two, pairs 0 and 1 are of rank 0. These jobs name both ranks.
Job both_ranks(uint32_t tokens, float x) { return simple_job(tokens, {0, 2}, x); }

/// Rank 1 answers and is lost; the call goes on waiting for rank 2, whose link becomes ready at the far end only then.
/// What rank 1 had written is gone with its segment: the call ends without it, and the GPU's context goes on.
TEST_F(CudaLinks, ARankThatAnsweredAndIsLostBeforeTheOthersAnswered) {
  for (const OnLostRank then : {OnLostRank::fail, OnLostRank::drop}) {
    WorldOptions o = options(3);
    o.on_lost_rank = then;
    o.linked = false;
    World world(o);
    const auto engine = world.engine(0);
    for (uint32_t session = 1; session <= 5; ++session) {
      world.link(0, 1, session);
      world.map(0, 2);
      world.ready(0, 2, session);
      const Call call = engine->lay_out(simple_job(7, {1, 3}, 2));  // experts of ranks 1 and 2
      engine->submit(call);
      Reply reply{};
      ASSERT_FALSE(engine->wait(reply, 3 * kMs)) << name(status_of(reply));  // passes go by
      world.lose(0, 1);
      std::this_thread::sleep_for(std::chrono::milliseconds(3));  // the pass that saw the link may still use it: ok
      world.ready(2, 0, session);
      ASSERT_TRUE(engine->wait(reply, 500 * kMs)) << "a call goes on waiting for a rank that has answered and is gone";
      EXPECT_EQ(status_of(reply), then == OnLostRank::fail ? Status::peer_lost : Status::degraded)
          << name(status_of(reply));
      EXPECT_EQ(reply.ranks[0], 2ULL);
      for (int i = 0; i < 100; ++i) ASSERT_TRUE(expect_answer(*engine, simple_job(3, {0}, 2), 4)) << i;
      world.lose(0, 2);
    }
  }
}

TEST_F(CudaLinks, CallsThatWaitEndWhenTheLinkIsLostAndALinkMadeAgainServes) {
  for (const OnLostRank then : {OnLostRank::fail, OnLostRank::drop}) {
    WorldOptions o = options(4);
    o.on_lost_rank = then;
    o.linked = false;
    World world(o);
    std::vector<std::unique_ptr<Engine>> engines;
    for (const uint32_t lane : {1U, 2U}) engines.push_back(world.engine(0, lane));
    for (uint32_t session = 1; session <= 40; session += 2) {
      const bool fail = then == OnLostRank::fail;
      wait_and_lose(world, engines, session, fail ? Status::peer_lost : Status::degraded, fail ? 0 : 2);
      if (HasFailure()) return;
      world.link(0, 1, session + 1);
      for (const auto& engine : engines)
        for (int i = 1; i <= 5; ++i)
          expect_answer(*engine, simple_job(7, {0, 1}, static_cast<float>(i)), 2 * static_cast<float>(i));
      world.lose(0, 1);
    }
  }
}

TEST_F(CudaLinks, AnExpiredCallNamesTheLateRankAndItsLaneGoesOn) {
  WorldOptions o = options(2);
  o.linked = false;
  World world(o);
  const auto engine = world.engine(0);
  uint32_t session = 1;
  for (int round = 0; round < 5; ++round, ++session) {
    world.map(0, 1);
    world.ready(0, 1, session);
    for (const uint32_t timeout_ms : {1U, 5U, 40U}) {
      Job job = both_ranks(6, 1);
      job.timeout_us = timeout_ms * 1000;
      Reply reply{};
      const Nanos called = now_ns();
      const auto rows = engine->run(job, reply);
      EXPECT_LT(now_ns() - called, (timeout_ms + 100) * kMs);
      EXPECT_EQ(status_of(reply), Status::peer_timeout) << name(status_of(reply));
      EXPECT_EQ(reply.ranks[0], 2ULL);
      expect_all(rows, 0);
    }
    expect_answer(*engine, simple_job(6, {0}, 3), 6);  // what does not need the late rank
    world.ready(1, 0, session);                        // it comes to its senses and finds an expired call first
    for (int i = 1; i <= 10; ++i)
      expect_answer(*engine, both_ranks(6, static_cast<float>(i)), 2 * static_cast<float>(i));
    world.lose(0, 1);
  }
}

TEST_F(CudaLinks, CallsThatDoNotNeedARankAreUndisturbedWhileItComesAndGoes) {
  World world(options(4));
  std::atomic<bool> stop{false};
  std::atomic<uint64_t> calls{0};
  std::vector<std::thread> threads;
  for (const uint32_t rank : {0U, 1U, 3U})
    threads.emplace_back([&, rank] {
      const auto engine = world.engine(rank);
      std::mt19937_64 random(rank);
      for (bool right = true; right && !stop; ++calls) {
        const auto value = static_cast<float>(1 + random() % 15);
        const uint32_t others[] = {0, 1, 3};
        const auto tokens = static_cast<uint32_t>(random() % 20);
        right = expect_answer(*engine, simple_job(tokens, {rank, others[random() % 3]}, value), 2 * value);
      }
    });
  const auto returning = world.engine(2);
  for (uint32_t session = 2; session < 22; ++session) {
    for (const uint32_t peer : {0U, 1U, 3U}) world.lose(2, peer);
    const uint64_t until = calls + 20;
    for (const Nanos limit = now_ns() + 10'000 * kMs; calls < until && now_ns() < limit;) std::this_thread::yield();
    EXPECT_GE(calls, until) << "the others stopped calling while rank 2 was away";
    if (calls < until) break;
    for (const uint32_t peer : {0U, 1U, 3U}) world.link(2, peer, session);
    expect_answer(*returning, simple_job(9, {0, 3}, 5), 10);
  }
  stop = true;
  for (std::thread& t : threads) t.join();
}

TEST_F(CudaLinks, LostLinksLeaveNoMemoryBehind) {
  World world(options(2));
  const auto engine = world.engine(0);
  const auto heap = [&] { return world.backend(0).memory().heap + world.backend(1).memory().heap; };
  const uint64_t before = heap();
  EXPECT_GT(before, 0U);
  for (uint32_t session = 2; session < 42; ++session) {
    expect_answer(*engine, both_ranks(3, 3), 6);
    world.lose(0, 1);
    world.link(0, 1, session);
  }
  for (const Nanos until = now_ns() + 5'000 * kMs; heap() != before && now_ns() < until;) std::this_thread::yield();
  EXPECT_EQ(heap(), before);
}

TEST_F(CudaLinks, ALaneIsLetGoWhileItsCallWaitsAndTheNextEngineIsServed) {
  World world(options(2));
  for (uint32_t session = 2; session < 12; ++session) {
    world.lose(0, 1);
    world.map(0, 1);
    world.ready(0, 1, session);
    auto engine = world.engine(0);
    engine->submit(engine->lay_out(both_ranks(4, 1)));
    Reply reply{};
    ASSERT_FALSE(engine->wait(reply, 2 * kMs)) << name(status_of(reply));
    const Nanos start = now_ns();
    engine->leave();
    EXPECT_LT(now_ns() - start, 1'000 * kMs);
    engine = nullptr;
    world.ready(1, 0, session);
    engine = world.engine(0);
    for (int i = 1; i <= 5; ++i)
      expect_answer(*engine, both_ranks(4, static_cast<float>(i)), 2 * static_cast<float>(i));
  }
}

TEST_F(CudaLinks, ADaemonThatLeavesEndsNewCallsWithDraining) {
  World world(options(2));
  const auto engine = world.engine(0);
  expect_answer(*engine, both_ranks(4, 2), 4);
  world.service(0).drain();
  expect_answer(*engine, both_ranks(4, 2), 0, Status::draining);
  const auto other = world.engine(1);
  expect_answer(*other, both_ranks(4, 2), 4);  // who leaves serves its peers to the last
}

/// A kernel that goes on for a second stands for a GPU that answers nothing: calls cannot end by themselves then, so
/// the back end says that it is over.
TEST_F(CudaLinks, AGpuThatStandsStillIsFoundOut) {
  WorldOptions o = options(1);
  o.drills.experts_delay_us = 1'000'000;
  o.stuck_after_ms = 200;
  World world(o);
  const auto engine = world.engine(0);
  EXPECT_EQ(world.backend(0).health(), Status::ok);
  engine->submit(engine->lay_out(simple_job(3, {1}, 2)));
  Status health = Status::ok;
  for (const Nanos until = now_ns() + 900 * kMs; health == Status::ok && now_ns() < until;)
    health = world.backend(0).health();
  EXPECT_EQ(health, Status::internal) << name(health);
  EXPECT_NE(world.backend(0).last_error().find("stands still"), std::string::npos) << world.backend(0).last_error();
}

}  // namespace
}  // namespace moed
