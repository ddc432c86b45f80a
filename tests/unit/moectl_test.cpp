// moectl's own arithmetic and what it makes of a daemon's state and records: the status table, a trace, the view of
// top. The identity answer is compared with the oracle's MXFP8 bytes.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <fstream>
#include <iterator>
#include <map>
#include <random>

#include "daemon/abi/call.h"
#include "daemon/moectl/bench.h"
#include "daemon/moectl/identity.h"
#include "daemon/moectl/status.h"
#include "daemon/moectl/top.h"
#include "daemon/moectl/trace.h"
#include "tests/support/trace_sums.h"

namespace {

using namespace moed::ctl;
using moed::CallRecord;
using moed::ServeRecord;
namespace test = moed::test;

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

/// Records with everything that a back end may say, calls of each lane one after the other.
Flight random_flight(uint32_t rank, uint64_t seed) {
  std::mt19937_64 random(seed);
  Flight flight;
  flight.rank = rank;
  flight.ranks = 5;
  flight.realtime_ahead_ns = 1'790'000'000'000'000'000 + static_cast<int64_t>(seed % 1000);
  uint64_t end[3] = {1000, 1500, 2000}, served = 900;
  for (int i = 0; i < 400; ++i) {
    CallRecord r{};
    r.lane = static_cast<uint16_t>(random() % 3);
    r.start = end[r.lane] + random() % 5000;
    r.status = static_cast<uint32_t>(random() % moed::kStatuses);
    r.layer = i % 7 == 0 ? moed::kIdentityLayer : static_cast<uint32_t>(random() % 92);
    r.last = i % 5 == 0 ? moed::kNoRank : static_cast<uint32_t>(random() % 5);
    for (uint64_t& phase : r.phase_ns) phase = random() % 3 == 0 ? 0 : random() % 3'000'000;
    r.total_ns = r.phase_ns[0] + r.phase_ns[1] + r.phase_ns[2] + random() % 1000;
    for (uint32_t p = 0; p < 5; ++p) r.peer[p].wait = static_cast<uint32_t>(random() % 1000 * (random() % 2));
    end[r.lane] = r.start + r.total_ns;
    flight.calls.push_back(r);
    ServeRecord s{};
    s.gather_ns = random() % 5000;
    s.experts_ns = random() % 50'000;
    s.send_ns = random() % 5000;
    // As on a GPU: the end is seen some time after it was, now and then behind the next pass's beginning.
    served += s.gather_ns + s.experts_ns + s.send_ns;
    s.start = served + random() % 20'000 - s.gather_ns - s.experts_ns - s.send_ns;
    flight.passes.push_back(s);
  }
  return flight;
}

TEST(Trace, AddsUpToItsRecordsToTheNanosecond) {
  const std::vector<Flight> flights = {random_flight(0, 1), random_flight(3, 2)};
  const std::string text = trace_json(flights);
  const test::Sums got = test::sums_of(test::parse_trace(text));
  test::Sums expected;
  for (const Flight& f : flights) test::add_records(expected, f);
  EXPECT_EQ(got, expected);
  EXPECT_EQ(expected.size(), 2U * (3 * 4 + 4)) << "three lanes and serve passes, each with three parts";
  // One nanosecond more in one record is seen.
  std::vector<Flight> other = flights;
  ++other[1].calls[200].total_ns;
  EXPECT_NE(test::sums_of(test::parse_trace(trace_json(other))), expected);
}

TEST(Trace, EventsOfATrackFollowOneAnotherAndHoldTheirParts) {
  const std::vector<Flight> flights = {random_flight(0, 3), random_flight(1, 4)};
  bool overlapped = false;
  for (const Flight& f : flights)
    for (size_t i = 1; i < f.passes.size(); ++i) {
      const ServeRecord& a = f.passes[i - 1];
      overlapped = overlapped || a.start + a.gather_ns + a.experts_ns + a.send_ns > f.passes[i].start;
    }
  EXPECT_TRUE(overlapped) << "the records themselves overlap";
  struct Whole {
    int64_t start = 0, end = 0, part_end = 0;
  };
  std::map<std::pair<uint64_t, uint64_t>, Whole> tracks;
  int64_t earliest = INT64_MAX;
  for (const test::Slice& s : test::parse_trace(trace_json(flights))) {
    Whole& w = tracks[{s.process, s.thread}];
    earliest = std::min(earliest, s.start);
    if (s.category == "call" || s.category == "pass") {
      EXPECT_GE(s.start, w.end);
      w = {s.start, s.start + static_cast<int64_t>(s.duration), s.start};
    } else {
      EXPECT_GE(s.start, w.part_end);
      w.part_end = s.start + static_cast<int64_t>(s.duration);
      EXPECT_LE(w.part_end, w.end);
    }
  }
  EXPECT_EQ(tracks.size(), 8U);
  EXPECT_EQ(earliest, 0);
}

TEST(Trace, SaysWhoWasWaitedForAndWhy) {
  Flight f;
  f.ranks = 8;
  f.realtime_ahead_ns = 1'790'000'000'000'000'000;
  CallRecord r{};
  r.start = 1'000'123;
  r.layer = 61;
  r.tokens = 5;
  r.status = static_cast<uint32_t>(moed::Status::peer_timeout);
  r.lane = 2;
  r.last = 6;
  r.ranks[0] = 1U << 6;
  r.total_ns = 2'000'001;
  r.phase_ns[1] = 1'999'999;
  for (uint32_t p = 0; p < 7; ++p) r.peer[p].wait = 1000 + p;
  r.peer[6] = {1'999'999, 100, 1'000'000, 200};
  f.calls.push_back(r);
  const nlohmann::json trace = nlohmann::json::parse(trace_json({f}));
  EXPECT_EQ(trace["otherData"]["begin_unix_ns"], "1790000000001000123");
  nlohmann::json call;
  for (const auto& e : trace["traceEvents"])
    if (e.value("cat", "") == "call") call = e;
  EXPECT_EQ(call["name"], "layer 61");
  EXPECT_EQ(call["args"]["status"], "peer_timeout");
  EXPECT_EQ(call["args"]["tokens"], 5);
  EXPECT_EQ(call["args"]["last"], 6);
  EXPECT_EQ(call["args"]["ranks"], nlohmann::json({6}));
  const nlohmann::json& waits = call["args"]["waits"];
  EXPECT_EQ(waits.size(), 4U) << "the longest four";
  EXPECT_EQ(waits["rank 6"]["wait_us"], 1999.999);
  EXPECT_EQ(waits["rank 6"]["experts_us"], 1000.0);
  EXPECT_EQ(waits["rank 6"]["wire_us"], 999.699);
  EXPECT_TRUE(waits.contains("rank 3") && !waits.contains("rank 2"));
}

TEST(Trace, OfNothingIsATraceToo) {
  Flight empty;
  for (const std::vector<Flight>& flights : {std::vector<Flight>{}, std::vector<Flight>{empty}})
    EXPECT_TRUE(test::parse_trace(trace_json(flights)).empty());
}

/// A rank's state with so many calls and waits for its two peers.
std::string state(uint64_t ok, uint64_t late, double experts, double wire, uint64_t last, const char* life = "77") {
  nlohmann::json peers = nlohmann::json::array();
  peers.push_back({{"rank", 1},
                   {"link", "ready"},
                   {"last", last},
                   {"wait_by", {{"queue", 0.5}, {"experts", experts}, {"send", 0.0}, {"wire", wire}}}});
  peers.push_back({{"rank", 2},
                   {"link", "lost"},
                   {"last", 3},
                   {"wait_by", {{"queue", 1.0 + wire}, {"experts", 0.0}, {"send", 0.0}, {"wire", 0.0}}}});
  return nlohmann::json{{"rank", 0},
                        {"ranks", 3},
                        {"ready", false},
                        {"missing", {"link 2: lost"}},
                        {"incarnation", life},
                        {"lanes", {{{"lane", 1}}}},
                        {"calls", {{"ok", ok}, {"peer_timeout", late}}},
                        {"call_us", {{"p50", 41.3}, {"p99", 88}}},
                        {"peers", peers}}
      .dump();
}

TEST(Top, ShowsWhatHappenedSinceTheLookBefore) {
  const Look before{1'000'000'000, state(1000, 2, 3.0, 1.0, 10), {}};
  const Look now{3'000'000'000, state(1500, 12, 3.6, 1.2, 30), {}};
  EXPECT_EQ(top_rank("S", before, now),
            "rank 0 of 3  not ready (link 2: lost)  lanes 1  calls/s 255  not ok/s 5.0  p50 41.3 us  p99 88.0 us\n"
            "  peer  link        waits  queue  experts   send   wire   last/s\n"
            "     1  ready        80 %    0 %     75 %    0 %   25 %     10.0\n"
            "     2  lost         20 %  100 %      0 %    0 %    0 %      0.0\n");
}

TEST(Top, HasNoRatesWithoutAnEarlierLookAtTheSameLife) {
  const std::string rateless =
      "rank 0 of 3  not ready (link 2: lost)  lanes 1  calls/s -  not ok/s -  p50 41.3 us  p99 88.0 us\n"
      "  peer  link        waits  queue  experts   send   wire   last/s\n"
      "     1  ready           -      -        -      -      -        -\n"
      "     2  lost            -      -        -      -      -        -\n";
  const Look now{3'000'000'000, state(1500, 12, 3.6, 1.2, 30), {}};
  EXPECT_EQ(top_rank("S", {}, now), rateless);
  EXPECT_EQ(top_rank("S", Look{1, "", "gone"}, now), rateless) << "it was not reachable before";
  EXPECT_EQ(top_rank("S", Look{1, state(9, 9, 9, 9, 9, "76"), {}}, now), rateless) << "another incarnation";
}

TEST(Top, ShowsWhoIsNotReachableOrNotUnderstood) {
  EXPECT_EQ(top_rank("/s/3.sock", {}, Look{1, "", "nobody listens"}), "/s/3.sock  not reachable: nobody listens\n");
  EXPECT_EQ(top_rank("", {}, Look{1, "", "no socket"}), "the daemon  not reachable: no socket\n");
  EXPECT_EQ(top_rank("S", {}, Look{1, "[1]", ""}), "S  not understood: daemon and moectl are of different versions\n");
  EXPECT_EQ(top_rank("S", {}, Look{1, R"({"rank":"x","peers":{},"lanes":4,"calls":[],"call_us":7})", ""}),
            "rank 0 of 0  not ready  lanes 1  calls/s -  not ok/s -  p50 0.0 us  p99 0.0 us\n");
}

TEST(Top, ShowsTokensWhereTheDaemonCountsThem) {
  const Look before{1'000'000'000, R"({"incarnation":"1","tokens":100})", ""};
  const Look now{3'000'000'000, R"({"incarnation":"1","tokens":5100})", ""};
  EXPECT_NE(top_rank("S", before, now).find("  tokens/s 2500  "), std::string::npos);
}

}  // namespace
