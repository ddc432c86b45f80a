// Faults of sizes, layout and protocol that others met in the field, with the values that docs/faults.md names, in
// worlds in this process. Every answer is compared element by element.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <random>
#include <thread>

#include "tests/support/jobs.h"
#include "tests/support/ranks.h"

namespace moed {
namespace {

using test::Engine;
using test::expect_all;
using test::Job;
using test::job_of;
using test::Ranks;
using test::simple_job;
using test::small_shape;
using test::status_of;
using test::World;
using test::world_of;
using test::WorldOptions;

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr int kPace = 10;  // a sanitizer's pace: so many times fewer calls
#else
constexpr int kPace = 1;
#endif

/// F07. Rank 2 asks for more than a call may have, in its very first call and ever after, while the others call: it
/// alone is refused, and no rank serves a row of it.
TEST(FaultsOfSize, TooManyTokensAreRefusedAndPeersGoOn) {
  WorldOptions o = world_of(small_shape(), 4, 512);
  o.max_call_tokens = 512;
  Ranks ranks(o);
  ranks.attach(4);
  double served[4]{};
  for (const uint32_t tokens : {65'536U, 513U, 512U, 511U, 1024U, 65'535U, 0x8000'0000U, UINT32_MAX}) {
    const bool fits = tokens <= 512;
    std::vector<Call> calls;
    for (uint32_t r = 0; r < 4; ++r)
      calls.push_back(ranks.engines[r]->lay_out(simple_job(r == 2 && fits ? tokens : 5, {r}, 3)));
    calls[2].tokens = tokens;
    for (uint32_t r = 0; r < 4; ++r) ranks.engines[r]->submit(calls[r]);
    for (uint32_t r = 0; r < 4; ++r) {
      Reply reply{};
      ASSERT_TRUE(ranks.engines[r]->wait(reply));
      if (r != 2 || fits) {
        EXPECT_EQ(status_of(reply), Status::ok) << "rank " << r << ", " << tokens << " tokens";
        expect_all(ranks.engines[r]->out(calls[r]), 6);
        served[r] += calls[r].tokens;
        continue;
      }
      EXPECT_EQ(status_of(reply), Status::bad_call);
      EXPECT_EQ(reply.field, static_cast<uint32_t>(CallField::tokens));
      EXPECT_EQ(reply.value, int64_t{tokens});
      EXPECT_EQ(reply.limit, 512U);
    }
    Reply reply{};
    expect_all(ranks.engines[2]->run(simple_job(5, {2}, 4), reply), 8);  // the next call works
    EXPECT_EQ(status_of(reply), Status::ok);
    served[2] += 5;
    for (uint32_t r = 0; r < 4; ++r) ASSERT_TRUE(ranks.served(r, served[r])) << tokens;
  }
}

/// Moves the arrays of a call to odd places: 16 bytes behind a line.
Call moved(Engine& engine, const Call& call, const Shape& s) {
  Call there = call;
  uint64_t at = engine.arena_bytes() / 2;
  const auto move = [&](uint64_t Call::*member, uint64_t bytes) {
    there.*member = at + 16;
    std::memcpy(engine.arena() + at + 16, engine.arena() + call.*member, bytes);
    at = round_up(at + 16 + bytes, 128);
  };
  const uint64_t tokens = call.tokens;
  move(&Call::x, tokens * s.latent * 2);
  move(&Call::ids, tokens * s.top_k * 4);
  move(&Call::weights, tokens * s.top_k * 4);
  move(&Call::out, tokens * s.latent * 2);
  return there;
}

/// F09. Odd T, max_tokens as odd, worlds in which ranks x max_tokens is odd, arrays off their lines: every row is
/// written and right, with max_tokens and with one token more.
TEST(FaultsOfSize, OddSizesAndOddPlaces) {
  const Shape s = make_shape(64, 64, 32, 28, 3);
  for (const uint32_t n : {1U, 7U, 14U})
    for (const uint32_t tokens : {1U, 3U, 7U, 8U, 9U, 31U, 33U, 45U, 127U, 129U}) {
      World world(world_of(s, n, tokens));
      const auto engine = world.engine(n - 1, 1, 1 << 20);
      for (const uint32_t t : {tokens, tokens + 1}) {
        const oracle::Rows rows = make_rows(Routing::random, s, n, t, 90);
        const auto want = oracle::routed(oracle_layer(s), rows, n).latent;
        const Call call = engine->lay_out(job_of(rows, kIdentityLayer, kFlagNoNorm));
        for (const Call& c : {call, moved(*engine, call, s)}) {
          ASSERT_EQ(status_of(engine->call(c)), Status::ok);
          EXPECT_EQ(engine->out(c), want) << n << " ranks, " << t << " tokens, out at " << c.out;
        }
      }
      for (const uint64_t off : {8U, 4U, 2U}) {
        Call call = engine->lay_out(job_of(make_rows(Routing::random, s, n, 1, 91), kIdentityLayer, kFlagNoNorm));
        call.x += off;
        EXPECT_EQ(status_of(engine->call(call)), Status::bad_call) << off;
      }
    }
}

/// F10. The same T and ids in every call, only the data changes: an answer of another call would be a wrong number.
/// Rank 1 comes 50 ms late now and then.
TEST(FaultsOfProtocol, EqualCallsAreNotTakenForOneAnother) {
  constexpr uint32_t kRanks = 4;
  constexpr int kCalls = 25'000 / kPace;
  Ranks ranks(world_of(small_shape(), kRanks, 16));
  ranks.attach(kRanks);
  std::atomic<int> running{kRanks - 1};
  std::vector<std::thread> threads;
  for (uint32_t r = 0; r < kRanks; ++r)
    threads.emplace_back([&, r] {
      Engine& engine = *ranks.engines[r];
      for (int i = 1; r == 1 ? running > 0 : i <= kCalls; ++i) {
        if (r == 1 && i % 97 == 0) std::this_thread::sleep_for(std::chrono::milliseconds(50));
        const auto value = static_cast<float>(1 + (static_cast<uint32_t>(i) + r) % 15);
        Reply reply{};
        const auto rows = engine.run(simple_job(4, {r, (r + 1) % kRanks}, value), reply);
        const uint16_t right = oracle::bf16_bits(2 * double{value});
        if (status_of(reply) == Status::ok && std::count(rows.begin(), rows.end(), right) == 4 * 64) continue;
        ADD_FAILURE() << "rank " << r << " call " << i << " " << name(status_of(reply));
        break;
      }
      if (r != 1) --running;
    });
  for (std::thread& t : threads) t.join();
}

/// F11. Links of eight ranks come up in random order, one end before the other, and the first call of a link is on its
/// way while the other end is not told yet. Twenty lives of each link; each life has data of its own.
TEST(FaultsOfProtocol, TheFirstCallOverANewLinkIsRight) {
  constexpr uint32_t kRanks = 8;
  const Shape s = make_shape(64, 64, 32, 16, 2);  // two experts a rank, as simple_job has them
  WorldOptions o = world_of(s, kRanks, 8);
  o.linked = false;
  Ranks ranks(o);
  ranks.attach(kRanks);
  std::vector<std::pair<uint32_t, uint32_t>> pairs;
  for (uint32_t a = 0; a < kRanks; ++a)
    for (uint32_t b = 0; b < a; ++b) pairs.emplace_back(a, b);
  std::mt19937 random(11);
  for (uint32_t session = 1; session <= 20; ++session) {
    const auto value = static_cast<float>(1 + session % 15);
    std::shuffle(pairs.begin(), pairs.end(), random);
    for (auto [early, late] : pairs) {
      if (random() % 2 == 0) std::swap(early, late);
      ranks.world.map(early, late);
      ranks.world.ready(early, late, session);
      const Call call = ranks.engines[early]->lay_out(simple_job(3, {late}, value));
      ranks.engines[early]->submit(call);
      std::this_thread::sleep_for(std::chrono::microseconds(random() % 300));
      ranks.world.ready(late, early, session);
      Reply reply{};
      ASSERT_TRUE(ranks.engines[early]->wait(reply));
      ASSERT_EQ(status_of(reply), Status::ok) << early << " to " << late << ", session " << session;
      expect_all(ranks.engines[early]->out(call), 2 * value);
      expect_all(ranks.engines[late]->run(simple_job(3, {early}, value), reply), 2 * value);
      ASSERT_EQ(status_of(reply), Status::ok);
    }
    for (const auto& [a, b] : pairs) ranks.world.lose(a, b);
  }
}

/// Whole numbers of 1 to 15 that differ by token, element and call, every slot to experts of one rank with weight 1.
Job whole_numbers(uint32_t tokens, uint32_t rank, uint32_t call) {
  Job job = simple_job(tokens, {rank}, 1);
  for (uint32_t i = 0; i < job.x.size(); ++i)
    job.x[i] = oracle::bf16_bits(1 + (i * 7 + i / 64 * 3 + call * 5 + rank) % 15);
  return job;
}

/// The same numbers twice as large; -1: none is wrong.
std::ptrdiff_t first_wrong(const Job& job, const std::vector<uint16_t>& rows) {
  for (size_t i = 0; i < rows.size(); ++i)
    if (rows[i] != oracle::bf16_bits(2 * oracle::bf16_value(job.x[i]))) return static_cast<std::ptrdiff_t>(i);
  return rows.size() == job.x.size() ? -1 : static_cast<std::ptrdiff_t>(rows.size());
}

/// F12. Rank 0 alone has tokens, 256 and 1,024 of them, each to two experts of one rank.
TEST(FaultsOfProtocol, NotOneWrongRowOfOneRanksTokens) {
  Ranks ranks(world_of(small_shape(), 4, 256));
  ranks.attach(4);
  for (const uint32_t tokens : {256U, 1024U})
    for (uint32_t i = 0; i < 400 / kPace; ++i) {
      std::vector<Job> jobs(4, simple_job(tokens, {0}, 1));
      for (Job& job : jobs) std::fill(job.ids.begin(), job.ids.end(), -1);
      jobs[0] = whole_numbers(tokens, i % 4, i);
      const Ranks::Round got = ranks.call(jobs);
      ASSERT_EQ(first_wrong(jobs[0], got.rows[0]), -1) << "call " << i << " of " << tokens << " tokens";
      for (const uint32_t r : {1U, 2U, 3U}) expect_all(got.rows[r], 0);
    }
}

/// F12. Every rank has as many tokens as a piece may have.
TEST(FaultsOfProtocol, NotOneWrongRowOfFullCalls) {
  Ranks ranks(world_of(small_shape(), 4, 256));
  ranks.attach(4);
  for (uint32_t i = 0; i < 500 / kPace; ++i) {
    std::vector<Job> jobs;
    for (uint32_t r = 0; r < 4; ++r) jobs.push_back(whole_numbers(256, (r + i) % 4, i));
    const Ranks::Round got = ranks.call(jobs);
    for (uint32_t r = 0; r < 4; ++r) ASSERT_EQ(first_wrong(jobs[r], got.rows[r]), -1) << "call " << i << " of " << r;
  }
}

}  // namespace
}  // namespace moed
