// What a daemon says of itself: why it is not ready, status, metrics, pages.
#include <algorithm>
#include <numeric>

#include "daemon/daemon.h"
#include "daemon/log.h"
#include "daemon/status_page.h"
#include "daemon/version.h"

namespace moed {
namespace {

constexpr Nanos kAlive = 2'000'000'000;  ///< a loop whose last tick is older is not alive

}  // namespace

/// Why this daemon is not ready; empty: it is.
std::vector<std::string> Daemon::missing() {
  std::vector<std::string> all = links_.missing();
  if (canary_)
    for (std::string& answer : canary_->missing()) all.push_back(std::move(answer));
  if (draining_) all.emplace_back("draining");
  for (std::string& loop : stalled()) all.push_back(std::move(loop));
  if (backend_->health() != Status::ok) all.push_back("back end: " + backend_->last_error());
  return all;
}

/// Loops that do not tick: the process is of no more use.
std::vector<std::string> Daemon::stalled() const {
  std::vector<std::string> all;
  const Nanos now = now_ns();
  const Nanos interval = Nanos{config_.heartbeat.interval_ms} * 1'000'000;
  if (metrics_.tick_age(LoopId::service, now) > kAlive) all.emplace_back("service loop: stalled");
  if (metrics_.tick_age(LoopId::net, now) > kAlive + interval) all.emplace_back("net loop: stalled");
  return all;
}

Report Daemon::report() {
  Report r;
  r.rank = config_.rank;
  r.ranks = config_.ranks();
  r.missing = missing();
  r.ready = r.missing.empty();
  r.backend = name(config_.backend);
  r.transport = name(config_.transport);
  if (config_.backend == BackendKind::cuda) r.sharing = name(config_.gpu.sharing);
  r.incarnation = incarnation_;
  r.uptime_s = static_cast<double>(now_ns() - started_) * 1e-9;
  r.version = kVersion;
  r.socket = attach_.path();
  if (http_) r.http = config_.http.listen.substr(0, config_.http.listen.rfind(':') + 1) + std::to_string(http_->port());
  r.lanes_max = config_.limits.lanes;
  for (const LaneInfo& lane : attach_.lanes())
    r.lanes.push_back({lane.lane, lane.name, lane.pid, lane.calls, lane.dry});
  for (uint32_t s = 0; s < kStatuses; ++s) r.calls[s] = metrics_.calls(static_cast<Status>(s));
  r.p50_us = metrics_.call_quantile(0.5);
  r.p99_us = metrics_.call_quantile(0.99);
  const auto phases = recorder_.phases();
  for (std::size_t p = 0; p < phases.size(); ++p)
    if (phases[p].seen > 0)
      r.phases.push_back(
          {kPhaseNames[p], static_cast<double>(phases[p].p50) * 1e-3, static_cast<double>(phases[p].p99) * 1e-3});
  r.peers = peer_reports();
  const Backend::Memory memory = backend_->memory();
  r.heap = memory.heap;
  r.weights = memory.weights;
  return r;
}

std::vector<Report::Peer> Daemon::peer_reports() const {
  std::vector<Report::Peer> all;
  const Nanos now = now_ns();
  const std::vector<control::PeerView> views = links_.peers();
  for (uint32_t rank = 0; rank < views.size(); ++rank) {
    if (rank == config_.rank) continue;
    const control::PeerView& v = views[rank];
    Report::Peer& p = all.emplace_back();
    p.rank = rank;
    p.link = v.leaving ? "leaving" : control::name(v.state);
    if (v.heard) p.heartbeat_ms = static_cast<double>(now - std::min(now, *v.heard)) * 1e-6;
    p.wait_s = metrics_.peer_wait(rank);
    for (uint32_t c = 0; c < p.wait_by.size(); ++c) p.wait_by[c] = metrics_.peer_wait(rank, static_cast<Cause>(c));
    p.last = metrics_.peer_last(rank);
    p.losses = std::accumulate(v.losses.begin(), v.losses.end(), uint64_t{0});
    p.busy = control::name(v.busy);
    p.loop_ms = v.service_age_us * 1e-3;
    p.waits_for = v.waits_for;
    p.waits_ms = v.waits_us * 1e-3;
  }
  return all;
}

/// Our own row is what we counted, the others' is what they told.
std::vector<WaitsRow> Daemon::waits() const {
  std::vector<WaitsRow> rows;
  const std::vector<control::WaitRow> told = links_.waits();
  const Nanos now = now_ns();
  for (uint32_t rank = 0; rank < told.size(); ++rank) {
    WaitsRow& row = rows.emplace_back();
    if (rank == config_.rank) {
      row.age_ms = 0;
      for (uint32_t r = 0; r < told.size(); ++r) row.wait_ms.push_back(metrics_.peer_wait(r) * 1e3);
    } else if (told[rank].beat) {
      row.age_ms = static_cast<double>(now - std::min(now, *told[rank].beat)) * 1e-6;
      for (const uint64_t us : told[rank].wait_us) row.wait_ms.push_back(static_cast<double>(us) * 1e-3);
    }
  }
  return rows;
}

Gauges Daemon::gauges() {
  const Backend::Memory memory = backend_->memory();
  Gauges g;
  g.ready = missing().empty();
  g.lanes_attached = static_cast<uint32_t>(attach_.lanes().size());
  const Nanos now = now_ns();
  for (const control::PeerView& v : links_.peers()) {
    LinkGauge& link = g.links.emplace_back();
    link.state = static_cast<uint32_t>(v.state);
    link.losses = v.losses;
    if (v.heard) link.heartbeat_age = now - std::min(now, *v.heard);
  }
  g.heap = memory.heap;
  g.weights = memory.weights;
  g.arena = memory.arena;
  g.scratch = memory.scratch;
  return g;
}

HttpAnswer Daemon::page(std::string_view path) {
  if (path == "/") return status_page();
  if (path == "/metrics") return {200, metrics_.text(gauges()), kTypeMetrics};
  if (path == "/status.json") return {200, to_json(report()), kTypeJson};
  if (path == "/waits.json") return {200, waits_json(config_.rank, waits()), kTypeJson};
  if (path == "/livez") {
    const std::vector<std::string> why = stalled();
    return {why.empty() ? 200U : 503U, health_json(why.empty(), why), kTypeJson};
  }
  if (path == "/readyz") {
    const std::vector<std::string> why = missing();
    return {why.empty() ? 200U : 503U, health_json(why.empty(), why), kTypeJson};
  }
  return {404, "no such page: / /metrics /livez /readyz /status.json /waits.json\n"};
}

}  // namespace moed
