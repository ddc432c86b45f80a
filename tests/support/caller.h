// A lane that calls all the time, on a thread of its own.
#pragma once

#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <map>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "daemon/abi/futex.h"
#include "tests/support/process.h"

namespace moed::test {

template <class Done>
bool wait_until(Done done, int ms = 10'000) {
  for (const Nanos end = now_ns() + Nanos{1'000'000} * static_cast<uint32_t>(ms); now_ns() < end; test::sleep_ms(5))
    if (done()) return true;
  return done();
}

/// Calls need experts of the first ranks of the world, two experts a token (top_k is 2). Of the identity the right
/// answer is known: halves of numbers that are exact in every format on the way add up to the row. Of experts, later
/// answers are compared with the first.
class Caller {
 public:
  Caller(const std::string& socket, uint32_t ranks) : lane_(socket), ranks_(ranks), thread_([this] { run(); }) {}
  ~Caller() {
    stop_ = true;
    thread_.join();
  }
  /// Calls from here need the first so many ranks; returns when none that needs others is under way.
  void use(uint32_t ranks) {
    ranks_ = ranks;
    EXPECT_TRUE(more(2));
  }
  /// Whether so many further calls end.
  bool more(uint64_t calls) const {
    const uint64_t until = calls_ + calls;
    return wait_until([&] { return calls_ >= until; });
  }
  std::string faults() const {
    const std::lock_guard lock(mutex_);
    return faults_;
  }

 private:
  void run() {
    for (uint32_t i = 0; !stop_; ++i, ++calls_)
      call(ranks_, i % 2 == 0 ? MOED_LAYER_IDENTITY : lane_.info().first_layer);
  }

  void call(uint32_t ranks, uint32_t layer) {
    const uint32_t experts = ranks * lane_.info().experts / lane_.info().ranks;
    moed_call_t call = lane_.slot(layer, experts);
    call.flags = MOED_FLAG_NO_NORM;
    constexpr std::array<uint16_t, 4> exact{0x3F80, 0xBFC0, 0x4000, 0x3F00};  // 1, -1.5, 2, 0.5
    std::vector<uint16_t> x(uint64_t{experts} * lane_.info().latent);
    for (size_t i = 0; i < x.size(); ++i) x[i] = exact[(i * 5 + i / 7) % exact.size()];
    std::vector<int32_t> ids;
    for (uint32_t t = 0; t < experts; ++t)
      for (const uint32_t e : {t, (t + 3) % experts}) ids.push_back(static_cast<int32_t>(e));
    lane_.put(call.x, x);
    lane_.put(call.ids, ids);
    lane_.put(call.weights, std::vector<float>(ids.size(), 0.5F));
    lane_.put(call.out, std::vector<uint16_t>(x.size(), 0x7FFF));
    moed_reply_t reply{};
    const moed_status status = moed_call(lane_.get(), &call, &reply);
    if (status != MOED_OK) return fault(std::string(moed_status_name(status)) + ": " + moed_last_error(lane_.get()));
    const std::vector<uint16_t> out = lane_.out(call);
    const auto& right = layer == MOED_LAYER_IDENTITY ? x : first_.try_emplace(ranks, out).first->second;
    if (out != right) fault("other bits in layer " + std::to_string(layer));
    if (out == std::vector<uint16_t>(x.size(), 0)) fault("zeros");
  }

  void fault(const std::string& text) {
    const std::lock_guard lock(mutex_);
    if (faults_.find(text) == std::string::npos) faults_ += text + "\n";
  }

  const test::Lane lane_;
  std::atomic<uint32_t> ranks_;
  std::map<uint32_t, std::vector<uint16_t>> first_;  ///< by ranks
  std::atomic<uint64_t> calls_{0};
  std::atomic<bool> stop_{false};
  mutable std::mutex mutex_;
  std::string faults_;
  std::thread thread_;  // last: it uses what is above
};

}  // namespace moed::test
