// One rank of chain_bench: its back end, a lane with a GPU arena, and the kernel that rings its bell.
#pragma once

#include <cuda_runtime.h>

#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "daemon/abi/arena.h"
#include "daemon/abi/mailbox.h"
#include "kernels/backend.h"
#include "kernels/cuda/memory.h"
#include "kernels/cuda/ptx.cuh"
#include "tests/support/cases.h"
#include "tests/support/oracle.h"
#include "tests/support/tolerance.h"

namespace moed::bench {

inline constexpr int kRanks = 2, kLane = 1;
inline constexpr uint32_t kWarmUp = 200;
inline constexpr uint64_t kLongest =
    2'000'000'000;  ///< ns that a call may take on the GPU before the chain is given up

inline void check(cudaError_t e, const char* what) {
  if (e != cudaSuccess) throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(e));
}

/// Rings `calls` times, each time the next of `count` record numbers in turn, and notes in clock cycles how long each
/// call took. failed: 1 + the call that had no end.
static __global__ void chain(DeviceMailbox* box, const uint32_t* numbers, uint32_t count, uint32_t calls,
                             uint32_t* cycles, uint32_t* failed) {
  volatile uint32_t* const bell = &box->bell;
  volatile uint32_t* const done = &box->done;
  for (uint32_t i = 0; i < calls; ++i) {
    const uint64_t until = cuda::global_time() + kLongest;
    const int64_t began = clock64();
    *done = 0;
    *bell = numbers[i % count];
    while (*done == 0)
      if (cuda::global_time() > until) {
        *failed = 1 + i;
        return;
      }
    cycles[i] = static_cast<uint32_t>(clock64() - began);
  }
}

