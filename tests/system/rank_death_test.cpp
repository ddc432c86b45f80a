// Ranks die, stop and return under calls: statuses name exactly the rank that is gone, calls that avoid it never
// notice, answers keep their bits, and the world comes together again without a hand.
#include <gtest/gtest.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <random>
#include <thread>

#include "tests/support/daemons.h"
#include "tests/support/questions.h"

namespace moed {
namespace {

using test::Asker;
using test::Daemons;
using test::Question;
using test::QuestionModel;
using test::Tally;

constexpr uint32_t kRanks = 4;
constexpr uint32_t kVictim = 2;
constexpr int kCallsMeanwhile = 1000;
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr int kKills = 8, kStops = 2;  // at a sanitizer's pace fifty take five minutes
#else
constexpr int kKills = 50, kStops = 10;
#endif

const QuestionModel& model() {
  static const QuestionModel m;
  return m;
}

Question for_all() {
  return test::question(1, 5, kRanks, 1, [](uint32_t) { return true; });
}
Question without_victim() {
  return test::question(2, 3, kRanks, 2, [](uint32_t rank) { return rank != kVictim; });
}

Daemons::Sets settings() {
  Daemons::Sets sets = QuestionModel::sets();
  sets.emplace_back("calls.first_deadline_ms=2000");
  return sets;
}

/// Milliseconds since midnight of a log line such as 2026-11-29T22:10:03.123Z.
int64_t time_of(const std::string& log, size_t line) {
  const auto number = [&](size_t at, size_t digits) { return std::stoll(log.substr(line + at, digits)); };
  return ((number(11, 2) * 60 + number(14, 2)) * 60 + number(17, 2)) * 1000 + number(20, 3);
}

/// From `listening` to `ready` in the last life that a log tells of.
int64_t ready_after_ms(const std::string& log) {
  const auto line_of = [&](const char* part) {
    const size_t at = log.rfind(part);
    return at == std::string::npos ? at : log.rfind('\n', at) + 1;
  };
  const size_t listening = line_of(" info listening ");
  const size_t ready = line_of(" info ready ");
  if (listening == std::string::npos || ready == std::string::npos || ready < listening) return -1;
  return (time_of(log, ready) - time_of(log, listening) + 86'400'000) % 86'400'000;
}

/// Asks until a call that needs every rank is ok again; every other end names the victim alone.
void until_ok(Asker& asker, Question& all, Tally& tally) {
  for (const Nanos end = now_ns() + 20'000'000'000; now_ns() < end; test::sleep_ms(5)) {
    const moed_reply_t reply = asker.ask(all);
    tally.add(reply.status);
    if (reply.status == MOED_OK) {
      EXPECT_TRUE(asker.right(all, model(), kRanks));
      return;
    }
    ASSERT_TRUE(reply.status == MOED_PEER_LOST || reply.status == MOED_PEER_TIMEOUT) << reply.status;
    ASSERT_TRUE(test::names_only(reply, kVictim)) << reply.ranks[0];
  }
  FAIL() << "no call is ok 20 s after the rank came back";
}

void undisturbed(Asker& asker, Question& avoiding) {
  for (int i = 0; i < kCallsMeanwhile; ++i) {
    const moed_reply_t reply = asker.ask(avoiding);
    ASSERT_EQ(reply.status, uint32_t{MOED_OK}) << "call " << i << " avoids the rank that is gone";
    ASSERT_TRUE(asker.right(avoiding, model(), kRanks)) << i;
  }
}

/// Every other rank has lost its link to the victim so often, and no other link.
void expect_losses(const Daemons& world, uint64_t times) {
  for (const uint32_t rank : {0U, 1U, 3U}) {
    const auto status = nlohmann::json::parse(world[rank].status_json());
    for (const auto& peer : status["peers"])
      EXPECT_EQ(peer["losses"], peer["rank"] == kVictim ? times : 0) << "rank " << rank << ": " << peer;
  }
}

TEST(RankDeath, FiftyKillsWithCallsPending) {
  // The victim takes 20 ms over a pass, so a call is surely pending when it dies.
  const Daemons world(kRanks, settings(), [](uint32_t rank) {
    return rank == kVictim ? Daemons::Sets{"debug.experts_delay_us=20000"} : Daemons::Sets{};
  });
  Question all = for_all();
  Question avoiding = without_victim();
  Asker asker(world[0].socket());
  Tally tally;
  until_ok(asker, all, tally);
  int64_t slowest = 0;
  int pending = 0;
  for (int kill = 0; kill < kKills && !HasFatalFailure(); ++kill) {
    asker.submit(all);
    test::sleep_ms(kill % 20);
    world[kVictim].kill();
    const moed_reply_t reply = asker.wait();
    tally.add(reply.status);
    if (reply.status != MOED_OK) {
      ++pending;
      EXPECT_EQ(reply.status, uint32_t{MOED_PEER_LOST}) << kill;
      EXPECT_TRUE(test::names_only(reply, kVictim)) << reply.ranks[0];
    }
    world[kVictim].start();
    undisturbed(asker, avoiding);
    world[kVictim].wait_ready();
    const int64_t took = ready_after_ms(world[kVictim].log());
    EXPECT_TRUE(took >= 0 && took <= 1000) << took;
    slowest = std::max(slowest, took);
    until_ok(asker, all, tally);
  }
  EXPECT_GT(pending, kKills / 2) << "the kills came too late to find calls pending";
  expect_losses(world, kKills);
  std::printf(
      "%d kills, %d with the call pending; links ready at most %lld ms after listening; longest call %llu ms;%s\n",
      kKills, pending, static_cast<long long>(slowest), static_cast<unsigned long long>(asker.longest() / 1'000'000),
      tally.text().c_str());
}

TEST(RankDeath, TenStopsOfFiveSeconds) {
  const Daemons world(kRanks, settings());
  Question all = for_all();
  Question avoiding = without_victim();
  Asker patient(world[0].socket());
  Asker hasty(world[1].socket(), 200'000);  // less than the heartbeat takes to tell: peer_timeout first
  Tally tally;
  until_ok(patient, all, tally);
  until_ok(hasty, all, tally);
  for (int stop = 0; stop < kStops && !HasFatalFailure(); ++stop) {
    world[kVictim].freeze();
    const Nanos stopped = now_ns();
    for (Asker* asker : {&hasty, &patient}) {
      const moed_reply_t reply = asker->ask(all);
      tally.add(reply.status);
      EXPECT_EQ(reply.status, asker == &hasty ? uint32_t{MOED_PEER_TIMEOUT} : uint32_t{MOED_PEER_LOST});
      EXPECT_TRUE(test::names_only(reply, kVictim)) << reply.ranks[0];
    }
    undisturbed(patient, avoiding);
    undisturbed(hasty, avoiding);
    const Nanos left = 5'000'000'000 - std::min<Nanos>(now_ns() - stopped, 5'000'000'000);
    std::this_thread::sleep_for(std::chrono::nanoseconds(left));
    world[kVictim].thaw();
    until_ok(patient, all, tally);
    until_ok(hasty, all, tally);
    for (const uint32_t rank : {0U, 1U, 3U})  // the third rank's link, too, before the next stop
      for (int i = 0; i < 2000 && world[rank].count("link ready peer=2") < static_cast<size_t>(stop) + 2; ++i)
        test::sleep_ms(5);
  }
  expect_losses(world, kStops);
  for (const uint32_t rank : {0U, 1U, 3U})
    EXPECT_EQ(world[rank].count("link lost peer=2 reason=heartbeat"), static_cast<size_t>(kStops));
  std::printf("%d stops of 5 s; longest calls %llu and %llu ms;%s\n", kStops,
              static_cast<unsigned long long>(hasty.longest() / 1'000'000),
              static_cast<unsigned long long>(patient.longest() / 1'000'000), tally.text().c_str());
}

TEST(RankDeath, AllKilledAndRestartedInRandomOrder) {
  const Daemons world(kRanks, settings());
  Question all = for_all();
  {
    Asker asker(world[1].socket());
    ASSERT_EQ(asker.ask(all).status, uint32_t{MOED_OK});
    ASSERT_TRUE(asker.right(all, model(), kRanks));
  }
  std::mt19937 random(3);
  std::vector<uint32_t> order{0, 1, 2, 3};
  for (const uint32_t rank : order) world[rank].kill();
  std::shuffle(order.begin(), order.end(), random);
  std::vector<int> at;
  for (uint32_t i = 0; i < kRanks; ++i) at.push_back(static_cast<int>(random() % 20'000));
  std::sort(at.begin(), at.end());
  int now = 0;
  for (uint32_t i = 0; i < kRanks; ++i) {
    test::sleep_ms(at[i] - now);
    now = at[i];
    world[order[i]].start();
  }
  world.wait_ready();
  for (uint32_t rank = 0; rank < kRanks; ++rank) {
    Asker asker(world[rank].socket());
    EXPECT_EQ(asker.ask(all).status, uint32_t{MOED_OK});
    EXPECT_TRUE(asker.right(all, model(), kRanks));
  }
  EXPECT_LE(ready_after_ms(world[order.back()].log()), 1000);
}

}  // namespace
}  // namespace moed
