// A real Prometheus scrapes two real daemons while engines call: it stores what the engines saw, what the pages say and
// what docs/metrics.md lists, no more and no less; promtool has nothing to say about the pages.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cmath>
#include <fstream>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <regex>
#include <set>
#include <sstream>
#include <thread>

#include "tests/support/caller.h"
#include "tests/support/daemons.h"
#include "tests/support/fault_daemon.h"
#include "tests/support/prometheus.h"
#include "tests/support/questions.h"

namespace moed {
namespace {

using nlohmann::json;
using test::Asker;
using test::Daemons;
using test::kPrometheus;
using test::Prometheus;
using test::QuestionModel;
using test::Samples;
using test::Series;
using test::wait_until;

constexpr uint32_t kRanks = 2;
constexpr int kPrometheusMs = 60'000;  ///< for whatever Prometheus has to do by itself; it scrapes once a second
constexpr const char* kPromtool = "/usr/bin/promtool";
constexpr const char* kRevision = R"(tag "v1\2", {final})";  ///< a label whose value has to be escaped

double seconds_since_1970() {
  return std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
}

std::string body_of(const std::string& answer) { return answer.substr(answer.find("\r\n\r\n") + 4); }

/// One row of the table in docs/metrics.md; a label without a closed list of values has an empty one.
struct Documented {
  std::string type, meaning;
  std::map<std::string, std::set<std::string>> labels;
};

std::map<std::string, Documented> documented() {
  static const std::regex row(R"(\| `([a-z_]+)` \| ([a-z]+) \|(.*)\| (1|bytes|seconds) \| (.*) \|)");
  static const std::regex label(R"(`([a-z_]+)`(?: \(([^)]*)\))?)");
  std::map<std::string, Documented> rows;
  std::ifstream file(MOED_SOURCE "/docs/metrics.md");
  for (std::string line; std::getline(file, line);) {
    std::smatch cells;
    if (!std::regex_match(line, cells, row)) continue;
    Documented& d = rows[cells[1]];
    d.type = cells[2];
    d.meaning = cells[5];
    const std::string labels = cells[3];
    for (std::sregex_iterator it(labels.begin(), labels.end(), label), end; it != end; ++it) {
      std::istringstream values((*it)[2]);
      std::set<std::string>& known = d.labels[(*it)[1]];
      for (std::string value; std::getline(values >> std::ws, value, ',');) known.insert(value);
    }
  }
  return rows;
}

/// What the engine at one rank saw of its own calls.
struct Seen {
  std::atomic<uint64_t> ok{0};
  uint64_t bad_route = 0, tokens = 0, single = 0;  ///< single: calls of 0 or 1 token
  double seconds = 0;                              ///< in calls that ended ok
};

/// Calls of 0 to 16 tokens to experts of both ranks, each tenth with an expert that there is not.
void ask_until(const std::atomic<bool>& stop, const std::string& socket, Seen& seen) {
  Asker asker(socket, 10'000'000);
  for (uint32_t i = 0; !stop; ++i) {
    const uint32_t tokens = i % 17;
    test::Question q = test::question(1 + i % 2, tokens, kRanks, i, [](uint32_t) { return true; });
    const bool bad = i % 10 == 9 && tokens > 0;
    if (bad) q.rows.ids[0] = 1000;
    const Nanos start = now_ns();
    const uint32_t status = asker.ask(q).status;
    EXPECT_EQ(status, uint32_t{bad ? MOED_BAD_ROUTE : MOED_OK});
    if (status == MOED_BAD_ROUTE) ++seen.bad_route;
    if (status != MOED_OK) continue;
    seen.seconds += static_cast<double>(now_ns() - start) * 1e-9;
    ++seen.ok;
    seen.tokens += tokens;
    if (tokens <= 1) ++seen.single;
  }
}

/// Two daemons, a Prometheus that knows both, and engines that have called while it scraped and are gone.
class PrometheusTest : public testing::Test {
 protected:
  static void SetUpTestSuite() {
    if (::access(kPrometheus, X_OK) != 0) return;
    Daemons::Sets sets = QuestionModel::sets();
    sets.emplace_back("heartbeat.lost_after_ms=10000");  // a link that a busy machine loses would be told, too
    sets.emplace_back("calls.deadline_ms=20000");        // nor is a rank late
    sets.push_back(std::string("model.revision='") + kRevision + "'");
    world_ = std::make_unique<Daemons>(kRanks, sets);
    prometheus_ = std::make_unique<Prometheus>(std::vector{port(0), port(1)});
    ASSERT_TRUE(wait_until([] { return all_up(0); }, kPrometheusMs)) << prometheus_->log();
    std::atomic<bool> stop{false};
    std::vector<std::thread> engines;
    for (uint32_t r = 0; r < kRanks; ++r)
      engines.emplace_back([&, r, socket = (*world_)[r].socket()] { ask_until(stop, socket, seen_[r]); });
    const auto called = [](uint32_t r) { return stored("moed_calls_total", {{"status", "ok"}}, r) > 20; };
    const bool scraped = wait_until([&] { return called(0) && called(1); }, kPrometheusMs);
    stop = true;
    for (std::thread& engine : engines) engine.join();
    ASSERT_TRUE(scraped) << prometheus_->log();
    for (uint32_t r = 0; r < kRanks; ++r)
      ASSERT_TRUE(wait_until(
          [r] {
            return stored("moed_calls_total", {{"status", "ok"}}, r) == static_cast<double>(seen_[r].ok);
          },
          kPrometheusMs))
          << stored("moed_calls_total", {{"status", "ok"}}, r) << " calls of " << seen_[r].ok;
  }

