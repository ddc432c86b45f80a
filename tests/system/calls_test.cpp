// Calls through libmoed to a real daemon: every form of input, every bad value, two engines at once, dry lanes. Each
// call has the right bytes or the named status, within its deadline and 100 ms.
#include <gtest/gtest.h>

#include <random>
#include <thread>

#include "daemon/abi/call.h"
#include "daemon/abi/futex.h"
#include "tests/support/cases.h"
#include "tests/support/process.h"
#include "tests/support/synthetic.h"
#include "tests/support/tolerance.h"

namespace moed {
namespace {

using test::Daemon;
using test::Lane;
using test::SyntheticModel;

constexpr uint32_t kDeadlineUs = 5'000'000;
constexpr uint32_t kMaxCallTokensHere = 200;

Shape served_shape() { return make_shape(128, 64, 32, 12, 3); }

/// One daemon for all tests of this file: synthetic weights, seed 9, the shape above.
Daemon& daemon() {
  static Daemon d({"model.source=synthetic", "model.seed=9", "limits.lanes=3", "limits.max_tokens=16",
                   "limits.max_call_tokens=200", "limits.arena_mb=4", "calls.deadline_ms=5000",
                   "calls.first_deadline_ms=5000",
                   "model.shape={hidden: 128, latent: 64, intermediate: 32, experts: 12, top_k: 3, layers: 2}"});
  return d;
}

const SyntheticModel& model() {
  static const SyntheticModel m(
      [] {
        Shape s = served_shape();
        s.layers = 2;
        return s;
      }(),
      9);
  return m;
}

class Calls : public testing::Test {
 protected:
  Calls() : lane_(daemon().socket()) {}

  /// Runs a call and checks that it ends in time.
  moed_reply_t run(const moed_call_t& call) {
    moed_reply_t reply{};
    const Nanos start = now_ns();
    const moed_status status = moed_call(lane_.get(), &call, &reply);
    const Nanos limit =
        (call.timeout_us != 0 && call.timeout_us <= kMaxTimeoutUs ? call.timeout_us : kDeadlineUs) * 1000ULL;
    EXPECT_LE(now_ns() - start, limit + 100'000'000);
    EXPECT_EQ(status, reply.status);
    return reply;
  }

  /// Fills the slot with rows, out with rubbish.
  moed_call_t lay_out(const oracle::Rows& rows, uint32_t layer, uint32_t flags = MOED_FLAG_NO_NORM) {
    const auto tokens = static_cast<uint32_t>(rows.ids.size() / served_shape().top_k);
    moed_call_t call = lane_.slot(layer, tokens);
    call.flags = flags;
    lane_.put(call.x, rows.x);
    lane_.put(call.ids, rows.ids);
    lane_.put(call.weights, rows.weights);
    lane_.put(call.out, std::vector<uint16_t>(uint64_t{tokens} * served_shape().latent, 0x7FFF));
    return call;
  }

  std::vector<uint16_t> right(const oracle::Rows& rows, uint32_t layer, bool norm = false) {
    oracle::Layer m = oracle_layer(served_shape());
    if (layer != MOED_LAYER_IDENTITY) m.expert = [layer](uint32_t e) { return model().values(layer, e); };
    const oracle::Result result = oracle::routed(m, rows, 1);
    return norm ? result.out : result.latent;
  }

  void expect_right(const oracle::Rows& rows, uint32_t layer, const moed_call_t& call) {
    const Closeness c =
        compare_rows(lane_.out(call), right(rows, layer, (call.flags & MOED_FLAG_NO_NORM) == 0), served_shape().latent);
    EXPECT_TRUE(c.ok) << c.text();
  }

  void expect_zeros(const moed_call_t& call) {
    for (const uint16_t bits : lane_.out(call)) ASSERT_EQ(bits, 0);
  }

  oracle::Rows rows(uint32_t tokens, uint64_t seed = 1) {
    return make_rows(Routing::random, served_shape(), 1, tokens, seed);
  }

