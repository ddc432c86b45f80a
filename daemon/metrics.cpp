// The table of metrics, the slots behind it, and their text. The only file that includes prometheus-cpp, and only for
// the text: its own counters and histograms take a mutex, which a hot thread must not wait for.
#include "daemon/metrics.h"

#include <prometheus/metric_family.h>
#include <prometheus/text_serializer.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <initializer_list>
#include <iterator>
#include <sstream>
#include <string_view>
#include <system_error>
#include <utility>

#include "daemon/abi/attach.h"

namespace moed {

// clang-format off
enum class MetricId : uint32_t {
  build_info, config_info, model_info,
  ready, ranks, lanes_attached,
  calls, tokens, call_bytes, call_duration, phase_duration, flag_wait,
  peer_wait, peer_last, peer_dropped,
  serve_passes, serve_rows, serve_sources, serve_weight_bytes,
  link_state, link_losses, heartbeat_age, refused, loop_tick_age, loop_stalls, memory, canary,
  cpu_seconds, resident_memory, open_fds, start_time,
};
// clang-format on

namespace {

using enum MetricKind;
using Id = MetricId;

// clang-format off
constexpr MetricRow kTable[] = {
    {Id::build_info, "moed_build_info", gauge, "version,commit,protocol,numerics,cuda,ucx,nccl", "1; what this daemon was built from."},
    {Id::config_info, "moed_config_info", gauge, "backend,transport,sharing,handles", "1; how this daemon is configured."},
    {Id::model_info, "moed_model_info", gauge, "digest,revision", "1; which model is served."},
    {Id::ready, "moed_ready", gauge, "", "1 when every link is ready, every rank has answered the canary and nothing has failed for good, else 0."},
    {Id::ranks, "moed_ranks", gauge, "", "Daemons in this world."},
    {Id::lanes_attached, "moed_lanes_attached", gauge, "", "Lanes that an engine holds."},
    {Id::calls, "moed_calls_total", counter, "status", "Calls ended, by status."},
    {Id::tokens, "moed_tokens_total", counter, "", "Tokens of calls that gave a result."},
    {Id::call_bytes, "moed_call_bytes_total", counter, "", "Bytes that calls which gave a result read from and wrote to their arenas."},
    {Id::call_duration, "moed_call_duration_seconds", histogram, "path,tokens", "Time of calls that ran, from the bell to done."},
    {Id::phase_duration, "moed_phase_duration_seconds", histogram, "phase", "Time of each phase of calls and of serve passes."},
    {Id::flag_wait, "moed_flag_wait_seconds", histogram, "flag", "Time spent waiting for return lines (source side) and for call lines (expert side)."},
    {Id::peer_wait, "moed_peer_wait_seconds_total", counter, "peer,cause", "Time that calls waited for a rank, by cause."},
    {Id::peer_last, "moed_peer_last_total", counter, "peer", "Calls in which this rank answered last."},
    {Id::peer_dropped, "moed_peer_dropped_total", counter, "peer", "Calls that ended without this rank's contribution."},
    {Id::serve_passes, "moed_serve_passes_total", counter, "", "Serve passes ended."},
    {Id::serve_rows, "moed_serve_rows_total", counter, "", "Rows served."},
    {Id::serve_sources, "moed_serve_sources_total", counter, "", "Calls served, counted once for each pass that they were in."},
    {Id::serve_weight_bytes, "moed_serve_weight_bytes_total", counter, "", "Bytes of expert weights that serve passes touched."},
    {Id::link_state, "moed_link_state", gauge, "peer", "State of the link: 0 connecting, 1 mapped, 2 ready, 3 lost."},
    {Id::link_losses, "moed_link_losses_total", counter, "peer,reason", "Links lost that had been mapped or ready."},
    {Id::heartbeat_age, "moed_heartbeat_age_seconds", gauge, "peer", "Time since this rank was last heard of; no series while it never was."},
    {Id::refused, "moed_refused_total", counter, "where", "Requests from outside that were turned away."},
    {Id::loop_tick_age, "moed_loop_tick_age_seconds", gauge, "loop", "Time since the loop last ticked."},
    {Id::loop_stalls, "moed_loop_stalls_total", counter, "loop", "Turns of the loop that took too long."},
    {Id::memory, "moed_memory_bytes", gauge, "kind", "Memory taken, by what it is for."},
    {Id::canary, "moed_canary_total", counter, "peer,result", "Rounds of the canary, by what this rank answered."},
    {Id::cpu_seconds, "process_cpu_seconds_total", counter, "", "User and system CPU time of the process."},
    {Id::resident_memory, "process_resident_memory_bytes", gauge, "", "Resident memory of the process."},
    {Id::open_fds, "process_open_fds", gauge, "", "Open file descriptors of the process."},
    {Id::start_time, "process_start_time_seconds", gauge, "", "Start of the process, seconds since 1970."},
};
// clang-format on

constexpr std::size_t index(auto e) { return static_cast<std::size_t>(e); }

constexpr bool in_order() {
  for (std::size_t i = 0; i < std::size(kTable); ++i)
    if (index(kTable[i].id) != i) return false;
  return std::size(kTable) == index(Id::start_time) + 1;
}
static_assert(in_order(), "kTable lists every MetricId once, in order");

/// Histogram bounds in seconds: exact in binary, so their text never changes, and 1.5 steps where calls usually lie.
constexpr auto kBounds = [] {
  std::array<double, 25> bounds{};
  std::size_t n = 0;
  double power = 1.0 / (1U << 20U);
  for (int k = -20; k <= -9; ++k, power *= 2) {
    bounds[n++] = power;
    if (k >= -18 && k <= -12) bounds[n++] = 1.5 * power;
  }
  for (const int down : {8, 7, 6, 4, 2, 0}) bounds[n++] = 1.0 / (1U << down);
  return bounds;
}();
static_assert(kBounds.back() == 1.0 && kBounds[2] * 1.5 == kBounds[3]);

/// The same in whole nanoseconds, rounded down: for an integer t, t <= kBoundsNs[i] exactly when t ns <= kBounds[i] s.
constexpr auto kBoundsNs = [] {
  std::array<uint64_t, kBounds.size()> ns{};
  for (std::size_t i = 0; i < ns.size(); ++i) ns[i] = static_cast<uint64_t>(kBounds[i] * 1e9);
  return ns;
}();

constexpr const char* kPaths[] = {"host", "stream"};
constexpr const char* kTokens[] = {"1", "2-16", "17-64", "65-512", "more"};
constexpr const char* kPhases[] = {"dispatch", "wait", "reduce", "gather", "experts", "send"};
constexpr const char* kFlags[] = {"call", "return"};
constexpr const char* kLosses[] = {"error", "heartbeat", "leaving"};
constexpr const char* kRefused[] = {"attach", "mailbox", "handshake", "message", "http"};
constexpr const char* kLoops[] = {"service", "net", "control"};
constexpr const char* kCanary[] = {"ok", "wrong", "late"};
constexpr std::size_t kRecent = 4096;

constexpr std::size_t tokens_label(uint32_t tokens) {
  return tokens <= 1 ? 0 : tokens <= 16 ? 1 : tokens <= 64 ? 2 : tokens <= 512 ? 3 : 4;
}

/// A count with one writer: no read-modify-write instruction needed.
class Slot {
 public:
  void add(uint64_t n) noexcept { set(get() + n); }
  void set(uint64_t n) noexcept { value_.store(n, std::memory_order_relaxed); }
  uint64_t get() const noexcept { return value_.load(std::memory_order_relaxed); }
  double value() const noexcept { return static_cast<double>(get()); }