/// Reads memory on all multiprocessors until told to end.
static __global__ void __launch_bounds__(512)
    stream_memory(const uint4* memory, uint64_t count, const volatile uint32_t* end, uint32_t* sink) {
  uint32_t sum = 0;
  while (*end == 0) {
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
  if (sum == 0x12345678U) *sink = sum;
}

struct Options {
  uint32_t latent = 3584, top_k = 16, experts = 896;
  std::vector<uint32_t> tokens{1, 5, 16, 64, 128};
  uint32_t calls = 1000, series = 5;
  bool load = false;
  BackendOptions::Tuning tuning{};
};

inline Shape shape_of(const Options& o) { return make_shape(7168, o.latent, 3072, o.experts, o.top_k); }

/// One rank: back end, lane with a GPU arena, and the chain's memory.
class Rank {
 public:
  Rank(const Options& o, uint32_t rank, uint32_t max_tokens)
      : options_(o), shape_(shape_of(o)), rank_(rank), slot_(arena_slot(shape_, 0, max_tokens)) {
    BackendOptions b;
    b.shape = shape_;
    b.rank = rank;
    b.ranks = kRanks;
    b.lanes = 1;
    b.max_tokens = max_tokens;
    b.in_process = true;
    b.device = std::to_string(rank);
    b.tuning = o.tuning;
    backend_ = make_cuda_backend(std::move(b));
    LaneMemory memory;
    const uint64_t bytes = slot_.end * o.tokens.size();
    if (backend_->open_lane(kLane, ArenaKind::gpu, bytes, memory) != Status::ok)
      throw std::runtime_error(backend_->last_error());
    check(cudaSetDevice(static_cast<int>(rank)), "cudaSetDevice");
    std::string why;
    driver_ = cuda::driver(why);
    memory_ = std::make_unique<cuda::Memory>(*driver_, static_cast<int>(rank));
    mailbox_ = memory_->import_fd(memory.device_mailbox, sizeof(DeviceMailbox), why);
    arena_ = memory_->import_fd(memory.arena, bytes, why);
    if (!mailbox_ || !arena_) throw std::runtime_error(why);
    check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "stream");
    check(cudaStreamCreateWithFlags(&load_, cudaStreamNonBlocking), "stream");
    check(cudaMalloc(&numbers_, 64 * sizeof(uint32_t)), "cudaMalloc");
    check(cudaMalloc(&cycles_, 1'000'000 * sizeof(uint32_t)), "cudaMalloc");
    check(cudaMallocHost(&failed_, 64), "cudaMallocHost");
    check(cudaMallocHost(&end_, 64), "cudaMallocHost");
    if (o.load) check(cudaMalloc(&bulk_, kBulk), "cudaMalloc");
    // As a kernel that keeps what it streams in shared memory: else no other block that has some fits beside it.
    check(cudaFuncSetAttribute(stream_memory, cudaFuncAttributePreferredSharedMemoryCarveout, 100), "carveout");
    for (auto& event : event_) check(cudaEventCreate(&event), "event");
    cudaDeviceProp properties{};
    check(cudaGetDeviceProperties(&properties, static_cast<int>(rank)), "properties");
    processors_ = properties.multiProcessorCount;
  }

  Backend& backend() { return *backend_; }

  /// Registers calls 1, 2, ... of the given sizes, each with input of its own.
  void prepare(const std::vector<uint32_t>& tokens) {
    check(cudaSetDevice(static_cast<int>(rank_)), "cudaSetDevice");
    rows_.clear();
    for (size_t i = 0; i < tokens.size(); ++i) {
      const uint64_t at = i * slot_.end;
      const oracle::Rows& rows =
          rows_.emplace_back(make_rows(Routing::random, shape_, kRanks, tokens[i], 40 + rank_ + 10 * i));
      Call call{};
      call.layer = kIdentityLayer;
      call.tokens = tokens[i];
      call.x = at + slot_.x;
      call.ids = at + slot_.ids;
      call.weights = at + slot_.weights;
      call.out = at + slot_.out;
      copy(call.x, rows.x.data(), rows.x.size() * 2);
      copy(call.ids, rows.ids.data(), rows.ids.size() * 4);
      copy(call.weights, rows.weights.data(), rows.weights.size() * 4);
      if (backend_->add_record(kLane, static_cast<uint32_t>(i + 1), call, 1'000'000'000) != Status::ok)
        throw std::runtime_error(backend_->last_error());
    }
  }

  void start(const std::vector<uint32_t>& numbers, uint32_t calls) {
    check(cudaSetDevice(static_cast<int>(rank_)), "cudaSetDevice");
    calls_ = calls;
    *failed_ = 0;
    check(cudaMemcpyAsync(numbers_, numbers.data(), numbers.size() * 4, cudaMemcpyHostToDevice, stream_), "copy");
    check(cudaStreamSynchronize(stream_), "copy");
    if (options_.load) {
      *end_ = 0;
      stream_memory<<<processors_, 512, 32 << 10, load_>>>(static_cast<const uint4*>(bulk_), kBulk / 16, end_, cycles_);
    }
    check(cudaEventRecord(event_[0], stream_), "event");
    chain<<<1, 1, 0, stream_>>>(mailbox_.as<DeviceMailbox>(), numbers_, static_cast<uint32_t>(numbers.size()), calls,
                                cycles_, failed_);
    check(cudaGetLastError(), "launch");
    check(cudaEventRecord(event_[1], stream_), "event");
  }

  bool ended() {
    cudaSetDevice(static_cast<int>(rank_));
    const cudaError_t e = cudaStreamQuery(stream_);
    if (e != cudaErrorNotReady) check(e, "the chain");
    if (e == cudaSuccess) *static_cast<volatile uint32_t*>(end_) = 1;
    return e == cudaSuccess;
  }

  void serve() { static_cast<void>(backend_->serve(now_ns(), served_)); }

  /// Microseconds a call by the events, and each call's cycles.
  double collect(std::vector<uint32_t>& cycles) {
    check(cudaSetDevice(static_cast<int>(rank_)), "cudaSetDevice");
    if (*failed_ != 0) throw std::runtime_error("call " + std::to_string(*failed_ - 1) + " has no end");
    cycles.resize(calls_);
    check(cudaMemcpyAsync(cycles.data(), cycles_, calls_ * 4, cudaMemcpyDeviceToHost, stream_), "copy");
    check(cudaStreamSynchronize(stream_), "copy");
    check(cudaStreamSynchronize(load_), "load");
    float ms = 0;
    check(cudaEventElapsedTime(&ms, event_[0], event_[1]), "event");
    return ms * 1e3 / calls_;
  }

  void poison() {
    check(cudaSetDevice(static_cast<int>(rank_)), "cudaSetDevice");
    for (size_t i = 0; i < rows_.size(); ++i)
      check(cudaMemsetAsync(arena_.as<std::byte>() + i * slot_.end + slot_.out, 0xFF, rows_[i].x.size() * 2, stream_),
            "poison");
    check(cudaStreamSynchronize(stream_), "poison");
  }

  /// Throws unless the last answer to each registered call is the oracle's within one ulp.
  void verify() {
    check(cudaSetDevice(static_cast<int>(rank_)), "cudaSetDevice");
    for (size_t i = 0; i < rows_.size(); ++i) {
      const oracle::Result want = oracle::routed(oracle_layer(shape_), rows_[i], kRanks);
      std::vector<uint16_t> got(want.out.size());
      check(cudaMemcpyAsync(got.data(), arena_.as<std::byte>() + i * slot_.end + slot_.out, got.size() * 2,
                            cudaMemcpyDeviceToHost, stream_),
            "copy");
      check(cudaStreamSynchronize(stream_), "copy");
      for (size_t k = 0; k < got.size(); ++k)
        if (bf16_ulps(got[k], want.out[k]) > kNormUlps)
          throw std::runtime_error("rank " + std::to_string(rank_) + ": wrong answer at token " +
                                   std::to_string(k / shape_.latent) + " element " + std::to_string(k % shape_.latent));
    }
  }

  bool phases(CallRecord& record) { return backend_->poll(kLane, now_ns(), record); }

 private:
  static constexpr uint64_t kBulk = uint64_t{4} << 30;

  void copy(uint64_t to, const void* from, uint64_t bytes) {
    check(cudaMemcpyAsync(arena_.as<std::byte>() + to, from, bytes, cudaMemcpyHostToDevice, stream_), "copy");
    check(cudaStreamSynchronize(stream_), "copy");
  }

  const Options& options_;
  const Shape shape_;
  const uint32_t rank_;
  const ArenaSlot slot_;
  std::unique_ptr<Backend> backend_;
  const cuda::Driver* driver_ = nullptr;
  std::unique_ptr<cuda::Memory> memory_;
  cuda::Allocation mailbox_, arena_;
  cudaStream_t stream_ = nullptr, load_ = nullptr;
  cudaEvent_t event_[2] = {};
  uint32_t *numbers_ = nullptr, *cycles_ = nullptr, *failed_ = nullptr, *end_ = nullptr;
  void* bulk_ = nullptr;
  int processors_ = 0;
  uint32_t calls_ = 0;
  std::vector<oracle::Rows> rows_;
  ServeRecord served_{};
};

}  // namespace moed::bench