  Lane lane_;
};

TEST_F(Calls, ExpertsWithAndWithoutNorm) {
  for (const uint32_t layer : {1U, 2U, MOED_LAYER_IDENTITY})
    for (const uint32_t flags : {0U, uint32_t{MOED_FLAG_NO_NORM}}) {
      const oracle::Rows r = rows(9, layer);
      const moed_call_t call = lay_out(r, layer, flags);
      EXPECT_EQ(run(call).status, uint32_t{MOED_OK});
      expect_right(r, layer, call);
    }
}

TEST_F(Calls, NoTokens) {
  for (int i = 0; i < 100; ++i) {
    const moed_call_t call = lane_.slot(1, 0);
    const moed_reply_t reply = run(call);
    ASSERT_EQ(reply.status, uint32_t{MOED_OK});
    ASSERT_EQ(reply.number, static_cast<uint64_t>(i + 1));
  }
}

TEST_F(Calls, ValidTokensCountAndPaddingIsNeitherReadNorLeft) {
  const uint32_t tokens = 12;
  oracle::Rows r = rows(tokens);
  const std::vector<uint16_t> all = right(r, 1);
  for (const int32_t valid : {0, 1, 5, 11, 12, 13, 1000, INT32_MAX, -1, INT32_MIN}) {
    const auto kept = static_cast<uint32_t>(std::clamp(valid, 0, 12));
    oracle::Rows padded = r;
    for (uint32_t t = kept; t < tokens; ++t) {  // garbage in the padding: NaN rows and ids of no expert
      std::fill_n(padded.x.begin() + t * 64, 64, uint16_t{0x7FC0});
      for (uint32_t k = 0; k < 3; ++k) padded.ids[t * 3 + k] = static_cast<int32_t>(0x40000000U + t);
    }
    moed_call_t call = lay_out(padded, 1);
    moed_call_t slot{};
    ASSERT_EQ(moed_slot(lane_.get(), 0, &slot), uint32_t{MOED_OK});
    call.valid = slot.valid;
    lane_.put(call.valid, std::vector<int32_t>{valid});
    ASSERT_EQ(run(call).status, uint32_t{MOED_OK}) << valid;
    const std::vector<uint16_t> got = lane_.out(call);
    for (size_t i = kept * 64ULL; i < got.size(); ++i) ASSERT_EQ(got[i], 0) << "valid " << valid << " element " << i;
    const std::span<const uint16_t> head(got.data(), kept * 64ULL);
    if (kept == 0) continue;
    EXPECT_TRUE(compare_rows(head, {all.data(), head.size()}, 64).ok) << valid;
  }
}

TEST_F(Calls, AbsentAndRepeatedExperts) {
  for (const Routing routing :
       {Routing::masked, Routing::all_masked, Routing::some_silent, Routing::duplicates, Routing::one_expert}) {
    const oracle::Rows r = make_rows(routing, served_shape(), 1, 8, 4);
    const moed_call_t call = lay_out(r, 2);
    EXPECT_EQ(run(call).status, uint32_t{MOED_OK}) << name(routing);
    expect_right(r, 2, call);
  }
}

/// F03: each value that is no expert, refused or masked, with the other tokens' bits unchanged.
TEST_F(Calls, EveryBadIdIsNamedOrMasked) {
  const oracle::Rows good = rows(7);
  moed_call_t call = lay_out(good, 1);
  ASSERT_EQ(run(call).status, uint32_t{MOED_OK});
  const std::vector<uint16_t> before = lane_.out(call);
  for (const int64_t bad : std::initializer_list<int64_t>{12, 13, 65535, 1LL << 30, INT32_MAX, -2, INT32_MIN, INT64_MAX,
                                                          INT64_MIN, 1LL << 32}) {
    const bool wide = bad < INT32_MIN || bad > INT32_MAX;
    std::vector<int64_t> ids(good.ids.begin(), good.ids.end());
    ids[4 * 3 + 2] = bad;
    const uint32_t form = MOED_FLAG_NO_NORM | (wide ? MOED_FLAG_IDS64 : 0);
    const auto put_ids = [&] {
      if (wide)
        lane_.put(call.ids, ids);
      else
        lane_.put(call.ids, std::vector<int32_t>(ids.begin(), ids.end()));
    };
    call = lay_out(good, 1, form);
    put_ids();
    const moed_reply_t refused = run(call);
    EXPECT_EQ(refused.status, uint32_t{MOED_BAD_ROUTE}) << bad;
    EXPECT_EQ(refused.token, 4U);
    EXPECT_EQ(refused.slot, 2U);
    EXPECT_EQ(refused.value, bad);
    EXPECT_EQ(refused.limit, 11U);
    expect_zeros(call);
    call = lay_out(good, 1, form | MOED_FLAG_MASK);
    put_ids();
    const moed_reply_t masked = run(call);
    EXPECT_EQ(masked.status, uint32_t{MOED_MASKED}) << bad;
    EXPECT_EQ(masked.token, 4U);
    EXPECT_EQ(masked.slot, 2U);
    EXPECT_EQ(masked.value, bad);
    oracle::Rows with_none = good;
    with_none.ids[4 * 3 + 2] = -1;
    expect_right(with_none, 1, call);
    const std::vector<uint16_t> after = lane_.out(call);
    for (const uint32_t t : {0U, 1U, 2U, 3U, 5U, 6U})
      EXPECT_TRUE(std::equal(after.begin() + t * 64, after.begin() + (t + 1) * 64, before.begin() + t * 64)) << t;
  }
}

TEST_F(Calls, OtherFormsOfInputGiveTheSameBits) {
  oracle::Rows r = rows(6);
  std::vector<uint16_t> narrow;
  for (float& w : r.weights) {
    narrow.push_back(oracle::bf16_bits(double{w}));
    w = static_cast<float>(oracle::bf16_value(narrow.back()));
  }
  moed_call_t call = lay_out(r, 1);
  ASSERT_EQ(run(call).status, uint32_t{MOED_OK});
  const std::vector<uint16_t> plain = lane_.out(call);
  call = lay_out(r, 1, MOED_FLAG_NO_NORM | MOED_FLAG_IDS64);
  lane_.put(call.ids, std::vector<int64_t>(r.ids.begin(), r.ids.end()));
  ASSERT_EQ(run(call).status, uint32_t{MOED_OK});
  EXPECT_EQ(lane_.out(call), plain);
  call = lay_out(r, 1, MOED_FLAG_NO_NORM | MOED_FLAG_WEIGHTS16);
  lane_.put(call.weights, narrow);
  ASSERT_EQ(run(call).status, uint32_t{MOED_OK});
  EXPECT_EQ(lane_.out(call), plain);
  call = lay_out(r, 1, MOED_FLAG_NO_NORM | MOED_FLAG_WIRE);
  std::vector<float> x;
  for (const uint16_t bits : r.x) x.push_back(static_cast<float>(oracle::bf16_value(bits)));
  const oracle::Quantised q = oracle::mxfp8(x);
  lane_.put(call.x, q.codes);
  lane_.put(call.scales, q.scales);
  ASSERT_EQ(run(call).status, uint32_t{MOED_OK});
  EXPECT_EQ(lane_.out(call), plain);
}

/// F07: more tokens than a piece holds, up to and beyond what a call may have; F09: odd numbers.
TEST_F(Calls, PiecesGiveTheBitsOfSingleCalls) {
  const oracle::Rows r = rows(kMaxCallTokensHere);
  const std::vector<uint16_t> want = right(r, 1);
  std::vector<uint16_t> whole;
  for (const uint32_t tokens : {200U, 1U, 15U, 16U, 17U, 32U, 33U, 45U, 127U, 129U, 199U}) {
    oracle::Rows part{{r.x.begin(), r.x.begin() + tokens * 64},
                      {r.ids.begin(), r.ids.begin() + tokens * 3},
                      {r.weights.begin(), r.weights.begin() + tokens * 3}};
    const moed_call_t call = lay_out(part, 1);
    ASSERT_EQ(run(call).status, uint32_t{MOED_OK}) << tokens;
    const std::vector<uint16_t> got = lane_.out(call);
    EXPECT_TRUE(compare_rows(got, {want.data(), got.size()}, 64).ok) << tokens;
    if (whole.empty()) whole = got;
    EXPECT_TRUE(std::equal(got.begin(), got.end(), whole.begin())) << tokens;
  }
  for (const uint32_t tokens : {201U, 1024U, 65536U, 0x80000000U, UINT32_MAX}) {
    moed_call_t call = lane_.slot(1, tokens);
    const moed_reply_t reply = run(call);
    EXPECT_EQ(reply.status, uint32_t{MOED_BAD_CALL});
    EXPECT_EQ(reply.field, static_cast<uint32_t>(CallField::tokens));
    EXPECT_EQ(reply.value, int64_t{tokens});
    EXPECT_EQ(reply.limit, kMaxCallTokensHere);
  }
}

TEST_F(Calls, ABadIdInTheLastPieceSendsNothingAndZeroesAll) {
  oracle::Rows r = rows(100);
  r.ids[99 * 3] = 12;
  const moed_call_t call = lay_out(r, 1);
  const moed_reply_t reply = run(call);
  EXPECT_EQ(reply.status, uint32_t{MOED_BAD_ROUTE});
  EXPECT_EQ(reply.token, 99U);
  expect_zeros(call);
}

TEST_F(Calls, EveryFieldOutOfRangeIsNamed) {
  const oracle::Rows r = rows(4);
  const moed_call_t good = lay_out(r, 1, MOED_FLAG_NO_NORM | MOED_FLAG_WIRE);
  const uint64_t arena = lane_.info().arena_bytes;
  struct Bad {
    CallField field;
    std::function<void(moed_call_t&)> spoil;
    uint32_t status = MOED_BAD_CALL;
  };
  std::vector<Bad> all = {
      {CallField::kind, [](moed_call_t& c) { c.kind = 2; }},
      {CallField::kind, [](moed_call_t& c) { c.kind = 1; }, MOED_UNSUPPORTED},
      {CallField::layer, [](moed_call_t& c) { c.layer = 0; }},
      {CallField::layer, [](moed_call_t& c) { c.layer = 3; }},
      {CallField::layer, [](moed_call_t& c) { c.layer = 0xFFFFFFFEU; }},
      {CallField::flags, [](moed_call_t& c) { c.flags |= 32; }},
      {CallField::timeout_us, [](moed_call_t& c) { c.timeout_us = 60'000'001; }},
      {CallField::reserved, [](moed_call_t& c) { c.reserved[14] = 1; }},
  };
  const std::pair<CallField, uint64_t moed_call_t::*> offsets[] = {
      {CallField::x, &moed_call_t::x},     {CallField::scales, &moed_call_t::scales},
      {CallField::ids, &moed_call_t::ids}, {CallField::weights, &moed_call_t::weights},
      {CallField::out, &moed_call_t::out}, {CallField::valid, &moed_call_t::valid}};
  for (const auto& [field, member] : offsets)
    for (const uint64_t value :
         {uint64_t{8}, arena, arena - 1, arena + 16, UINT64_MAX, UINT64_MAX - 15, uint64_t{1} << 63})
      all.push_back({field, [at = member, value](moed_call_t& c) { c.*at = value; }});
  for (const Bad& bad : all) {
    moed_call_t call = good;
    bad.spoil(call);
    const moed_reply_t reply = run(call);
    EXPECT_EQ(reply.status, bad.status) << name(bad.field);
    EXPECT_EQ(reply.field, static_cast<uint32_t>(bad.field)) << name(bad.field);
    if (bad.field != CallField::out && bad.field != CallField::kind) expect_zeros(good);
    ASSERT_EQ(run(lay_out(r, 1)).status, uint32_t{MOED_OK});  // and nothing is left behind
  }
}

TEST_F(Calls, TwoEnginesAtOnce) {
  std::vector<std::thread> threads;
  for (uint64_t engine = 0; engine < 2; ++engine)
    threads.emplace_back([&, engine] {
      Lane lane(daemon().socket());
      std::mt19937_64 random(engine);
      for (int i = 0; i < 300; ++i) {
        const auto tokens = static_cast<uint32_t>(random() % 20);
        const oracle::Rows r = rows(tokens, random());
        const uint32_t layer = i % 2 == 0 ? MOED_LAYER_IDENTITY : 1;
        moed_call_t call = lane.slot(layer, tokens);
        call.flags = MOED_FLAG_NO_NORM;
        lane.put(call.x, r.x);
        lane.put(call.ids, r.ids);
        lane.put(call.weights, r.weights);
        moed_reply_t reply{};
        ASSERT_EQ(moed_call(lane.get(), &call, &reply), uint32_t{MOED_OK});
        if (tokens == 0) continue;
        const Closeness c = compare_rows(lane.out(call), right(r, layer), served_shape().latent);
        ASSERT_TRUE(c.ok) << c.text();
      }
    });
  for (std::thread& t : threads) t.join();
}

TEST_F(Calls, DryLanesCheckAndAnswerZeros) {
  ASSERT_EQ(moed_dry(lane_.get(), 1), uint32_t{MOED_OK});
  const oracle::Rows r = rows(40);
  moed_call_t call = lay_out(r, 1);
  EXPECT_EQ(run(call).status, uint32_t{MOED_DRY});
  expect_zeros(call);
  oracle::Rows bad = r;
  bad.ids[5] = 12;
  call = lay_out(bad, 1);
  EXPECT_EQ(run(call).status, uint32_t{MOED_BAD_ROUTE});
  call = lay_out(r, 7);
  EXPECT_EQ(run(call).status, uint32_t{MOED_BAD_CALL});
  ASSERT_EQ(moed_dry(lane_.get(), 0), uint32_t{MOED_OK});
  call = lay_out(r, 1);
  EXPECT_EQ(run(call).status, uint32_t{MOED_OK});
  expect_right(r, 1, call);
  moed_options options{};
  options.dry = 1;
  const Lane dry(daemon().socket(), options);
  moed_call_t empty = dry.slot(1, 0);
  moed_reply_t reply{};
  EXPECT_EQ(moed_call(dry.get(), &empty, &reply), uint32_t{MOED_DRY});
}

/// A call whose experts take longer than it may ends in time, with the late rank named and zeros; the next one is
/// served.
TEST(Deadline, ALateCallEndsInTimeAndNamesTheRank) {
  const Daemon slow({"debug.experts_delay_us=200000", "debug.for_ms=1500"});
  const Lane lane(slow.socket());
  moed_call_t call = lane.slot(MOED_LAYER_IDENTITY, 3);
  call.flags = MOED_FLAG_NO_NORM;
  lane.put(call.ids, std::vector<int32_t>{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11});
  lane.put(call.out, std::vector<uint16_t>(3 * uint64_t{lane.info().latent}, 0x7FFF));
  moed_reply_t reply{};
  for (int i = 0; i < 5; ++i) {
    call.timeout_us = 20'000;
    const Nanos start = now_ns();
    EXPECT_EQ(moed_call(lane.get(), &call, &reply), uint32_t{MOED_PEER_TIMEOUT});
    EXPECT_LE(now_ns() - start, 120'000'000U);
    EXPECT_EQ(reply.ranks[0], 1U);
    for (const uint16_t bits : lane.out(call)) ASSERT_EQ(bits, 0);
  }
  call.timeout_us = 10'000'000;
  EXPECT_EQ(moed_call(lane.get(), &call, &reply), uint32_t{MOED_OK});
}

/// F05: rows of zeros, tiny, NaN and infinite values spoil themselves and nothing else.
TEST_F(Calls, StrangeNumbersStayInTheirRow) {
  const uint32_t tokens = 8;
  oracle::Rows normal = rows(tokens, 3);
  moed_call_t call = lay_out(normal, 1, 0);
  ASSERT_EQ(run(call).status, uint32_t{MOED_OK});
  const std::vector<uint16_t> before = lane_.out(call);
  oracle::Rows strange = normal;
  std::fill_n(strange.x.begin(), 64, uint16_t{0});
  std::fill_n(strange.x.begin() + 64, 32, uint16_t{0});
  for (int i = 0; i < 32; ++i) strange.x[2 * 64 + i] = oracle::bf16_bits(i % 2 == 0 ? 1e-37 : -1e-37);
  std::fill_n(strange.x.begin() + 3 * 64, 64, uint16_t{1});
  strange.x[4 * 64 + 7] = 0x7FC0;
  strange.x[5 * 64 + 7] = 0x7F80;
  strange.x[6 * 64 + 7] = 0x7F7F;
  strange.weights[3 * 3] = 0.0F;
  call = lay_out(strange, 1, 0);
  ASSERT_EQ(run(call).status, uint32_t{MOED_OK});
  const std::vector<uint16_t> after = lane_.out(call);
  for (uint32_t i = 0; i < 64; ++i) ASSERT_EQ(after[i], 0);
  for (uint32_t i = 64; i < 4 * 64; ++i) ASSERT_TRUE(std::isfinite(oracle::bf16_value(after[i]))) << i;
  EXPECT_TRUE(std::equal(after.begin() + 7 * 64, after.end(), before.begin() + 7 * 64));
  oracle::Rows nan_weight = normal;
  nan_weight.weights[2 * 3 + 1] = std::numeric_limits<float>::quiet_NaN();
  call = lay_out(nan_weight, 1, 0);
  ASSERT_EQ(run(call).status, uint32_t{MOED_OK});
  const std::vector<uint16_t> spoiled = lane_.out(call);
  for (uint32_t i = 0; i < tokens * 64; ++i) {
    if (i / 64 == 2) {
      ASSERT_TRUE(std::isnan(oracle::bf16_value(spoiled[i])));
    } else {
      ASSERT_EQ(spoiled[i], before[i]);
    }
  }
}

}  // namespace
}  // namespace moed
