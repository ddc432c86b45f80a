// Faults that others met in the field, with the values that docs/faults.md names, in worlds in this process. Identity
// layers have one right set of bits, so every element is compared bit for bit unless a test says otherwise.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>

#include "tests/support/jobs.h"
#include "tests/support/ranks.h"
#include "tests/support/synthetic.h"
#include "tests/support/tolerance.h"

namespace moed {
namespace {

using test::Engine;
using test::expect_all;
using test::Job;
using test::job_of;
using test::pick_rows;
using test::Ranks;
using test::status_of;
using test::SyntheticModel;
using test::world_of;
using test::WorldOptions;

/// The experts and slots of Kimi K3; narrow rows, for they are not what is looked at.
Shape many_experts() { return make_shape(64, 64, 32, 896, 16); }

Job identity(const oracle::Rows& rows) { return job_of(rows, kIdentityLayer, kFlagNoNorm); }

/// The first element that differs, NaN being equal to NaN; -1: none.
std::ptrdiff_t first_difference(const std::vector<uint16_t>& a, const std::vector<uint16_t>& b) {
  if (a.size() != b.size()) return static_cast<std::ptrdiff_t>(std::min(a.size(), b.size()));
  for (size_t i = 0; i < a.size(); ++i)
    if (a[i] != b[i] && (bf16_ulps(a[i], b[i]) != 0 || (a[i] & 0x7FFF) == 0)) return static_cast<std::ptrdiff_t>(i);
  return -1;
}

std::vector<uint16_t> row_of(const std::vector<uint16_t>& rows, uint32_t t, uint32_t latent) {
  return {rows.begin() + t * latent, rows.begin() + (t + 1) * latent};
}

/// Calls of each rank with T of its own, out of a pool of rows whose answers are known.
class UnevenTokens : public testing::TestWithParam<uint32_t> {
 protected:
  static constexpr uint32_t kMost = 512;

  UnevenTokens() : ranks_(world_of(shape(), GetParam(), kMost)) {
    ranks_.attach(GetParam());
    for (uint32_t r = 0; r < GetParam(); ++r) {
      const oracle::Rows rows = make_rows(Routing::random, shape(), GetParam(), kMost, 20 + r);
      want_.push_back(oracle::routed(oracle_layer(shape()), rows, GetParam()).latent);
      pool_.push_back(identity(rows));
    }
  }
  static Shape shape() { return make_shape(64, 64, 32, 32, 4); }

  /// One round; T of rank r is tokens[r modulo their number]. False: a call was not ok or a bit was wrong.
  bool round(const std::vector<uint32_t>& tokens) {
    std::vector<Job> jobs;
    for (uint32_t r = 0; r < GetParam(); ++r) {
      std::vector<uint32_t> pick(tokens[r % tokens.size()]);
      for (uint32_t t = 0; t < pick.size(); ++t) pick[t] = t;
      jobs.push_back(pick_rows(pool_[r], shape(), pick));
    }
    const Ranks::Round got = ranks_.call(jobs);
    bool right = true;
    for (uint32_t r = 0; r < GetParam(); ++r) {
      right = right && status_of(got.replies[r]) == Status::ok;
      right = right && std::equal(got.rows[r].begin(), got.rows[r].end(), want_[r].begin());
      EXPECT_TRUE(right) << "rank " << r << ", " << jobs[r].ids.size() / shape().top_k << " tokens, "
                         << name(status_of(got.replies[r]));
    }
    return right;
  }

