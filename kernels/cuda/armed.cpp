#include "kernels/cuda/armed.h"

#include "kernels/cuda/passes.h"

namespace moed::cuda {

Armed::~Armed() {
  if (stream_ != nullptr) cudaStreamDestroy(stream_);
}

void Armed::set_pass(Pass pass, const uint64_t& begun, uint64_t& completed) {
  pass_ = std::move(pass);
  begun_ = &begun;
  completed_ = &completed;
}

cudaError_t Armed::fill(uint64_t depth, uint32_t loops) {
  const std::lock_guard lock(mutex_);
  return fill_locked(depth, loops);
}

/// Loops may begin while this queues more: it queues no more than `depth` at a time.
cudaError_t Armed::fill_locked(uint64_t depth, uint32_t loops) {
  cudaError_t e = cudaSuccess;
  for (uint64_t now = 0; now < depth && ahead() < depth && e == cudaSuccess; now += loops) {
    e = pass_(launched_ + 1, loops);
    launched_ += loops;  // after an error, too: a part of it may be queued
  }
  return e;
}

CUresult Armed::park(const Driver& driver, CUdeviceptr word, uint32_t value, uint64_t depth, uint32_t loops,
                     cudaError_t& launched) {
  const std::lock_guard lock(mutex_);
  const CUresult waits = driver.cuStreamWaitValue32(stream_, word, value, CU_STREAM_WAIT_VALUE_GEQ);
  if (waits == CUDA_SUCCESS) launched = fill_locked(depth, loops);
  return waits;
}

cudaError_t Armed::mark() {
  const std::lock_guard lock(mutex_);
  if (marked_ == launched_) return cudaSuccess;
  const cudaError_t e = launch_marker(completed_, launched_, stream_);
  if (e == cudaSuccess) marked_ = launched_.load();
  return e;
}

}  // namespace moed::cuda
