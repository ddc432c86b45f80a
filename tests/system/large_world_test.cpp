// A world of 72 real daemons, as many as an NVL72 has GPUs, with Kimi K3's 896 experts and top-16: 12 or 13 experts a
// rank. Whatever rank is asked, its answer is the float64 oracle's for 72 ranks, and the same bits from every rank.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <functional>
#include <memory>
#include <nlohmann/json.hpp>
#include <numeric>
#include <random>

#include "tests/support/cases.h"
#include "tests/support/daemons.h"
#include "tests/support/process.h"
#include "tests/support/synthetic.h"
#include "tests/support/tolerance.h"

namespace moed {
namespace {

using Clock = std::chrono::steady_clock;
using test::Daemons;
using test::Lane;

constexpr uint32_t kRanks = 72;
constexpr uint32_t kLayers = 2;
constexpr uint64_t kSeed = 9;
constexpr uint32_t kTokens = 7;
constexpr uint32_t kPieceTokens = 16;         // limits.max_tokens
constexpr uint32_t kDeadlineUs = 30'000'000;  // generous: 72 daemons share a few cores
constexpr std::chrono::seconds kLeaveWithin{30};
constexpr std::array<uint32_t, 8> kSources = {0, 1, 17, 35, 36, 53, 70, 71};

Shape served_shape() {
  Shape s = make_shape(128, 128, 64, 896, 16);
  s.layers = kLayers;
  return s;
}

const test::SyntheticModel& model() {
  static const test::SyntheticModel m(served_shape(), kSeed);
  return m;
}

/// Where the experts of a rank begin, written out: what the daemons do is not asked.
uint32_t first_of(uint32_t rank) { return rank * 896 / 72; }

std::string layer_name(uint32_t layer) {
  return layer == MOED_LAYER_IDENTITY ? "identity" : "layer " + std::to_string(layer);
}

/// Rows of the table's random routing; the caller chooses the experts.
oracle::Rows rows_with(uint32_t tokens, uint64_t seed, const std::function<uint32_t(uint32_t t, uint32_t k)>& expert) {
  const Shape s = served_shape();
  oracle::Rows rows = make_rows(Routing::random, s, kRanks, tokens, seed);
  for (uint32_t t = 0; t < tokens; ++t)
    for (uint32_t k = 0; k < s.top_k; ++k) rows.ids[t * s.top_k + k] = static_cast<int32_t>(expert(t, k));
  return rows;
}

/// Distinct experts from all over the world, as a router chooses them: the table's own random ones are neighbours.
oracle::Rows scattered(uint32_t tokens, uint64_t seed) {
  std::mt19937_64 random(seed);
  std::vector<uint32_t> experts(served_shape().experts);
  std::iota(experts.begin(), experts.end(), 0U);
  return rows_with(tokens, seed, [&](uint32_t, uint32_t k) {
    std::swap(experts[k], experts[k + random() % (experts.size() - k)]);
    return experts[k];
  });
}

class LargeWorld : public testing::Test {
 protected:
  static void SetUpTestSuite() {
    world_ = std::make_unique<Daemons>(
        kRanks,
        Daemons::Sets{"model.source=synthetic", "model.seed=" + std::to_string(kSeed),
                      "model.shape={hidden: 128, latent: 128, intermediate: 64, experts: 896, top_k: 16, layers: 2}",
                      "limits.lanes=1", "limits.max_tokens=" + std::to_string(kPieceTokens), "limits.arena_mb=1",
                      "heartbeat.interval_ms=1000", "heartbeat.lost_after_ms=10000", "http.listen="});
    for (uint32_t r = 0; r < kRanks; ++r) lanes_.push_back(std::make_unique<Lane>((*world_)[r].socket()));
  }

  /// All are told to leave at once, their engines being attached; each leaves with 0.
  static void TearDownTestSuite() {
    if (!world_) return;
    for (uint32_t r = 0; r < kRanks; ++r) (*world_)[r].signal(SIGTERM);
    const auto end = Clock::now() + kLeaveWithin;
    for (uint32_t r = 0; r < kRanks; ++r) {
      const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(end - Clock::now());
      EXPECT_EQ((*world_)[r].reap(std::max(static_cast<int>(left.count()), 0)), 0) << (*world_)[r].log();
    }
    lanes_.clear();
    world_.reset();
  }

