#include "kernels/cuda/side.h"

#include <thread>

namespace moed::cuda {
namespace {

constexpr Nanos kLongestCopy = 10'000'000'000;

}  // namespace

bool Health::note(std::string text) {
  const std::lock_guard lock(mutex_);
  if (text_.empty()) text_ = std::move(text);
  lost_.store(true, std::memory_order_release);
  return false;
}

bool Health::good(cudaError_t error, const char* what) {
  return error == cudaSuccess || note(cuda_text(what, error) + "; the GPU's context is lost, start this process again");
}

bool Health::good(CUresult result, const Driver& driver, const char* what) {
  return result == CUDA_SUCCESS ||
         note(std::string(what) + ": " + driver.text(result) + "; the GPU's context is lost, start this process again");
}

void Health::stand_still(std::string text) {
  if (lost()) return;
  stuck_.store(true, std::memory_order_release);
  note(std::move(text));
}

std::string Health::text() const {
  const std::lock_guard lock(mutex_);
  return text_;
}

Side::~Side() {
  if (stream_ != nullptr) cudaStreamDestroy(stream_);
}

bool Side::to_gpu(void* to, const void* from, uint64_t bytes) {
  return bytes == 0 ||
         health_.good(cudaMemcpyAsync(to, from, bytes, cudaMemcpyHostToDevice, stream_), "copy to the GPU");
}

bool Side::from_gpu(void* to, const void* from, uint64_t bytes) {
  if (bytes == 0) return true;
  return health_.good(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToHost, stream_), "copy from the GPU") &&
         settle();
}

bool Side::zero(void* at, uint64_t bytes) {
  return bytes == 0 || health_.good(cudaMemsetAsync(at, 0, bytes, stream_), "zeroing");
}

bool Side::word(const void* at, uint32_t value) {
  return health_.good(driver_.cuStreamWriteValue32(stream_, reinterpret_cast<CUdeviceptr>(at), value, 0), driver_,
                      "writing a word");
}

/// Asks again and again, so that a GPU that stands still is found out; only copies from or to memory of the host that
/// is not pinned block in the driver.
bool Side::settle() {
  for (const Nanos until = now_ns() + kLongestCopy;;) {
    const cudaError_t e = cudaStreamQuery(stream_);
    if (e == cudaSuccess) return true;
    if (e != cudaErrorNotReady || now_ns() > until)
      return health_.good(e == cudaErrorNotReady ? cudaErrorLaunchTimeout : e, "waiting for copies");
    std::this_thread::yield();
  }
}

}  // namespace moed::cuda
