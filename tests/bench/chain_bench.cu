// Routed identity calls from bell to done with no CPU between: a kernel on each GPU rings its rank's bell, waits for
// done and rings again, one event pair round all of it. Two ranks, both call at once.
//   chain_bench [--latent L --top-k K --experts E] [--tokens T,...] [--calls N] [--load] [--ablate]
// Exits 0 measured, 1 a failure or a wrong result, 2 this machine lacks two GPUs.
#include <cuda_runtime.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "daemon/abi/arena.h"
#include "daemon/abi/mailbox.h"
#include "kernels/backend.h"
#include "kernels/cuda/memory.h"
#include "tests/support/cases.h"
#include "tests/support/link.h"
#include "tests/support/oracle.h"
#include "tests/support/tolerance.h"

namespace {

using namespace moed;

constexpr int kRanks = 2, kLane = 1;
constexpr uint32_t kWarmUp = 200;
constexpr uint64_t kLongest = 2'000'000'000;  ///< ns that a call may take on the GPU before the chain is given up

void check(cudaError_t e, const char* what) {
  if (e != cudaSuccess) throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(e));
}

__device__ uint64_t global_time() {
  uint64_t t;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t));
  return t;
}

/// Rings `calls` times, each time the next of `count` record numbers in turn, and notes in clock cycles how long each
/// call took. failed: 1 + the call that had no end.
__global__ void chain(DeviceMailbox* box, const uint32_t* numbers, uint32_t count, uint32_t calls, uint32_t* cycles,
                      uint32_t* failed) {
  volatile uint32_t* const bell = &box->bell;
  volatile uint32_t* const done = &box->done;
  for (uint32_t i = 0; i < calls; ++i) {
    const uint64_t until = global_time() + kLongest;
    const int64_t began = clock64();
    *done = 0;
    *bell = numbers[i % count];
    while (*done == 0)
      if (global_time() > until) {
        *failed = 1 + i;
        return;
      }
    cycles[i] = static_cast<uint32_t>(clock64() - began);
  }
}

/// Reads memory on all multiprocessors until told to end.
__global__ void __launch_bounds__(512)
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

Shape shape_of(const Options& o) { return make_shape(7168, o.latent, 3072, o.experts, o.top_k); }

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

/// Microseconds below which `share` of the values lie, by nearest rank.
template <class T>
double percentile(std::vector<T> values, double share) {
  const auto rank = static_cast<size_t>(std::ceil(share * static_cast<double>(values.size())));
  const auto at = values.begin() + static_cast<ptrdiff_t>(std::max<size_t>(rank, 1) - 1);
  std::nth_element(values.begin(), at, values.end());
  return static_cast<double>(*at);
}

struct Row {
  double mean = 0, p50 = 0, p99 = 0;  ///< us of a call: by the events, and of single calls; the slower rank's
  double phase[3] = {};               ///< medians
};

class Bench {
 public:
  explicit Bench(const Options& o) : options_(o) {
    const uint32_t most = *std::max_element(o.tokens.begin(), o.tokens.end());
    for (uint32_t r = 0; r < kRanks; ++r) rank_.push_back(std::make_unique<Rank>(o, r, most));
    test::give_segment(rank_[0]->backend(), 0, rank_[1]->backend(), 1);
    test::give_segment(rank_[1]->backend(), 1, rank_[0]->backend(), 0);
    for (int r = 0; r < kRanks; ++r) rank_[r]->backend().link_changed(1 - r, LinkState::ready, 1);
    for (int r = 0; r < kRanks; ++r)
      threads_.emplace_back([this, r] {
        while (!stop_) {
          rank_[r]->serve();
          CallRecord record;
          if (!rank_[r]->phases(record)) continue;
          const std::lock_guard lock(mutex_);
          if (record_) samples_[r].push_back(record);
        }
      });
  }
  ~Bench() {
    stop_ = true;
    for (std::thread& t : threads_) t.join();
    for (int r = 0; r < kRanks; ++r) rank_[r]->backend().link_changed(1 - r, LinkState::lost, 0);
    for (int r = 0; r < kRanks; ++r) rank_[r]->backend().retire(1 - r);
  }

