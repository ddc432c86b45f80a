// The daemon's state as JSON: what moectl status --json and /status.json print, the wait matrix of /waits.json, and the
// bodies of /livez and /readyz.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "daemon/abi/status.h"

namespace moed {

/// A snapshot, filled by whoever is asked. Text may hold any bytes: what is not UTF-8, and control characters, are
/// replaced by U+FFFD.
struct Report {
  struct Lane {
    uint32_t lane = 0;
    std::string name;  ///< as the engine gave it; ends at the first zero byte
    int32_t pid = 0;
    uint64_t calls = 0;  ///< ended, of this attach
    bool dry = false;
  };
  struct Phase {
    const char* name;
    double p50_us, p99_us;  ///< of the last calls or serve passes
  };
  struct Peer {
    uint32_t rank = 0;
    std::string link;                    ///< connecting, mapped, ready, lost, leaving
    std::optional<double> heartbeat_ms;  ///< age of the last one; null before the first
    double wait_s = 0;                   ///< that calls waited for this rank
    std::array<double, 4> wait_by{};     ///< the same by cause: queue, experts, send, wire
    uint64_t last = 0;                   ///< calls in which it answered last
    uint64_t losses = 0;                 ///< of the link
    std::string busy{};  ///< what keeps the peer, as it said last: loading, mapping, draining; empty: nothing
    double loop_ms = 0;  ///< age of its service loop's last turn, as it said last
    std::optional<uint32_t> waits_for{};  ///< the rank that it waited for most in its last heartbeat interval
    double waits_ms = 0;
  };

  uint32_t rank = 0, ranks = 1;
  bool ready = false;
  std::vector<std::string> missing;  ///< why not ready, such as "link 3: lost"
  std::string backend, transport, sharing;
  uint64_t incarnation = 0;
  double uptime_s = 0;
  std::string version;
  std::string socket;      ///< path of the Unix socket
  std::string http;        ///< host:port, empty when switched off
  uint32_t lanes_max = 0;  ///< engine lanes there are (limits.lanes); lanes lists those attached
  std::vector<Lane> lanes;
  std::array<uint64_t, kStatuses> calls{};  ///< ended, by status
  double p50_us = 0, p99_us = 0;            ///< of the last calls
  std::vector<Phase> phases;                ///< those that there were
  std::vector<Peer> peers;
  uint64_t heap = 0, weights = 0;  ///< bytes
};

/// One line of JSON, at most kMaxStatusBytes: what does not fit is left out of lanes, peers and missing, from the end,
/// and "truncated": true is added. Strings are cut at 256 bytes.
std::string to_json(const Report& report);

/// One rank's row of the wait matrix.
struct WaitsRow {
  std::optional<double> age_ms;  ///< of the heartbeat that told it last; null: none has
  std::vector<double> wait_ms;   ///< that its calls waited for rank 0, 1, ...; empty: not known
};

/// {"rank": own, "ranks": N, "rows": [{"rank": 0, "age_ms": 0.0, "wait_ms": [...]}, ...]}: rows by rank. Apart from the
/// status, because 128 rows of 128 are more than kMaxStatusBytes.
std::string waits_json(uint32_t rank, const std::vector<WaitsRow>& rows);

/// {"ok": true|false, "missing": [...]}
std::string health_json(bool ok, const std::vector<std::string>& missing);

/// The link state as interfaces and logs spell it; "unknown" beyond 3.
const char* link_name(uint32_t state);

}  // namespace moed
