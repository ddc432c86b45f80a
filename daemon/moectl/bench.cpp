// moectl bench: checks an answer, warms up, times calls one by one, prints a table.
#include "daemon/moectl/bench.h"

#include <sched.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <nlohmann/json.hpp>
#include <thread>

#include "daemon/abi/futex.h"
#include "daemon/moectl/identity.h"
#include "daemon/moectl/lane.h"

namespace moed::ctl {
namespace {

constexpr std::chrono::milliseconds kAfterLoss{1};  ///< a lost rank is answered at once: without a pause, in a flood
constexpr Nanos kFirstAnswer = 30'000'000'000;      ///< how long a row's first answer may wait for a lost rank

enum class Ended { ok, lost, failed };

/// One row of the table: its inputs, its reference answer, its times.
class Row {
 public:
  Row(const Lane& lane, const BenchOptions& options, uint32_t tokens) : lane_(lane), options_(options) {
    row_.tokens = tokens;
    call_.tokens = tokens;
    call_.layer = options.layer;
    call_.flags = identity() ? uint32_t{MOED_FLAG_NO_NORM} : 0;
  }

  /// Writes the inputs into the arena and checks a first answer. False, said on stderr: there is none to trust.
  bool prepare();
  /// Warms up and times; false: the lane is of no more use.
  bool measure();

  const BenchRow& row() const { return row_; }
  moed_status status() const { return status_; }

 private:
  bool identity() const { return options_.layer == MOED_LAYER_IDENTITY; }
  uint64_t out_bytes() const { return bytes_of(lane_.info, call_).out; }
  std::byte* out() const { return lane_.arena + call_.out; }
  bool gone() const { return status_ == MOED_DAEMON_LOST || status_ == MOED_PENDING; }
  Ended call_once();
  bool call(int poison, std::vector<std::byte>& answer);
  bool check_identity(const Inputs& inputs);
  void compare();
  void summarise(std::vector<uint64_t>& times);
  void report_once(const std::string& line);