  Ranks ranks_;
  std::vector<std::vector<uint16_t>> want_;
  std::vector<Job> pool_;
};

/// F01 and F15.
TEST_P(UnevenTokens, EveryRankGetsItsOwnAnswer) {
  const std::vector<std::vector<uint32_t>> patterns = {
      {0, 5, 5, 5}, {0, 0, 0, 5}, {0, 0, 0, 0}, {0, 1, 7, 512}, {512, 1, 512, 1}};
  for (const auto& tokens : patterns)
    for (int i = 0; i < 10; ++i) ASSERT_TRUE(round(tokens));
  for (int i = 0; i < 1000; ++i) ASSERT_TRUE(round({0, 3, 2, 3}));
  std::mt19937 random(GetParam());
  for (int i = 0; i < 50; ++i) {
    std::vector<uint32_t> tokens(GetParam());
    for (uint32_t& t : tokens) t = static_cast<uint32_t>(random() % (kMost + 1));
    tokens[random() % tokens.size()] = 0;
    ASSERT_TRUE(round(tokens));
  }
}

INSTANTIATE_TEST_SUITE_P(Worlds, UnevenTokens, testing::Values(4U, 8U));

/// F02. -1 in one slot, in all slots of a token, of a rank, of all ranks: other tokens keep their bits, and nothing
/// but out is written in the arena.
TEST(Faults, AbsentExpertsAddNothing) {
  const Shape s = many_experts();
  Ranks ranks(world_of(s, 4, 8));
  ranks.attach(4);
  const oracle::Rows good = make_rows(Routing::random, s, 4, 8, 31);
  const std::vector<uint16_t> want = oracle::routed(oracle_layer(s), good, 4).latent;
  oracle::Rows slot = good;
  slot.ids[3 * 16 + 15] = -1;
  slot.weights[3 * 16 + 15] = 0.25F;
  oracle::Rows token = good;
  std::fill_n(token.ids.begin() + 3 * 16, 16, -1);
  oracle::Rows rank = good;
  std::fill(rank.ids.begin(), rank.ids.end(), -1);
  for (const oracle::Rows* spoilt : {&slot, &token, &rank}) {
    const Ranks::Round got = ranks.call({identity(good), identity(good), identity(*spoilt), identity(good)});
    for (const uint32_t r : {0U, 1U, 3U}) EXPECT_EQ(first_difference(got.rows[r], want), -1) << r;
    EXPECT_EQ(first_difference(got.rows[2], oracle::routed(oracle_layer(s), *spoilt, 4).latent), -1);
    if (spoilt != &rank) {
      for (const uint32_t t : {0U, 1U, 2U, 4U, 5U, 6U, 7U})
        EXPECT_EQ(row_of(got.rows[2], t, s.latent), row_of(want, t, s.latent)) << t;
    }
    if (spoilt != &slot) expect_all(row_of(got.rows[2], 3, s.latent), 0);
  }
  for (const auto& rows : ranks.call(std::vector<Job>(4, identity(rank))).rows) expect_all(rows, 0);

  Engine& engine = *ranks.engines[1];
  std::memset(engine.arena(), 0xA5, test::kRanksArena);
  const Call call = engine.lay_out(identity(slot));
  const std::vector<std::byte> before(engine.arena(), engine.arena() + test::kRanksArena);
  ASSERT_EQ(status_of(engine.call(call)), Status::ok);
  const uint64_t end = call.out + uint64_t{call.tokens} * s.latent * 2;
  EXPECT_EQ(std::memcmp(engine.arena(), before.data(), call.out), 0) << "before out";
  EXPECT_EQ(std::memcmp(engine.arena() + end, before.data() + end, test::kRanksArena - end), 0) << "behind out";
}

/// Adds the rows that each of four ranks serves of such a call.
void add_rows(const oracle::Rows& rows, const Shape& s, double (&served)[4]) {
  for (size_t t = 0; t < rows.ids.size() / s.top_k; ++t) {
    bool asked[4]{};
    for (uint32_t k = 0; k < s.top_k; ++k) asked[owner(s, static_cast<uint32_t>(rows.ids[t * s.top_k + k]), 4)] = true;
    for (uint32_t r = 0; r < 4; ++r) served[r] += asked[r] ? 1 : 0;
  }
}

constexpr int32_t kNoExperts[] = {896, 897, 65'535, 1 << 30, INT32_MAX, -2, INT32_MIN};

/// F03. A refused call names token, slot and value, and no rank serves a row of it.
TEST(Faults, ABadIdIsRefusedBeforeAnyRankSeesIt) {
  const Shape s = many_experts();
  Ranks ranks(world_of(s, 4, 8));
  ranks.attach(4);
  const oracle::Rows good = make_rows(Routing::random, s, 4, 8, 41);
  const std::vector<uint16_t> want = oracle::routed(oracle_layer(s), good, 4).latent;
  double served[4]{};
  for (const int32_t bad : kNoExperts) {
    oracle::Rows spoilt = good;
    spoilt.ids[5 * 16 + 7] = bad;
    Reply reply{};
    expect_all(ranks.engines[2]->run(identity(spoilt), reply), 0);
    EXPECT_EQ(status_of(reply), Status::bad_route) << bad;
    EXPECT_EQ(reply.token, 5U);
    EXPECT_EQ(reply.slot, 7U);
    EXPECT_EQ(reply.value, bad);
    EXPECT_EQ(reply.limit, 895U);
    const Ranks::Round got = ranks.call({identity(good), identity(good), identity(spoilt), identity(good)});
    for (const uint32_t r : {0U, 1U, 3U}) EXPECT_EQ(first_difference(got.rows[r], want), -1) << r;
    EXPECT_EQ(ranks.engines[2]->run(identity(good), reply), want);
    for (int calls = 0; calls < 4; ++calls) add_rows(good, s, served);
    for (uint32_t r = 0; r < 4; ++r) ASSERT_TRUE(ranks.served(r, served[r])) << "a refused call was served, " << bad;
  }
}

/// F03. 10,000 calls, one slot of a hundred being no expert: exactly the calls with such a slot are refused.
TEST(Faults, OneBadIdOfAHundred) {
  const Shape s = many_experts();
  Ranks ranks(world_of(s, 4, 2));
  ranks.attach(4);
  const oracle::Rows good = make_rows(Routing::random, s, 4, 2, 42);
  const std::vector<uint16_t> want = oracle::routed(oracle_layer(s), good, 4).latent;
  std::mt19937 random(43);
  int refused = 0;
  for (int i = 0; i < 2500; ++i) {
    std::vector<Job> jobs(4, identity(good));
    int first[4] = {-1, -1, -1, -1};
    for (uint32_t r = 0; r < 4; ++r)
      for (int k = 0; k < 32; ++k) {
        if (random() % 100 != 0) continue;
        jobs[r].ids[static_cast<size_t>(k)] = kNoExperts[random() % std::size(kNoExperts)];
        if (first[r] < 0) first[r] = k;
      }
    const Ranks::Round got = ranks.call(jobs);
    for (uint32_t r = 0; r < 4; ++r) {
      const Reply& reply = got.replies[r];
      ASSERT_EQ(status_of(reply), first[r] < 0 ? Status::ok : Status::bad_route) << i;
      if (first[r] < 0) {
        ASSERT_EQ(got.rows[r], want) << "call " << i << " of rank " << r;
        continue;
      }
      ASSERT_EQ(reply.token * 16 + reply.slot, static_cast<uint32_t>(first[r]));
      ++refused;
    }
  }
  EXPECT_GT(refused, 1000);
}

/// F04. An expert counts as often as it is named, in worlds of 1, 4 and 8.
TEST(Faults, AnExpertNamedTwiceCountsTwice) {
  const Shape s = make_shape(64, 64, 32, 128, 16);
  const SyntheticModel model(s, 5);
  oracle::Layer layer = oracle_layer(s);
  layer.expert = [&](uint32_t e) { return model.values(1, e); };
  oracle::Rows rows = make_rows(Routing::random, s, 1, 5, 51);
  std::fill_n(rows.ids.begin(), 16, 5);
  std::fill_n(rows.weights.begin(), 16, 1.0F / 16);
  rows.ids[16] = rows.ids[17] = 5, rows.ids[18] = 6;
  rows.weights[16] = 0.5F, rows.weights[17] = 0.25F;
  for (int32_t k = 0; k < 16; ++k) rows.ids[static_cast<size_t>(32 + k)] = 16 + k;
  oracle::Rows once = rows;  // expert 5 named once with all the weight
  std::fill_n(once.ids.begin() + 1, 15, -1);
  once.weights[0] = 1;
  for (const uint32_t n : {1U, 4U, 8U}) {
    WorldOptions o = world_of(s, n, 8);
    o.weights = [&](uint32_t r) { return model.of_rank(r, n); };
    Ranks ranks(o);
    ranks.attach(1);
    Reply reply{};
    const auto got = ranks.engines[0]->run(job_of(rows, 1, kFlagNoNorm), reply);
    ASSERT_EQ(status_of(reply), Status::ok);
    const Closeness c = compare_rows(got, oracle::routed(layer, rows, n).latent, s.latent);
    EXPECT_TRUE(c.ok) << n << ": " << c.text();
    const auto alone = ranks.engines[0]->run(job_of(once, 1, kFlagNoNorm), reply);
    const Closeness same = compare_rows(row_of(got, 0, s.latent), row_of(alone, 0, s.latent), s.latent);
    EXPECT_TRUE(same.ok) << n << ": " << same.text();
  }
}

/// Rows 0 to 6 as F05 has them; row 7 is left as it was. Row 8 holds a number of the greatest binade whose code and
/// scale give a finite one.
oracle::Rows strange_rows(oracle::Rows rows, uint32_t latent) {
  const auto at = [&](uint32_t t) { return rows.x.begin() + t * latent; };
  std::fill_n(at(0), latent, uint16_t{0});
  std::fill_n(at(1), 32, uint16_t{0});
  for (int i = 0; i < 32; ++i) at(2)[i] = oracle::bf16_bits(i % 2 == 0 ? 1e-37 : -1e-37);
  std::fill_n(at(3), latent, uint16_t{1});  // 2^-133
  at(4)[7] = 0x7FC0;
  at(5)[7] = 0x7F80;
  at(6)[7] = 0x7F7F;  // 3.39e38: its code and scale give 2^128, an infinity
  at(8)[7] = 0x7F60;  // 2.98e38
  return rows;
}

/// F05. What a row of zeros, tiny numbers, NaN and infinities becomes is fixed, and it stays in its row.
TEST(Faults, StrangeRowsAreRightAndStayAlone) {
  const Shape s = make_shape(64, 64, 32, 12, 3);
  const SyntheticModel model(s, 6);
  WorldOptions o = world_of(s, 3, 9);
  o.weights = [&](uint32_t r) { return model.of_rank(r, 3); };
  Ranks ranks(o);
  ranks.attach(1);
  const oracle::Rows normal = make_rows(Routing::random, s, 3, 9, 61);
  const oracle::Rows strange = strange_rows(normal, s.latent);
  Reply reply{};
  const auto moved = ranks.engines[0]->run(identity(strange), reply);
  ASSERT_EQ(status_of(reply), Status::ok);
  EXPECT_EQ(first_difference(moved, oracle::routed(oracle_layer(s), strange, 3).latent), -1);
  EXPECT_FALSE(std::isfinite(oracle::bf16_value(moved[6 * 64 + 7])));
  oracle::Layer layer = oracle_layer(s);
  layer.expert = [&](uint32_t e) { return model.values(1, e); };
  const auto want = oracle::routed(layer, strange, 3).latent;
  const auto before = ranks.engines[0]->run(job_of(normal, 1, kFlagNoNorm), reply);
  const auto after = ranks.engines[0]->run(job_of(strange, 1, kFlagNoNorm), reply);
  ASSERT_EQ(status_of(reply), Status::ok);
  for (const uint32_t t : {0U, 1U, 2U, 3U, 4U, 8U}) {  // an infinity may become anything in its own row: 5 and 6
    const Closeness c = compare_rows(row_of(after, t, s.latent), row_of(want, t, s.latent), s.latent);
    EXPECT_TRUE(c.ok) << "row " << t << ": " << c.text();
    for (const uint16_t bits : row_of(after, t, s.latent)) ASSERT_TRUE(std::isfinite(oracle::bf16_value(bits))) << t;
  }
  EXPECT_EQ(row_of(after, 7, s.latent), row_of(before, 7, s.latent));
}

/// F06. After calls that filled every row and partial with NaN, calls that leave most of them unwritten have the bits
/// that they have in a new world.
TEST(Faults, OldMemoryIsNeverRead) {
  const Shape s = make_shape(64, 64, 32, 32, 4);
  const SyntheticModel model(s, 7);
  WorldOptions o = world_of(s, 4, 16);
  o.weights = [&](uint32_t r) { return model.of_rank(r, 4); };
  Ranks used(o), fresh(o);
  for (Ranks* ranks : {&used, &fresh}) ranks->attach(4);
  Job poison = job_of(make_rows(Routing::random, s, 4, 16, 71), 1, kFlagNoNorm);
  std::fill(poison.x.begin(), poison.x.end(), uint16_t{0xFFFF});
  std::fill(poison.weights.begin(), poison.weights.end(), std::numeric_limits<float>::quiet_NaN());
  for (int i = 0; i < 3; ++i) {
    const Ranks::Round round = used.call(std::vector<Job>(4, poison));
    ASSERT_TRUE(std::isnan(oracle::bf16_value(round.rows[0][0]))) << "nothing was poisoned";
  }
  for (uint32_t tokens = 1; tokens <= 9; ++tokens)
    for (const Routing routing : kRoutings)
      for (const uint32_t layer : {1U, kIdentityLayer}) {
        const Job job = job_of(make_rows(routing, s, 4, tokens, 72), layer, 0);
        const Ranks::Round a = used.call(std::vector<Job>(4, job));
        const Ranks::Round b = fresh.call(std::vector<Job>(4, job));
        EXPECT_EQ(a.rows, b.rows) << tokens << " tokens, " << name(routing) << ", layer " << layer;
      }
}

/// F06. A weight of NaN, infinity, -1 or 0 is a number like any other, for its own token.
TEST(Faults, StrangeWeightsStayInTheirToken) {
  const Shape s = make_shape(64, 64, 32, 32, 4);
  Ranks ranks(world_of(s, 4, 16));
  ranks.attach(1);
  const float inf = std::numeric_limits<float>::infinity();
  for (const float weight : {std::numeric_limits<float>::quiet_NaN(), inf, -inf, -1.0F, 0.0F})
    for (const bool nan_row : {false, true}) {
      oracle::Rows rows = make_rows(Routing::random, s, 4, 6, 73);
      rows.weights[2 * 4 + 1] = weight;
      if (nan_row) std::fill_n(rows.x.begin() + 2 * 64, 64, uint16_t{0x7FC0});
      Reply reply{};
      const auto got = ranks.engines[0]->run(identity(rows), reply);
      ASSERT_EQ(status_of(reply), Status::ok);
      EXPECT_EQ(first_difference(got, oracle::routed(oracle_layer(s), rows, 4).latent), -1) << weight << nan_row;
    }
}

}  // namespace
}  // namespace moed