 private:
  std::atomic<uint64_t> value_{0};
};

struct Histogram {
  std::array<Slot, kBounds.size() + 1> buckets;  ///< not cumulative; the last is beyond all bounds
  Slot sum_ns;

  void observe(uint64_t ns) noexcept {
    buckets[static_cast<std::size_t>(std::ranges::lower_bound(kBoundsNs, ns) - kBoundsNs.begin())].add(1);
    sum_ns.add(ns);
  }
};

struct alignas(64) Loop {
  Slot tick, stalls;
};

struct Peer {
  std::array<Slot, std::size(kCauses)> wait_ns;
  Slot last, dropped;
  std::array<Slot, std::size(kCanary)> canary;
};

bool gave_result(Status s) noexcept { return s == Status::ok || s == Status::degraded || s == Status::masked; }

/// The families of one scrape, in the table's order.
class Families {
 public:
  Families() : families_(std::size(kTable)) {
    for (const MetricRow& row : kTable) {
      const auto type = row.kind == gauge     ? prometheus::MetricType::Gauge
                        : row.kind == counter ? prometheus::MetricType::Counter
                                              : prometheus::MetricType::Histogram;
      families_[index(row.id)] = {row.name, row.help, type, {}};
    }
  }

  /// One series; `labels` are the values, in the order of the row's label names.
  void add(Id id, std::initializer_list<std::string_view> labels, double value) {
    prometheus::ClientMetric& m = series(id, labels);
    (kTable[index(id)].kind == gauge ? m.gauge.value : m.counter.value) = value;
  }