  const Lane& lane_;
  const BenchOptions& options_;
  moed_call_t call_ = {};
  BenchRow row_;
  moed_status status_ = MOED_OK;
  std::vector<std::byte> reference_;
  bool reported_ = false;
};

void Row::report_once(const std::string& line) {
  if (!reported_) std::fprintf(stderr, "moectl: %s\n", line.c_str());
  reported_ = true;
}

/// One call, and what became of it counted.
Ended Row::call_once() {
  moed_reply_t reply{};
  status_ = moed_call(lane_.handle.get(), &call_, &reply);
  if (status_ == MOED_OK) {
    if (row_.lost != 0) ++row_.ok_after_lost;
    return Ended::ok;
  }
  if (lost_only(status_, reply, options_.may_lose)) {
    ++row_.lost;
    row_.ok_after_lost = 0;
    return Ended::lost;
  }
  ++row_.not_ok;
  report_once(describe(lane_, call_, status_, reply));
  return Ended::failed;
}

/// A call whose out is poisoned first, so that a byte that nobody wrote shows; again while it is lost.
bool Row::call(int poison, std::vector<std::byte>& answer) {
  const Nanos until = now_ns() + kFirstAnswer;
  Ended ended = Ended::lost;
  while (ended == Ended::lost && now_ns() < until) {
    std::memset(out(), poison, out_bytes());
    ended = call_once();
    if (ended == Ended::lost) std::this_thread::sleep_for(kAfterLoss);
  }
  if (ended == Ended::lost)
    report_once("no first answer: rank " + std::to_string(options_.may_lose) + " stayed lost for 30 s");
  if (ended != Ended::ok) return false;
  answer.assign(out(), out() + out_bytes());
  return true;
}

bool Row::check_identity(const Inputs& inputs) {
  const std::vector<uint16_t> expected = identity_answer(inputs, lane_.info.experts, lane_.info.ranks);
  for (std::size_t i = 0; i < expected.size(); ++i) {
    uint16_t got = 0;
    std::memcpy(&got, reference_.data() + i * 2, sizeof got);
    if (same_number(got, expected[i])) continue;
    char line[160];
    std::snprintf(line, sizeof line,
                  "wrong answer: token %zu element %zu of an identity call is BF16 0x%04x, 0x%04x expected",
                  i / inputs.width, i % inputs.width, got, expected[i]);
    report_once(line);
    ++row_.wrong;
    return false;
  }
  return true;
}

bool Row::prepare() {
  const moed_info& info = lane_.info;
  if (!place(lane_, call_)) {
    status_ = MOED_NO_MEMORY;
    return false;
  }
  call_.valid = 0;
  const Inputs in = random_inputs(call_.tokens, info.latent, info.top_k, info.experts, options_.seed + call_.tokens);
  if (call_.tokens != 0) {
    std::memcpy(lane_.arena + call_.x, in.x.data(), in.x.size() * sizeof in.x[0]);
    std::memcpy(lane_.arena + call_.ids, in.ids.data(), in.ids.size() * sizeof in.ids[0]);
    std::memcpy(lane_.arena + call_.weights, in.weights.data(), in.weights.size() * sizeof in.weights[0]);
  }
  std::vector<std::byte> again;
  if (!call(0x00, reference_) || !call(0xFF, again)) return false;
  row_.checked += 2;
  if (reference_ != again) {
    report_once("wrong answer: two calls with the same inputs gave different bits");
    ++row_.wrong;
    return false;
  }
  return !identity() || check_identity(in);
}

void Row::compare() {
  ++row_.checked;
  if (reference_.empty() || std::memcmp(out(), reference_.data(), reference_.size()) == 0) return;
  ++row_.wrong;
  report_once("wrong answer: a call's bits differ from the first call's with the same inputs");
}

bool Row::measure() {
  const uint64_t bytes = out_bytes();
  std::vector<uint64_t> times;
  if (options_.seconds <= 0) times.reserve(options_.calls);
  for (uint32_t i = 0; i < options_.warmup; ++i) {
    if (call_once() == Ended::lost) std::this_thread::sleep_for(kAfterLoss);
    if (gone()) return false;
  }
  const Nanos start = now_ns();
  const auto limit = static_cast<Nanos>(options_.seconds * 1e9);
  auto more = [&] { return limit != 0 ? now_ns() - start < limit : row_.calls < options_.calls; };
  for (; more(); ++row_.calls) {
    if (options_.check) std::memset(out(), 0xFF, bytes);
    const Nanos before = now_ns();
    const Ended ended = call_once();
    const Nanos after = now_ns();
    if (ended == Ended::lost) std::this_thread::sleep_for(kAfterLoss);
    if (gone()) break;
    if (ended != Ended::ok) continue;
    times.push_back(after - before);
    if (options_.check) compare();
  }
  summarise(times);
  return !gone();
}

/// Percentiles by nearest rank; the rate counts the time inside calls only, so that --check does not change it.
void Row::summarise(std::vector<uint64_t>& times) {
  if (times.empty()) return;
  std::sort(times.begin(), times.end());
  auto at = [&times](double share) {
    const auto rank = static_cast<std::size_t>(std::ceil(share * static_cast<double>(times.size())));
    return static_cast<double>(times[std::max<std::size_t>(rank, 1) - 1]) * 1e-3;
  };
  double total_ns = 0;
  for (const uint64_t t : times) total_ns += static_cast<double>(t);
  row_.p50_us = at(0.50);
  row_.p99_us = at(0.99);
  row_.max_us = at(1.00);
  row_.tokens_per_s = static_cast<double>(times.size()) * row_.tokens / (total_ns * 1e-9);
}

bool pin(int cpu) {
  if (cpu < 0) return true;
  cpu_set_t set;
  CPU_ZERO(&set);
  if (cpu < CPU_SETSIZE) CPU_SET(static_cast<unsigned>(cpu), &set);
  if (::sched_setaffinity(0, sizeof set, &set) == 0) return true;
  std::fprintf(stderr, "moectl: cpu %d cannot be used: %s\n", cpu, std::strerror(errno));
  return false;
}

void print_row(const BenchRow& r) {
  std::printf("%6u  %8llu  %8.2f  %8.2f  %8.1f  %10.0f  %6llu\n", r.tokens, static_cast<unsigned long long>(r.calls),
              r.p50_us, r.p99_us, r.max_us, r.tokens_per_s, static_cast<unsigned long long>(r.not_ok + r.wrong));
  std::fflush(stdout);
}

void print_json(const Lane& lane, const BenchOptions& options, const std::vector<BenchRow>& rows) {
  nlohmann::ordered_json all;
  all["rank"] = lane.info.rank;
  all["ranks"] = lane.info.ranks;
  all["layer"] = layer_name(options.layer);
  all["latent"] = lane.info.latent;
  all["top_k"] = lane.info.top_k;
  all["seed"] = options.seed;
  all["rows"] = nlohmann::ordered_json::array();
  for (const BenchRow& r : rows) {
    all["rows"].push_back({{"tokens", r.tokens},
                           {"calls", r.calls},
                           {"p50_us", r.p50_us},
                           {"p99_us", r.p99_us},
                           {"max_us", r.max_us},
                           {"tokens_per_s", r.tokens_per_s},
                           {"not_ok", r.not_ok},
                           {"checked", r.checked},
                           {"wrong", r.wrong},
                           {"lost", r.lost},
                           {"ok_after_lost", r.ok_after_lost}});
  }
  std::printf("%s\n", all.dump().c_str());
}

}  // namespace

int run_bench(const BenchOptions& options) {
  if (!pin(options.pin_cpu)) return kUsage;
  moed_options attach_options{};
  attach_options.size = sizeof attach_options;
  attach_options.spin_us = options.spin_us;
  attach_options.name = "moectl-bench";
  Lane lane;
  if (const Exit failed = attach(options.socket, attach_options, lane); failed != kDone) return failed;
  std::vector<BenchRow> rows;
  Exit result = kDone;
  if (!options.json) std::printf("tokens     calls    p50 us    p99 us    max us    tokens/s  not ok\n");
  for (const uint32_t tokens : options.tokens) {
    Row row(lane, options, tokens);
    const bool usable = row.prepare() && row.measure();
    rows.push_back(row.row());
    if (!options.json) print_row(rows.back());
    if (!usable || rows.back().not_ok + rows.back().wrong != 0) result = std::max(result, kNo);
    if (row.status() == MOED_DAEMON_LOST) result = kUnreachable;
    if (row.status() == MOED_DAEMON_LOST || row.status() == MOED_PENDING) break;
  }
  uint64_t checked = 0;
  uint64_t wrong = 0;
  uint64_t lost = 0;
  for (const BenchRow& r : rows) checked += r.checked, wrong += r.wrong, lost += r.lost;
  if (options.json) return print_json(lane, options, rows), result;
  std::printf("%llu answers checked, %llu wrong", static_cast<unsigned long long>(checked),
              static_cast<unsigned long long>(wrong));
  if (options.may_lose >= 0)
    std::printf(", %llu calls lost rank %d", static_cast<unsigned long long>(lost), options.may_lose);
  std::printf("\n");
  return result;
}

}  // namespace moed::ctl
