// The daemon's metrics: hot code bumps plain slots, a scrape reads them. Every metric is one row of the table in
// metrics.cpp and one row of docs/metrics.md; a test compares the two.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "daemon/abi/futex.h"
#include "daemon/abi/record.h"
#include "daemon/abi/status.h"

namespace moed {

/// Where something from outside was turned away.
enum class Refused : uint32_t { attach, mailbox, handshake, message, http };
enum class LoopId : uint32_t { service, net, control };
/// Why a call waited for a rank: its own times, and the rest on the wire.
enum class Cause : uint32_t { queue, experts, send, wire };
inline constexpr const char* kCauses[] = {"queue", "experts", "send", "wire"};
/// What a rank answered the canary with in one round.
enum class CanaryResult : uint32_t { ok, wrong, late };
enum class MetricKind : uint32_t { gauge, counter, histogram };
enum class MetricId : uint32_t;

/// One metric: its full name, its labels separated by commas ("" for none) and its help line.
struct MetricRow {
  MetricId id;
  const char* name;
  MetricKind kind;
  const char* labels;
  const char* help;
};
std::span<const MetricRow> metric_table();

/// What never changes while the daemon lives: the labels of the info metrics. ranks: 1..128.
struct MetricsInfo {
  std::string version, commit, backend, transport, sharing, handles, digest, revision, cuda, ucx, nccl;
  uint32_t rank = 0, ranks = 1;
};

/// A link at the time of a scrape; state is a LinkState.
struct LinkGauge {
  uint32_t state = 0;
  std::array<uint64_t, 3> losses{};      ///< error, heartbeat, leaving
  std::optional<Nanos> heartbeat_age{};  ///< nothing: never heard of
};

/// What the caller of a scrape looks up. Bytes for memory; links by rank.
struct Gauges {
  bool ready = false;
  uint32_t lanes_attached = 0;
  std::vector<LinkGauge> links;
  uint64_t heap = 0, weights = 0, arena = 0, scratch = 0;
};

class Metrics {
 public:
  explicit Metrics(MetricsInfo info);
  ~Metrics();
  Metrics(const Metrics&) = delete;
  Metrics& operator=(const Metrics&) = delete;

  /// Service thread only. `bytes`: what the call read from and wrote to its arena.
  void call_ended(const CallRecord& record, uint64_t bytes) noexcept;
  /// Service thread only.
  void pass_ended(const ServeRecord& record) noexcept;
  /// Any thread. mailbox is counted by call_ended (bad_call), message also by pass_ended (rows that gather refused).
  void refused(Refused where) noexcept;
  /// From the loop's own thread. A loop that never ticked is not exported.
  void tick(LoopId loop, Nanos now) noexcept;
  void stall(LoopId loop) noexcept;
  /// Control thread only.
  void canary(uint32_t peer, CanaryResult result) noexcept;

  // Any thread.

  /// Time since the loop's last tick; 0 for a loop that never ticked.
  Nanos tick_age(LoopId loop, Nanos now) const;
  /// Calls that ended with `status`.
  uint64_t calls(Status status) const;
  /// Calls of peers and our own that serve passes have answered.
  uint64_t sources_served() const;
  /// Seconds that calls waited for rank `peer`, all causes, and in how many it came last. 0 for a rank beyond the
  /// world.
  double peer_wait(uint32_t peer) const;
  double peer_wait(uint32_t peer, Cause cause) const;
  uint64_t peer_last(uint32_t peer) const;
  /// Quantile q (0..1, nearest rank) of the last 4096 call durations, in microseconds; 0 without calls.
  double call_quantile(double q) const;
  /// The whole exposition, Prometheus text format 0.0.4.
  std::string text(const Gauges& gauges) const;

 private:
  struct Slots;
  MetricsInfo info_;
  std::unique_ptr<Slots> slots_;
};

}  // namespace moed
