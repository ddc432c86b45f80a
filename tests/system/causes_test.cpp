// A rank is slowed on purpose: in its experts, in its service loop, in its send. Every other rank's metrics name it and
// the cause, and stop doing so when it is over.
#include <gtest/gtest.h>

#include <string>

#include "tests/support/daemons.h"
#include "tests/support/questions.h"
#include "tests/support/scrape.h"

namespace moed {
namespace {

using test::Asker;
using test::Daemons;
using test::metric;
using test::Question;
using test::QuestionModel;

constexpr uint32_t kRanks = 4, kSlow = 2;
constexpr uint32_t kRoundsAfter = 20, kCallsAfter = 100;  // a burst keeps the cores it began with: many short ones
constexpr int kAfterMs = 2'000;
constexpr uint32_t kDelayUs = 2'000;
constexpr uint32_t kCalls = 200;
constexpr int kDrillMs = 10'000;

struct Seen {
  double last;     ///< calls in which the slow rank came last
  double wait[4];  ///< seconds waited for it, by cause
};
constexpr const char* kCauses[] = {"queue", "experts", "send", "wire"};

uint16_t http_port(const Daemons& world, uint32_t rank) {
  const std::string log = world[rank].log();
  const size_t at = log.find(" http=");
  return static_cast<uint16_t>(std::stoul(log.substr(at + 6)));
}

Seen look(const Daemons& world, uint32_t rank) {
  const std::string page = test::get_page(http_port(world, rank), "/metrics");
  Seen seen{};
  seen.last = metric(page, "moed_peer_last_total{peer=\"2\"}");
  for (int c = 0; c < 4; ++c)
    seen.wait[c] = metric(page, std::string("moed_peer_wait_seconds_total{peer=\"2\",cause=\"") + kCauses[c] + "\"}");
  return seen;
}

/// Calls of one engine at `rank`; the share in which the slow rank came last, and the cause that took most.
std::pair<double, std::string> measure(const Daemons& world, uint32_t rank, const Question& q, uint32_t calls) {
  const Seen before = look(world, rank);
  {
    Asker asker(world[rank].socket());
    for (uint32_t i = 0; i < calls; ++i) EXPECT_EQ(asker.ask(q).status, uint32_t{MOED_OK});
  }
  const Seen after = look(world, rank);
  int most = 0;
  for (int c = 1; c < 4; ++c)
    if (after.wait[c] - before.wait[c] > after.wait[most] - before.wait[most]) most = c;
  return {(after.last - before.last) / calls, kCauses[most]};
}

void drill(const std::string& key, const std::string& cause) {
  const Daemons world(kRanks, QuestionModel::sets(), [&](uint32_t rank) {
    return rank == kSlow
               ? Daemons::Sets{key + "=" + std::to_string(kDelayUs), "debug.for_ms=" + std::to_string(kDrillMs)}
               : Daemons::Sets{};
  });
  const Nanos start = now_ns();
  const Question q = test::question(1, 5, kRanks, 1, [](uint32_t) { return true; });
  for (const uint32_t rank : {0U, 1U, 3U}) {
    const auto [share, named] = measure(world, rank, q, kCalls);
    EXPECT_GE(share, 0.9) << "rank " << rank << " " << key;
    EXPECT_EQ(named, cause) << "rank " << rank << " " << key;
    std::printf("%s, rank %u: rank 2 last in %.0f %% of calls, cause %s\n", key.c_str(), rank, share * 100,
                named.c_str());
  }
  ASSERT_LT(now_ns() - start, kDrillMs * 1'000'000ULL) << "the drill ended before the calls did";
  const int over = static_cast<int>((now_ns() - start) / 1'000'000);
  test::sleep_ms(kDrillMs + kAfterMs - over);
  double mean = 0;  // of one rank alone it depends on which core its daemon came to lie
  for (const uint32_t rank : {0U, 1U, 3U}) {
    double share = 0;
    for (uint32_t i = 0; i < kRoundsAfter; ++i) {
      share += measure(world, rank, q, kCallsAfter).first / kRoundsAfter;
      test::sleep_ms(20);
    }
    EXPECT_LT(share, 0.9) << "rank " << rank << " after " << key;
    mean += share / 3;
    std::printf("%s over, rank %u: rank 2 last in %.0f %% of calls\n", key.c_str(), rank, share * 100);
  }
  EXPECT_LT(mean, 0.6) << "after " << key;
}

TEST(Causes, SlowExperts) { drill("debug.experts_delay_us", "experts"); }
TEST(Causes, SlowServiceLoop) { drill("debug.loop_delay_us", "queue"); }
TEST(Causes, SlowSend) { drill("debug.send_delay_us", "send"); }

}  // namespace
}  // namespace moed
