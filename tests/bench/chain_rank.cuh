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
#include "tests/bench/load.h"
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

struct Options {
  uint32_t latent = 3584, top_k = 16, experts = 896;
  std::vector<uint32_t> tokens{1, 5, 16, 64, 128};
  uint32_t calls = 1000, series = 5;
  bool one_gpu = false;  ///< both ranks on GPU 0
  bool load = false;
  LoadBlock load_block{};
  BackendOptions::Tuning tuning{};
};

inline Shape shape_of(const Options& o) { return make_shape(7168, o.latent, 3072, o.experts, o.top_k); }

/// One rank: back end, lane with a GPU arena, and the chain's memory.
class Rank {
 public:
  Rank(const Options& o, uint32_t rank, uint32_t max_tokens)
      : shape_(shape_of(o)),
        rank_(rank),
        device_(o.one_gpu ? 0 : static_cast<int>(rank)),
        slot_(arena_slot(shape_, 0, max_tokens)) {
    BackendOptions b;
    b.shape = shape_;
    b.rank = rank;
    b.ranks = kRanks;
    b.lanes = 1;
    b.max_tokens = max_tokens;
    b.in_process = true;
    b.device = std::to_string(device_);
    b.tuning = o.tuning;
    backend_ = make_cuda_backend(std::move(b));
    LaneMemory memory;
    const uint64_t bytes = slot_.end * o.tokens.size();
    if (backend_->open_lane(kLane, ArenaKind::gpu, bytes, memory) != Status::ok)
      throw std::runtime_error(backend_->last_error());
    check(cudaSetDevice(device_), "cudaSetDevice");
    std::string why;
    driver_ = cuda::driver(why);
    memory_ = std::make_unique<cuda::Memory>(*driver_, device_);
    mailbox_ = memory_->import_fd(memory.device_mailbox, sizeof(DeviceMailbox), why);
    arena_ = memory_->import_fd(memory.arena, bytes, why);
    if (!mailbox_ || !arena_) throw std::runtime_error(why);
    check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "stream");
    check(cudaMalloc(&numbers_, 64 * sizeof(uint32_t)), "cudaMalloc");
    check(cudaMalloc(&cycles_, 1'000'000 * sizeof(uint32_t)), "cudaMalloc");
    check(cudaMallocHost(&failed_, 64), "cudaMallocHost");
    for (auto& event : event_) check(cudaEventCreate(&event), "event");
  }

  Backend& backend() { return *backend_; }

  /// Registers calls 1, 2, ... of the given sizes, each with input of its own.
  void prepare(const std::vector<uint32_t>& tokens) {
    check(cudaSetDevice(device_), "cudaSetDevice");
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
    check(cudaSetDevice(device_), "cudaSetDevice");
    calls_ = calls;
    *failed_ = 0;
    check(cudaMemcpyAsync(numbers_, numbers.data(), numbers.size() * 4, cudaMemcpyHostToDevice, stream_), "copy");
    check(cudaStreamSynchronize(stream_), "copy");
    check(cudaEventRecord(event_[0], stream_), "event");
    chain<<<1, 1, 0, stream_>>>(mailbox_.as<DeviceMailbox>(), numbers_, static_cast<uint32_t>(numbers.size()), calls,
                                cycles_, failed_);
    check(cudaGetLastError(), "launch");
    check(cudaEventRecord(event_[1], stream_), "event");
  }

  bool ended() {
    cudaSetDevice(device_);
    const cudaError_t e = cudaStreamQuery(stream_);
    if (e != cudaErrorNotReady) check(e, "the chain");
    return e == cudaSuccess;
  }

  void serve() { static_cast<void>(backend_->serve(now_ns(), served_)); }

  /// Microseconds a call by the events, and each call's cycles.
  double collect(std::vector<uint32_t>& cycles) {
    check(cudaSetDevice(device_), "cudaSetDevice");
    if (*failed_ != 0) throw std::runtime_error("call " + std::to_string(*failed_ - 1) + " has no end");
    cycles.resize(calls_);
    check(cudaMemcpyAsync(cycles.data(), cycles_, calls_ * 4, cudaMemcpyDeviceToHost, stream_), "copy");
    check(cudaStreamSynchronize(stream_), "copy");
    float ms = 0;
    check(cudaEventElapsedTime(&ms, event_[0], event_[1]), "event");
    return ms * 1e3 / calls_;
  }

  void poison() {
    check(cudaSetDevice(device_), "cudaSetDevice");
    for (size_t i = 0; i < rows_.size(); ++i)
      check(cudaMemsetAsync(arena_.as<std::byte>() + i * slot_.end + slot_.out, 0xFF, rows_[i].x.size() * 2, stream_),
            "poison");
    check(cudaStreamSynchronize(stream_), "poison");
  }

  /// Throws unless the last answer to each registered call is the oracle's within one ulp.
  void verify() {
    check(cudaSetDevice(device_), "cudaSetDevice");
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
  void copy(uint64_t to, const void* from, uint64_t bytes) {
    check(cudaMemcpyAsync(arena_.as<std::byte>() + to, from, bytes, cudaMemcpyHostToDevice, stream_), "copy");
    check(cudaStreamSynchronize(stream_), "copy");
  }

  const Shape shape_;
  const uint32_t rank_;
  const int device_;
  const ArenaSlot slot_;
  std::unique_ptr<Backend> backend_;
  const cuda::Driver* driver_ = nullptr;
  std::unique_ptr<cuda::Memory> memory_;
  cuda::Allocation mailbox_, arena_;
  cudaStream_t stream_ = nullptr;
  cudaEvent_t event_[2] = {};
  uint32_t *numbers_ = nullptr, *cycles_ = nullptr, *failed_ = nullptr;
  uint32_t calls_ = 0;
  std::vector<oracle::Rows> rows_;
  ServeRecord served_{};
};

}  // namespace moed::bench
