// What the tests of operation faults share: the settings of their daemons and short questions to them.
#pragma once

#include <string>
#include <vector>

#include "tests/support/process.h"
#include "tests/support/scrape.h"

namespace moed::test {

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
inline constexpr bool kSanitized = true;  // a sanitizer wants to be loaded first and keeps freed memory for itself
#else
inline constexpr bool kSanitized = false;
#endif

/// A model for Caller, whose top_k is 2, and limits that a busy machine keeps; then `own`.
inline std::vector<std::string> fault_settings(const std::vector<std::string>& own = {}) {
  std::vector<std::string> all{
      "service.spin_us=0",
      "model.source=synthetic",
      "limits.arena_mb=1",
      "calls.deadline_ms=10000",
      "calls.first_deadline_ms=10000",
      "heartbeat.lost_after_ms=5000",
      "model.shape={hidden: 128, latent: 64, intermediate: 32, experts: 8, top_k: 2, layers: 2}"};
  all.insert(all.end(), own.begin(), own.end());
  return all;
}

/// Of the daemon's last life, as its log tells it.
inline uint16_t http_port(const Daemon& daemon) {
  const std::string log = daemon.log();
  return static_cast<uint16_t>(std::stoul(log.substr(log.rfind(" http=") + 6, 5)));
}

inline std::string metrics_of(const Daemon& daemon) { return get_page(http_port(daemon), "/metrics"); }

/// A call without tokens.
inline moed_status empty_call(const Lane& lane) {
  moed_call_t call = lane.slot(MOED_LAYER_IDENTITY, 0);
  moed_reply_t reply{};
  return moed_call(lane.get(), &call, &reply);
}

}  // namespace moed::test
