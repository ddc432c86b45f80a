// The canary of one rank in a world of this process: answers, flipped bits, ranks that are late, lost or back.
#include "daemon/canary.h"

#include <gtest/gtest.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <thread>

#include "tests/support/cases.h"
#include "tests/support/synthetic.h"
#include "tests/support/world.h"

namespace moed {
namespace {

using test::SyntheticModel;
using test::World;
using test::WorldOptions;

constexpr uint32_t kRanks = 4;
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr uint32_t kEach = 3;  // of the experts: a sanitizer's pace is ten times slower
#else
constexpr uint32_t kEach = 1;
#endif

/// Two layers of 16 experts, of which a token names four: two rounds ask for every expert once.
Shape two_rounds() {
  Shape s = make_shape(128, 128, 64, 16, 4);
  s.layers = 2;
  return s;
}

class CanaryTest : public testing::Test {
 protected:
  void make(const Shape& shape, uint32_t max_call_tokens = 4096, bool experts = true, uint32_t deadline_ms = 20'000) {
    model_ = std::make_unique<SyntheticModel>(shape, 7);
    WorldOptions o;
    o.shape = shape;
    o.ranks = kRanks;
    o.lanes = 1;
    o.max_tokens = 8;
    o.max_call_tokens = max_call_tokens;
    o.linked = false;
    o.deadline_ms = deadline_ms;
    if (experts) o.weights = [this](uint32_t r) { return model_->of_rank(r, kRanks); };
    world_ = std::make_unique<World>(o);
    CanaryOptions c;
    c.shape = shape;
    c.ranks = kRanks;
    c.max_call_tokens = max_call_tokens;
    c.experts = experts;
    c.period_ms = 1;
    canary_ = std::make_unique<Canary>(io_, c, world_->backend(0), world_->service(0), world_->metrics(0));
    canary_->start([this] { return lives_; }, [] {});
  }

  void TearDown() override {
    if (canary_) canary_->stop();
    if (!world_) return;
    world_->service(0).stop();  // as the daemon does before it lets its parts go
    canary_.reset();
    world_.reset();
  }

  void link(uint32_t rank) {
    world_->link(0, rank, ++session_);
    lives_[rank] = session_;
    canary_->look();
  }
  void link_all() {
    for (uint32_t r = 1; r < kRanks; ++r) link(r);
  }
  /// Rank 3 is never told that its end is ready, so it looks at no call line.
  void link_to_the_silent() {
    world_->map(0, 3);
    world_->ready(0, 3, 77);
    lives_[3] = 77;
    canary_->look();
  }
  void lose(uint32_t rank) {
    world_->lose(0, rank);
    lives_[rank] = 0;
    canary_->look();
  }

  uint64_t count(uint32_t rank, const std::string& result) {
    const std::string text = world_->metrics(0).text({});
    const std::string series = "\nmoed_canary_total{peer=\"" + std::to_string(rank) + "\",result=\"" + result + "\"} ";
    const size_t at = text.find(series);
    return at == std::string::npos ? 0 : std::strtoull(text.c_str() + at + series.size(), nullptr, 10);
  }
  /// Runs until `rank` has had so many more rounds that ended with any result.
  void rounds(uint64_t n, uint32_t rank = 0) {
    const auto all = [&] { return count(rank, "ok") + count(rank, "wrong") + count(rank, "late"); };
    const uint64_t enough = all() + n;
    for (const Nanos until = now_ns() + 30'000'000'000; all() < enough;) {
      ASSERT_LT(now_ns(), until) << "a round of the canary does not end";
      io_.run_one_for(std::chrono::milliseconds(50));
    }
  }
  std::string missing() const {
    std::string all;
    for (const std::string& m : canary_->missing()) all += (all.empty() ? "" : "; ") + m;
    return all;
  }

