// Copies and words written beside the passes, on a stream of their own, and what has gone wrong for good.
#pragma once

#include <cuda_runtime.h>

#include <atomic>
#include <mutex>
#include <string>

#include "kernels/cuda/device_world.h"
#include "kernels/cuda/driver.h"

namespace moed::cuda {

/// A CUDA failure is sticky: the process has to end. The first one is kept.
class Health {
 public:
  /// True when `error` is none; else notes it.
  bool good(cudaError_t error, const char* what);
  bool good(CUresult result, const Driver& driver, const char* what);
  /// A GPU that answers nothing any more: as sticky, and told apart.
  void stand_still(std::string text);
  bool stuck() const { return stuck_.load(std::memory_order_acquire); }
  bool lost() const { return lost_.load(std::memory_order_acquire); }
  std::string text() const;

 private:
  bool note(std::string text);
  std::atomic<bool> lost_{false}, stuck_{false};
  mutable std::mutex mutex_;
  std::string text_;
};

/// From any thread. What one call queues is in order with what other calls queued before.
class Side {
 public:
  Side(const Driver& driver, Health& health) : driver_(driver), health_(health) {}
  Side(const Side&) = delete;
  Side& operator=(const Side&) = delete;
  ~Side();

  bool make() { return health_.good(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "side stream"); }
  cudaStream_t stream() const { return stream_; }

  bool to_gpu(void* to, const void* from, uint64_t bytes);
  /// Waits until the bytes are there.
  bool from_gpu(void* to, const void* from, uint64_t bytes);
  bool zero(void* at, uint64_t bytes);
  /// Writes a word after everything that was queued here before.
  bool word(const void* at, uint32_t value);
  /// Waits for what was queued.
  bool settle();

 private:
  const Driver& driver_;
  Health& health_;
  cudaStream_t stream_ = nullptr;
};

}  // namespace moed::cuda
