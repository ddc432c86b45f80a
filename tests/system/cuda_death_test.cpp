// A peer dies or stops while calls wait for it, on real GPUs: the statuses name it, the survivor's context goes on, the
// peer's memory is let go, and when it returns it serves and is served with the same bits.
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "tests/support/caller.h"
#include "tests/support/daemons.h"
#include "tests/support/gpus_here.h"
#include "tests/support/questions.h"

namespace moed {
namespace {

using test::Asker;
using test::Daemon;
using test::Daemons;
using test::Question;
using test::QuestionModel;
using test::Tally;
using test::wait_until;

constexpr uint32_t kRanks = 2, kVictim = 1;
constexpr int kTimes = 20, kCallsMeanwhile = 100;
/// A killed process computes on for up to 50 ms, a stopped one until the passes that it has queued are through.
constexpr uint32_t kLongPassUs = 300'000;
constexpr int kQueueEndsMs = 300;

const QuestionModel& model() {
  static const QuestionModel m;
  return m;
}

Question for_both() {
  return test::question(1, 5, kRanks, 1, [](uint32_t) { return true; });
}
Question for_itself() {
  return test::question(2, 3, kRanks, 2, [](uint32_t rank) { return rank != kVictim; });
}

/// What the survivor says of itself.
struct Seen {
  explicit Seen(const Daemon& daemon) {
    const auto status = nlohmann::json::parse(daemon.status_json());
    heap = status["memory"]["heap"];
    losses = status["peers"][0]["losses"];
    incarnation = status["incarnation"];
  }
  uint64_t heap = 0, losses = 0;
  std::string incarnation;
};

class CudaDeath : public testing::Test {
 protected:
  void SetUp() override {
    if (!test::built_with_cuda()) GTEST_SKIP() << "this build has no CUDA back end";
    gpus_ = test::gpus_here();
    if (gpus_ == 0) GTEST_SKIP() << "nvidia-smi -L lists no GPU";
  }

  /// victim_delay_us: the victim takes so long over a pass that a call is surely pending when it dies.
  std::unique_ptr<Daemons> world(uint32_t victim_delay_us) const {
    Daemons::Sets sets = QuestionModel::sets();
    sets.emplace_back("backend=cuda");
    return std::make_unique<Daemons>(kRanks, sets, [this, victim_delay_us](uint32_t rank) {
      Daemons::Sets own{"device=" + std::to_string(gpus_ > 1 ? rank : 0)};
      if (rank == kVictim) own.push_back("debug.experts_delay_us=" + std::to_string(victim_delay_us));
      return own;
    });
  }

