// Metrics: what is counted where, that the text is valid and complete, and that docs/metrics.md says the same.
#include "daemon/metrics.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <atomic>
#include <cmath>
#include <cstdlib>
#include <ctime>
#include <fstream>
#include <iomanip>
#include <limits>
#include <map>
#include <set>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

namespace moed {
namespace {

using Labels = std::map<std::string, std::string>;

struct Family {
  std::string type, help;
  std::vector<std::pair<std::string, std::pair<Labels, double>>> samples;  ///< sample name, labels, value
};

/// A reader of the text format that accepts only what the format allows without escapes.
std::map<std::string, Family> parse(const std::string& text) {
  std::map<std::string, Family> families;
  std::string current;
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) {
    if (line.starts_with("# ")) {
      std::istringstream words(line.substr(2));
      std::string what, rest;
      words >> what >> current;
      std::getline(words >> std::ws, rest);
      (what == "TYPE" ? families[current].type : families[current].help) = rest;
      continue;
    }
    const std::size_t brace = line.find('{');
    const std::size_t space = line.rfind(' ');
    std::pair<std::string, std::pair<Labels, double>> sample;
    sample.first = line.substr(0, std::min(brace, space));
    sample.second.second = std::strtod(line.c_str() + space, nullptr);
    for (std::size_t at = brace; at != std::string::npos && line[at] != '}';) {
      const std::size_t equals = line.find("=\"", at);
      const std::size_t quote = line.find('"', equals + 2);
      EXPECT_NE(quote, std::string::npos) << line;
      if (quote == std::string::npos) break;
      sample.second.first[line.substr(at + 1, equals - at - 1)] = line.substr(equals + 2, quote - equals - 2);
      at = quote + 1;
      EXPECT_TRUE(line[at] == ',' || line[at] == '}') << line;
    }
    EXPECT_TRUE(sample.first.starts_with(current)) << line;
    families[current].samples.push_back(sample);
  }
  return families;
}

/// The value of the line that begins with `sample`, written without quotes: name{label=value,...}. NaN: there is none.
double value(const std::string& text, const std::string& sample) {
  std::string line = "\n";
  for (const char c : sample)
    line += c == '=' ? "=\"" : (c == ',' || c == '}') ? std::string("\"") + c : std::string(1, c);
  const std::size_t at = text.find(line + " ");
  if (at == std::string::npos) return std::numeric_limits<double>::quiet_NaN();
  return std::strtod(text.c_str() + at + line.size(), nullptr);
}

/// Every sample has its value: exactly, or within some units in the last place.
void expect(const std::string& text, const std::vector<std::pair<std::string, double>>& samples) {
  for (const auto& [sample, wanted] : samples) EXPECT_DOUBLE_EQ(value(text, sample), wanted) << sample;
}

MetricsInfo info(uint32_t ranks = 4) {
  MetricsInfo i;
  i.version = "0.1.0";
  i.commit = "abc";
  i.backend = "cpu";
  i.transport = "heap";
  i.cuda = i.ucx = i.nccl = "none";
  i.digest = "00ff";
  i.ranks = ranks;
  return i;
}

Gauges gauges() {
  Gauges g;
  g.ready = true;
  g.lanes_attached = 2;
  g.links = {{.state = 2}, {.state = 1}, {.state = 3, .losses = {4, 5, 6}, .heartbeat_age = 250'000'000}, {.state = 0}};
  g.heap = 4194304;
  g.weights = 7;
  g.arena = 8;
  g.scratch = 9;
  return g;
}

CallRecord record(Status status, uint32_t tokens, uint64_t total_ns) {
  CallRecord r{};
  r.status = static_cast<uint32_t>(status);
  r.tokens = tokens;
  r.total_ns = total_ns;
  r.last = kNoRank;
  return r;
}

/// A daemon that has seen some of everything.
void fill(Metrics& m) {
  CallRecord r = record(Status::ok, 5, 50'000);
  r.phase_ns[0] = 10'000;
  r.phase_ns[1] = 30'000;
  r.phase_ns[2] = 10'000;
  r.last = 1;
  r.peer[1] = {30'000, 1'000, 2'000, 3'000};
  m.call_ended(r, 5 * 512 * 2);
  ServeRecord s{};
  s.rows = 6;
  s.sources = 2;
  s.weight_bytes = 1000;
  s.wait_ns = 3'000;
  m.pass_ended(s);
  m.tick(LoopId::service, now_ns());
  m.tick(LoopId::net, now_ns());
  m.tick(LoopId::control, now_ns());
  m.stall(LoopId::control);
}

TEST(Metrics, EverythingIsThereFromTheStart) {
  const std::string text = Metrics(info()).text(gauges());
  for (uint32_t s = 0; s < kStatuses; ++s)
    EXPECT_EQ(value(text, "moed_calls_total{status=" + std::string(name(static_cast<Status>(s))) + "}"), 0) << s;
  expect(text, {{"moed_ready", 1},
                {"moed_ranks", 4},
                {"moed_lanes_attached", 2},
                {"moed_link_state{peer=2}", 3},
                {"moed_link_losses_total{peer=2,reason=error}", 4},
                {"moed_link_losses_total{peer=2,reason=heartbeat}", 5},
                {"moed_link_losses_total{peer=2,reason=leaving}", 6},
                {"moed_heartbeat_age_seconds{peer=2}", 0.25},
                {"moed_memory_bytes{kind=heap}", 4194304},
                {"moed_memory_bytes{kind=scratch}", 9},
                {"moed_config_info{backend=cpu,transport=heap,sharing=,handles=}", 1},
                {"moed_model_info{digest=00ff,revision=}", 1},
                {"moed_refused_total{where=http}", 0}});
}

TEST(Metrics, CallsThatGaveAResult) {
  Metrics m(info());
  m.call_ended(record(Status::ok, 3, 1000), 100);
  m.call_ended(record(Status::masked, 4, 1000), 10);
  m.call_ended(record(Status::degraded, 5, 1000), 1);
  m.call_ended(record(Status::bad_call, 4'000'000'000U, 1000), 9000);
  m.call_ended(record(Status::dry, 7, 1000), 9000);
  const std::string text = m.text(gauges());
  expect(text, {{"moed_tokens_total", 12},
                {"moed_call_bytes_total", 111},
                {"moed_calls_total{status=bad_call}", 1},
                {"moed_refused_total{where=mailbox}", 1},
                {"moed_call_duration_seconds_count{path=host,tokens=2-16}", 3},
                {"moed_call_duration_seconds_count{path=host,tokens=more}", 0}});
  EXPECT_EQ(m.calls(Status::dry), 1U);
  EXPECT_EQ(m.calls(Status::internal), 0U);
  CallRecord unknown = record(Status::ok, 1, 1);
  unknown.status = 77;
  m.call_ended(unknown, 0);
  EXPECT_EQ(m.calls(Status::internal), 1U);
}

TEST(Metrics, TokensFallIntoTheirBucket) {
  Metrics m(info());
  const std::pair<uint32_t, const char*> cases[] = {{0, "1"},      {1, "1"},        {2, "2-16"},      {16, "2-16"},
                                                    {17, "17-64"}, {64, "17-64"},   {65, "65-512"},   {512, "65-512"},
                                                    {513, "more"}, {65536, "more"}, {1048576, "more"}};
  std::map<std::string, int> expected;
  for (const auto& [tokens, label] : cases) {
    m.call_ended(record(Status::ok, tokens, 1000), 0);
    ++expected[label];
  }
  const std::string text = m.text(gauges());
  for (const auto& [label, count] : expected)
    EXPECT_EQ(value(text, "moed_call_duration_seconds_count{path=host,tokens=" + label + "}"), count) << label;
}

TEST(Metrics, PhasesOfACallThatFailedAreThoseItReached) {
  Metrics m(info());
  CallRecord r = record(Status::peer_timeout, 1, 3000);
  r.phase_ns[0] = 1000;
  r.phase_ns[1] = 2000;
  m.call_ended(r, 0);
  const std::string text = m.text(gauges());
  expect(text, {{"moed_phase_duration_seconds_count{phase=dispatch}", 1},
                {"moed_phase_duration_seconds_count{phase=wait}", 1},
                {"moed_phase_duration_seconds_count{phase=reduce}", 0},
                {"moed_phase_duration_seconds_sum{phase=wait}", 2e-6},
                {"moed_flag_wait_seconds_count{flag=return}", 1},
                {"moed_flag_wait_seconds_count{flag=call}", 0},
                {"moed_tokens_total", 0}});
}

TEST(Metrics, PeersAreBlamedByCause) {
  Metrics m(info(3));
  CallRecord r = record(Status::degraded, 1, 1);
  r.peer[0] = {1000, 100, 200, 300};
  r.peer[1] = {500, 400, 400, 400};  // its own times exceed our wait: wire is 0
  r.peer[2] = {UINT32_MAX, UINT32_MAX, UINT32_MAX, UINT32_MAX};
  r.peer[3] = {9, 9, 9, 9};  // not of this world
  r.last = 1;
  r.ranks[0] = 0b1101;
  m.call_ended(r, 0);
  r.last = kNoRank - 1;
  r.status = static_cast<uint32_t>(Status::peer_timeout);
  m.call_ended(r, 0);
  const std::string text = m.text(gauges());
  expect(text, {{"moed_peer_wait_seconds_total{peer=0,cause=queue}", 200e-9},
                {"moed_peer_wait_seconds_total{peer=0,cause=experts}", 400e-9},
                {"moed_peer_wait_seconds_total{peer=0,cause=send}", 600e-9},
                {"moed_peer_wait_seconds_total{peer=0,cause=wire}", 800e-9},
                {"moed_peer_wait_seconds_total{peer=1,cause=wire}", 0},
                {"moed_peer_wait_seconds_total{peer=2,cause=send}", 2e-9 * UINT32_MAX}});
  EXPECT_TRUE(std::isnan(value(text, "moed_peer_wait_seconds_total{peer=3,cause=queue}")));
  expect(text, {{"moed_peer_last_total{peer=1}", 1},
                {"moed_peer_last_total{peer=0}", 0},
                {"moed_peer_dropped_total{peer=0}", 1},
                {"moed_peer_dropped_total{peer=1}", 0},
                {"moed_peer_dropped_total{peer=2}", 1}});
  EXPECT_DOUBLE_EQ(m.peer_wait(0), 2000e-9);
  EXPECT_EQ(m.peer_last(1), 1U);
  EXPECT_EQ(m.peer_wait(3), 0);
  EXPECT_EQ(m.peer_last(1000), 0U);
}

TEST(Metrics, ServePasses) {
  Metrics m(info());
  ServeRecord s{};
  s.rows = 6;
  s.sources = 2;
  s.weight_bytes = 1000;
  s.wait_ns = 3000;
  s.gather_ns = 4000;
  s.experts_ns = 5000;
  s.send_ns = 6000;
  s.refused = 1;
  m.pass_ended(s);
  m.pass_ended(s);
  const std::string text = m.text(gauges());
  expect(text, {{"moed_serve_passes_total", 2},
                {"moed_serve_rows_total", 12},
                {"moed_serve_sources_total", 4},
                {"moed_serve_weight_bytes_total", 2000},
                {"moed_flag_wait_seconds_sum{flag=call}", 6e-6},
                {"moed_phase_duration_seconds_sum{phase=gather}", 8e-6},
                {"moed_phase_duration_seconds_sum{phase=experts}", 10e-6},
                {"moed_phase_duration_seconds_sum{phase=send}", 12e-6},
                {"moed_refused_total{where=message}", 2}});
}

/// The bounds as interfaces.md has them, in ascending order.
std::vector<double> documented_bounds() {
  std::set<double> bounds;
  for (int k = -20; k <= -9; ++k) bounds.insert(std::ldexp(1.0, k));
  for (int k = -18; k <= -12; ++k) bounds.insert(std::ldexp(1.5, k));
  for (const int k : {-8, -7, -6, -4, -2, 0}) bounds.insert(std::ldexp(1.0, k));
  return {bounds.begin(), bounds.end()};
}

TEST(Metrics, HistogramBoundsAreExactAndClosed) {
  const std::vector<double> bounds = documented_bounds();
  ASSERT_EQ(bounds.size(), 25U);
  const std::string bucket = "moed_call_duration_seconds_bucket{path=host,tokens=1,le=";
  for (const double bound : bounds) {
    Metrics m(info());
    const auto below = static_cast<uint64_t>(std::floor(bound * 1e9));
    m.call_ended(record(Status::ok, 1, below), 0);
    m.call_ended(record(Status::ok, 1, below + 1), 0);
    const std::string text = m.text(gauges());
    for (const double at : bounds) {
      std::ostringstream le;
      le << std::setprecision(17) << at;
      EXPECT_EQ(value(text, bucket + le.str() + "}"), at < bound ? 0 : at == bound ? 1 : 2) << bound << " at " << at;
    }
    EXPECT_EQ(value(text, bucket + "+Inf}"), 2);
    std::size_t buckets = 0;
    for (std::size_t at = 0; (at = text.find("{path=\"host\",tokens=\"1\",le=", at)) != std::string::npos; ++at)
      ++buckets;
    EXPECT_EQ(buckets, 26U);
  }
}

TEST(Metrics, RefusedLoopsAndStalls) {
  Metrics m(info());
  m.refused(Refused::attach);
  m.refused(Refused::http);
  m.refused(Refused::http);
  EXPECT_EQ(m.tick_age(LoopId::service, 5000), 0U);
  m.tick(LoopId::service, 1000);
  EXPECT_EQ(m.tick_age(LoopId::service, 5000), 4000U);
  EXPECT_EQ(m.tick_age(LoopId::service, 500), 0U);
  m.tick(LoopId::control, now_ns());
  m.stall(LoopId::control);
  const std::string text = m.text(gauges());
  expect(text, {{"moed_refused_total{where=attach}", 1},
                {"moed_refused_total{where=http}", 2},
                {"moed_refused_total{where=mailbox}", 0},
                {"moed_loop_stalls_total{loop=control}", 1},
                {"moed_loop_stalls_total{loop=service}", 0}});
  EXPECT_GT(value(text, "moed_loop_tick_age_seconds{loop=service}"), 1);
  EXPECT_TRUE(std::isnan(value(text, "moed_loop_tick_age_seconds{loop=net}")));
}

TEST(Metrics, QuantilesOfTheLastCalls) {
  Metrics m(info());
  EXPECT_EQ(m.call_quantile(0.5), 0);
  for (uint64_t us = 100; us >= 1; --us) m.call_ended(record(Status::ok, 1, us * 1000), 0);
  m.call_ended(record(Status::bad_call, 1, 10'000'000), 0);
  EXPECT_EQ(m.call_quantile(0), 1);
  EXPECT_EQ(m.call_quantile(0.5), 50);
  EXPECT_EQ(m.call_quantile(0.99), 99);
  EXPECT_EQ(m.call_quantile(1), 100);
  EXPECT_EQ(m.call_quantile(7), 100);
  for (int i = 0; i < 4096; ++i) m.call_ended(record(Status::ok, 1, 2'000'000), 0);
  EXPECT_EQ(m.call_quantile(0), 2000);
}

TEST(Metrics, OnlyBackEndsWithStreamsHaveThatPath) {
  MetricsInfo i = info();
  EXPECT_EQ(Metrics(i).text(gauges()).find("path=\"stream\""), std::string::npos);
  i.backend = "cuda";
  Metrics m(i);
  CallRecord r = record(Status::ok, 1, 1000);
  r.path = static_cast<uint16_t>(CallPath::stream);
  m.call_ended(r, 0);
  EXPECT_EQ(value(m.text(gauges()), "moed_call_duration_seconds_count{path=stream,tokens=1}"), 1);
}

TEST(Metrics, LabelsAreEscaped) {
  MetricsInfo i = info();
  i.revision = "a\"b\\c\nd";
  EXPECT_NE(Metrics(i).text(gauges()).find("revision=\"a\\\"b\\\\c\\nd\"} 1\n"), std::string::npos);
}

TEST(Metrics, TheProcess) {
  const std::string text = Metrics(info()).text(gauges());
  const auto now = static_cast<double>(std::time(nullptr));
  EXPECT_GE(value(text, "process_cpu_seconds_total"), 0);
  EXPECT_GT(value(text, "process_resident_memory_bytes"), 1e6);
  EXPECT_LE(value(text, "process_start_time_seconds"), now + 2);
  EXPECT_GT(value(text, "process_start_time_seconds"), 1e9);
  int ends[2];
  ASSERT_EQ(::pipe(ends), 0);
  const std::string more = Metrics(info()).text(gauges());
  EXPECT_EQ(value(more, "process_open_fds"), value(text, "process_open_fds") + 2);
  ::close(ends[0]);
  ::close(ends[1]);
}

/// One row of docs/metrics.md. values[label]: the closed list of its values, if it has one.
struct Documented {
  std::string type, unit, meaning;
  std::vector<std::string> labels;
  std::map<std::string, std::set<std::string>> values;
};

std::string trim(const std::string& s) {
  const std::size_t first = s.find_first_not_of(' ');
  return first == std::string::npos ? "" : s.substr(first, s.find_last_not_of(' ') - first + 1);
}

/// "`path` (host, stream), `tokens` (1, more)" or "`version`, `commit`".
void parse_labels(const std::string& cell, Documented& out) {
  for (std::size_t at = cell.find('`'); at != std::string::npos;) {
    const std::size_t end = cell.find('`', at + 1);
    out.labels.push_back(cell.substr(at + 1, end - at - 1));
    at = cell.find('`', end + 1);
    const std::size_t open = cell.find('(', end);
    if (open == std::string::npos || open > at) continue;
    std::istringstream list(cell.substr(open + 1, cell.find(')', open) - open - 1));
    for (std::string item; std::getline(list, item, ',');) out.values[out.labels.back()].insert(trim(item));
    if (at == std::string::npos) break;
  }
}

std::map<std::string, Documented> documented() {
  std::map<std::string, Documented> rows;
  std::ifstream file(MOED_SOURCE "/docs/metrics.md");
  for (std::string line; std::getline(file, line);) {
    if (!line.starts_with("| `")) continue;
    std::vector<std::string> cells;
    std::istringstream stream(line.substr(1));
    for (std::string cell; std::getline(stream, cell, '|');) cells.push_back(trim(cell));
    EXPECT_EQ(cells.size(), 5U) << line;
    if (cells.size() != 5) continue;
    Documented d{cells[1], cells[3], cells[4], {}, {}};
    if (!cells[2].empty()) parse_labels(cells[2], d);
    EXPECT_TRUE(rows.emplace(cells[0].substr(1, cells[0].size() - 2), d).second) << "twice: " << line;
  }
  return rows;
}

TEST(MetricsDocument, HasTheTable) {
  const auto docs = documented();
  std::set<std::string> names;
  for (const MetricRow& row : metric_table()) {
    names.insert(row.name);
    ASSERT_TRUE(docs.contains(row.name)) << row.name << " is not in docs/metrics.md";
    const Documented& d = docs.at(row.name);
    std::string labels;
    for (const std::string& label : d.labels) labels += (labels.empty() ? "" : ",") + label;
    EXPECT_EQ(labels, row.labels) << row.name;
    EXPECT_EQ(d.meaning, row.help) << row.name;
  }
  for (const auto& [name, d] : docs) EXPECT_TRUE(names.contains(name)) << name << " is documented but does not exist";
}

TEST(MetricsDocument, HasTheText) {
  MetricsInfo i = info();
  i.backend = "cuda";
  Metrics m(i);
  fill(m);
  const auto families = parse(m.text(gauges()));
  const auto docs = documented();
  for (const auto& [name, d] : docs) EXPECT_TRUE(families.contains(name)) << name << " has no series";
  for (const auto& [name, family] : families) {
    ASSERT_TRUE(docs.contains(name)) << name;
    const Documented& d = docs.at(name);
    EXPECT_EQ(family.type, d.type) << name;
    EXPECT_EQ(family.help, d.meaning) << name;
    EXPECT_EQ(d.unit, name.find("_seconds") != name.npos ? "seconds"
                      : name.find("_bytes") != name.npos ? "bytes"
                                                         : "1")
        << name;
    std::map<std::string, std::set<std::string>> seen;
    for (const auto& [sample_name, sample] : family.samples) {
      std::set<std::string> labels;
      for (const auto& [label, text] : sample.first) {
        if (label == "le") continue;
        labels.insert(label);
        if (d.values.contains(label)) seen[label].insert(text);
      }
      EXPECT_EQ(labels, std::set<std::string>(d.labels.begin(), d.labels.end())) << sample_name;
    }
    EXPECT_EQ(seen, d.values) << name;
  }
}

TEST(Metrics, AScrapeMeetsTheHotThread) {
  Metrics m(info());
  std::atomic<bool> stop{false};
  std::thread hot([&] {
    while (!stop.load(std::memory_order_relaxed)) fill(m);
  });
  double last = 0;
  for (int i = 0; i < 20; ++i) {
    const std::string text = m.text(gauges());
    m.refused(Refused::http);
    const double calls = value(text, "moed_calls_total{status=ok}");
    EXPECT_GE(calls, last);
    last = calls;
    const std::string calls_of = "moed_call_duration_seconds_", path = "{path=host,tokens=2-16";
    EXPECT_EQ(value(text, calls_of + "count" + path + "}"), value(text, calls_of + "bucket" + path + ",le=+Inf}"));
    EXPECT_GE(m.call_quantile(0.99), 0);
  }
  stop.store(true);
  hot.join();
  EXPECT_EQ(m.call_quantile(1), 50);
}

TEST(Metrics, PromtoolFindsNothing) {
  if (::access("/usr/bin/promtool", X_OK) != 0) GTEST_SKIP() << "no /usr/bin/promtool";
  MetricsInfo i = info(128);
  i.backend = "cuda";
  Metrics m(i);
  fill(m);
  char dir[] = "/tmp/metrics_test.XXXXXX";
  ASSERT_NE(::mkdtemp(dir), nullptr);
  const std::string report = std::string(dir) + "/report";
  FILE* pipe = ::popen(("/usr/bin/promtool check metrics > " + report + " 2>&1").c_str(), "w");
  ASSERT_NE(pipe, nullptr);
  const std::string text = m.text(gauges());
  EXPECT_EQ(std::fwrite(text.data(), 1, text.size(), pipe), text.size());
  const int result = ::pclose(pipe);
  std::stringstream findings;
  findings << std::ifstream(report).rdbuf();
  EXPECT_EQ(result, 0) << findings.str();
  EXPECT_EQ(findings.str(), "");
  ::unlink(report.c_str());
  ::rmdir(dir);
}

}  // namespace
}  // namespace moed