  void SetUp() override { ASSERT_EQ(lanes_.size(), kRanks) << "the world did not start"; }

  static moed_call_t lay_out(uint32_t rank, const oracle::Rows& rows, uint32_t layer, uint32_t flags) {
    const Lane& lane = *lanes_[rank];
    moed_call_t call = lane.slot(layer, static_cast<uint32_t>(rows.ids.size() / served_shape().top_k));
    call.flags = flags;
    call.timeout_us = kDeadlineUs;
    lane.put(call.x, rows.x);
    lane.put(call.ids, rows.ids);
    lane.put(call.weights, rows.weights);
    lane.put(call.out, std::vector<uint16_t>(uint64_t{call.tokens} * served_shape().latent, 0x7FFF));
    return call;
  }

  /// What the rank answers; nothing if it does not.
  static std::vector<uint16_t> ask(uint32_t rank, const oracle::Rows& rows, uint32_t layer, uint32_t flags) {
    const moed_call_t call = lay_out(rank, rows, layer, flags);
    moed_reply_t reply{};
    const moed_status status = moed_call(lanes_[rank]->get(), &call, &reply);
    EXPECT_EQ(status, uint32_t{MOED_OK}) << moed_status_name(status) << ": " << moed_last_error(lanes_[rank]->get());
    return status == MOED_OK ? lanes_[rank]->out(call) : std::vector<uint16_t>{};
  }

  static oracle::Result right(const oracle::Rows& rows, uint32_t layer) {
    oracle::Layer m = oracle_layer(served_shape());
    if (layer != MOED_LAYER_IDENTITY) m.expert = [layer](uint32_t e) { return model().values(layer, e); };
    return oracle::routed(m, rows, kRanks);
  }

  static void expect_close(const std::vector<uint16_t>& got, const std::vector<uint16_t>& want) {
    const Closeness c = compare_rows(got, want, served_shape().latent);
    EXPECT_TRUE(c.ok) << c.text();
  }

  /// From some ranks, with and without the norm. The identity layer's sum has the oracle's very bits.
  static void check(const oracle::Rows& rows, uint32_t layer) {
    const oracle::Result result = right(rows, layer);
    for (const uint32_t flags : {0U, uint32_t{MOED_FLAG_NO_NORM}}) {
      std::vector<uint16_t> first;
      for (const uint32_t rank : kSources) {
        SCOPED_TRACE(layer_name(layer) + (flags == 0 ? ", norm" : ", no norm") + ", from rank " + std::to_string(rank));
        const std::vector<uint16_t> got = ask(rank, rows, layer, flags);
        expect_close(got, flags == 0 ? result.out : result.latent);
        if (layer == MOED_LAYER_IDENTITY && flags != 0) {
          EXPECT_EQ(got, result.latent);
        }
        if (rank == kSources.front()) first = got;
        EXPECT_EQ(got, first) << "other bits than from rank 0";
      }
    }
  }

