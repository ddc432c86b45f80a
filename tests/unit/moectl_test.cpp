// moectl's own arithmetic and its status table. The identity answer is compared with the oracle's MXFP8 bytes.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <fstream>
#include <iterator>

#include "daemon/moectl/bench.h"
#include "daemon/moectl/identity.h"
#include "daemon/moectl/status.h"

namespace {

using namespace moed::ctl;

template <class T>
std::vector<T> golden(const std::string& name) {
  std::ifstream file(std::string(MOED_GOLDEN) + "/" + name, std::ios::binary);
  const std::string bytes((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  std::vector<T> values(bytes.size() / sizeof(T));
  std::memcpy(values.data(), bytes.data(), values.size() * sizeof(T));
  return values;
}

double e4m3(uint8_t code) {
  const int exponent = code >> 3 & 15;
  const double magnitude = exponent == 0 ? std::ldexp(code & 7, -9) : std::ldexp(8 + (code & 7), exponent - 10);
  return (code & 0x80) != 0 ? -magnitude : magnitude;
}

double number(uint16_t bf16) {
  const uint32_t bits = uint32_t{bf16} << 16;
  float value = 0;
  std::memcpy(&value, &bits, sizeof value);
  return static_cast<double>(value);
}

TEST(Identity, AgreesWithTheOracleOnMxfp8) {
  const auto x = golden<uint16_t>("mxfp8_x.bin");
  const auto codes = golden<uint8_t>("mxfp8_codes.bin");
  const auto scales = golden<uint8_t>("mxfp8_scales.bin");
  ASSERT_EQ(x.size(), 49U * 3584U);
  ASSERT_EQ(codes.size(), x.size());
  ASSERT_EQ(scales.size() * 32, x.size());
  const std::vector<uint16_t> out =
      identity_answer({49, 3584, 1, x, std::vector<int32_t>(49, 0), std::vector<float>(49, 1.0F)}, 1, 1);
  ASSERT_EQ(out.size(), x.size());
  std::size_t compared = 0;
  for (std::size_t block = 0; block < scales.size(); ++block) {
    if (scales[block] < 16 || scales[block] > 240) continue;  // bench stays far from the ends of the scale
    for (std::size_t i = block * 32; i < block * 32 + 32; ++i, ++compared)
      ASSERT_EQ(number(out[i]), std::ldexp(e4m3(codes[i]), scales[block] - 127)) << "element " << i;
  }
  EXPECT_GT(compared, 100'000U);
}

TEST(Identity, SumsPartialsRoundedRankByRank) {
  // 5 experts over 2 ranks: 0 and 1 belong to rank 0, 2 to 4 to rank 1. x = 1 goes through MXFP8 unchanged.
  Inputs in{1, 32, 4, std::vector<uint16_t>(32, 0x3F80), {1, 2, -1, 4}, {1.0F + 0x1p-8F, 0x1p-8F, 100.0F, 0x1p-9F}};
  // rank 0: 1 + 2^-8 is a tie and rounds to 1; rank 1: 1.5 x 2^-8; their sum rounds up to 1 + 2^-7
  for (const uint16_t got : identity_answer(in, 5, 2)) EXPECT_EQ(number(got), 1 + 0x1p-7);
  // one rank: 1 + 2.5 x 2^-8 rounds to 1 + 2^-7
  for (const uint16_t got : identity_answer(in, 5, 1)) EXPECT_EQ(number(got), 1 + 0x1p-7);
  in.weights = {1.0F + 0x1p-8F, 0x1p-9F, 100.0F, 0};
  // two ranks: 1 and 2^-9 give 1; one rank: 1 + 1.5 x 2^-8 rounds up
  for (const uint16_t got : identity_answer(in, 5, 2)) EXPECT_EQ(number(got), 1);
  for (const uint16_t got : identity_answer(in, 5, 1)) EXPECT_EQ(number(got), 1 + 0x1p-7);
  EXPECT_TRUE(same_number(0x8000, 0) && !same_number(0x8000, 0x3F80));
}

TEST(RandomInputs, AreRepeatableAndDistinct) {
  const Inputs a = random_inputs(50, 64, 8, 16, 3);
  const Inputs b = random_inputs(50, 64, 8, 16, 3);
  EXPECT_EQ(a.x, b.x);
  EXPECT_EQ(a.ids, b.ids);
  EXPECT_NE(a.x, random_inputs(50, 64, 8, 16, 4).x);
  for (uint32_t t = 0; t < 50; ++t) {
    uint32_t seen = 0;
    for (uint32_t k = 0; k < 8; ++k) {
      const int32_t id = a.ids[t * 8 + k];
      ASSERT_TRUE(id >= 0 && id < 16 && (seen >> id & 1) == 0) << "token " << t << " slot " << k;
      seen |= 1U << id;
    }
  }
}

TEST(LostOnly, WantsThisRankAndNoOther) {
  constexpr uint64_t kRank2 = 4;  // bit 2 of the first word, and bit 70 - 64 of the second
  constexpr uint64_t kRank70 = 64;
  moed_reply_t reply{};
  reply.ranks[0] = kRank2;
  for (const moed_status s : {MOED_DEGRADED, MOED_NOT_READY, MOED_PEER_TIMEOUT, MOED_PEER_LOST}) {
    EXPECT_TRUE(lost_only(s, reply, 2)) << moed_status_name(s);
    for (const int other : {-1, 0, 1, 3, 66, 127, 128, 130}) EXPECT_FALSE(lost_only(s, reply, other)) << other;
  }
  for (const moed_status s : {MOED_OK, MOED_PENDING, MOED_MASKED, MOED_BAD_CALL, MOED_BUSY, MOED_STEP_FAILED,
                              MOED_DRAINING, MOED_DAEMON_LOST, MOED_INTERNAL})
    EXPECT_FALSE(lost_only(s, reply, 2)) << moed_status_name(s);
  reply.ranks[1] = kRank70;
  EXPECT_FALSE(lost_only(MOED_PEER_LOST, reply, 2));
  EXPECT_FALSE(lost_only(MOED_PEER_LOST, reply, 70));
  reply.ranks[0] = 0;
  EXPECT_TRUE(lost_only(MOED_PEER_LOST, reply, 70));
  reply.ranks[1] = 0;
  EXPECT_FALSE(lost_only(MOED_PEER_LOST, reply, 2));
}

TEST(Status, MakesATable) {
  const std::string table =
      status_table(R"({"rank":0,"ranks":4,"ready":false,"missing":["link 3: lost"],"backend":"cpu",
    "transport":"heap","sharing":"","incarnation":"5f0c81d2a7e94b10","uptime_s":12.1,"version":"0.1.0",
    "limits":{"lanes":2},"lanes":[{"lane":1,"name":"engine-a","pid":4711,"calls":51234}],"calls":{"ok":51234,"bad_route":2,"dry":1},
    "call_us":{"p50":41,"p99":88},"peers":[
    {"rank":1,"link":"ready","heartbeat_ms":42,"wait_s":1.0,
     "wait_by":{"queue":0.1,"experts":0.6,"send":0.1,"wire":0.2},"last":15871,"losses":0},
    {"rank":2,"link":"ready","heartbeat_ms":17,"wait_s":3.0,"last":18034,"losses":0},
    {"rank":3,"link":"lost","heartbeat_ms":1400,"wait_s":0,"last":12,"losses":1}],"memory":{"heap":1}})");
  EXPECT_EQ(table,
            "rank 0 of 4  not ready (link 3: lost)  cpu heap  incarnation 5f0c81d2  uptime 12 s  version 0.1.0\n"
            "lanes 2: 1 attached (engine-a, pid 4711)   calls 51234 ok, 3 other   p50 41 us  p99 88 us\n"
            "peer  link        heartbeat  wait share  mostly       last  losses\n"
            "   1  ready           42 ms        25 %  experts     15871       0\n"
            "   2  ready           17 ms        75 %  -           18034       0\n"
            "   3  lost            1.4 s           -  -              12       1\n");
}

TEST(Status, ReadsWhatItDoesNotExpect) {
  EXPECT_EQ(status_table("no json"), "");
  EXPECT_EQ(status_table("[1]"), "");
  EXPECT_EQ(status_table(R"({"rank":"x","peers":[],"lanes":[],"calls":{"ok":-1.5,"x":{}},"missing":[1]})"),
            "rank 0 of 0  not ready     incarnation   uptime 0 s  version unknown\n"
            "lanes: 0 attached   calls 0 ok, 0 other   p50 0.0 us  p99 0.0 us\n");
}

}  // namespace