  static void TearDownTestSuite() {
    prometheus_.reset();
    world_.reset();
  }

  void SetUp() override {
    if (::access(kPrometheus, X_OK) != 0) GTEST_SKIP() << "no " << kPrometheus;
  }

  static uint16_t port(uint32_t rank) { return test::http_port((*world_)[rank]); }
  static std::string instance(uint32_t rank) { return Prometheus::instance(port(rank)); }
  static std::string page(uint32_t rank) { return body_of(test::get_page(port(rank), "/metrics")); }

  /// Whether both daemons were scraped well after that time.
  static bool all_up(double after) {
    const Samples up = prometheus_->query("up == 1 and timestamp(up) > " + std::to_string(after));
    return up.size() == kRanks;
  }

  /// The value of one series of a rank, NaN without one.
  static double stored(const std::string& name, Series labels, uint32_t rank) {
    labels["__name__"] = name;
    labels["instance"] = instance(rank);
    const Samples all = prometheus_->query(name);
    const auto it = all.find(labels);
    return it == all.end() ? std::nan("") : it->second;
  }

  /// All that Prometheus has of the daemons: names that are not its own.
  static Samples stored_series() {
    Samples all = prometheus_->query(R"({job="moed"})");
    std::erase_if(all, [](const auto& sample) {
      const std::string& name = sample.first.at("__name__");
      return name == "up" || name.starts_with("scrape_");
    });
    return all;
  }