  Backend::Waiting waiting() { return rank_[0]->backend().waiting(); }

  /// Chains of calls of the given sizes in turn.
  Row measure(const std::vector<uint32_t>& tokens) {
    std::vector<uint32_t> numbers;
    for (size_t i = 0; i < tokens.size(); ++i) numbers.push_back(static_cast<uint32_t>(i + 1));
    for (auto& r : rank_) r->prepare(tokens);
    run(numbers, kWarmUp);
    for (auto& r : rank_) r->poison();
    std::vector<double> mean[kRanks];
    std::vector<uint32_t> cycles[kRanks];
    {
      const std::lock_guard lock(mutex_);
      for (auto& s : samples_) s.clear();
    }
    for (uint32_t i = 0; i < options_.series; ++i) {
      set_record(true);
      run(numbers, options_.calls);
      set_record(false);
      for (int r = 0; r < kRanks; ++r) {
        std::vector<uint32_t> one;
        mean[r].push_back(rank_[r]->collect(one));
        cycles[r].insert(cycles[r].end(), one.begin(), one.end());
      }
    }
    for (auto& r : rank_) r->verify();
    Row row;
    for (int r = 0; r < kRanks; ++r) {
      // Cycles become microseconds by what the events say of their sum.
      double sum = 0;
      for (const uint32_t c : cycles[r]) sum += c;
      double us = 0;
      for (const double m : mean[r]) us += m * options_.calls;
      const double each = us / sum;
      row.mean = std::max(row.mean, percentile(mean[r], 0.5));
      row.p50 = std::max(row.p50, percentile(cycles[r], 0.5) * each);
      row.p99 = std::max(row.p99, percentile(cycles[r], 0.99) * each);
      for (int p = 0; p < 3 && !samples_[r].empty(); ++p) {
        std::vector<uint64_t> v;
        for (const CallRecord& s : samples_[r]) v.push_back(s.phase_ns[p]);
        row.phase[p] = std::max(row.phase[p], percentile(v, 0.5) * 1e-3);
      }
    }
    return row;
  }

 private:
  void set_record(bool on) {
    const std::lock_guard lock(mutex_);
    record_ = on;
  }

  void run(const std::vector<uint32_t>& numbers, uint32_t calls) {
    for (auto& r : rank_) r->start(numbers, calls);
    const Nanos until = now_ns() + 20'000'000'000ULL;
    for (bool all = false; !all;) {
      all = true;
      for (auto& r : rank_) all = r->ended() && all;
      if (now_ns() > until) throw std::runtime_error("a chain of calls has no end within 20 s");
    }
  }

  const Options& options_;
  std::vector<std::unique_ptr<Rank>> rank_;
  std::vector<std::thread> threads_;
  std::vector<CallRecord> samples_[kRanks];
  std::mutex mutex_;  ///< of samples_ and record_
  bool record_ = false;
  std::atomic<bool> stop_{false};
};

void print_table(const Options& o) {
  Bench bench(o);
  const Backend::Waiting w = bench.waiting();
  std::printf(
      "waiting blocks: %u on %u multiprocessors; %.1f %% of their registers, %.1f %% of threads, %.1f %% of shared "
      "memory\n",
      w.blocks, w.multiprocessors, w.registers * 100, w.threads * 100, w.shared_memory * 100);
  std::printf(
      "\nchained calls: us a call, bell to done, the slower rank; median of %u chains of %u calls by events, then "
      "single calls and medians of the phases\n",
      o.series, o.calls);
  std::printf("tokens   chain     p50     p99  dispatch    wait  reduce\n");
  const auto print = [](const std::string& name, const Row& r) {
    std::printf("%-7s %6.2f  %6.2f  %6.2f    %6.2f  %6.2f  %6.2f\n", name.c_str(), r.mean, r.p50, r.p99, r.phase[0],
                r.phase[1], r.phase[2]);
    std::fflush(stdout);
  };
  for (const uint32_t t : o.tokens) print(std::to_string(t), bench.measure({t}));
  if (o.tokens.size() > 1) print("mixed", bench.measure(o.tokens));
}

