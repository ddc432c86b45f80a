#include "tests/bench/load.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <stdexcept>
#include <string>
#include <thread>

namespace moed::bench {
namespace {

constexpr uint64_t kBytes = uint64_t{4} << 30;
constexpr uint32_t kEnd = 0, kSink = 1, kBegun = 32;  ///< words; what has begun does not share a line with kEnd
constexpr std::chrono::seconds kLongestStart{5};

void must(cudaError_t e, const char* what) {
  if (e != cudaSuccess) throw std::runtime_error(std::string("load: ") + what + ": " + cudaGetErrorString(e));
}

/// Reads memory until told to end. Each block has a word of its own for that it has begun: not every machine lets a GPU
/// add to host memory.
__global__ void __launch_bounds__(512) stream_memory(const uint4* memory, uint64_t count, volatile uint32_t* words) {
  if (threadIdx.x == 0) words[kBegun + blockIdx.x] = 1;
  uint32_t sum = 0;
  while (words[kEnd] == 0) {
    uint64_t i = uint64_t{blockIdx.x} * blockDim.x + threadIdx.x;
    for (uint32_t turn = 0; turn < 64; ++turn) {
      uint4 v[4];
#pragma unroll
      for (auto& one : v) {
        one = __ldcs(memory + i % count);
        i += uint64_t{gridDim.x} * blockDim.x;
      }
#pragma unroll
      for (const auto& one : v) sum += one.x ^ one.y ^ one.z ^ one.w;
    }
  }
  if (sum == 0x12345678U) words[kSink] = sum;
}

}  // namespace

Load::Load(int device, const LoadBlock& block) : device_(device), block_(block) {
  try {
    must(cudaSetDevice(device_), "cudaSetDevice");
    cudaDeviceProp properties{};
    must(cudaGetDeviceProperties(&properties, device_), "cudaGetDeviceProperties");
    blocks_ = static_cast<uint32_t>(properties.multiProcessorCount);
    must(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "cudaStreamCreate");
    must(cudaMalloc(&memory_, kBytes), "cudaMalloc of 4 GiB");
    must(cudaMallocHost(&words_, (kBegun + blocks_) * sizeof(uint32_t)), "cudaMallocHost");
    // As a kernel that keeps what it streams in shared memory: else no other block that has some fits beside it.
    must(cudaFuncSetAttribute(stream_memory, cudaFuncAttributePreferredSharedMemoryCarveout, 100), "carveout");
    must(cudaFuncSetAttribute(stream_memory, cudaFuncAttributeMaxDynamicSharedMemorySize,
                              static_cast<int>(block_.shared_bytes)),
         "shared memory");
  } catch (...) {
    free();
    throw;
  }
}

Load::~Load() {
  end();
  free();
}

void Load::free() noexcept {
  static_cast<void>(cudaSetDevice(device_));
  if (stream_ != nullptr) {
    static_cast<void>(cudaStreamSynchronize(stream_));
    static_cast<void>(cudaStreamDestroy(stream_));
  }
  static_cast<void>(cudaFree(memory_));
  static_cast<void>(cudaFreeHost(words_));
}

void Load::start() {
  stop();
  must(cudaSetDevice(device_), "cudaSetDevice");
  std::fill_n(words_, kBegun + blocks_, 0U);
  stream_memory<<<blocks_, block_.threads, block_.shared_bytes, stream_>>>(static_cast<const uint4*>(memory_),
                                                                           kBytes / sizeof(uint4), words_);
  must(cudaGetLastError(), "launch");
  const auto until = std::chrono::steady_clock::now() + kLongestStart;
  while (begun() < blocks_) {
    if (std::chrono::steady_clock::now() > until) {
      const std::string seen = std::to_string(begun());
      end();
      throw std::runtime_error("load: " + seen + " of " + std::to_string(blocks_) + " blocks have begun on GPU " +
                               std::to_string(device_) + " within " + std::to_string(kLongestStart.count()) +
                               " s; there is no room for the others beside what waits there, try smaller blocks");
    }
    std::this_thread::yield();
  }
}

uint32_t Load::begun() const {
  uint32_t n = 0;
  for (uint32_t i = 0; i < blocks_; ++i)
    n += std::atomic_ref(words_[kBegun + i]).load(std::memory_order_relaxed) != 0 ? 1 : 0;
  return n;
}

void Load::end() noexcept { std::atomic_ref(words_[kEnd]).store(1, std::memory_order_relaxed); }

void Load::stop() {
  end();
  must(cudaStreamSynchronize(stream_), "stream of the load");
}

}  // namespace moed::bench
