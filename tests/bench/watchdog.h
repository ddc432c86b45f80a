// Something that is done when a bench has not got on in time.
#pragma once

#include <chrono>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <stop_token>
#include <thread>
#include <utility>

namespace moed::bench {

/// Calls `late` on a thread of its own once, unless it is destroyed within `limit`.
class Watchdog {
 public:
  Watchdog(std::chrono::seconds limit, std::function<void()> late)
      : late_(std::move(late)), thread_([this, limit](const std::stop_token& stop) {
          std::unique_lock lock(mutex_);
          ended_.wait_for(lock, stop, limit, [] { return false; });
          if (!stop.stop_requested()) late_();
        }) {}

 private:
  std::function<void()> late_;
  std::mutex mutex_;
  std::condition_variable_any ended_;
  std::jthread thread_;  // last: it uses the others
};

}  // namespace moed::bench
