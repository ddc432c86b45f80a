// What other threads may see of a peer: the net thread writes it, anybody reads it.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <optional>
#include <vector>

#include "control/messages.h"
#include "control/world.h"
#include "daemon/abi/futex.h"

namespace moed::control {

/// A peer as any thread may see it.
struct PeerView {
  State state = State::connecting;
  bool leaving = false;
  std::optional<Nanos> heard{};      ///< when it was last heard of; nothing: never
  std::array<uint64_t, 3> losses{};  ///< by Loss
  Busy busy = Busy::no;
  uint32_t service_age_us = 0;          ///< of its service loop, as it said last
  std::optional<uint32_t> waits_for{};  ///< the rank that it waited for most in the last interval
  uint32_t waits_us = 0;
};

/// A peer's row of the wait matrix: what all its heartbeats heard here add up to, over all lives of its link.
struct WaitRow {
  std::optional<Nanos> beat{};      ///< when the last heartbeat came; nothing: none ever did
  std::vector<uint64_t> wait_us{};  ///< by the rank that it waited for; empty without a heartbeat
};

/// No lock between the threads; fields that are a message apart do no harm.
class SharedPeer {
 public:
  // The net thread's:

  void show(const Peer& peer, uint32_t ranks) {
    const auto* most = std::max_element(peer.beat.wait_us, peer.beat.wait_us + ranks);
    state_ = static_cast<uint32_t>(peer.state);
    leaving_ = peer.leaving;
    heard_ = peer.heard;
    for (size_t i = 0; i < losses_.size(); ++i) losses_[i] = peer.losses[i];
    busy_ = static_cast<uint32_t>(peer.beat.busy);
    service_age_us_ = peer.beat.service_age_us;
    waits_for_ = static_cast<uint32_t>(most - peer.beat.wait_us);
    waits_us_ = *most;
  }
  void add(const HeartbeatBody& beat, Nanos now) {
    for (size_t r = 0; r < waited_us_.size(); ++r) waited_us_[r].fetch_add(beat.wait_us[r], std::memory_order_relaxed);
    beat_ = now;
  }

  // Any thread:

  PeerView view() const {
    PeerView view;
    view.state = static_cast<State>(state_.load());
    view.leaving = leaving_;
    view.busy = static_cast<Busy>(busy_.load());
    if (const Nanos heard = heard_; heard != 0) view.heard = heard;
    std::copy(losses_.begin(), losses_.end(), view.losses.begin());
    view.service_age_us = service_age_us_;
    view.waits_us = waits_us_;
    if (view.waits_us != 0) view.waits_for = waits_for_;
    return view;
  }
  WaitRow row(uint32_t ranks) const {
    WaitRow row;
    const Nanos beat = beat_;
    if (beat == 0) return row;
    row.beat = beat;
    row.wait_us.assign(waited_us_.begin(), waited_us_.begin() + ranks);
    return row;
  }

 private:
  std::atomic<uint32_t> state_{0}, busy_{0}, service_age_us_{0}, waits_for_{0}, waits_us_{0};
  std::atomic<bool> leaving_{false};
  std::atomic<Nanos> heard_{0}, beat_{0};
  std::array<std::atomic<uint64_t>, 3> losses_{};
  std::array<std::atomic<uint64_t>, kMaxRanks> waited_us_{};
};

}  // namespace moed::control
