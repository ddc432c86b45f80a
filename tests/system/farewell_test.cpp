// A world that forms, a rank that takes its leave, a rank whose part is dropped: each call says which rank is meant.
#include <gtest/gtest.h>

#include "tests/support/caller.h"
#include "tests/support/daemons.h"
#include "tests/support/questions.h"

namespace moed {
namespace {

using test::Asker;
using test::Daemon;
using test::Daemons;
using test::Question;
using test::QuestionModel;

constexpr uint32_t kRanks = 3, kOther = 2;

const QuestionModel& model() {
  static const QuestionModel m;
  return m;
}

Question for_all() {
  return test::question(1, 5, kRanks, 1, [](uint32_t) { return true; });
}
Question without_other() {
  return test::question(2, 3, kRanks, 2, [](uint32_t rank) { return rank != kOther; });
}

void expect_right(Asker& asker, Question q) {
  ASSERT_EQ(asker.ask(q).status, uint32_t{MOED_OK});
  EXPECT_TRUE(asker.right(q, model(), kRanks));
}

TEST(Forming, CallsThatNeedARankNeverSeenAreNotReady) {
  const test::TempDir dir;
  Daemons::Sets sets = QuestionModel::sets();
  sets.push_back(test::peers_of(test::free_ports(kRanks)));
  Daemon zero(sets, dir.path(), 0);
  Daemon one(sets, dir.path(), 1);
  for (const Daemon* d : {&zero, &one})
    for (int i = 0; i < 4000 && d->count("link ready") == 0; ++i) test::sleep_ms(5);
  {
    Asker asker(zero.socket());
    const moed_reply_t reply = asker.ask(for_all());
    EXPECT_EQ(reply.status, uint32_t{MOED_NOT_READY});
    EXPECT_TRUE(test::names_only(reply, kOther)) << reply.ranks[0];
    for (const uint16_t bits : asker.out()) ASSERT_EQ(bits, 0);
    expect_right(asker, without_other());
  }
  const std::string missing =
      R"("ready":false,"missing":["link 2: connecting"])";  // once the canary has had its answer
  EXPECT_TRUE(test::wait_until([&] { return zero.status_json().find(missing) != std::string::npos; }))
      << zero.status_json();
  Daemon two(sets, dir.path(), 2);
  for (Daemon* d : {&zero, &one, &two}) d->wait_ready();
  Asker asker(zero.socket());
  expect_right(asker, for_all());
  for (Daemon* d : {&zero, &one, &two}) d->signal(SIGTERM);
  for (Daemon* d : {&zero, &one, &two}) EXPECT_EQ(d->reap(10'000), 0) << d->log();
}

/// The rank takes 100 ms over a pass, so that a call of a peer is running there when it is told to go.
TEST(Leaving, PeersCallsThatRunStillEndAndNewOnesNameTheRank) {
  const Daemons world(kRanks, QuestionModel::sets(), [](uint32_t rank) {
    return rank == kOther ? Daemons::Sets{"debug.experts_delay_us=100000"} : Daemons::Sets{};
  });
  Question all = for_all();
  Asker asker(world[0].socket());
  expect_right(asker, all);
  asker.submit(all);
  test::sleep_ms(20);
  world[kOther].signal(SIGTERM);
  moed_reply_t reply = asker.wait();
  EXPECT_EQ(reply.status, uint32_t{MOED_OK}) << world[kOther].log();
  EXPECT_TRUE(asker.right(all, model(), kRanks));
  for (int i = 0; i < 200 && reply.status == MOED_OK; ++i) reply = asker.ask(all);  // until the farewell is here
  EXPECT_EQ(reply.status, uint32_t{MOED_PEER_LOST});
  EXPECT_TRUE(test::names_only(reply, kOther));
  expect_right(asker, without_other());
  EXPECT_EQ(world[kOther].reap(10'000), 0);
  for (int i = 0; i < 1000 && world[0].count("link lost") == 0; ++i) test::sleep_ms(5);
  for (const uint32_t rank : {0U, 1U}) {
    EXPECT_EQ(world[rank].count("link lost peer=2 reason=leaving"), 1U) << world[rank].log();
    EXPECT_EQ(world[rank].count("link lost"), 1U);
  }
  expect_right(asker, without_other());
  world[kOther].start();
  world[kOther].wait_ready();
  expect_right(asker, all);
}

/// The second call comes while the rank is busy for 400 ms with the first: no pass ends for longer than a silence after
/// which the rank would go, and the call has still to be taken.
TEST(Leaving, ACallThatWaitsForALongPassIsStillServed) {
  const Daemons world(kRanks, QuestionModel::sets(), [](uint32_t rank) {
    return rank == kOther ? Daemons::Sets{"debug.experts_delay_us=400000"} : Daemons::Sets{};
  });
  Question all = for_all();
  Asker first(world[0].socket());
  Asker second(world[1].socket());
  expect_right(first, all);
  first.submit(all);
  test::sleep_ms(50);
  second.submit(all);
  test::sleep_ms(50);
  world[kOther].signal(SIGTERM);
  for (Asker* asker : {&first, &second}) {
    EXPECT_EQ(asker->wait().status, uint32_t{MOED_OK}) << world[kOther].log();
    EXPECT_TRUE(asker->right(all, model(), kRanks));
  }
  EXPECT_EQ(world[kOther].reap(10'000), 0);
}

TEST(Leaving, AllAtOnce) {
  const Daemons world(kRanks, QuestionModel::sets());
  for (uint32_t rank = 0; rank < kRanks; ++rank) world[rank].signal(SIGTERM);
  for (uint32_t rank = 0; rank < kRanks; ++rank) EXPECT_EQ(world[rank].reap(10'000), 0) << world[rank].log();
}

TEST(Lost, ItsPartIsDroppedWhereTheConfigurationSaysSo) {
  Daemons::Sets sets = QuestionModel::sets();
  sets.emplace_back("calls.on_lost_rank=drop");
  const Daemons world(kRanks, sets);
  Question all = for_all();
  Asker asker(world[0].socket());
  expect_right(asker, all);
  world[kOther].kill();
  for (int i = 0; i < 2000 && world[0].count("link lost") == 0; ++i) test::sleep_ms(5);
  const moed_reply_t reply = asker.ask(all);
  EXPECT_EQ(reply.status, uint32_t{MOED_DEGRADED});
  EXPECT_TRUE(test::names_only(reply, kOther)) << reply.ranks[0];
  // What is left is what the others' experts give: the oracle without those slots.
  Question rest = all;
  uint32_t dropped = 0;
  for (size_t t = 0; t < rest.rows.ids.size() / 4; ++t) {
    bool asked = false;
    for (size_t k = 0; k < 4; ++k) {
      int32_t& id = rest.rows.ids[t * 4 + k];
      if (owner(QuestionModel::shape(), static_cast<uint32_t>(id), kRanks) != kOther) continue;
      id = -1;
      asked = true;
    }
    dropped += asked ? 1 : 0;
  }
  EXPECT_EQ(reply.dropped, dropped);
  rest.answer.clear();
  EXPECT_TRUE(asker.right(rest, model(), kRanks));
}

}  // namespace
}  // namespace moed
