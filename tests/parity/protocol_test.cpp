// The protocol between ranks, in one process over one mapping: deadlines, lost links, new sessions, hostile call lines.
// Built with TSan, this is where races show.
#include <gtest/gtest.h>

#include <random>
#include <thread>

#include "tests/support/cases.h"
#include "tests/support/world.h"

namespace moed {
namespace {

using test::Engine;
using test::Job;
using test::World;

constexpr uint32_t kRanks = 4;

Shape small_shape() { return make_shape(64, 64, 32, 8, 2); }  // two experts a rank

Status status_of(const Reply& r) { return static_cast<Status>(r.status); }

/// T tokens, slot k of token t to one of the experts 2p and 2p + 1 for p in pairs (in a world of 4, rank p owns pair p);
/// x is exact in MXFP8, so that the answer is a plain sum.
Job simple_job(uint32_t tokens, std::vector<uint32_t> pairs, float x, float weight = 1.0F) {
  const Shape s = small_shape();
  Job job;
  job.flags = kFlagNoNorm;
  job.x.assign(uint64_t{tokens} * s.latent, oracle::bf16_bits(double{x}));
  for (uint32_t t = 0; t < tokens; ++t)
    for (uint32_t k = 0; k < s.top_k; ++k) {
      job.ids.push_back(static_cast<int32_t>(pairs[k % pairs.size()] * 2 + t % 2));
      job.weights.push_back(weight);
    }
  return job;
}

void expect_all(const std::vector<uint16_t>& rows, float value) {
  for (const uint16_t bits : rows) ASSERT_EQ(oracle::bf16_value(bits), double{value});
}

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

/// What a hostile peer may put on the wire: the server answers with a status and goes on serving others.
TEST(Protocol, HostileLinesHurtOnlyTheirSender) {
  const Shape shape = small_shape();
  BackendOptions options;
  options.shape = shape;
  options.ranks = 2;
  options.lanes = 1;
  options.max_tokens = 16;
  const auto server = make_cpu_backend(options);
  options.rank = 1;
  const auto peer = make_cpu_backend(options);
  Handle there;
  Handle bell;
  Handle back;
  ASSERT_EQ(server->make_segment(1, there), Status::ok);
  ASSERT_EQ(server->make_doorbell(bell), Status::ok);
  ASSERT_EQ(peer->map_segment(0, there, bell), Status::ok);
  ASSERT_EQ(peer->make_segment(0, back), Status::ok);
  ASSERT_EQ(peer->make_doorbell(bell), Status::ok);
  ASSERT_EQ(server->map_segment(1, back, bell), Status::ok);
  server->link_changed(1, LinkState::ready, 3);
  const SegmentLayout layout = segment_layout(shape, 1, 16);
  const Mapping rows(there.fd, layout.bytes);
  const Mapping answers(back.fd, layout.bytes);
  uint64_t count = 0;
  const auto send = [&](CallLine line, std::vector<int32_t> ids) {
    std::vector<std::byte> row(row_layout(shape).bytes);
    std::memcpy(row.data(), ids.data(), ids.size() * 4);
    const uint64_t q = sequence(3, ++count);
    for (uint32_t t = 0; t < 16; ++t)
      store_record(reinterpret_cast<Line*>(rows.data() + layout.row(1, t)), row.data(), row.size(), q);
    store_line(*reinterpret_cast<Line*>(rows.data() + layout.call(1)), &line, sizeof line, q);
    const Nanos until = now_ns() + 5'000'000'000;
    ServeRecord record;
    ReturnLine answer;
    while (load_line(*reinterpret_cast<const Line*>(answers.data() + layout.return_line(1)), &answer, sizeof answer, q) != Seen::same) {
      if (now_ns() > until) return Status::pending;
      server->serve(now_ns(), record);
    }
    return static_cast<Status>(answer.status);
  };
  CallLine good{.layer = kIdentityLayer, .tokens = 2, .bitmap = {3}};
  EXPECT_EQ(send(good, {0, 1}), Status::ok);
  CallLine tokens = good;
  tokens.tokens = 17;
  EXPECT_EQ(send(tokens, {0, 1}), Status::bad_call);
  CallLine bits = good;
  bits.bitmap[103] = 0x80;
  EXPECT_EQ(send(bits, {0, 1}), Status::bad_call);
  CallLine layer = good;
  layer.layer = 77;
  EXPECT_EQ(send(layer, {0, 1}), Status::bad_call);
  for (const int32_t id : {8, -2, 1 << 30, INT32_MAX, INT32_MIN}) EXPECT_EQ(send(good, {0, id}), Status::bad_route) << id;
  EXPECT_EQ(send(good, {-1, 1}), Status::ok);
}

}  // namespace
}  // namespace moed