  void add(Id id, std::initializer_list<std::string_view> labels, const Histogram& h) {
    prometheus::ClientMetric::Histogram& out = series(id, labels).histogram;
    uint64_t count = 0;
    for (std::size_t i = 0; i < kBounds.size(); ++i) {
      count += h.buckets[i].get();
      out.bucket.push_back({count, kBounds[i]});
    }
    out.sample_count = count + h.buckets.back().get();
    out.sample_sum = h.sum_ns.value() / 1e9;
  }

  std::string text() {
    std::erase_if(families_, [](const auto& f) { return f.metric.empty(); });
    return prometheus::TextSerializer().Serialize(families_);
  }

 private:
  prometheus::ClientMetric& series(Id id, std::initializer_list<std::string_view> labels) {
    prometheus::ClientMetric& m = families_[index(id)].metric.emplace_back();
    std::string_view names = kTable[index(id)].labels;
    for (const std::string_view value : labels) {
      const std::size_t comma = std::min(names.find(','), names.size());
      m.label.push_back({std::string(names.substr(0, comma)), std::string(value)});
      names.remove_prefix(std::min(comma + 1, names.size()));
    }
    return m;
  }

  std::vector<prometheus::MetricFamily> families_;
};

/// When this machine booted, seconds since 1970; 0 when /proc/stat does not say.
double boot_time() {
  std::ifstream file("/proc/stat");
  for (std::string line; std::getline(file, line);)
    if (line.starts_with("btime ")) return std::strtod(line.c_str() + 6, nullptr);
  return 0;
}

/// proc(5): the fields of /proc/self/stat are counted from the last ')', since the name before it may hold anything.
void add_process(Families& out) {
  std::ifstream file("/proc/self/stat");
  const std::string stat{std::istreambuf_iterator<char>(file), {}};
  std::istringstream rest(stat.substr(std::min(stat.rfind(')') + 1, stat.size())));
  const std::vector<std::string> field{std::istream_iterator<std::string>(rest), {}};  // field[0] is number 3
  if (field.size() > 22) {
    static const double boot = boot_time();
    const auto number = [&field](std::size_t n) { return std::strtod(field[n - 3].c_str(), nullptr); };
    const auto ticks = static_cast<double>(::sysconf(_SC_CLK_TCK));
    out.add(Id::cpu_seconds, {}, (number(14) + number(15)) / ticks);
    out.add(Id::resident_memory, {}, number(24) * static_cast<double>(::sysconf(_SC_PAGESIZE)));
    out.add(Id::start_time, {}, boot + number(22) / ticks);
  }
  std::error_code failed;
  const std::filesystem::directory_iterator fds("/proc/self/fd", failed);
  if (!failed) out.add(Id::open_fds, {}, static_cast<double>(std::distance(begin(fds), end(fds)) - 1));  // its own
}

}  // namespace

/// Written by the service thread, except the canary's slots and the last two.
struct Metrics::Slots {
  std::array<Slot, kStatuses> calls;
  Slot tokens, call_bytes;
  Histogram duration[std::size(kPaths)][std::size(kTokens)];
  Histogram phases[std::size(kPhases)];
  Histogram flags[std::size(kFlags)];
  std::array<Peer, kMaxRanks> peers;
  Slot passes, rows, sources, weight_bytes;
  std::array<Slot, kRecent> recent;  ///< durations in ns, a ring
  Slot recent_count;
  std::array<Loop, std::size(kLoops)> loops;
  alignas(64) std::array<std::atomic<uint64_t>, std::size(kRefused)> refused{};

