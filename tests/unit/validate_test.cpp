// The check of a call: every field at its limit and just above, offsets that would wrap, arrays whose size a flag
// changes.
#include "daemon/abi/validate.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <functional>
#include <utility>
#include <vector>

#include "daemon/abi/arena.h"
#include "daemon/abi/call.h"
#include "daemon/abi/shape.h"
#include "daemon/abi/status.h"

namespace moed {
namespace {

Shape small_shape() {
  Shape s;
  s.hidden = 512;
  s.latent = 256;
  s.intermediate = 128;
  s.experts = 32;
  s.top_k = 4;
  s.first_layer = 1;
  s.layers = 2;
  return s;
}

constexpr uint64_t kArena = 1 << 20;

CallLimits limits() { return {small_shape(), 4096, kArena, true}; }

/// 8 tokens, every array in its place, all within limits.
Call good_call() {
  Call c{};
  c.kind = static_cast<uint32_t>(CallKind::routed);
  c.layer = 1;
  c.tokens = 8;
  c.x = 0;
  c.ids = 8192;
  c.weights = 16384;
  c.out = 32768;
  return c;
}

TEST(Validate, AcceptsAGoodCall) {
  EXPECT_EQ(validate(good_call(), limits()).status, Status::ok);
  Call empty = good_call();
  empty.tokens = 0;
  EXPECT_EQ(validate(empty, limits()).status, Status::ok);
  empty.x = empty.ids = empty.weights = empty.out =
      kArena;  // nothing fits behind the last byte, and nothing is asked for
  EXPECT_EQ(validate(empty, limits()).status, Status::ok);
}

struct FieldCase {
  CallField field;
  std::function<void(Call&, uint64_t)> set;
  uint64_t largest;  ///< accepted; one step above is refused
  uint64_t step = 1;
};

TEST(Validate, EveryFieldAtItsLimitAndJustAbove) {
  const std::vector<FieldCase> cases = {
      {CallField::kind, [](Call& c, uint64_t v) { c.kind = static_cast<uint32_t>(v); }, 1},
      {CallField::layer, [](Call& c, uint64_t v) { c.layer = static_cast<uint32_t>(v); }, 2},
      {CallField::flags, [](Call& c, uint64_t v) { c.flags = static_cast<uint32_t>(v); }, 31},
      {CallField::x, [](Call& c, uint64_t v) { c.x = v; }, kArena - 8 * 256 * 2, 16},
      {CallField::ids, [](Call& c, uint64_t v) { c.ids = v; }, kArena - 8 * 4 * 4, 16},
      {CallField::weights, [](Call& c, uint64_t v) { c.weights = v; }, kArena - 8 * 4 * 4, 16},
      {CallField::out, [](Call& c, uint64_t v) { c.out = v; }, kArena - 8 * 256 * 2, 16},
      {CallField::valid, [](Call& c, uint64_t v) { c.valid = v; }, kArena - 16, 16},
      {CallField::timeout_us, [](Call& c, uint64_t v) { c.timeout_us = static_cast<uint32_t>(v); }, 60'000'000},
  };
  for (const FieldCase& f : cases) {
    Call c = good_call();
    f.set(c, f.largest);
    EXPECT_EQ(validate(c, limits()).status, Status::ok) << name(f.field);
    f.set(c, f.largest + f.step);
    const Refusal r = validate(c, limits());
    EXPECT_EQ(r.status, Status::bad_call) << name(f.field);
    EXPECT_EQ(r.field, f.field);
    EXPECT_EQ(r.value, static_cast<int64_t>(f.largest + f.step)) << name(f.field);
    EXPECT_EQ(r.limit, f.largest) << name(f.field);
  }
}

TEST(Validate, TokensUpToMaxCallTokens) {
  CallLimits m = limits();
  m.arena_bytes = 1 << 24;
  Call c = good_call();
  c.x = 0, c.out = 4 << 20, c.ids = 8 << 20, c.weights = 9 << 20;
  c.tokens = 4096;
  EXPECT_EQ(validate(c, m).status, Status::ok);
  c.tokens = 4097;
  const Refusal r = validate(c, m);
  EXPECT_EQ(r.status, Status::bad_call);
  EXPECT_EQ(r.field, CallField::tokens);
  EXPECT_EQ(r.value, 4097);
  EXPECT_EQ(r.limit, 4096U);
  c.tokens = 0xFFFFFFFFU;
  EXPECT_EQ(validate(c, m).field, CallField::tokens);
}

TEST(Validate, EveryReservedWordMustBeZero) {
  for (std::size_t i = 0; i < 15; ++i) {
    Call c = good_call();
    c.reserved[i] = 1;
    const Refusal r = validate(c, limits());
    EXPECT_EQ(r.status, Status::bad_call) << i;
    EXPECT_EQ(r.field, CallField::reserved) << i;
  }
}

TEST(Validate, LayersBelowTheFirstAndTheIdentity) {
  CallLimits m = limits();
  m.shape.first_layer = 3;
  Call c = good_call();
  for (const uint32_t layer : {0U, 2U, 5U, 0x7FFFFFFFU, 0xFFFFFFFEU}) {
    c.layer = layer;
    EXPECT_EQ(validate(c, m).field, CallField::layer) << layer;
    EXPECT_EQ(validate(c, m).status, Status::bad_call) << layer;
  }
  for (const uint32_t layer : {3U, 4U, kIdentityLayer}) {
    c.layer = layer;
    EXPECT_EQ(validate(c, m).status, Status::ok) << layer;
  }
}

TEST(Validate, LayerCallsOnlyWhereServed) {
  CallLimits m = limits();
  Call c = good_call();
  c.kind = 1;
  EXPECT_EQ(validate(c, m).status, Status::ok);
  m.layer_calls = false;
  EXPECT_EQ(validate(c, m).status, Status::unsupported);
  EXPECT_EQ(validate(c, m).field, CallField::kind);
}

TEST(Validate, LayerCallsAreAsWideAsHidden) {
  Call c = good_call();
  c.kind = 1;
  c.out = kArena - 8 * 512 * 2;
  EXPECT_EQ(validate(c, limits()).status, Status::ok);
  c.out += 16;
  EXPECT_EQ(validate(c, limits()).field, CallField::out);
  EXPECT_EQ(out_bytes(c, small_shape()), 8U * 512 * 2);
  c.kind = 0;
  EXPECT_EQ(out_bytes(c, small_shape()), 8U * 256 * 2);
}

TEST(Validate, FlagsChangeTheSizesOfArrays) {
  Call c = good_call();
  c.flags = kFlagIds64;
  c.ids = kArena - 8 * 4 * 8;
  EXPECT_EQ(validate(c, limits()).status, Status::ok);
  c.ids += 16;
  EXPECT_EQ(validate(c, limits()).field, CallField::ids);

  c = good_call();
  c.flags = kFlagWeights16;
  c.weights = kArena - 8 * 4 * 2;
  EXPECT_EQ(validate(c, limits()).status, Status::ok);
  c.weights += 16;
  EXPECT_EQ(validate(c, limits()).field, CallField::weights);

  c = good_call();
  c.scales = ~uint64_t{0};  // not read without the flag
  EXPECT_EQ(validate(c, limits()).status, Status::ok);
  c.flags = kFlagWire;
  EXPECT_EQ(validate(c, limits()).field, CallField::scales);
  c.scales = kArena - 8 * 8;
  c.x = kArena - 8 * 256;
  EXPECT_EQ(validate(c, limits()).status, Status::ok);
  c.scales += 16;
  EXPECT_EQ(validate(c, limits()).field, CallField::scales);
  c.scales -= 16;
  c.x += 16;
  EXPECT_EQ(validate(c, limits()).field, CallField::x);
}

TEST(Validate, OffsetsMustBeMultiplesOf16) {
  const std::vector<std::pair<CallField, std::function<void(Call&, uint64_t)>>> arrays = {
      {CallField::x, [](Call& c, uint64_t v) { c.x += v; }},
      {CallField::ids, [](Call& c, uint64_t v) { c.ids += v; }},
      {CallField::weights, [](Call& c, uint64_t v) { c.weights += v; }},
      {CallField::out, [](Call& c, uint64_t v) { c.out += v; }},
      {CallField::valid, [](Call& c, uint64_t v) { c.valid = 65536 + v; }},
  };
  for (const auto& [field, add] : arrays) {
    for (uint64_t by = 0; by <= 16; ++by) {
      Call c = good_call();
      add(c, by);
      const Refusal r = validate(c, limits());
      EXPECT_EQ(r.status, by % 16 == 0 ? Status::ok : Status::bad_call) << name(field) << " + " << by;
      EXPECT_EQ(r.field, by % 16 == 0 ? CallField::kind : field) << name(field) << " + " << by;
    }
  }
}

TEST(Validate, OffsetsNear2To64DoNotWrap) {
  for (const uint64_t back : {16ULL, 32ULL, 128ULL, 4096ULL, 1ULL << 32}) {
    const uint64_t offset = 0 - back;
    Call c = good_call();
    c.x = offset;
    EXPECT_EQ(validate(c, limits()).field, CallField::x) << back;
    EXPECT_EQ(validate(c, limits()).status, Status::bad_call) << back;
    c = good_call();
    c.out = offset;
    EXPECT_EQ(validate(c, limits()).field, CallField::out) << back;
    EXPECT_EQ(validate(c, limits()).status, Status::bad_call) << back;
    c = good_call();
    c.valid = offset;
    EXPECT_EQ(validate(c, limits()).field, CallField::valid) << back;
    EXPECT_EQ(validate(c, limits()).status, Status::bad_call) << back;
  }
}

TEST(Validate, AnArrayLargerThanTheArenaIsRefused) {
  CallLimits m = limits();
  m.arena_bytes = 4096;
  Call c{};
  c.layer = 1;
  c.tokens = 4096;
  const Refusal r = validate(c, m);
  EXPECT_EQ(r.status, Status::bad_call);
  EXPECT_EQ(r.field, CallField::x);
  EXPECT_EQ(r.limit, 0U);
  m.arena_bytes = 0;
  c.tokens = 1;
  EXPECT_EQ(validate(c, m).field, CallField::x);
}

TEST(Validate, ACallInASlotPassesTheCheck) {
  for (const uint32_t hidden : {512U, 8U}) {  // 8: a model whose latent is wider than its hidden state
    CallLimits m = limits();
    m.shape.hidden = hidden;
    const uint32_t tokens = slot_tokens(m.shape, 2, kArena, 4096);
    ASSERT_GT(tokens, 0U);
    const ArenaSlot a = arena_slot(m.shape, 1, tokens);
    for (const uint32_t kind : {0U, 1U}) {
      for (uint32_t flags = 0; flags <= kFlagsAll; ++flags) {
        Call c{};
        c.kind = kind, c.layer = 2, c.tokens = tokens, c.flags = flags;
        c.x = a.x, c.scales = a.scales, c.ids = a.ids, c.weights = a.weights, c.out = a.out, c.valid = a.valid;
        EXPECT_EQ(validate(c, m).status, Status::ok) << hidden << " " << kind << " " << flags;
      }
    }
  }
}

}  // namespace
}  // namespace moed
