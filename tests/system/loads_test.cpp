// Ranks with different loads, at different layers, all at once: nobody waits for anybody's call, every answer is right
// and every call ends in time. F15, F17.
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
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
constexpr uint32_t kMostTokens = 16;  // limits.max_tokens of these daemons
constexpr int kCalls = 10'000, kCallsOfAPattern = 500;

const QuestionModel& model() {
  static const QuestionModel m;
  return m;
}

Daemons& world() {
  static Daemons w(kRanks, QuestionModel::sets());
  return w;
}

/// Every layer that is served with every number of tokens.
class Book {
 public:
  explicit Book(uint64_t seed) {
    for (const uint32_t layer : {1U, 2U, uint32_t{MOED_LAYER_IDENTITY}})
      for (uint32_t tokens = 0; tokens <= kMostTokens; ++tokens)
        questions_.push_back(test::question(layer, tokens, kRanks, seed + tokens, [](uint32_t) { return true; }));
  }
  Question& at(uint32_t layer, uint32_t tokens) {
    const uint32_t place = layer == MOED_LAYER_IDENTITY ? 2 : layer - 1;
    return questions_[place * (kMostTokens + 1) + tokens];
  }

 private:
  std::vector<Question> questions_;
};

/// A thread a rank, each with `calls` calls; `next` says of which layer and how large.
void load(const char* name, int calls, const std::function<std::pair<uint32_t, uint32_t>(uint32_t rank, int i)>& next) {
  Tally tally;
  std::atomic<Nanos> longest{0};
  const Daemons& daemons = world();  // here: a daemon lives as long as the thread that started it
  std::vector<std::thread> engines;
  for (uint32_t rank = 0; rank < kRanks; ++rank)
    engines.emplace_back([&, rank] {
      Book book(rank * 100);
      Asker asker(daemons[rank].socket());
      for (int i = 0; i < calls; ++i) {
        const auto [layer, tokens] = next(rank, i);
        Question& q = book.at(layer, tokens);
        const moed_reply_t reply = asker.ask(q);
        tally.add(reply.status);
        if (reply.status != MOED_OK || !asker.right(q, model(), kRanks)) {
          ADD_FAILURE() << "rank " << rank << " call " << i << " layer " << layer << " tokens " << tokens << " status "
                        << reply.status;
          break;
        }
      }
      Nanos seen = longest;
      while (seen < asker.longest() && !longest.compare_exchange_weak(seen, asker.longest())) {
      }
    });
  for (std::thread& engine : engines) engine.join();
  EXPECT_EQ(tally.of(Status::ok), uint64_t{kRanks} * static_cast<uint64_t>(calls));
  std::printf("%s: %u engines;%s; longest call %llu ms\n", name, kRanks, tally.text().c_str(),
              static_cast<unsigned long long>(longest / 1'000'000));
}

void pattern(const char* name, const std::array<uint32_t, kRanks>& tokens) {
  load(name, kCallsOfAPattern, [&](uint32_t rank, int i) {
    return std::pair{1 + (rank + static_cast<uint32_t>(i)) % 2, tokens[rank]};  // neighbours are at different layers
  });
}

TEST(Loads, OneRankWithoutTokens) { pattern("T = 0, 5, 5, 5", {0, 5, 5, 5}); }
TEST(Loads, OneRankWithTokens) { pattern("T = 0, 0, 0, 5", {0, 0, 0, 5}); }
TEST(Loads, NobodyWithTokens) { pattern("T = 0", {0, 0, 0, 0}); }

TEST(Loads, TenThousandCallsOfRandomSizesAtRandomLayers) {
  std::array<std::mt19937, kRanks> random{std::mt19937{1}, std::mt19937{2}, std::mt19937{3}, std::mt19937{4}};
  load("random T", kCalls / static_cast<int>(kRanks), [&](uint32_t rank, int) {
    const auto layer = static_cast<uint32_t>(random[rank]() % 3);
    return std::pair{layer == 2 ? uint32_t{MOED_LAYER_IDENTITY} : layer + 1,
                     static_cast<uint32_t>(random[rank]() % (kMostTokens + 1))};
  });
}

/// Only one engine calls: the others' ranks serve it without any call of their own.
TEST(Loads, IdleRanksServe) {
  Question q = test::question(1, 16, kRanks, 77, [](uint32_t) { return true; });
  Asker asker(world()[3].socket());
  for (int i = 0; i < kCallsOfAPattern; ++i) {
    ASSERT_EQ(asker.ask(q).status, uint32_t{MOED_OK});
    ASSERT_TRUE(asker.right(q, model(), kRanks));
  }
}

}  // namespace
}  // namespace moed
