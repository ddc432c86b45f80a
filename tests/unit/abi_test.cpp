// What engine and daemon agree on: statuses, the limits of a shape, who owns an expert, the slots of the arena.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <set>
#include <string>
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

// ---- status

TEST(Status, NamesAndNumbersAreFixed) {
  const std::vector<std::string> names = {"ok",        "pending",     "degraded",    "masked",      "dry",
                                          "bad_call",  "bad_route",   "busy",        "not_ready",   "peer_timeout",
                                          "peer_lost", "step_failed", "draining",    "daemon_lost", "device_lost",
                                          "version",   "denied",      "unsupported", "no_memory",   "internal"};
  ASSERT_EQ(names.size(), kStatuses);
  for (uint32_t n = 0; n < kStatuses; ++n) EXPECT_EQ(name(static_cast<Status>(n)), names[n]) << n;
  EXPECT_STREQ(name(static_cast<Status>(kStatuses)), "unknown");
  EXPECT_STREQ(name(static_cast<Status>(0xFFFFFFFFU)), "unknown");
}

TEST(Status, CallFieldsAreNamedInOrder) {
  EXPECT_STREQ(name(CallField::kind), "kind");
  EXPECT_STREQ(name(CallField::valid), "valid");
  EXPECT_STREQ(name(CallField::reserved), "reserved");
  EXPECT_EQ(static_cast<uint32_t>(CallField::reserved), 11U);
  EXPECT_STREQ(name(static_cast<CallField>(12)), "unknown");
}

// ---- shape

struct ShapeCase {
  const char* field;  ///< that check() must name; nullptr: accepted
  std::function<void(Shape&, uint32_t& ranks, uint32_t& max_tokens)> change;
};

TEST(Shape, EveryLimitFromBothSides) {
  const std::vector<ShapeCase> cases = {
      {nullptr, [](Shape&, uint32_t&, uint32_t&) {}},
      {"ranks", [](Shape&, uint32_t& r, uint32_t&) { r = 0; }},
      {nullptr, [](Shape& s, uint32_t& r, uint32_t&) { r = 128, s.experts = 128; }},
      {"ranks", [](Shape& s, uint32_t& r, uint32_t&) { r = 129, s.experts = 896; }},
      {"max_tokens", [](Shape&, uint32_t&, uint32_t& t) { t = 0; }},
      {nullptr, [](Shape&, uint32_t&, uint32_t& t) { t = 1; }},
      {nullptr, [](Shape&, uint32_t&, uint32_t& t) { t = 832; }},
      {"max_tokens", [](Shape&, uint32_t&, uint32_t& t) { t = 833; }},
      {"hidden", [](Shape& s, uint32_t&, uint32_t&) { s.hidden = 0; }},
      {nullptr, [](Shape& s, uint32_t&, uint32_t&) { s.hidden = 8; }},
      {"hidden", [](Shape& s, uint32_t&, uint32_t&) { s.hidden = 12; }},
      {nullptr, [](Shape& s, uint32_t&, uint32_t&) { s.hidden = 16384; }},
      {"hidden", [](Shape& s, uint32_t&, uint32_t&) { s.hidden = 16392; }},
      {"latent", [](Shape& s, uint32_t&, uint32_t&) { s.latent = 0; }},
      {nullptr, [](Shape& s, uint32_t&, uint32_t&) { s.latent = 64; }},
      {"latent", [](Shape& s, uint32_t&, uint32_t&) { s.latent = 96; }},
      {nullptr, [](Shape& s, uint32_t&, uint32_t&) { s.latent = 16384; }},
      {"latent", [](Shape& s, uint32_t&, uint32_t&) { s.latent = 16448; }},
      {"intermediate", [](Shape& s, uint32_t&, uint32_t&) { s.intermediate = 0; }},
      {nullptr, [](Shape& s, uint32_t&, uint32_t&) { s.intermediate = 32; }},
      {"intermediate", [](Shape& s, uint32_t&, uint32_t&) { s.intermediate = 48; }},
      {nullptr, [](Shape& s, uint32_t&, uint32_t&) { s.intermediate = 65536; }},
      {"intermediate", [](Shape& s, uint32_t&, uint32_t&) { s.intermediate = 65568; }},
      {"top_k", [](Shape& s, uint32_t&, uint32_t&) { s.top_k = 0; }},
      {nullptr, [](Shape& s, uint32_t&, uint32_t&) { s.top_k = 1; }},
      {nullptr, [](Shape& s, uint32_t&, uint32_t&) { s.top_k = 32; }},
      {"top_k", [](Shape& s, uint32_t&, uint32_t&) { s.top_k = 33; }},
      {"experts", [](Shape& s, uint32_t&, uint32_t&) { s.experts = 0; }},
      {nullptr, [](Shape& s, uint32_t&, uint32_t&) { s.experts = 1; }},
      {nullptr, [](Shape& s, uint32_t&, uint32_t&) { s.experts = 65000; }},
      {"experts", [](Shape& s, uint32_t&, uint32_t&) { s.experts = 65001; }},
      {nullptr, [](Shape& s, uint32_t& r, uint32_t&) { s.experts = 5, r = 5; }},
      {"experts", [](Shape& s, uint32_t& r, uint32_t&) { s.experts = 5, r = 6; }},
      {"layers", [](Shape& s, uint32_t&, uint32_t&) { s.layers = 0; }},
      {nullptr, [](Shape& s, uint32_t&, uint32_t&) { s.layers = 65535; }},
      {"layers", [](Shape& s, uint32_t&, uint32_t&) { s.layers = 65536; }},
      {"layers", [](Shape& s, uint32_t&, uint32_t&) { s.first_layer = 65536; }},
  };
  for (std::size_t i = 0; i < cases.size(); ++i) {
    Shape s = small_shape();
    uint32_t ranks = 1;
    uint32_t max_tokens = 128;
    cases[i].change(s, ranks, max_tokens);
    const ShapeFault fault = check(s, ranks, max_tokens);
    EXPECT_STREQ(fault.field, cases[i].field) << "case " << i << " value " << fault.value;
    EXPECT_EQ(std::string(fault.limit).empty(), fault.field == nullptr) << "case " << i;
  }
}