  void call_ran(const CallRecord& r, bool result) noexcept;
  void add_calls(Families& out, bool streams) const;
  void add_peers(Families& out, uint32_t ranks, const std::vector<LinkGauge>& links) const;
  void add_loops(Families& out, const Metrics& metrics) const;
};

std::span<const MetricRow> metric_table() { return kTable; }

Metrics::Metrics(MetricsInfo info) : info_(std::move(info)), slots_(std::make_unique<Slots>()) {
  info_.ranks = std::min(info_.ranks, kMaxRanks);
}
Metrics::~Metrics() = default;

void Metrics::call_ended(const CallRecord& r, uint64_t bytes) noexcept {
  Slots& s = *slots_;
  const Status status = r.status < kStatuses ? static_cast<Status>(r.status) : Status::internal;
  const bool result = gave_result(status);
  s.calls[index(status)].add(1);
  if (status == Status::bad_call) refused(Refused::mailbox);
  if (result) {
    s.tokens.add(r.tokens);
    s.call_bytes.add(bytes);
  }
  if (result || r.phase_ns[0] + r.phase_ns[1] + r.phase_ns[2] > 0) s.call_ran(r, result);
  for (uint32_t rank = 0; rank < info_.ranks; ++rank) {
    const CallRecord::Peer& p = r.peer[rank];
    const uint64_t server = uint64_t{p.queue} + p.experts + p.send;
    if (p.wait == 0 && server == 0) continue;
    const uint64_t causes[] = {p.queue, p.experts, p.send, p.wait > server ? p.wait - server : 0};
    for (std::size_t c = 0; c < std::size(causes); ++c) s.peers[rank].wait_ns[c].add(causes[c]);
  }
  if (r.last < info_.ranks) s.peers[r.last].last.add(1);
  if (status == Status::degraded)
    for (uint32_t rank = 0; rank < info_.ranks; ++rank)
      s.peers[rank].dropped.add((r.ranks[rank / 64] >> (rank % 64)) & 1U);
}

void Metrics::Slots::call_ran(const CallRecord& r, bool result) noexcept {
  const std::size_t path = r.path == index(CallPath::stream) ? 1 : 0;
  duration[path][tokens_label(r.tokens)].observe(r.total_ns);
  for (std::size_t p = 0; p < 3; ++p)
    if (result || r.phase_ns[p] > 0) phases[p].observe(r.phase_ns[p]);
  if (const uint64_t wait = r.phase_ns[index(Phase::wait)]; result || wait > 0) flags[1].observe(wait);
  recent[recent_count.get() % kRecent].set(r.total_ns);
  recent_count.add(1);
}

void Metrics::pass_ended(const ServeRecord& r) noexcept {
  Slots& s = *slots_;
  s.passes.add(1);
  s.rows.add(r.rows);
  s.sources.add(r.sources);
  s.weight_bytes.add(r.weight_bytes);
  s.flags[0].observe(r.wait_ns);
  s.phases[3].observe(r.gather_ns);
  s.phases[4].observe(r.experts_ns);
  s.phases[5].observe(r.send_ns);
  if (r.refused > 0) s.refused[index(Refused::message)].fetch_add(r.refused, std::memory_order_relaxed);
}

void Metrics::refused(Refused where) noexcept { slots_->refused[index(where)].fetch_add(1, std::memory_order_relaxed); }

void Metrics::tick(LoopId loop, Nanos now) noexcept { slots_->loops[index(loop)].tick.set(now); }
void Metrics::stall(LoopId loop) noexcept { slots_->loops[index(loop)].stalls.add(1); }
void Metrics::canary(uint32_t peer, CanaryResult result) noexcept {
  if (peer < info_.ranks) slots_->peers[peer].canary[index(result)].add(1);
}

Nanos Metrics::tick_age(LoopId loop, Nanos now) const {
  const Nanos tick = slots_->loops[index(loop)].tick.get();
  return tick == 0 || now <= tick ? 0 : now - tick;
}

uint64_t Metrics::calls(Status status) const {
  return index(status) < kStatuses ? slots_->calls[index(status)].get() : 0;
}

uint64_t Metrics::sources_served() const { return slots_->sources.get(); }

double Metrics::peer_wait(uint32_t peer) const {
  double seconds = 0;
  for (uint32_t c = 0; c < std::size(kCauses); ++c) seconds += peer_wait(peer, static_cast<Cause>(c));
  return seconds;
}

double Metrics::peer_wait(uint32_t peer, Cause cause) const {
  return peer < info_.ranks ? slots_->peers[peer].wait_ns[index(cause)].value() / 1e9 : 0;
}

uint64_t Metrics::peer_last(uint32_t peer) const { return peer < info_.ranks ? slots_->peers[peer].last.get() : 0; }

double Metrics::call_quantile(double q) const {
  const std::size_t n = std::min<uint64_t>(slots_->recent_count.get(), kRecent);
  if (n == 0) return 0;
  std::vector<uint64_t> ns(n);
  for (std::size_t i = 0; i < n; ++i) ns[i] = slots_->recent[i].get();
  const auto count = static_cast<double>(n);
  const auto at = static_cast<std::ptrdiff_t>(std::clamp(std::ceil(q * count) - 1, 0.0, count - 1));
  std::ranges::nth_element(ns, ns.begin() + at);
  return static_cast<double>(ns[static_cast<std::size_t>(at)]) / 1e3;
}

void Metrics::Slots::add_calls(Families& out, bool streams) const {
  for (uint32_t i = 0; i < kStatuses; ++i) out.add(Id::calls, {name(static_cast<Status>(i))}, calls[i].value());
  out.add(Id::tokens, {}, tokens.value());
  out.add(Id::call_bytes, {}, call_bytes.value());
  for (std::size_t path = 0; path < (streams ? 2 : 1); ++path)
    for (std::size_t t = 0; t < std::size(kTokens); ++t)
      out.add(Id::call_duration, {kPaths[path], kTokens[t]}, duration[path][t]);
  for (std::size_t p = 0; p < std::size(kPhases); ++p) out.add(Id::phase_duration, {kPhases[p]}, phases[p]);
  for (std::size_t f = 0; f < std::size(kFlags); ++f) out.add(Id::flag_wait, {kFlags[f]}, flags[f]);
  out.add(Id::serve_passes, {}, passes.value());
  out.add(Id::serve_rows, {}, rows.value());
  out.add(Id::serve_sources, {}, sources.value());
  out.add(Id::serve_weight_bytes, {}, weight_bytes.value());
  for (std::size_t i = 0; i < std::size(kRefused); ++i)
    out.add(Id::refused, {kRefused[i]}, static_cast<double>(refused[i].load(std::memory_order_relaxed)));
}

void Metrics::Slots::add_peers(Families& out, uint32_t ranks, const std::vector<LinkGauge>& links) const {
  for (uint32_t rank = 0; rank < ranks; ++rank) {
    const std::string label = std::to_string(rank);
    const Peer& peer = peers[rank];
    for (std::size_t c = 0; c < std::size(kCauses); ++c)
      out.add(Id::peer_wait, {label, kCauses[c]}, peer.wait_ns[c].value() / 1e9);
    out.add(Id::peer_last, {label}, peer.last.value());
    out.add(Id::peer_dropped, {label}, peer.dropped.value());
    for (std::size_t i = 0; i < std::size(kCanary); ++i)
      out.add(Id::canary, {label, kCanary[i]}, peer.canary[i].value());
    if (rank >= links.size()) continue;
    const LinkGauge& link = links[rank];
    out.add(Id::link_state, {label}, link.state);
    for (std::size_t l = 0; l < std::size(kLosses); ++l)
      out.add(Id::link_losses, {label, kLosses[l]}, static_cast<double>(link.losses[l]));
    if (link.heartbeat_age) out.add(Id::heartbeat_age, {label}, static_cast<double>(*link.heartbeat_age) / 1e9);
  }
}

void Metrics::Slots::add_loops(Families& out, const Metrics& metrics) const {
  for (std::size_t i = 0; i < std::size(kLoops); ++i) {
    if (loops[i].tick.get() == 0) continue;
    const Nanos age = metrics.tick_age(static_cast<LoopId>(i), now_ns());
    out.add(Id::loop_tick_age, {kLoops[i]}, static_cast<double>(age) / 1e9);
    out.add(Id::loop_stalls, {kLoops[i]}, loops[i].stalls.value());
  }
}

std::string Metrics::text(const Gauges& g) const {
  Families out;
  out.add(Id::build_info,
          {info_.version, info_.commit, std::to_string(kProtocol), std::to_string(kNumerics), info_.cuda, info_.ucx,
           info_.nccl},
          1);
  out.add(Id::config_info, {info_.backend, info_.transport, info_.sharing, info_.handles}, 1);
  out.add(Id::model_info, {info_.digest, info_.revision}, 1);
  out.add(Id::ready, {}, g.ready ? 1 : 0);
  out.add(Id::ranks, {}, info_.ranks);
  out.add(Id::lanes_attached, {}, g.lanes_attached);
  slots_->add_calls(out, info_.backend != "cpu");
  slots_->add_peers(out, info_.ranks, g.links);
  slots_->add_loops(out, *this);
  const std::pair<const char*, uint64_t> memory[] = {
      {"heap", g.heap}, {"weights", g.weights}, {"arena", g.arena}, {"scratch", g.scratch}};
  for (const auto& [kind, bytes] : memory) out.add(Id::memory, {kind}, static_cast<double>(bytes));
  add_process(out);
  return out.text();
}

}  // namespace moed
