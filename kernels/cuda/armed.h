// A stream with passes queued ahead, so that no CPU stands between a bell and the kernels that answer it.
#pragma once

#include <cuda_runtime.h>

#include <atomic>
#include <string>

#include "kernels/cuda/driver.h"
#include "kernels/cuda/state.h"

namespace moed::cuda {

/// Host words that the GPU writes with release at system scope.
inline uint64_t host_load(const uint64_t& word) {
  return std::atomic_ref(const_cast<uint64_t&>(word)).load(std::memory_order_acquire);
}

class Armed {
 public:
  Armed() = default;
  Armed(const Armed&) = delete;
  Armed& operator=(const Armed&) = delete;
  ~Armed();

  cudaError_t make(int priority) { return cudaStreamCreateWithPriority(&stream_, cudaStreamNonBlocking, priority); }
  cudaStream_t stream() const { return stream_; }
  /// Takes the pass over. `begun`, `completed`: the board's words of this stream.
  void set_pass(cudaGraphExec_t pass, const uint64_t& begun, const uint64_t& completed);

  /// Queues passes until `depth` are ahead, at most `most` of them now. Never waits.
  cudaError_t fill(uint64_t depth, uint64_t most);
  /// Queues one pass behind a wait for *word >= 1: a stream memory operation costs the GPU nothing while it waits.
  CUresult park(const Driver& driver, CUdeviceptr word, cudaError_t& launched);

  uint64_t ahead() const { return launched_ - host_load(*completed_); }
  uint64_t begun() const { return host_load(*begun_); }
  uint64_t completed() const { return host_load(*completed_); }

 private:
  cudaStream_t stream_ = nullptr;
  cudaGraphExec_t pass_ = nullptr;
  const uint64_t* begun_ = nullptr;
  const uint64_t* completed_ = nullptr;
  uint64_t launched_ = 0;
};

}  // namespace moed::cuda