TEST(Shape, FaultNamesTheValue) {
  Shape s = small_shape();
  s.latent = 250;
  EXPECT_EQ(check(s, 1, 128).value, 250U);
}

TEST(Shape, EveryExpertHasTheOwnerWhoseRangeHoldsIt) {
  const std::vector<uint32_t> counts = {1, 2, 3, 7, 31, 32, 64, 127, 128, 129, 160, 256, 384, 895, 896, 897, 1000};
  for (const uint32_t experts : counts) {
    Shape s = small_shape();
    s.experts = experts;
    for (uint32_t ranks = 1; ranks <= std::min(experts, kMaxRanks); ++ranks) {
      ASSERT_EQ(first_expert(s, 0, ranks), 0U);
      ASSERT_EQ(first_expert(s, ranks, ranks), experts);
      uint32_t least = experts;
      uint32_t most = 0;
      for (uint32_t r = 0; r < ranks; ++r) {
        const uint32_t begin = first_expert(s, r, ranks);
        const uint32_t end = first_expert(s, r + 1, ranks);
        ASSERT_LT(begin, end) << experts << " over " << ranks;
        least = std::min(least, end - begin);
        most = std::max(most, end - begin);
        for (uint32_t e = begin; e < end; ++e)
          ASSERT_EQ(owner(s, e, ranks), r) << e << " of " << experts << " over " << ranks;
      }
      ASSERT_LE(most - least, 1U) << experts << " over " << ranks;
    }
  }
}

TEST(Shape, OwnersAtTheGreatestCount) {
  Shape s = small_shape();
  s.experts = kMaxExperts;
  for (const uint32_t ranks : {1U, 72U, 128U})
    for (uint32_t r = 0; r < ranks; ++r) {
      ASSERT_EQ(owner(s, first_expert(s, r, ranks), ranks), r);
      ASSERT_EQ(owner(s, first_expert(s, r + 1, ranks) - 1, ranks), r);
    }
}

TEST(Shape, KimiK3Over72RanksIs12Or13Each) {
  Shape s = small_shape();
  s.experts = 896;
  std::set<uint32_t> sizes;
  for (uint32_t r = 0; r < 72; ++r) sizes.insert(first_expert(s, r + 1, 72) - first_expert(s, r, 72));
  EXPECT_EQ(sizes, (std::set<uint32_t>{12, 13}));
}

// ---- arena

struct Array {
  uint64_t at, bytes;
};

/// Rows are as wide as the wider of hidden and latent.
std::vector<Array> arrays_of(const Shape& s, const ArenaSlot& a, uint64_t tokens) {
  const uint64_t width = std::max(s.hidden, s.latent);
  return {{a.x, tokens * width * 2},     {a.scales, tokens * ((width + 31) / 32)},
          {a.ids, tokens * s.top_k * 8}, {a.weights, tokens * s.top_k * 4},
          {a.out, tokens * width * 2},   {a.valid, 4}};
}

TEST(Arena, SlotsAreAlignedAndDisjoint) {
  for (const uint32_t hidden : {8U, 512U, 7168U, kMaxWidth}) {
    for (const uint64_t tokens : {uint64_t{1}, uint64_t{7}, uint64_t{832}, uint64_t{1} << 20}) {
      Shape s = small_shape();
      s.hidden = hidden;
      uint64_t end = 0;
      for (uint32_t slot = 0; slot < 64; ++slot) {
        const ArenaSlot a = arena_slot(s, slot, tokens);
        for (const Array& array : arrays_of(s, a, tokens)) {
          ASSERT_EQ(array.at % 256, 0U);
          ASSERT_GE(array.at, end) << "hidden " << hidden << " tokens " << tokens << " slot " << slot;
          ASSERT_LT(array.at - end, 256U) << "a gap wider than the alignment asks for";
          end = array.at + array.bytes;
        }
        ASSERT_GE(a.end, end);
        ASSERT_LT(a.end - end, 256U);
        ASSERT_EQ(a.end, arena_slot(s, slot + 1, tokens).x);
      }
    }
  }
}

TEST(Arena, SlotTokensAreTheMostThatFit) {
  for (const uint32_t slots : {1U, 2U, 64U}) {
    for (const uint64_t bytes : {uint64_t{1} << 16, uint64_t{1} << 20, uint64_t{64} << 20, uint64_t{1} << 32}) {
      const Shape s = small_shape();
      const uint32_t tokens = slot_tokens(s, slots, bytes, 65536);
      EXPECT_TRUE(tokens == 0 || arena_slot(s, slots - 1, tokens).end <= bytes) << slots << " " << bytes;
      EXPECT_TRUE(tokens == 65536 || arena_slot(s, slots - 1, tokens + 1).end > bytes) << slots << " " << bytes;
    }
  }
  EXPECT_EQ(slot_tokens(small_shape(), 64, 4096, 65536), 0U);
  EXPECT_EQ(slot_tokens(small_shape(), 1, uint64_t{1} << 32, 100), 100U);
}

}  // namespace
}  // namespace moed
