// The hot thread: sees bells, begins and polls calls, drives serve passes, replies, records. Control hands it lanes and
// takes them back; nothing else is shared.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <vector>

#include "daemon/abi/fd.h"
#include "daemon/abi/mailbox.h"
#include "daemon/loop.h"
#include "daemon/metrics.h"
#include "daemon/recorder.h"
#include "kernels/backend.h"

namespace moed {

struct ServiceOptions {
  Shape shape;
  IdlePolicy idle;
  uint32_t lanes = 2;  ///< engine lanes, numbered 1..lanes; lane 0 is the daemon's own
  uint32_t deadline_ms = 2000, first_deadline_ms = 60000;
  uint32_t loop_delay_us = 0;    ///< drill
  uint32_t delay_for_ms = 0;     ///< the drill ends so long after the loop was made; 0: never
  Recorder* recorder = nullptr;  ///< gets every ended call and pass; nullptr: nothing is recorded
};

class ServiceLoop {
 public:
  ServiceLoop(Backend& backend, Metrics& metrics, ServiceOptions options);
  ~ServiceLoop();

  // From the control thread.

  /// Serves a lane, 0..lanes, from now on. The mailbox is the attach's own. Calls of lane 0 are recorded and not
  /// counted: neither in metrics nor as in flight.
  void attach(uint32_t lane, Mapping mailbox);
  /// Lets a lane go, whatever it is doing; `released` is called on the service thread when nothing refers to it.
  void detach(uint32_t lane, std::function<void()> released);
  /// From here every new call ends with `draining`.
  void drain() { draining_.store(true, std::memory_order_release); }
  /// Engine lanes with a call in flight.
  uint32_t in_flight() const { return in_flight_.load(std::memory_order_acquire); }
  /// Calls that a lane's present engine has ended.
  uint64_t calls(uint32_t lane) const { return lanes_[lane]->calls.load(std::memory_order_relaxed); }
  void stop();

 private:
  enum class LaneState : uint32_t { free, attached, leaving };
  struct Lane {
    std::atomic<LaneState> state{LaneState::free};
    std::atomic<uint64_t> calls{0};
    Mapping mailbox;  ///< set before attached, dropped after leaving
    std::function<void()> released;
    // The service thread's alone:
    uint64_t bell = 0;  ///< number of the call taken last
    bool running = false;
    bool warm = false;  ///< had a good call
    Call call{};        ///< the running call, as copied
    HostMailbox& box() { return *reinterpret_cast<HostMailbox*>(mailbox.data()); }
  };

  bool work(Nanos now);
  void sleep(Nanos now);
  bool step(uint32_t number, Lane& lane, Nanos now);
  void take(uint32_t number, Lane& lane, uint64_t bell, Nanos now);
  static void reply(Lane& lane, const CallRecord& record);
  void finish(uint32_t number, Lane& lane, const CallRecord& record);
  void ended(uint32_t number, Lane& lane);
  void let_go(uint32_t number, Lane& lane);
  static void tell(const WaitFault& fault);
  void wake_up();

  Backend& backend_;
  Metrics& metrics_;
  const ServiceOptions options_;
  const Nanos made_ = now_ns();
  std::vector<std::unique_ptr<Lane>> lanes_;
  std::atomic<bool> draining_{false};
  std::atomic<uint32_t> in_flight_{0};
  std::vector<FutexWord> words_;
  CallRecord record_{};
  ServeRecord served_{};
  std::unique_ptr<Loop> loop_;  // last: its thread uses what is above
};

}  // namespace moed
