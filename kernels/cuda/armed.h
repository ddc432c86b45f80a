// A stream with passes queued ahead, so that no CPU stands between a bell and the kernels that answer it.
#pragma once

#include <cuda_runtime.h>

#include <atomic>
#include <cstring>
#include <functional>
#include <mutex>

#include "kernels/cuda/driver.h"
#include "kernels/cuda/state.h"

namespace moed::cuda {

/// Host words that the GPU writes with release at system scope.
inline uint64_t host_load(const uint64_t& word) {
  return std::atomic_ref(const_cast<uint64_t&>(word)).load(std::memory_order_acquire);
}

/// A record that the GPU has written word by word. False: it is not whole yet, or has been overwritten. Only the first
/// `bytes` are there.
template <class Record>
bool take_tagged(const Tagged<Record>& from, uint64_t number, size_t bytes, Record& out) {
  for (size_t i = 0; i < bytes / 4; ++i) {
    const uint64_t word = host_load(from.word[i]);
    if (word >> 32 != (number & 0xFFFFFFFFU)) return false;
    const auto value = static_cast<uint32_t>(word);
    std::memcpy(reinterpret_cast<std::byte*>(&out) + i * 4, &value, 4);
  }
  return true;
}

/// From any thread.
class Armed {
 public:
  /// Queues one pass of so many loops, the first of which has this number.
  using Pass = std::function<cudaError_t(uint64_t loop, uint32_t loops)>;

  Armed() = default;
  Armed(const Armed&) = delete;
  Armed& operator=(const Armed&) = delete;
  ~Armed();

  cudaError_t make(int priority) { return cudaStreamCreateWithPriority(&stream_, cudaStreamNonBlocking, priority); }
  cudaStream_t stream() const { return stream_; }
  /// `begun`, `completed`: the board's words of this stream.
  void set_pass(Pass pass, const uint64_t& begun, uint64_t& completed);

  /// Queues passes of `loops` loops until `depth` loops are ahead. Never waits.
  cudaError_t fill(uint64_t depth, uint32_t loops);
  /// The same behind a wait for *word >= value, cyclically: a stream memory operation costs the GPU nothing while it
  /// waits. Several, because nobody queues more before the host has looked again.
  CUresult park(const Driver& driver, CUdeviceptr word, uint32_t value, uint64_t depth, uint32_t loops,
                cudaError_t& launched);
  /// Has the GPU say when all that is queued by now has ended. Loops do not say it by themselves: they begin before
  /// those ahead have ended, and what says it stops the stream for a moment.
  cudaError_t mark();

  /// Loops that have not begun.
  uint64_t ahead() const { return launched_ - begun(); }
  /// Loops that have begun, and that a marker has said to have ended.
  uint64_t begun() const { return host_load(*begun_); }
  uint64_t completed() const { return host_load(*completed_); }
  /// Whether nothing runs and nothing is queued.
  bool settled() const { return completed() == launched_; }

 private:
  cudaError_t fill_locked(uint64_t depth, uint32_t loops);

  cudaStream_t stream_ = nullptr;
  Pass pass_;
  const uint64_t* begun_ = nullptr;
  uint64_t* completed_ = nullptr;
  std::mutex mutex_;  ///< of what is queued
  std::atomic<uint64_t> launched_{0};
  uint64_t marked_ = 0;
};

}  // namespace moed::cuda