  boost::asio::io_context io_{1};
  std::unique_ptr<SyntheticModel> model_;
  std::unique_ptr<World> world_;
  std::unique_ptr<Canary> canary_;
  std::vector<uint64_t> lives_ = {0, 0, 0, 0};  // the own rank needs no link
  uint32_t session_ = 0;
};

TEST_F(CanaryTest, EveryRankHasToAnswerAndThenNothingIsMissing) {
  make(two_rounds());
  rounds(1);
  EXPECT_EQ(missing(), "");  // whose links are not ready is missing already
  link(2);
  EXPECT_EQ(missing(), "canary 2: no answer yet");
  rounds(2);
  EXPECT_EQ(missing(), "");
  link_all();
  rounds(10);
  EXPECT_EQ(missing(), "");
  for (uint32_t r = 0; r < kRanks; ++r) {
    EXPECT_GE(count(r, "ok"), 8U) << "rank " << r;
    EXPECT_EQ(count(r, "wrong") + count(r, "late"), 0U) << "rank " << r;
  }
}

/// One bit of every expert of every layer and rank in turn: two rounds see it, the next two see it put right.
TEST_F(CanaryTest, AFlippedBitOfAnyExpertIsNamedWithinTwoRounds) {
  const Shape shape = two_rounds();
  make(shape);
  link_all();
  rounds(4);
  for (uint32_t layer = 1; layer <= 2; ++layer)
    for (uint32_t expert = 0; expert < shape.experts; expert += kEach) {
      const uint32_t rank = expert / 4;
      const std::string who = "canary " + std::to_string(rank) + ": wrong at layer " + std::to_string(layer) +
                              ", experts " + std::to_string(rank * 4) + " to " + std::to_string(rank * 4 + 3);
      model_->flip_scale(layer, expert);
      rounds(2);
      ASSERT_EQ(missing(), who) << "expert " << expert;
      model_->flip_scale(layer, expert);
      rounds(2);
      ASSERT_EQ(missing(), "") << "expert " << expert;
    }
}

/// Three quarters of all experts wait for a later round where a token names only one of four.
TEST_F(CanaryTest, EveryExpertIsSeenInTurn) {
  Shape shape = two_rounds();
  shape.top_k = 1;
  make(shape);
  link_all();
  rounds(8);
  for (const uint32_t expert : {0U, 6U, 15U}) {
    model_->flip_scale(2, expert);
    rounds(8);
    const std::string number = std::to_string(expert);
    EXPECT_EQ(missing(),
              "canary " + std::to_string(expert / 4) + ": wrong at layer 2, experts " + number + " to " + number);
    model_->flip_scale(2, expert);
    rounds(8);
    EXPECT_EQ(missing(), "");
  }
}

/// How many flips of one weight's sign change an answer is a property of the model; printed, and not nothing.
TEST_F(CanaryTest, SignsOfSingleWeights) {
  const Shape shape = two_rounds();
  make(shape);
  link_all();
  rounds(4);
  uint32_t found = 0;
  for (uint32_t expert = 0; expert < shape.experts; ++expert) {
    model_->flip_sign(1, expert);
    rounds(2);
    found += missing().empty() ? 0 : 1;
    model_->flip_sign(1, expert);
    rounds(2);
    ASSERT_EQ(missing(), "");
  }
  std::printf("a sign of W1 flipped: seen in %u of %u experts\n", found, shape.experts);
  EXPECT_GT(found, 0U);
}

TEST_F(CanaryTest, ALateRankIsNamedAndTheOthersAreAskedWithoutIt) {
  make(two_rounds(), 4096, true, 1'000);
  link(1);
  link(2);
  rounds(2);
  link_to_the_silent();
  rounds(1, 3);
  EXPECT_EQ(missing(), "canary 3: late");
  const uint64_t before = count(2, "ok");
  rounds(1, 3);
  EXPECT_GT(count(2, "ok"), before);
  EXPECT_GE(count(3, "late"), 2U);
  model_->flip_scale(1, 8);
  rounds(2, 3);
  EXPECT_EQ(missing(), "canary 2: wrong at layer 1, experts 8 to 11; canary 3: late");
  model_->flip_scale(1, 8);
  world_->ready(3, 0, 77);
  rounds(4, 3);
  EXPECT_EQ(missing(), "");
}

TEST_F(CanaryTest, ARankThatIsBackHasToAnswerAsBefore) {
  make(two_rounds());
  link_all();
  rounds(4);
  lose(1);
  EXPECT_EQ(missing(), "");
  rounds(2);
  model_->flip_scale(1, 5);  // it comes back with other weights
  link(1);
  EXPECT_EQ(missing(), "canary 1: no answer yet");
  rounds(2, 1);
  EXPECT_EQ(missing(), "canary 1: wrong at layer 1, experts 4 to 7");
}

TEST_F(CanaryTest, ARankThatIsBackWithItsWeightsPutRightIsRightAtOnce) {
  Shape shape = two_rounds();
  shape.layers = 6;  // its turn would come again after six rounds
  make(shape);
  link_all();
  rounds(12);
  for (const uint32_t layer : {2U, 5U}) model_->flip_scale(layer, 5);
  rounds(6);
  EXPECT_EQ(missing(), "canary 1: wrong at layer 2, experts 4 to 7 and 1 more");
  lose(1);
  for (const uint32_t layer : {2U, 5U}) model_->flip_scale(layer, 5);
  link(1);
  rounds(2, 1);
  EXPECT_EQ(missing(), "");
}

/// Rank 3 is late, so the round lasts; meanwhile rank 1, which has answered in it, is lost and comes back.
TEST_F(CanaryTest, AnAnswerOfAFormerLifeOfTheLinkIsNone) {
  make(two_rounds(), 4096, true, 1'000);
  link(1);
  link(2);
  rounds(2);
  link_to_the_silent();
  io_.run_one_for(std::chrono::milliseconds(50));
  lose(1);
  link(1);
  EXPECT_EQ(missing().substr(0, 24), "canary 1: no answer yet;");
  rounds(1, 3);
  EXPECT_EQ(missing().substr(0, 24), "canary 1: no answer yet;") << "what was on its way counts";
  rounds(1, 1);
  EXPECT_EQ(missing(), "canary 3: late");
}

/// Seven experts over four ranks, three of which a token names; then one token a call.
TEST_F(CanaryTest, UnevenRanks) {
  for (const uint32_t max_call_tokens : {4096U, 1U}) {
    Shape shape = make_shape(64, 64, 32, 7, 3);
    make(shape, max_call_tokens);
    link_all();
    rounds(2);
    EXPECT_EQ(missing(), "");
    model_->flip_scale(1, 6);
    rounds(1);
    EXPECT_EQ(missing(), "canary 3: wrong at layer 1, experts 5 to 6");
    TearDown();
    lives_ = {0, 0, 0, 0};
  }
}

TEST_F(CanaryTest, CallsMayHaveFewerTokensThanTheWorldHasRanks) {
  make(two_rounds(), 3);
  link_all();
  rounds(4);
  EXPECT_EQ(missing(), "");
  model_->flip_scale(2, 13);
  rounds(2);
  EXPECT_EQ(missing(), "canary 3: wrong at layer 2, experts 12 to 15");
}

TEST_F(CanaryTest, AModelWithoutExpertsHasTheIdentity) {
  make(two_rounds(), 4096, false);
  link_all();
  rounds(3);
  EXPECT_EQ(missing(), "");
  EXPECT_GE(count(3, "ok"), 2U);
}

}  // namespace
}  // namespace moed
