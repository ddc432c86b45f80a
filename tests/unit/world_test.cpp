// The links' state machine: two ends driven by hand agree on states and sessions whatever the order of messages, deaths
// and returns; and every field of a Hello that differs is named with both values.
#include "control/world.h"

#include <gtest/gtest.h>

#include <functional>
#include <random>

namespace moed::control {
namespace {

constexpr Nanos kLostAfter = 1'000'000'000;

TEST(World, ALinkComesUpInAnyOrder) {
  World w(0, 3, kLostAfter);
  EXPECT_FALSE(w.ready());
  EXPECT_EQ(w.missing(), (std::vector<std::string>{"link 1: connecting", "link 2: connecting"}));
  EXPECT_FALSE(w.we_mapped(1));  // not proven
  EXPECT_FALSE(w.proven(1, 77, 0, 10).has_value());
  EXPECT_EQ(w.peer(1).session, 1U);
  EXPECT_FALSE(w.they_mapped(1));
  EXPECT_TRUE(w.we_mapped(1));
  EXPECT_EQ(w.peer(1).state, State::mapped);
  EXPECT_FALSE(w.they_are_ready(1, 2));  // of another session
  EXPECT_FALSE(w.they_are_ready(1, 1));
  EXPECT_TRUE(w.we_are_ready(1));
  EXPECT_EQ(w.peer(1).state, State::ready);
  EXPECT_EQ(w.missing(), std::vector<std::string>{"link 2: connecting"});
  EXPECT_FALSE(w.proven(2, 78, 0, 10).has_value());
  EXPECT_FALSE(w.they_are_ready(2, 1));  // ready may come before mapped
  EXPECT_FALSE(w.we_are_ready(2));
  EXPECT_FALSE(w.we_mapped(2));
  EXPECT_TRUE(w.they_mapped(2));
}

TEST(World, OnlyMessagesOfThisLifeInOrderCount) {
  World w(0, 2, kLostAfter);
  EXPECT_FALSE(w.heard(1, 77, 1, 5));  // nobody proven yet
  EXPECT_FALSE(w.proven(1, 77, 0, 5).has_value());
  EXPECT_TRUE(w.heard(1, 77, 1, 6));
  EXPECT_FALSE(w.heard(1, 77, 1, 7));  // said again
  EXPECT_FALSE(w.heard(1, 76, 2, 7));  // another life
  EXPECT_FALSE(w.heard(0, 77, 2, 7));  // our own rank
  EXPECT_FALSE(w.heard(2, 77, 2, 7));  // no such rank
  EXPECT_TRUE(w.heard(1, 77, 5, 8));
  EXPECT_EQ(w.peer(1).heard, 8U);
}

TEST(World, ALivingLinkIsNotReplaced) {
  World w(0, 2, kLostAfter);
  EXPECT_FALSE(w.proven(1, 77, 0, 5).has_value());
  const auto refusal = w.proven(1, 78, 0, 6);
  ASSERT_TRUE(refusal.has_value());
  EXPECT_NE(refusal->find("rank 1 is linked already"), std::string::npos);
  EXPECT_TRUE(w.lose(1, Loss::error));
  EXPECT_FALSE(w.lose(1, Loss::error));  // once
  EXPECT_FALSE(w.proven(1, 78, 0, 7).has_value());
  EXPECT_TRUE(w.proven(0, 1, 0, 7).has_value());
}

TEST(World, SilenceIsMeasuredOnOurClockAlone) {
  World w(0, 3, kLostAfter);
  EXPECT_FALSE(w.proven(1, 77, 0, 100).has_value());
  EXPECT_FALSE(w.proven(2, 78, 0, 100).has_value());
  EXPECT_TRUE(w.heard(2, 78, 1, 100 + kLostAfter / 2));
  EXPECT_TRUE(w.silent(100 + kLostAfter).empty());
  EXPECT_EQ(w.silent(101 + kLostAfter), std::vector<uint32_t>{1});
  EXPECT_TRUE(w.lose(1, Loss::heartbeat));
  EXPECT_TRUE(w.silent(101 + kLostAfter).empty());
}

/// Both ends of one link, with deaths and restarts at random: when both are up they have the same session, and no
/// session is used for two lives of a link.
TEST(World, BothEndsAgreeOnSessionsThatNeverRepeat) {
  std::mt19937 random(4);
  auto a = std::make_unique<World>(0, 2, kLostAfter);
  auto b = std::make_unique<World>(1, 2, kLostAfter);
  uint32_t last = 0;
  for (int round = 0; round < 500; ++round) {
    const uint32_t of_a = a->peer(1).greatest_session;
    const uint32_t of_b = b->peer(0).greatest_session;
    ASSERT_FALSE(a->proven(1, random(), of_b, 1).has_value());
    ASSERT_FALSE(b->proven(0, random(), of_a, 1).has_value());
    ASSERT_EQ(a->peer(1).session, b->peer(0).session);
    ASSERT_GT(a->peer(1).session, last);
    last = a->peer(1).session;
    const bool up = random() % 2 == 0;
    if (up) {
      for (World* w : {a.get(), b.get()}) {
        const uint32_t peer = w == a.get() ? 1 : 0;
        w->we_mapped(peer);
        w->they_mapped(peer);
        w->we_are_ready(peer);
        w->they_are_ready(peer, last);
        ASSERT_TRUE(w->ready());
      }
    }
    a->lose(1, Loss::error);
    b->lose(0, Loss::leaving);
    ASSERT_EQ(a->ready(), false);
    if (random() % 5 == 0)
      a = std::make_unique<World>(0, 2, kLostAfter);  // one of them dies; never both
    else if (random() % 5 == 0)
      b = std::make_unique<World>(1, 2, kLostAfter);
  }
}

TEST(World, LossesAreCountedByReasonAndOnlyOfLinksThatWereUp) {
  World w(0, 2, kLostAfter);
  EXPECT_FALSE(w.proven(1, 77, 0, 1).has_value());
  EXPECT_TRUE(w.lose(1, Loss::error));
  EXPECT_EQ(w.peer(1).state, State::connecting);  // it never was up
  EXPECT_EQ(w.peer(1).losses[0], 0U);
  EXPECT_FALSE(w.proven(1, 78, 0, 1).has_value());
  w.we_mapped(1);
  w.they_mapped(1);
  EXPECT_TRUE(w.lose(1, Loss::heartbeat));
  EXPECT_EQ(w.peer(1).state, State::lost);
  EXPECT_EQ(w.peer(1).losses[1], 1U);
  EXPECT_FALSE(w.proven(1, 79, 0, 1).has_value());
  EXPECT_EQ(w.peer(1).losses[1], 1U);
  EXPECT_EQ(w.peer(1).session, 3U);
}

TEST(World, SessionsEnd) {
  World w(0, 2, kLostAfter);
  const auto refusal = w.proven(1, 77, (1U << 20) - 1, 1);
  ASSERT_TRUE(refusal.has_value());
  EXPECT_NE(refusal->find("1048575"), std::string::npos) << *refusal;
}

/// Brings the link with `rank` up.
void bring_up(World& w, uint32_t rank, Nanos now) {
  ASSERT_FALSE(w.proven(rank, 70 + rank, 0, now).has_value());
  w.we_mapped(rank);
  w.they_mapped(rank);
  w.we_are_ready(rank);
  ASSERT_TRUE(w.they_are_ready(rank, w.peer(rank).session));
}

TEST(World, AFarewellEndsNewWorkAndItsLossIsNoError) {
  World w(0, 3, kLostAfter);
  bring_up(w, 1, 1);
  bring_up(w, 2, 1);
  EXPECT_TRUE(w.ready());
  EXPECT_TRUE(w.they_leave(1));
  EXPECT_EQ(w.peer(1).state, State::mapped);  // what runs may end
  EXPECT_TRUE(w.peer(1).leaving);
  EXPECT_EQ(w.missing(), std::vector<std::string>{"link 1: leaving"});
  EXPECT_FALSE(w.they_leave(1));    // said twice
  EXPECT_FALSE(w.we_are_ready(1));  // nothing late makes it ready again
  EXPECT_FALSE(w.they_are_ready(1, 1));
  EXPECT_EQ(w.peer(1).state, State::mapped);
  EXPECT_TRUE(w.lose(1, Loss::error));
  EXPECT_EQ(w.peer(1).losses[static_cast<size_t>(Loss::error)], 0U);
  EXPECT_EQ(w.peer(1).losses[static_cast<size_t>(Loss::leaving)], 1U);
  EXPECT_EQ(w.missing(), std::vector<std::string>{"link 1: lost"});
  bring_up(w, 1, 2);  // and its successor has said nothing of the kind
  EXPECT_FALSE(w.peer(1).leaving);
  EXPECT_TRUE(w.ready());
  EXPECT_TRUE(w.lose(1, Loss::error));
  EXPECT_EQ(w.peer(1).losses[static_cast<size_t>(Loss::error)], 1U);
  EXPECT_EQ(w.peer(2).state, State::ready);
}

TEST(World, AFarewellBeforeALinkIsUpKeepsItFromComingUp) {
  World w(0, 2, kLostAfter);
  EXPECT_FALSE(w.they_leave(1));  // nobody proven yet
  EXPECT_FALSE(w.they_leave(0));  // our own rank
  EXPECT_FALSE(w.peer(1).leaving || w.peer(0).leaving);
  EXPECT_EQ(w.peer(0).state, State::ready);
  EXPECT_FALSE(w.proven(1, 77, 0, 1).has_value());
  EXPECT_FALSE(w.they_leave(1));  // it was not ready
  EXPECT_EQ(w.missing(), std::vector<std::string>{"link 1: leaving"});
  w.we_mapped(1);
  w.they_mapped(1);
  w.we_are_ready(1);
  EXPECT_FALSE(w.they_are_ready(1, 1));
  EXPECT_FALSE(w.ready());
}

TEST(World, WhoWasAwayBlamesNobodyForTheSilence) {
  World w(0, 4, kLostAfter);
  EXPECT_FALSE(w.proven(1, 77, 0, 100).has_value());
  EXPECT_FALSE(w.proven(2, 78, 0, 100).has_value());
  const Nanos back = 100 + 5 * kLostAfter;
  EXPECT_EQ(w.silent(back), (std::vector<uint32_t>{1, 2}));
  w.was_away(back);
  EXPECT_TRUE(w.silent(back + kLostAfter).empty());
  EXPECT_TRUE(w.heard(2, 78, 1, back + 10));
  w.was_away(back);  // a time that is past sets nobody back
  EXPECT_EQ(w.silent(back + kLostAfter + 1), std::vector<uint32_t>{1});
  EXPECT_EQ(w.silent(back + kLostAfter + 11), (std::vector<uint32_t>{1, 2}));  // and rank 3 was never there
}

TEST(World, WhyALinkIsNotReadyIsTheMostThatIsKnown) {
  const struct {
    State state;
    bool leaving;
    Busy busy;
    const char* text;
  } cases[] = {
      {State::ready, false, Busy::no, ""},
      {State::ready, false, Busy::draining, ""},
      {State::connecting, false, Busy::no, "connecting"},
      {State::connecting, false, Busy::loading, "loading"},
      {State::connecting, false, Busy::mapping, "mapping"},
      {State::mapped, false, Busy::no, "mapped"},
      {State::mapped, false, Busy::draining, "draining"},
      {State::mapped, true, Busy::draining, "leaving"},
      {State::connecting, true, Busy::no, "leaving"},
      {State::lost, false, Busy::no, "lost"},
      {State::lost, false, Busy::loading, "lost"},  // of the life that is over
  };
  for (const auto& c : cases)
    EXPECT_EQ(why_not_ready(c.state, c.leaving, c.busy), c.text) << name(c.state) << ' ' << name(c.busy);
  World w(0, 3, kLostAfter);
  HeartbeatBody beat;
  beat.busy = Busy::loading;
  w.beat(1, beat);  // of nobody
  EXPECT_EQ(w.missing(), (std::vector<std::string>{"link 1: connecting", "link 2: connecting"}));
  EXPECT_FALSE(w.proven(1, 77, 0, 1).has_value());
  w.beat(1, beat);
  EXPECT_EQ(w.missing(), (std::vector<std::string>{"link 1: loading", "link 2: connecting"}));
  EXPECT_TRUE(w.lose(1, Loss::error));
  EXPECT_EQ(w.missing(), (std::vector<std::string>{"link 1: connecting", "link 2: connecting"}));
}

Hello good_hello(uint32_t rank) {
  Hello h;
  h.protocol = h.numerics = 1;
  h.rank = rank;
  h.ranks = 4;
  h.lanes = 2;
  h.max_tokens = 128;
  h.handle_kinds = 2;
  h.shape.latent = 256;
  std::snprintf(h.group, sizeof h.group, "moed");
  return h;
}

TEST(Disagreement, EachFieldIsNamedWithBothValues) {
  EXPECT_FALSE(disagreement(good_hello(0), good_hello(3)).has_value());
  const struct {
    const char* part;
    std::function<void(Hello&)> spoil;
  } cases[] = {
      {"group other, here moed", [](Hello& h) { std::snprintf(h.group, sizeof h.group, "other"); }},
      {"protocol 2, here 1", [](Hello& h) { h.protocol = 2; }},
      {"numerics 9, here 1", [](Hello& h) { h.numerics = 9; }},
      {"ranks 5, here 4", [](Hello& h) { h.ranks = 5; }},
      {"rank 4, here 0..3", [](Hello& h) { h.rank = 4; }},
      {"rank 0, here the same", [](Hello& h) { h.rank = 0; }},
      {"lanes 3, here 2", [](Hello& h) { h.lanes = 3; }},
      {"max_tokens 256, here 128", [](Hello& h) { h.max_tokens = 256; }},
      {"transport 1, here 0", [](Hello& h) { h.transport = 1; }},
      {"shape: latent 512, here 256", [](Hello& h) { h.shape.latent = 512; }},
      {"model digest ff00000000000000.., here 0000000000000000..", [](Hello& h) { h.model_digest[0] = 255; }},
      {"weights revision 'b', here ''", [](Hello& h) { h.revision[0] = 'b'; }},
      {"handle kinds 4, here 2", [](Hello& h) { h.handle_kinds = 4; }},
  };
  for (const auto& c : cases) {
    Hello theirs = good_hello(3);
    c.spoil(theirs);
    const auto sentence = disagreement(good_hello(0), theirs);
    ASSERT_TRUE(sentence.has_value()) << c.part;
    EXPECT_NE(sentence->find(c.part), std::string::npos) << *sentence;
  }
  Hello build = good_hello(3);
  std::snprintf(build.build, sizeof build.build, "newer");
  build.incarnation = 5;
  EXPECT_FALSE(disagreement(good_hello(0), build).has_value());
}

}  // namespace
}  // namespace moed::control