  static inline std::unique_ptr<Daemons> world_;
  static inline std::unique_ptr<Prometheus> prometheus_;
  static inline std::array<Seen, kRanks> seen_;
};

TEST_F(PrometheusTest, StoresWhatTheEnginesSaw) {
  for (uint32_t r = 0; r < kRanks; ++r) {
    const Seen& seen = seen_[r];
    EXPECT_GT(seen.bad_route, 0U);
    EXPECT_EQ(stored("moed_calls_total", {{"status", "ok"}}, r), static_cast<double>(seen.ok));
    EXPECT_EQ(stored("moed_calls_total", {{"status", "bad_route"}}, r), static_cast<double>(seen.bad_route));
    EXPECT_EQ(stored("moed_calls_total", {{"status", "internal"}}, r), 0);
    EXPECT_EQ(stored("moed_tokens_total", {}, r), static_cast<double>(seen.tokens));
    const Series one{{"path", "host"}, {"tokens", "1"}}, more{{"path", "host"}, {"tokens", "2-16"}};
    const std::string name = "moed_call_duration_seconds";
    EXPECT_EQ(stored(name + "_count", one, r), static_cast<double>(seen.single));
    EXPECT_EQ(stored(name + "_count", more, r), static_cast<double>(seen.ok - seen.single));
    const double seconds = stored(name + "_sum", one, r) + stored(name + "_sum", more, r);
    EXPECT_GT(seconds, 0);
    EXPECT_LE(seconds, seen.seconds) << "from the bell to done is within the engine's call";
    const std::string of = R"({instance=")" + instance(r) + R"("})";
    const Samples median = prometheus_->query("histogram_quantile(0.5, sum by (le) (" + name + "_bucket" + of + "))");
    ASSERT_EQ(median.size(), 1U);
    EXPECT_GT(median.begin()->second, 0);
    EXPECT_LE(median.begin()->second, 1) << "the last bound: later ones mean that the buckets are not read";
    const json status = json::parse((*world_)[r].status_json());
    const Samples build = prometheus_->query("moed_build_info" + of),
                  model = prometheus_->query("moed_model_info" + of);
    ASSERT_EQ(build.size() + model.size(), 2U);
    EXPECT_EQ(build.begin()->first.at("version"), status["version"].get<std::string>());
    EXPECT_EQ(build.begin()->second, 1);
    EXPECT_EQ(model.begin()->first.at("revision"), kRevision);
  }
}

bool counts(const Series& series) {
  const std::string& name = series.at("__name__");
  return name.ends_with("_total") || name.ends_with("_bucket") || name.ends_with("_count") || name.ends_with("_sum");
}
bool moves(const Series& series) {
  const std::string& name = series.at("__name__");
  return name.ends_with("_age_seconds") || name == "process_resident_memory_bytes" || name == "process_open_fds";
}
bool of_calls(const Series& series) {
  const std::string& name = series.at("__name__");
  return name.starts_with("moed_call") || name.starts_with("moed_tokens");
}

/// Counters only grow: what Prometheus has lies between the page before its scrape and the page after it.
TEST_F(PrometheusTest, StoresWhatThePagesSay) {
  std::array<Samples, kRanks> before, after;
  for (uint32_t r = 0; r < kRanks; ++r) before[r] = test::parse_page(page(r), instance(r));
  const double since = seconds_since_1970() + 0.1;  // Prometheus may move the time of a scrape by some ms
  ASSERT_TRUE(wait_until([since] { return all_up(since); }, kPrometheusMs)) << prometheus_->log();
  const Samples all = stored_series();
  for (uint32_t r = 0; r < kRanks; ++r) after[r] = test::parse_page(page(r), instance(r));
  std::set<Series> on_pages, in_prometheus;
  for (const auto& [series, value] : all) in_prometheus.insert(series);
  const auto rows = documented();
  for (uint32_t r = 0; r < kRanks; ++r)
    for (const auto& [series, low] : before[r]) {
      on_pages.insert(series);
      const std::string text = json(series).dump();
      ASSERT_TRUE(all.contains(series) && after[r].contains(series)) << text;
      const double high = after[r].at(series), between = all.at(series);
      if (counts(series)) {
        EXPECT_LE(low, between) << text;
        EXPECT_GE(high, between) << text;
      } else if (!moves(series)) {
        EXPECT_EQ(low, between) << text;
      }
      if (of_calls(series)) {
        EXPECT_EQ(low, high) << text << ": the engines are gone";
      }
    }
  EXPECT_EQ(in_prometheus, on_pages);
  EXPECT_GT(on_pages.size(), 2 * rows.size());
}

TEST_F(PrometheusTest, HasTwoHealthyTargets) {
  const json targets = prometheus_->api("targets").at("activeTargets");
  std::set<std::string> instances;
  for (const json& target : targets) {
    EXPECT_EQ(target.at("health"), "up") << target;
    EXPECT_EQ(target.at("lastError"), "") << target;
    instances.insert(target.at("labels").at("instance"));
  }
  EXPECT_EQ(instances, (std::set<std::string>{instance(0), instance(1)}));
}

TEST_F(PrometheusTest, HasTheNamesTypesAndMeaningsOfTheDocument) {
  const auto rows = documented();
  std::set<std::string> names, wanted;
  const json all_names = prometheus_->api("label/__name__/values");
  for (const json& name : all_names)
    if (name != "up" && !name.get<std::string>().starts_with("scrape_")) names.insert(name);
  for (const auto& [name, d] : rows) {
    if (d.type != "histogram") wanted.insert(name);
    if (d.type == "histogram") wanted.insert({name + "_bucket", name + "_count", name + "_sum"});
  }
  EXPECT_EQ(names, wanted);
  std::set<std::string> described;
  const json metadata = prometheus_->api("metadata");
  for (const auto& [name, all] : metadata.items()) {
    described.insert(name);
    ASSERT_TRUE(rows.contains(name)) << name << " is not in docs/metrics.md";
    ASSERT_EQ(all.size(), 1U) << "both daemons say the same: " << all;
    EXPECT_EQ(all[0].at("type"), rows.at(name).type) << name;
    EXPECT_EQ(all[0].at("help"), rows.at(name).meaning) << name;
  }
  for (const auto& [name, d] : rows) EXPECT_TRUE(described.contains(name)) << name << " is documented but not there";
}

/// What exists under a condition only, as docs/metrics.md has it: no stream calls here, and no rank hears of itself.
TEST_F(PrometheusTest, HasTheLabelsOfTheDocument) {
  auto rows = documented();
  rows.at("moed_call_duration_seconds").labels.at("path").erase("stream");
  rows.at("moed_config_info").labels.erase("sharing");                       // empty: that of a GPU
  std::map<std::string, std::map<std::string, std::set<std::string>>> seen;  // by name and label
  for (const auto& [series, value] : stored_series()) {
    std::string name = series.at("__name__");
    for (const std::string part : {"_bucket", "_count", "_sum"})
      if (name.ends_with(part) && !rows.contains(name)) name.resize(name.size() - part.size());
    auto& labels = seen[name];
    for (const auto& [label, text] : series)
      if (label != "__name__" && label != "instance" && label != "le") labels[label].insert(text);
    if (name == "moed_heartbeat_age_seconds") {
      EXPECT_NE(series.at("instance"), instance(series.at("peer")[0] - '0'));
    }
  }
  for (const auto& [name, d] : rows) {
    ASSERT_TRUE(seen.contains(name)) << name;
    EXPECT_EQ(seen.at(name).size(), d.labels.size()) << name << json(seen.at(name));
    for (const auto& [label, values] : d.labels) {
      const bool open = name.ends_with("_info");
      EXPECT_TRUE(open || label == "peer" || !values.empty()) << name << " has no list of values for " << label;
      if (!open) {
        EXPECT_EQ(seen.at(name)[label], label == "peer" ? std::set<std::string>({"0", "1"}) : values)
            << name << " " << label;
      }
    }
  }
}

/// Every expression of the document gives a number for both daemons.
TEST_F(PrometheusTest, AnswersTheExpressionsOfTheDocument) {
  std::string text = test::read_file(MOED_SOURCE "/docs/metrics.md");
  std::replace(text.begin(), text.end(), '\n', ' ');
  static const std::regex quoted("`([^`]*rate\\([^`]*)`");
  size_t expressions = 0;
  for (std::sregex_iterator it(text.begin(), text.end(), quoted), end; it != end; ++it, ++expressions) {
    const Samples values = prometheus_->query((*it)[1]);
    EXPECT_EQ(values.size(), kRanks) << (*it)[1];
    for (const auto& [series, value] : values) EXPECT_GT(value, 0) << (*it)[1];
  }
  EXPECT_GE(expressions, 3U);
}

TEST_F(PrometheusTest, PromtoolFindsNothingOnThePages) {
  if (::access(kPromtool, X_OK) != 0) GTEST_SKIP() << "no " << kPromtool;
  for (uint32_t r = 0; r < kRanks; ++r) {
    const test::TempDir dir;
    std::ofstream(dir.path() + "/page") << page(r);
    const std::string command = std::string("exec ") + kPromtool + " check metrics < " + dir.path() + "/page";
    const pid_t pid = test::spawn({"/bin/sh", "-c", command}, dir.path() + "/findings");
    const int status = test::wait_for(pid, 30'000);
    if (status == -1) {
      ::kill(pid, SIGKILL);
      ::waitpid(pid, nullptr, 0);
    }
    EXPECT_EQ(status, 0);
    EXPECT_EQ(test::read_file(dir.path() + "/findings"), "");
    EXPECT_GT(page(r).size(), 1000U);
  }
}

}  // namespace
}  // namespace moed
