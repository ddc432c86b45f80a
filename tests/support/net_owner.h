// NetLoops of one process and owners of theirs that answer by hand, on the test's thread.
#pragma once

#include <utility>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <deque>
#include <mutex>
#include <thread>

#include "control/net_loop.h"
#include "tests/support/ports.h"

namespace moed::control::test {

using std::chrono::milliseconds;
using std::chrono::steady_clock;

inline constexpr milliseconds kLimit{10'000};
inline constexpr const char* kUcxPorts = "7600-8099";

inline std::vector<std::string> free_peers(uint32_t count) {
  std::vector<std::string> peers;
  for (const uint16_t port : moed::test::free_ports(count)) peers.push_back("127.0.0.1:" + std::to_string(port));
  return peers;
}

inline Hello hello_of(uint32_t rank, uint32_t ranks) {
  static std::atomic<uint64_t> lives{1000};
  Hello h;
  h.protocol = h.numerics = 1;
  h.rank = rank;
  h.ranks = ranks;
  h.handle_kinds = 2;
  h.incarnation = ++lives;
  return h;
}

enum class What { open, segment, usable, ready, leaving, lost };

struct Event {
  What what{};
  LinkLife life;
  uint32_t session = 0;  ///< of open, usable, ready, leaving
  uint64_t incarnation = 0;
  SegmentBody body{};
  Loss loss{};
  std::string why = {};
  bool was_up = false;
};

struct Pace {
  uint32_t interval_ms = 10, lost_after_ms = 2000;
};

/// A NetLoop and its owner: events are queued by the net thread, and answered and remembered by the test's.
class Owner {
 public:
  Owner(std::vector<std::string> peers, uint32_t rank, Pace pace = {}) {
    NetOptions o;
    o.hello = hello_of(rank, static_cast<uint32_t>(peers.size()));
    o.listen = peers[rank];
    o.peers = std::move(peers);
    o.ucx_ports = kUcxPorts;
    o.ucx_devices = "lo";
    o.interval_ms = pace.interval_ms;
    o.lost_after_ms = pace.lost_after_ms;
    incarnation = o.hello.incarnation;
    loop = std::make_unique<NetLoop>(std::move(o), handlers(), KeyRing(""));
  }

  /// Takes what has happened, and answers if it is to.
  void pump() {
    std::deque<Event> news;
    {
      const std::lock_guard lock(mutex_);
      news.swap(queue_);
    }
    for (const Event& e : news) {
      all.push_back(e);
      if (answers) answer(e);
    }
  }

  void answer(const Event& e) {
    if (e.what == What::open) loop->offer(e.life, segment_of(e.life));
    if (e.what == What::segment) loop->mapped(e.life);
    if (e.what == What::usable) loop->ready(e.life);
  }

  /// What this owner offers: no two lives of no two owners are the same.
  SegmentBody segment_of(LinkLife life) const {
    SegmentBody body;
    body.kind = 1;
    body.bytes = incarnation * 1000 + life.rank * 100 + life.number;
    std::memset(body.segment, static_cast<int>(body.bytes % 251), sizeof body.segment);
    std::memset(body.doorbell, static_cast<int>(body.bytes % 241), sizeof body.doorbell);
    return body;
  }

  std::vector<Event> of(What what, uint32_t rank) const {
    std::vector<Event> some;
    std::copy_if(all.begin(), all.end(), std::back_inserter(some),
                 [&](const Event& e) { return e.what == what && e.life.rank == rank; });
    return some;
  }
  size_t count(What what, uint32_t rank) const { return of(what, rank).size(); }
  /// Of the link that became ready last with `rank`; 0: none has.
  uint32_t latest_session(uint32_t rank) const {
    const std::vector<Event> some = of(What::ready, rank);
    return some.empty() ? 0 : some.back().session;
  }
  State state(uint32_t rank) const { return loop->peers()[rank].state; }

  uint64_t incarnation = 0;
  bool answers = true;
  std::vector<Event> all;  ///< the test thread's alone, as everything above
  std::atomic<int> dropped{0}, refused{0}, ticks{0};
  std::atomic<uint32_t> age_us{0}, waited_us{0};
  std::atomic<Busy> busy{Busy::no};

 private:
  void add(Event e) {
    const std::lock_guard lock(mutex_);
    queue_.push_back(std::move(e));
  }

  NetHandlers handlers() {
    NetHandlers h;
    h.open = [this](LinkLife l, uint32_t session) { add({.what = What::open, .life = l, .session = session}); };
    h.segment = [this](LinkLife l, uint64_t of, const SegmentBody& body) {
      add({.what = What::segment, .life = l, .incarnation = of, .body = body});
    };
    h.usable = [this](LinkLife l, uint32_t session) { add({.what = What::usable, .life = l, .session = session}); };
    h.ready = [this](LinkLife l, uint32_t session, Nanos) {
      add({.what = What::ready, .life = l, .session = session});
    };
    h.leaving = [this](LinkLife l, uint32_t session) { add({.what = What::leaving, .life = l, .session = session}); };
    h.lost = [this](LinkLife l, Loss loss, const std::string& why, bool was_up) {
      add({.what = What::lost, .life = l, .loss = loss, .why = why, .was_up = was_up});
    };
    h.refused = [this](const std::string&) { ++refused; };
    h.dropped = [this] { ++dropped; };
    h.beat = [this] {
      HeartbeatBody beat;
      beat.service_age_us = age_us;
      beat.busy = busy;
      std::fill(std::begin(beat.wait_us), std::end(beat.wait_us), waited_us.load());
      return beat;
    };
    h.tick = [this](Nanos) { ++ticks; };
    h.stall = [] {};
    return h;
  }

  std::mutex mutex_;
  std::deque<Event> queue_;

 public:
  std::unique_ptr<NetLoop> loop;  // last: its thread uses what is above
};

/// Lets the owners answer until `done`; false when the limit has passed.
template <class Done>
bool pump_until(std::initializer_list<Owner*> owners, Done done) {
  for (const auto end = steady_clock::now() + kLimit; steady_clock::now() < end;) {
    for (Owner* o : owners) o->pump();
    if (done()) return true;
    std::this_thread::sleep_for(milliseconds(1));
  }
  return done();
}

inline bool linked(const Owner& a, uint32_t b) { return a.state(b) == State::ready; }

inline void pump_for(std::initializer_list<Owner*> owners, milliseconds time) {
  const auto end = steady_clock::now() + time;
  pump_until(owners, [end] { return steady_clock::now() > end; });
}

}  // namespace moed::control::test