/// A way to do it that is not the one taken, or is: what it takes, and whether one may.
struct Variant {
  const char* name;
  void (*change)(BackendOptions::Tuning&);
  const char* safe;
};
constexpr Variant kVariants[] = {
    {"as it is", [](BackendOptions::Tuning&) {}, "yes"},
    {"out made visible by a fence", [](BackendOptions::Tuning& t) { t.fence = true; },
     "yes; beside kernels that stream memory a fence takes 50 to 150 us"},
    {"out not waited for", [](BackendOptions::Tuning& t) { t.unsettled = true; },
     "no: done may be seen before the last stores to out"},
    {"32 call blocks, 33 serve blocks", [](BackendOptions::Tuning& t) { t.call_blocks = 32, t.serve_blocks = 33; },
     "yes"},
    {"1 call block, 33 serve blocks", [](BackendOptions::Tuning& t) { t.call_blocks = 1, t.serve_blocks = 33; }, "yes"},
    {"the kernels behind the loops", [](BackendOptions::Tuning& t) { t.long_way = true; },
     "yes: what unusual calls take"},
};

void print_variants(const Options& options) {
  std::printf("\nvariants: us a call, median of chains by events, the slower rank\n%-34s", "variant");
  for (const uint32_t t : options.tokens) std::printf("  T=%-5u", t);
  std::printf("  safe\n");
  for (const Variant& variant : kVariants) {
    Options o = options;
    o.series = 3;
    variant.change(o.tuning);
    if (o.tuning.long_way) o.calls = std::min(o.calls, 200U);
    Bench bench(o);
    std::printf("%-34s", variant.name);
    for (const uint32_t t : o.tokens) std::printf("  %7.2f", bench.measure({t}).mean);
    std::printf("  %s\n", variant.safe);
    std::fflush(stdout);
  }
}

}  // namespace

int main(int argc, char** argv) {
  Options o;
  bool ablate = false;
  CLI::App app("routed identity calls from bell to done, chained on the GPUs of two ranks");
  app.add_option("--latent", o.latent, "width of a row")->capture_default_str();
  app.add_option("--top-k", o.top_k, "experts of a token")->capture_default_str();
  app.add_option("--experts", o.experts, "experts of the layer")->capture_default_str();
  app.add_option("--tokens", o.tokens, "tokens of a call, one row each")
      ->delimiter(',')
      ->check(CLI::Range(1U, kMaxTokens))
      ->capture_default_str();
  app.add_option("--calls", o.calls, "calls of a chain")->check(CLI::Range(1U, 100'000U))->capture_default_str();
  app.add_flag("--load", o.load, "a kernel streams memory on all multiprocessors beside it");
  app.add_flag("--ablate", ablate, "then a table of variants: what else was tried, and whether it is safe");
  app.add_option("--call-blocks", o.tuning.call_blocks, "blocks of a call loop; 0: as the back end chooses");
  app.add_option("--serve-blocks", o.tuning.serve_blocks, "blocks of the serve loop");
  CLI11_PARSE(app, argc, argv);
  try {
    if (gpu_count() < kRanks) {
      std::fprintf(stderr, "chain_bench: needs 2 GPUs, there are %d\n", gpu_count());
      return 2;
    }
    std::printf("routed identity call with norm, latent %u, top_k %u of %u experts, 2 ranks on 2 GPUs%s\n", o.latent,
                o.top_k, o.experts, o.load ? ", beside kernels that stream memory on all multiprocessors" : "");
    print_table(o);
    if (ablate) print_variants(o);
    return 0;
  } catch (const std::exception& e) {
    std::fprintf(stderr, "chain_bench: %s\n", e.what());
    return 1;
  }
}