  int gpus_ = 0;
};

/// Asks until a call that needs both is ok again; every other end names the victim alone.
void until_ok(Asker& asker, Question& both, Tally& tally) {
  for (const Nanos end = now_ns() + 20'000'000'000; now_ns() < end; test::sleep_ms(5)) {
    const moed_reply_t reply = asker.ask(both);
    tally.add(reply.status);
    if (reply.status == MOED_OK) {
      EXPECT_TRUE(asker.right(both, model(), kRanks));
      return;
    }
    ASSERT_TRUE(reply.status == MOED_PEER_LOST || reply.status == MOED_PEER_TIMEOUT) << reply.status;
    ASSERT_TRUE(test::names_only(reply, kVictim)) << reply.ranks[0];
  }
  FAIL() << "no call is ok 20 s after the rank came back";
}

/// The survivor's copies, kernels and graphs work: its calls to itself keep their bits.
void undisturbed(Asker& asker, Question& own) {
  for (int i = 0; i < kCallsMeanwhile; ++i) {
    ASSERT_EQ(asker.ask(own).status, uint32_t{MOED_OK}) << "call " << i << " avoids the rank that is gone";
    ASSERT_TRUE(asker.right(own, model(), kRanks)) << i;
  }
}

/// The link is lost, once more, and what the victim wrote into is given back.
void expect_retired(const Daemon& survivor, uint64_t whole_heap, uint64_t losses) {
  EXPECT_TRUE(wait_until([&] { return Seen(survivor).losses == losses; })) << Seen(survivor).losses;
  EXPECT_TRUE(wait_until([&] { return Seen(survivor).heap < whole_heap; })) << Seen(survivor).heap;
}

/// The victim as a source, and again as a server, with the bits that it had in its first life.
void expect_back(const Daemons& world, Asker& asker, Question& both, Tally& tally, uint64_t whole_heap) {
  until_ok(asker, both, tally);
  Asker returned(world[kVictim].socket());
  until_ok(returned, both, tally);
  EXPECT_TRUE(wait_until([&] { return Seen(world[0]).heap == whole_heap; }))
      << Seen(world[0]).heap << " " << whole_heap;
}

TEST_F(CudaDeath, TwentyKillsWithCallsPending) {
  const auto world = this->world(kLongPassUs);
  Question both = for_both();
  Question own = for_itself();
  Asker asker((*world)[0].socket());
  Tally tally;
  until_ok(asker, both, tally);
  const Seen before((*world)[0]);
  int pending = 0;
  for (int kill = 0; kill < kTimes && !HasFatalFailure(); ++kill) {
    asker.submit(both);
    test::sleep_ms(kill % 20);
    (*world)[kVictim].kill();
    const moed_reply_t reply = asker.wait();
    tally.add(reply.status);
    if (reply.status != MOED_OK) {
      ++pending;
      EXPECT_EQ(reply.status, uint32_t{MOED_PEER_LOST}) << kill;
      EXPECT_TRUE(test::names_only(reply, kVictim)) << reply.ranks[0];
    }
    undisturbed(asker, own);
    expect_retired((*world)[0], before.heap, static_cast<uint64_t>(kill) + 1);
    (*world)[kVictim].start();
    (*world)[kVictim].wait_ready();
    expect_back(*world, asker, both, tally, before.heap);
  }
  EXPECT_GT(pending, kTimes / 2) << "the kills came too late to find calls pending";
  EXPECT_EQ(Seen((*world)[0]).incarnation, before.incarnation) << "the survivor is another one";
  std::printf("%d kills on %d GPUs, %d with the call pending; longest call %llu ms;%s\n", kTimes, gpus_, pending,
              static_cast<unsigned long long>(asker.longest() / 1'000'000), tally.text().c_str());
}

TEST_F(CudaDeath, TwentyStopsWithCallsPending) {
  const auto world = this->world(0);
  Question both = for_both();
  Question own = for_itself();
  Asker patient((*world)[0].socket());
  Asker hasty((*world)[0].socket(), 200'000);  // less than the heartbeat takes to tell: peer_timeout first
  Tally tally;
  until_ok(patient, both, tally);
  until_ok(hasty, both, tally);
  const Seen before((*world)[0]);
  for (int stop = 0; stop < kTimes && !HasFatalFailure(); ++stop) {
    (*world)[kVictim].freeze();
    test::sleep_ms(kQueueEndsMs);
    patient.submit(both);
    for (Asker* asker : {&hasty, &patient}) {
      const moed_reply_t reply = asker == &hasty ? hasty.ask(both) : patient.wait();
      tally.add(reply.status);
      EXPECT_EQ(reply.status, asker == &hasty ? uint32_t{MOED_PEER_TIMEOUT} : uint32_t{MOED_PEER_LOST}) << stop;
      EXPECT_TRUE(test::names_only(reply, kVictim)) << reply.ranks[0];
    }
    undisturbed(patient, own);
    expect_retired((*world)[0], before.heap, static_cast<uint64_t>(stop) + 1);
    (*world)[kVictim].thaw();
    expect_back(*world, patient, both, tally, before.heap);
    until_ok(hasty, both, tally);
  }
  EXPECT_EQ(Seen((*world)[0]).incarnation, before.incarnation) << "the survivor is another one";
  std::printf("%d stops on %d GPUs; longest calls %llu and %llu ms;%s\n", kTimes, gpus_,
              static_cast<unsigned long long>(hasty.longest() / 1'000'000),
              static_cast<unsigned long long>(patient.longest() / 1'000'000), tally.text().c_str());
}

}  // namespace
}  // namespace moed
