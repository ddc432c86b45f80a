#include "kernels/cuda/armed.h"

namespace moed::cuda {

Armed::~Armed() {
  if (pass_ != nullptr) cudaGraphExecDestroy(pass_);
  if (stream_ != nullptr) cudaStreamDestroy(stream_);
}

void Armed::set_pass(cudaGraphExec_t pass, const uint64_t& begun, const uint64_t& completed) {
  pass_ = pass;
  begun_ = &begun;
  completed_ = &completed;
}

cudaError_t Armed::fill(uint64_t depth, uint64_t most) {
  cudaError_t e = cudaSuccess;
  for (uint64_t i = 0; i < most && ahead() < depth && e == cudaSuccess; ++i) {
    e = cudaGraphLaunch(pass_, stream_);
    if (e == cudaSuccess) ++launched_;
  }
  return e;
}

CUresult Armed::park(const Driver& driver, CUdeviceptr word, uint32_t value, uint64_t passes, cudaError_t& launched) {
  const CUresult waits = driver.cuStreamWaitValue32(stream_, word, value, CU_STREAM_WAIT_VALUE_GEQ);
  if (waits == CUDA_SUCCESS) launched = fill(passes, passes);
  return waits;
}

}  // namespace moed::cuda
