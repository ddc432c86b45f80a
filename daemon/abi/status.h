// The one status enum: what became of a call, an attach or a back-end function. Bottom layer: host and device code.
#pragma once

#include <cstdint>

namespace moed {

/// Outcome of a call or of a function. The numbers are part of the C ABI and never change.
/// From bad_call on, except busy, a call's out is zeros; after daemon_lost and device_lost it is undefined.
enum class [[nodiscard]] Status : uint32_t{
    ok = 0,
    pending = 1,       ///< not ended yet (only from poll and wait)
    degraded = 2,      ///< ended, contributions of lost ranks left out
    masked = 3,        ///< ended, some ids were counted as -1 (flag mask)
    dry = 4,           ///< the lane is dry: checked, out is zeros
    bad_call = 5,      ///< a field of the call is beyond a limit
    bad_route = 6,     ///< an expert id outside [-1, experts)
    busy = 7,          ///< a call is in flight, or no lane is free
    not_ready = 8,     ///< the world is forming
    peer_timeout = 9,  ///< the deadline passed
    peer_lost = 10,    ///< a needed rank is lost
    step_failed = 11,  ///< an earlier call of this step failed
    draining = 12,     ///< this daemon is leaving
    daemon_lost = 13,  ///< the daemon is gone: attach again
    device_lost = 14,  ///< this daemon's GPU context failed
    version = 15,      ///< protocol or ABI not served
    denied = 16,       ///< other user
    unsupported = 17,  ///< e.g. a stream call to a CPU daemon
    no_memory = 18,    ///< the arena asked for does not fit
    internal = 19,     ///< a bug; the log says more
};

inline constexpr uint32_t kStatuses = 20;

/// The status as interfaces and logs spell it; "unknown" for a number that is no status.
constexpr const char* name(Status status) {
  constexpr const char* names[kStatuses] = {"ok",        "pending",     "degraded",    "masked",      "dry",
                                            "bad_call",  "bad_route",   "busy",        "not_ready",   "peer_timeout",
                                            "peer_lost", "step_failed", "draining",    "daemon_lost", "device_lost",
                                            "version",   "denied",      "unsupported", "no_memory",   "internal"};
  const auto n = static_cast<uint32_t>(status);
  return n < kStatuses ? names[n] : "unknown";
}

}  // namespace moed
