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

/// Reads memory until told to end. Each block has words of its own for that it has begun and for how much it has read:
/// not every machine lets a GPU add to host memory. One thread of all looks at the host's word: reads of host memory by
/// every block would be another load than the one that is meant, and stop whoever writes there.
__global__ void __launch_bounds__(512)
    stream_memory(const uint4* memory, uint64_t count, volatile uint32_t* words, volatile uint32_t* ended) {
  if (threadIdx.x == 0) words[kBegun + blockIdx.x] = 1;
  uint32_t sum = 0;
  uint32_t turns = 0;
  for (;; ++turns) {
    bool over = false;
    if (threadIdx.x == 0) {
      if (blockIdx.x == 0 && words[kEnd] != 0) *ended = 1;
      over = *ended != 0;
    }
    if (__syncthreads_or(over ? 1 : 0) != 0) break;
    uint64_t i = (uint64_t{blockIdx.x} + uint64_t{turns} * 256 * gridDim.x) * blockDim.x + threadIdx.x;
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
  if (threadIdx.x == 0) words[kBegun + gridDim.x + blockIdx.x] = turns;
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
    must(cudaMallocHost(&words_, (kBegun + 2 * blocks_) * sizeof(uint32_t)), "cudaMallocHost");
    must(cudaMalloc(&ended_, sizeof(uint32_t)), "cudaMalloc");
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
  static_cast<void>(cudaFree(ended_));
  static_cast<void>(cudaFreeHost(words_));
}

void Load::start() {
  stop();
  must(cudaSetDevice(device_), "cudaSetDevice");
  std::fill_n(words_, kBegun + 2 * blocks_, 0U);
  must(cudaMemsetAsync(ended_, 0, sizeof(uint32_t), stream_), "cudaMemset");
  stream_memory<<<blocks_, block_.threads, block_.shared_bytes, stream_>>>(static_cast<const uint4*>(memory_),
                                                                           kBytes / sizeof(uint4), words_, ended_);
  must(cudaGetLastError(), "launch");
  running_ = true;
  began_ = std::chrono::steady_clock::now();
  const auto until = began_ + kLongestStart;
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
  if (running_) {
    const std::chrono::duration<double> took = std::chrono::steady_clock::now() - began_;
    double turns = 0;
    for (uint32_t i = 0; i < blocks_; ++i) turns += words_[kBegun + blocks_ + i];
    rate_ = turns * 256 * sizeof(uint4) * block_.threads / took.count();
  }
  running_ = false;
}

}  // namespace moed::bench
