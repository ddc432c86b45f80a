// The protocol between ranks, in one process over one mapping: deadlines, lost links, new sessions, fairness.
// Built with TSan, this is where races show.
#include <gtest/gtest.h>

#include <atomic>
#include <fstream>
#include <random>
#include <thread>

#include "tests/support/jobs.h"
#include "tests/support/world.h"

namespace moed {
namespace {

using test::Engine;
using test::expect_all;
using test::Job;
using test::simple_job;
using test::small_shape;
using test::status_of;
using test::World;

constexpr uint32_t kRanks = 4;

TEST(Protocol, RanksOutOfStepWithChangingTokensAndData) {
  World world({.shape = small_shape(), .ranks = kRanks, .max_tokens = 16});
  std::vector<std::unique_ptr<Engine>> engines;
  for (uint32_t rank = 0; rank < kRanks; ++rank)
    for (uint32_t lane = 1; lane <= 2; ++lane) engines.push_back(world.engine(rank, lane, 1 << 20));
  std::vector<std::thread> threads;
  for (size_t i = 0; i < engines.size(); ++i)
    threads.emplace_back([&, i] {
      std::mt19937_64 random(i);
      for (int call = 0; call < 250; ++call) {
        const auto tokens = static_cast<uint32_t>(random() % 40);  // up to three pieces, and often none
        const auto value = static_cast<float>(1 + random() % 15);
        const auto a = static_cast<uint32_t>(random() % kRanks);
        const auto b = static_cast<uint32_t>(random() % kRanks);
        Reply reply{};
        const auto rows = engines[i]->run(simple_job(tokens, {a, b}, value), reply);
        ASSERT_EQ(status_of(reply), Status::ok);
        expect_all(rows, 2 * value);
      }
    });
  for (std::thread& t : threads) t.join();
}

TEST(Protocol, AWorldThatFormsSaysWhichRanksAreMissing) {
  World world({.shape = small_shape(), .ranks = kRanks, .linked = false});
  const auto engine = world.engine(1);
  Reply reply{};
  expect_all(engine->run(simple_job(3, {1}, 2), reply), 4);  // what it owns itself is served
  EXPECT_EQ(status_of(reply), Status::ok);
  expect_all(engine->run(simple_job(3, {1, 3}, 2), reply), 0);
  EXPECT_EQ(status_of(reply), Status::not_ready);
  EXPECT_EQ(reply.ranks[0], 1ULL << 3);
  world.link(1, 3, 5);
  expect_all(engine->run(simple_job(3, {1, 3}, 2), reply), 4);
  EXPECT_EQ(status_of(reply), Status::ok);
}

TEST(Protocol, ALostRankEndsTheCallsThatNeedItAndNoOthers) {
  World world({.shape = small_shape(), .ranks = kRanks});
  const auto engine = world.engine(0);
  Reply reply{};
  expect_all(engine->run(simple_job(5, {1, 2}, 3), reply), 6);
  world.lose(0, 2);
  expect_all(engine->run(simple_job(5, {1, 2}, 3), reply), 0);
  EXPECT_EQ(status_of(reply), Status::peer_lost);
  EXPECT_EQ(reply.ranks[0], 1ULL << 2);
  for (int i = 0; i < 50; ++i) {
    expect_all(engine->run(simple_job(5, {1, 3}, 3), reply), 6);
    ASSERT_EQ(status_of(reply), Status::ok);
  }
  world.link(0, 2, 9);  // a new session over new segments
  expect_all(engine->run(simple_job(5, {1, 2}, 4), reply), 8);
  EXPECT_EQ(status_of(reply), Status::ok);
}

TEST(Protocol, DropLeavesALostRankOutAndCountsIt) {
  World world({.shape = small_shape(), .ranks = kRanks, .on_lost_rank = OnLostRank::drop});
  const auto engine = world.engine(0);
  Reply reply{};
  world.lose(0, 2);
  expect_all(engine->run(simple_job(5, {1, 2}, 3), reply), 3);
  EXPECT_EQ(status_of(reply), Status::degraded);
  EXPECT_EQ(reply.ranks[0], 1ULL << 2);
  EXPECT_EQ(reply.dropped, 5U);
  expect_all(engine->run(simple_job(5, {2}, 3), reply), 0);
  EXPECT_EQ(status_of(reply), Status::degraded);
}

TEST(Protocol, ALinkLostInMidCallEndsIt) {
  World world({.shape = small_shape(), .ranks = 2, .drills = {.experts_delay_us = 300'000}});
  const auto engine = world.engine(0);
  const Call call = engine->lay_out(simple_job(3, {2}, 1));
  engine->submit(call);
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  world.lose(0, 1);
  Reply reply{};
  ASSERT_TRUE(engine->wait(reply, 200'000'000));
  EXPECT_EQ(status_of(reply), Status::peer_lost);
  EXPECT_EQ(reply.ranks[0], 2ULL);
}

TEST(Protocol, AnExpiredCallNamesTheLateRankAndItsLaneGoesOn) {
  World world({.shape = small_shape(), .ranks = 2, .drills = {.experts_delay_us = 150'000, .for_ms = 1500}});
  const auto engine = world.engine(0);
  Reply reply{};
  const Nanos start = now_ns();
  uint32_t late = 0;
  while (now_ns() < start + 1'200'000'000) {
    Job job = simple_job(3, {2}, 1);
    job.timeout_us = 20'000;
    const Nanos called = now_ns();
    const auto rows = engine->run(job, reply);
    ASSERT_LT(now_ns() - called, 120'000'000U);  // deadline + 100 ms
    if (status_of(reply) == Status::ok) continue;
    ASSERT_EQ(status_of(reply), Status::peer_timeout);
    ASSERT_EQ(reply.ranks[0], 2ULL);
    expect_all(rows, 0);
    ++late;
  }
  EXPECT_GE(late, 5U);
  std::this_thread::sleep_for(std::chrono::milliseconds(600));  // the drill is over
  for (int i = 1; i <= 20; ++i) {
    const auto value = static_cast<float>(i % 15 + 1);
    expect_all(engine->run(simple_job(3, {2}, value), reply), 2 * value);
    ASSERT_EQ(status_of(reply), Status::ok);
  }
}

/// Calls of other lanes must not be eaten by lingering for a lane that is silent just now.
TEST(Protocol, LingeringIsShortHoweverIdleTheLoop) {
  World world({.shape = small_shape(), .ranks = 1, .linger_us = 3});
  const auto a = world.engine(0, 1);
  const auto b = world.engine(0, 2);
  int ok = 0;
  for (int i = 0; i < 100; ++i) {
    Job job = simple_job(1, {0}, 1);
    job.timeout_us = 5'000;  // half of what a sleeping loop sleeps
    Reply reply{};
    (i % 2 == 0 ? a : b)->run(job, reply);
    ok += status_of(reply) == Status::ok ? 1 : 0;
    std::this_thread::sleep_for(std::chrono::microseconds(300));
  }
  EXPECT_GE(ok, 90);
}

/// A call that fills a pass comes to its turn although two other lanes have a new small one before every pass: the test
/// plays a peer with three lanes and drives the serve passes by hand.
TEST(Protocol, NoSourceStarves) {
  const Shape shape = small_shape();
  BackendOptions options;
  options.shape = shape;
  options.ranks = 2;
  options.lanes = 3;
  options.max_tokens = 16;
  options.max_pairs = 32;  // 16 rows of two slots: the big call alone
  options.linger_us = 0;
  const auto server = make_cpu_backend(options);
  options.rank = 1;
  const auto peer = make_cpu_backend(options);
  Handle there;
  Handle back;
  Handle bell;
  ASSERT_EQ(server->make_segment(1, there), Status::ok);
  ASSERT_EQ(peer->make_segment(0, back), Status::ok);
  ASSERT_EQ(peer->make_doorbell(bell), Status::ok);
  ASSERT_EQ(server->map_segment(1, back, bell), Status::ok);
  server->link_changed(1, LinkState::ready, 1);
  const SegmentLayout layout = segment_layout(shape, 3, 16);
  const Mapping written(there.fd, layout.bytes);
  const Mapping answered(back.fd, layout.bytes);
  const auto publish = [&](uint32_t lane, uint32_t tokens, uint64_t count) {
    CallLine line;
    line.layer = kIdentityLayer;
    line.tokens = static_cast<uint16_t>(tokens);
    const std::vector<std::byte> row(row_layout(shape).bytes);
    for (uint32_t t = 0; t < tokens; ++t) {
      line.bitmap[t / 8] = static_cast<uint8_t>(line.bitmap[t / 8] | 1U << (t % 8));
      store_record(reinterpret_cast<Line*>(written.data() + layout.row(lane, t)), row.data(), row.size(),
                   sequence(1, count));
    }
    store_line(*reinterpret_cast<Line*>(written.data() + layout.call(lane)), &line, sizeof line, sequence(1, count));
  };
  const auto answered_with = [&](uint32_t lane, uint64_t count) {
    return load_sequence(*reinterpret_cast<const Line*>(answered.data() + layout.return_line(lane))) ==
           sequence(1, count);
  };
  uint64_t small = 0;
  for (uint64_t big = 1; big <= 20; ++big) {
    publish(2, 16, big);
    int passes = 0;
    while (!answered_with(2, big) && passes < 10) {
      ServeRecord record;
      const Nanos until = now_ns() + 5'000'000'000;
      do {  // new small calls while a pass runs: they are there when the next one chooses
        ++small;
        publish(1, 1, small);
        publish(3, 1, small);
        ASSERT_LT(now_ns(), until);
      } while (!server->serve(now_ns(), record));
      ++passes;
    }
    ASSERT_LE(passes, 3) << "call " << big;
  }
}

/// Segments of lost links go, however often links come and go.
TEST(Protocol, LostLinksLeaveNoMemoryBehind) {
  World world({.shape = small_shape(), .ranks = 2});
  const auto segments = [&] {
    static_cast<void>(world.backend(0).memory());  // as a scrape does: it frees what no pass holds any more
    static_cast<void>(world.backend(1).memory());
    std::ifstream maps("/proc/self/maps");
    size_t count = 0;
    for (std::string line; std::getline(maps, line);) count += line.find("moed-segment") != std::string::npos ? 1 : 0;
    return count;
  };
  const auto engine = world.engine(0);
  const size_t before = segments();
  for (uint32_t session = 2; session < 22; ++session) {
    Reply reply{};
    expect_all(engine->run(simple_job(3, {0, 2}, 3), reply), 6);
    ASSERT_EQ(status_of(reply), Status::ok);
    world.lose(0, 1);
    world.link(0, 1, session);
  }
  for (const Nanos until = now_ns() + 5'000'000'000; segments() > before && now_ns() < until;)
    std::this_thread::yield();
  EXPECT_EQ(segments(), before);
}

}  // namespace
}  // namespace moed