  static inline std::unique_ptr<Daemons> world_;
  static inline std::vector<std::unique_ptr<Lane>> lanes_;
};

TEST_F(LargeWorld, EachRankSaysThatAllLinksAreReady) {
  for (uint32_t r = 0; r < kRanks; ++r) {
    SCOPED_TRACE("rank " + std::to_string(r));
    const auto status = nlohmann::json::parse((*world_)[r].status_json());
    EXPECT_EQ(status.at("rank"), r);
    EXPECT_EQ(status.at("ranks"), kRanks);
    EXPECT_EQ(status.at("ready"), true);
    EXPECT_EQ(status.at("missing").size(), 0U) << status.at("missing");
    EXPECT_FALSE(status.contains("truncated"));
    std::vector<uint32_t> ready;
    for (const auto& peer : status.at("peers"))
      if (peer.at("link") == "ready") ready.push_back(peer.at("rank"));
    std::sort(ready.begin(), ready.end());
    std::vector<uint32_t> others(kRanks);
    std::iota(others.begin(), others.end(), 0U);
    others.erase(others.begin() + r);
    EXPECT_EQ(ready, others);
  }
}

TEST_F(LargeWorld, EveryRoutingOfTheTable) {
  for (const Routing routing : kRoutings) {
    SCOPED_TRACE(name(routing));
    const oracle::Rows rows = make_rows(routing, served_shape(), kRanks, kTokens, 4);
    for (const uint32_t layer : {1U, 2U, MOED_LAYER_IDENTITY}) check(rows, layer);
  }
}

TEST_F(LargeWorld, ExpertsFromAllOver) {
  for (const uint32_t layer : {1U, 2U, MOED_LAYER_IDENTITY}) check(scattered(kTokens, layer), layer);
}

/// Two great weights cancel out; what was added between them has lost bits, in another order others.
TEST_F(LargeWorld, PartialsAreAddedInRankOrder) {
  oracle::Rows rows = scattered(kTokens, 8);
  for (uint32_t t = 0; t < kTokens; ++t) {
    rows.weights[t * served_shape().top_k] = 0x1p22F;
    rows.weights[t * served_shape().top_k + 1] = -0x1p22F;
  }
  check(rows, MOED_LAYER_IDENTITY);
}

/// A range that is one off shows here. A token names ranks that are no neighbours, each by one end of its range:
/// whoever sends a row to the wrong one does not also send it to the right one.
TEST_F(LargeWorld, FirstAndLastExpertOfEveryRank) {
  ASSERT_EQ(first_of(kRanks), served_shape().experts);
  const uint32_t tokens = 2 * kRanks / served_shape().top_k;  // 9: each end once
  const oracle::Rows rows = rows_with(tokens, 5, [&](uint32_t t, uint32_t k) {
    const uint32_t n = k * tokens + t;
    return n % 2 == 0 ? first_of(n / 2) : first_of(n / 2 + 1) - 1;
  });
  for (const uint32_t layer : {1U, 2U}) check(rows, layer);
}

/// One rank serves all rows of a call, its own or another's.
TEST_F(LargeWorld, AllExpertsOfOneRank) {
  for (const uint32_t owner : {0U, 1U, 36U, 71U}) {
    SCOPED_TRACE("experts of rank " + std::to_string(owner));
    const uint32_t count = first_of(owner + 1) - first_of(owner);
    EXPECT_TRUE(count == 12 || count == 13) << count;
    check(rows_with(kTokens, owner, [&](uint32_t t, uint32_t k) { return first_of(owner) + (t + k) % count; }), 1);
  }
}

TEST_F(LargeWorld, MoreTokensThanAPieceHolds) { check(scattered(2 * kPieceTokens + 5, 6), 2); }

/// Every rank is a source and serves all others meanwhile; alone it gets the same bits.
TEST_F(LargeWorld, AllRanksAskAtOnce) {
  const auto layer_of = [](uint32_t rank) { return 1 + rank % kLayers; };
  std::vector<oracle::Rows> rows;
  for (uint32_t r = 0; r < kRanks; ++r) rows.push_back(scattered(1 + r % kTokens, 100 + r));
  std::vector<moed_call_t> calls;
  for (uint32_t r = 0; r < kRanks; ++r) calls.push_back(lay_out(r, rows[r], layer_of(r), MOED_FLAG_NO_NORM));
  for (uint32_t r = 0; r < kRanks; ++r) ASSERT_EQ(moed_submit(lanes_[r]->get(), &calls[r]), uint32_t{MOED_OK});
  std::vector<std::vector<uint16_t>> together;
  for (uint32_t r = 0; r < kRanks; ++r) {
    moed_reply_t reply{};
    const moed_status status = moed_wait(lanes_[r]->get(), &reply, kDeadlineUs + 100'000);
    ASSERT_EQ(status, uint32_t{MOED_OK}) << "rank " << r << ": " << moed_status_name(status);
    together.push_back(lanes_[r]->out(calls[r]));
  }
  for (uint32_t r = 0; r < kRanks; ++r) {
    SCOPED_TRACE("from rank " + std::to_string(r));
    expect_close(together[r], right(rows[r], layer_of(r)).latent);
    EXPECT_EQ(ask(r, rows[r], layer_of(r), MOED_FLAG_NO_NORM), together[r]);
  }
}

}  // namespace
}  // namespace moed
