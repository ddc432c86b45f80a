// A duty cycle on a named thread: it works while there is work, spins for a while when there is none, then sleeps.
#pragma once

#include <pthread.h>
#include <sched.h>

#include <atomic>
#include <functional>
#include <string>
#include <thread>

#include "daemon/abi/futex.h"

namespace moed {

/// How a loop idles. spin_us: after the last work; cpu: core to stay on, -1: any.
struct IdlePolicy {
  uint32_t spin_us = 50;
  int32_t cpu = -1;
};

/// The parts of a duty cycle. All run on the loop's thread.
struct Duty {
  std::function<bool(Nanos now)> work;    ///< never blocks; true: something was done
  std::function<void(Nanos now)> sleep;   ///< at most some 10 ms; something else wakes it
  std::function<void(Nanos took)> stall;  ///< one turn took longer than kStall
};
inline constexpr Nanos kStall = 10'000'000;  ///< a turn that takes longer is counted

class Loop {
 public:
  Loop(const char* name, IdlePolicy idle, Duty duty) : idle_(idle), duty_(std::move(duty)) {
    thread_ = std::thread([this, name] { run(name); });
  }
  Loop(const Loop&) = delete;
  Loop& operator=(const Loop&) = delete;
  ~Loop() { stop(); }

  /// Ends the loop after its present turn; the caller wakes it if it sleeps.
  void request_stop() { stop_.store(true, std::memory_order_release); }
  void stop() {
    request_stop();
    if (thread_.joinable()) thread_.join();
  }

 private:
  void run(const char* name) {
    ::pthread_setname_np(::pthread_self(), name);
    if (idle_.cpu >= 0) {
      cpu_set_t set;
      CPU_ZERO(&set);
      CPU_SET(static_cast<size_t>(idle_.cpu), &set);
      ::pthread_setaffinity_np(::pthread_self(), sizeof set, &set);
    }
    Nanos now = now_ns();
    Nanos spin_until = now;
    while (!stop_.load(std::memory_order_acquire)) {
      const bool worked = duty_.work(now);
      const Nanos after = now_ns();
      if (after - now > kStall) duty_.stall(after - now);
      now = after;
      if (worked) {
        spin_until = now + uint64_t{idle_.spin_us} * 1000;
      } else if (now < spin_until) {
        cpu_relax();
      } else {
        duty_.sleep(now);
        now = now_ns();
      }
    }
  }

  IdlePolicy idle_;
  Duty duty_;
  std::atomic<bool> stop_{false};
  std::thread thread_;
};

}  // namespace moed
