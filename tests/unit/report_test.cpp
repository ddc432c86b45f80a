// Report: the JSON has the documented keys in order, survives hostile names, and never exceeds its limit.
#include "daemon/report.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

namespace moed {
namespace {

using Json = nlohmann::ordered_json;

/// The example of interfaces.md, section 13.
Report example() {
  Report r;
  r.ranks = 4;
  r.missing = {"link 3: lost"};
  r.backend = "cpu";
  r.transport = "heap";
  r.incarnation = 0x5f0c81d2a7e94b10ULL;
  r.uptime_s = 12.0832;
  r.version = "0.1.0";
  r.socket = "/run/moed/moed/0.sock";
  r.http = "127.0.0.1:9400";
  r.lanes_max = 2;
  r.lanes = {{1, "engine-a", 4711, 51234, false}};
  r.calls[0] = 51234;
  r.p50_us = 41;
  r.p99_us = 88.04;
  r.phases = {{"dispatch", 2.34, 5}, {"experts", 20.06, 40.96}};
  r.peers = {{1, "ready", 42.0, 1.31, {0.01, 1, 0.2, 0.1}, 15871, 0, "", 0.25, 3, 1.5},
             {2, "connecting", std::nullopt, 0, {}, 0, 1, "loading", 0, std::nullopt, 0}};
  r.heap = 4194304;
  return r;
}

TEST(Report, TheExample) {
  EXPECT_EQ(
      to_json(example()),
      R"({"rank":0,"ranks":4,"ready":false,"missing":["link 3: lost"],"backend":"cpu","transport":"heap","sharing":"",)"
      R"("incarnation":"5f0c81d2a7e94b10","uptime_s":12.1,"version":"0.1.0","socket":"/run/moed/moed/0.sock",)"
      R"("http":"127.0.0.1:9400","limits":{"lanes":2},)"
      R"("lanes":[{"lane":1,"name":"engine-a","pid":4711,"calls":51234,"dry":false}],)"
      R"("calls":{"ok":51234},"call_us":{"p50":41.0,"p99":88.0},)"
      R"("phase_us":{"dispatch":{"p50":2.3,"p99":5.0},"experts":{"p50":20.1,"p99":41.0}},)"
      R"("peers":[{"rank":1,"link":"ready","heartbeat_ms":42.0,"wait_s":1.31,)"
      R"("wait_by":{"queue":0.01,"experts":1.0,"send":0.2,"wire":0.1},"last":15871,"losses":0,"busy":"",)"
      R"("loop_ms":0.25,"waits_for":3,"waits_ms":1.5},)"
      R"({"rank":2,"link":"connecting","heartbeat_ms":null,"wait_s":0.0,)"
      R"("wait_by":{"queue":0.0,"experts":0.0,"send":0.0,"wire":0.0},"last":0,"losses":1,"busy":"loading",)"
      R"("loop_ms":0.0,"waits_for":null,"waits_ms":0.0}],)"
      R"("memory":{"heap":4194304,"weights":0}})");
}

TEST(Report, CallsShowOkAlwaysAndOthersWhenTheyHappened) {
  Report r;
  EXPECT_EQ(Json::parse(to_json(r))["calls"].dump(), R"({"ok":0})");
  r.calls[static_cast<std::size_t>(Status::bad_route)] = 3;
  r.calls[static_cast<std::size_t>(Status::internal)] = 1;
  EXPECT_EQ(Json::parse(to_json(r))["calls"].dump(), R"({"ok":0,"bad_route":3,"internal":1})");
}

TEST(Report, EmptyListsAreLists) {
  const Json json = Json::parse(to_json(Report{}));
  for (const char* key : {"missing", "lanes", "peers"}) {
    EXPECT_TRUE(json[key].is_array()) << key;
    EXPECT_TRUE(json[key].empty()) << key;
  }
  EXPECT_EQ(json["incarnation"], "0000000000000000");
  EXPECT_FALSE(json.contains("truncated"));
}

std::string name_after(const std::string& given) {
  Report r;
  r.lanes = {{1, given, 1, 0, true}};
  return Json::parse(to_json(r))["lanes"][0]["name"];
}

TEST(Report, HostileNamesBecomeHarmless) {
  const std::string fffd = "\xEF\xBF\xBD";
  EXPECT_EQ(name_after("Zürich 東京"), "Zürich 東京");
  EXPECT_EQ(name_after("quote\" back\\slash"), "quote\" back\\slash");
  EXPECT_EQ(name_after(std::string("ab\0cd", 5)), "ab");
  EXPECT_EQ(name_after(std::string(32, '\0')), "");
  EXPECT_EQ(name_after("\x1b[2J"), fffd + "[2J");
  EXPECT_EQ(name_after("a\nb\x7f"), "a" + fffd + "b" + fffd);
  EXPECT_EQ(name_after("a\xC2\x9B"
                       "b"),
            "a" + fffd + "b");
  EXPECT_EQ(name_after("\xff"), fffd);
  EXPECT_EQ(name_after("cut \xE6\x9D"), "cut " + fffd);
  EXPECT_EQ(name_after(std::string(1000, 'x')), std::string(256, 'x'));
}

TEST(Report, EveryPairOfBytesBecomesHarmless) {
  std::vector<std::string> pairs;
  for (int first = 1; first < 256; ++first)
    for (int second = 1; second < 256; ++second)
      pairs.push_back({static_cast<char>(first), static_cast<char>(second), 'z'});
  const Json json = Json::parse(health_json(true, pairs));  // throws on what is not UTF-8
  ASSERT_EQ(json["missing"].size(), pairs.size());
  for (const Json& text : json["missing"]) {
    const std::string& s = text.get_ref<const std::string&>();
    const bool control = std::ranges::any_of(s, [](unsigned char c) { return c < 0x20 || c == 0x7F; });
    if (control || s.back() != 'z') ADD_FAILURE() << text;
  }
}

TEST(Report, NumbersThatAreNone) {
  Report r;
  r.p50_us = std::numeric_limits<double>::quiet_NaN();
  r.uptime_s = std::numeric_limits<double>::infinity();
  const Json json = Json::parse(to_json(r));
  EXPECT_TRUE(json["call_us"]["p50"].is_null());
  EXPECT_TRUE(json["uptime_s"].is_null());
}

TEST(Report, TheLargestRealWorldFits) {
  Report r = example();
  r.lanes.assign(64, {63, std::string(32, '\\'), INT32_MAX, UINT64_MAX, true});
  r.peers.assign(127,
                 {126, "connecting", 1e9, 1e9, {1e9, 1e9, 1e9, 1e9}, UINT64_MAX, UINT64_MAX, "mapping", 1e9, 126, 1e9});
  r.missing.assign(128, "link 126: connecting");
  r.phases.clear();
  for (const char* phase : {"dispatch", "wait", "reduce", "gather", "experts", "send"})
    r.phases.push_back({phase, 1e9, 1e9});
  r.calls.fill(UINT64_MAX);
  const std::string text = to_json(r);
  EXPECT_LE(text.size(), 65536U);
  const Json json = Json::parse(text);
  EXPECT_FALSE(json.contains("truncated"));
  EXPECT_EQ(json["lanes"].size(), 64U);
  EXPECT_EQ(json["peers"].size(), 127U);
}

TEST(Report, WhatIsTooLargeIsTruncatedAndSaysSo) {
  Report lanes = example(), peers = example(), all = example();
  lanes.lanes.assign(5000, {1, "engine", 1, 1, false});
  peers.peers.assign(5000, {1, "ready", 1.0, 1, {}, 1, 1, "mapping", 1e9, 126, 1e9});
  all.missing.assign(3000, std::string(300, '"'));
  all.lanes.assign(3000, {1, std::string(300, '\x01'), 1, 1, false});
  all.peers.assign(3000, {1, std::string(300, '\xff'), 1.0, 1, {}, 1, 1, "mapping", 1e9, 126, 1e9});
  all.backend = all.transport = all.sharing = all.version = all.socket = all.http = std::string(100'000, '\x02');
  for (const Report& r : {lanes, peers, all}) {
    const std::string text = to_json(r);
    EXPECT_LE(text.size(), 65536U);
    const Json json = Json::parse(text);
    EXPECT_EQ(json["truncated"], true);
    EXPECT_EQ(json["ranks"], 4);
  }
  EXPECT_EQ(Json::parse(to_json(lanes))["peers"].size(), 2U);
  EXPECT_GT(Json::parse(to_json(lanes))["lanes"].size(), 100U);
}

TEST(Report, Waits) {
  EXPECT_EQ(waits_json(1, {{42.04, {0.001, 2}}, {0, {1234.567891, 0}}, {std::nullopt, {}}}),
            R"({"rank":1,"ranks":3,"rows":[{"rank":0,"age_ms":42.0,"wait_ms":[0.001,2.0]},)"
            R"({"rank":1,"age_ms":0.0,"wait_ms":[1234.567891,0.0]},{"rank":2,"age_ms":null,"wait_ms":[]}]})");
}

TEST(Report, Health) {
  EXPECT_EQ(health_json(true, {}), R"({"ok":true,"missing":[]})");
  EXPECT_EQ(health_json(false, {"link 3: connecting", "bad \xff"}),
            "{\"ok\":false,\"missing\":[\"link 3: connecting\",\"bad \xEF\xBF\xBD\"]}");
}

TEST(Report, LinkNames) {
  EXPECT_STREQ(link_name(0), "connecting");
  EXPECT_STREQ(link_name(3), "lost");
  EXPECT_STREQ(link_name(4), "unknown");
}

}  // namespace
}  // namespace moed
