// What a routed call would cost as two NCCL collectives, dispatch and combine: the baseline beside cuda_bench. One
// process, one thread a GPU, pairs captured in a CUDA graph on one stream, the graph replayed back to back.
// It does less than a routed call: no quantisation, no placing by route, no norm; all ranks are in step.
//   nccl_pairs [--nccl PATH] [--ranks N] [--tokens T,...] [--replays R] [--load] [--limit-s S]
// Exits 0 measured, 1 a failure, a wrong result, no end beside the load or the time limit, 2 this machine lacks GPUs or
// the library.
#include <cuda_runtime.h>
#include <nccl.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <atomic>
#include <barrier>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <memory>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "tests/bench/load.h"
#include "tests/bench/nccl_case.h"
#include "tests/bench/nccl_library.h"
#include "tests/bench/watchdog.h"

namespace {

using namespace moed::bench;

constexpr int kPairs = 50;    ///< pairs in a graph
constexpr int kWarmUps = 20;  ///< replays before those that count
constexpr int kMaxRanks = 8;
constexpr uint8_t kPoison = 0xFF;  ///< no byte of a payload; as BF16 a NaN
constexpr int kStuckS = 20;        ///< seconds after which what is measured beside the load has no end

struct Options {
  std::string nccl = "libnccl.so.2";
  int ranks = 2;
  std::vector<size_t> tokens{1, 5, 16, 64, 128};
  int replays = 200;
  bool load = false;
  int limit_s = 120;
};

/// What the threads share.
struct Bench {
  Bench(const Options& o, const Nccl& n) : options(o), nccl(n), step(o.ranks), us(static_cast<size_t>(o.ranks)) {}

  const Options& options;
  const Nccl& nccl;
  std::vector<Case> cases;
  std::barrier<> step;                 ///< nothing that allocates or maps runs while a peer waits on its GPU
  std::vector<std::vector<float>> us;  ///< [rank][replay]: us per pair
  std::atomic<bool> windows{true};     ///< all ranks have symmetric windows
  std::atomic<bool> late{false};       ///< this case had no end beside the load
  std::string_view stuck;              ///< the last system of which a case had none, written by rank 0
};

/// What throws ends the process: the other ranks wait for this one.
template <class F>
auto or_fail(F f) {
  try {
    return f();
  } catch (const std::exception& e) {
    fail(1, e.what());
  }
}

class Rank {
 public:
  Rank(Bench& bench, int rank, ncclComm_t comm)
      : bench_(bench), nccl_(bench.nccl), rank_(static_cast<size_t>(rank)), comm_(comm) {
    check(cudaSetDevice(rank), "cudaSetDevice");
    check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "cudaStreamCreate");
    events_.resize(static_cast<size_t>(bench.options.replays) + 1);
    for (cudaEvent_t& event : events_) check(cudaEventCreate(&event), "cudaEventCreate");
    const size_t most = *std::max_element(bench.options.tokens.begin(), bench.options.tokens.end());
    // Windows want pages of their own.
    const size_t wanted = static_cast<size_t>(bench.options.ranks) * most * kFormats[0].bytes;
    const size_t bytes =
        (wanted + NCCL_WIN_REQUIRED_ALIGNMENT - 1) / NCCL_WIN_REQUIRED_ALIGNMENT * NCCL_WIN_REQUIRED_ALIGNMENT;
    for (void** buffer : plain_.all()) check(cudaMalloc(buffer, bytes), "cudaMalloc");
    for (void** buffer : symmetric_.all()) nccl_.check(nccl_.ncclMemAlloc(buffer, bytes), "ncclMemAlloc");
    // Smaller blocks than chain_bench's: beside those NCCL has no end, probably for want of room on any multiprocessor
    // (tests/bench/RESULTS.md).
    if (bench.options.load) load_ = or_fail([rank] { return std::make_unique<Load>(rank, LoadBlock{256, 0}); });
    bench.step.arrive_and_wait();
    for (void** buffer : symmetric_.all()) {
      ncclWindow_t window = nullptr;
      nccl_.check(nccl_.ncclCommWindowRegister(comm_, *buffer, bytes, &window, NCCL_WIN_COLL_SYMMETRIC),
                  "ncclCommWindowRegister");
      if (window == nullptr)
        bench.windows = false;
      else
        windows_.push_back(window);
    }
    bench.step.arrive_and_wait();
  }
  Rank(const Rank&) = delete;
  Rank& operator=(const Rank&) = delete;
  ~Rank() {
    bench_.step.arrive_and_wait();
    for (ncclWindow_t window : windows_)
      nccl_.check(nccl_.ncclCommWindowDeregister(comm_, window), "ncclCommWindowDeregister");
    nccl_.check(nccl_.ncclCommDestroy(comm_), "ncclCommDestroy");
    bench_.step.arrive_and_wait();
    for (void** buffer : symmetric_.all()) nccl_.check(nccl_.ncclMemFree(*buffer), "ncclMemFree");
    for (void** buffer : plain_.all()) check(cudaFree(*buffer), "cudaFree");
    for (cudaEvent_t event : events_) check(cudaEventDestroy(event), "cudaEventDestroy");
    check(cudaStreamDestroy(stream_), "cudaStreamDestroy");
  }

  /// One case: filled, captured, checked, warmed up, timed. All ranks call it together.
  void run(const Case& c) {
    const Buffers& b = c.system.windows ? symmetric_ : plain_;
    fill(c, b);
    pair(c, b);  // connects the ranks, which a capture cannot
    check(cudaStreamSynchronize(stream_), "the first pair");
    bench_.step.arrive_and_wait();
    cudaGraph_t graph = nullptr;
    check(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeThreadLocal), "cudaStreamBeginCapture");
    for (int i = 0; i < kPairs; ++i) pair(c, b);
    check(cudaStreamEndCapture(stream_, &graph), "cudaStreamEndCapture");
    cudaGraphExec_t replay = nullptr;
    check(cudaGraphInstantiate(&replay, graph, 0), "cudaGraphInstantiate");
    check(cudaGraphUpload(replay, stream_), "cudaGraphUpload");
    poison(c, b);
    bench_.step.arrive_and_wait();

    check(cudaGraphLaunch(replay, stream_), "cudaGraphLaunch");
    check(cudaStreamSynchronize(stream_), "the first replay");
    verify(c, b);
    bench_.step.arrive_and_wait();
    time(replay);
    bench_.step.arrive_and_wait();  // replays end everywhere before a graph goes
    check(cudaGraphExecDestroy(replay), "cudaGraphExecDestroy");
    check(cudaGraphDestroy(graph), "cudaGraphDestroy");
  }

 private:
  void pair(const Case& c, const Buffers& b) {
    const size_t bytes = c.chunk_bytes(), elements = c.chunk_elements();
    if (c.system.all_to_all) {
      nccl_.check(nccl_.ncclAlltoAll(b.dispatch_send, b.dispatch_recv, bytes, ncclUint8, comm_, stream_),
                  "ncclAlltoAll");
      nccl_.check(nccl_.ncclAlltoAll(b.combine_send, b.combine_recv, elements, ncclBfloat16, comm_, stream_),
                  "ncclAlltoAll");
    } else {
      nccl_.check(nccl_.ncclAllGather(b.dispatch_send, b.dispatch_recv, bytes, ncclUint8, comm_, stream_),
                  "ncclAllGather");
      nccl_.check(
          nccl_.ncclReduceScatter(b.combine_send, b.combine_recv, elements, ncclBfloat16, ncclSum, comm_, stream_),
          "ncclReduceScatter");
    }
  }

  void fill(const Case& c, const Buffers& b) {
    const size_t bytes = c.chunk_bytes(), elements = c.chunk_elements();
    const size_t targets = c.system.all_to_all ? c.ranks : 1;  // an all-gather sends the same to everybody
    std::vector<uint8_t> dispatch(targets * bytes);
    for (size_t i = 0; i < dispatch.size(); ++i) dispatch[i] = dispatch_value(rank_, i / bytes, i % bytes);
    std::vector<uint16_t> combine(c.ranks * elements);
    for (size_t i = 0; i < combine.size(); ++i) combine[i] = bf16(combine_value(rank_, i / elements, i % elements));
    copy(b.dispatch_send, dispatch.data(), dispatch.size());
    copy(b.combine_send, combine.data(), combine.size() * sizeof(uint16_t));
  }

  void poison(const Case& c, const Buffers& b) {
    const size_t targets = c.system.all_to_all ? c.ranks : 1;
    check(cudaMemsetAsync(b.dispatch_recv, kPoison, c.ranks * c.chunk_bytes(), stream_), "cudaMemset");
    check(cudaMemsetAsync(b.combine_recv, kPoison, targets * c.chunk_elements() * sizeof(uint16_t), stream_),
          "cudaMemset");
    check(cudaStreamSynchronize(stream_), "cudaMemset");
  }

  void verify(const Case& c, const Buffers& b) {
    const size_t bytes = c.chunk_bytes(), elements = c.chunk_elements();
    std::vector<uint8_t> dispatch(c.ranks * bytes);
    copy(dispatch.data(), b.dispatch_recv, dispatch.size());
    for (size_t i = 0; i < dispatch.size(); ++i) {
      const uint8_t wanted = dispatch_value(i / bytes, c.system.all_to_all ? rank_ : 0, i % bytes);
      if (dispatch[i] != wanted) wrong(c, "dispatch", i, dispatch[i], wanted);
    }
    std::vector<uint16_t> combine((c.system.all_to_all ? c.ranks : 1) * elements);
    copy(combine.data(), b.combine_recv, combine.size() * sizeof(uint16_t));
    for (size_t i = 0; i < combine.size(); ++i) {
      uint32_t sum = 0;
      for (size_t source = 0; source < c.ranks; ++source)
        if (!c.system.all_to_all || source == i / elements) sum += combine_value(source, rank_, i % elements);
      if (combine[i] != bf16(sum)) wrong(c, "combine", i, combine[i], bf16(sum));
    }
  }

  [[noreturn]] void wrong(const Case& c, const char* what, size_t i, uint32_t saw, uint32_t wanted) const {
    fail(1, std::string(c.system.name) + ", " + c.format.name + ", T = " + std::to_string(c.tokens) + ": " + what +
                " at rank " + std::to_string(rank_) + ", element " + std::to_string(i) + " is " + std::to_string(saw) +
                " instead of " + std::to_string(wanted));
  }

  /// Starts the load, if there is one. NCCL may find no room beside it: after kStuckS the load ends, so that NCCL gets
  /// on and nothing hangs.
  std::unique_ptr<Watchdog> start_load() {
    if (!load_) return nullptr;
    or_fail([this] { load_->start(); });
    return std::make_unique<Watchdog>(std::chrono::seconds(kStuckS), [this] {
      bench_.late = true;
      load_->end();
    });
  }

  void time(cudaGraphExec_t replay) {
    const std::unique_ptr<Watchdog> watchdog = start_load();
    for (int i = 0; i < kWarmUps; ++i) check(cudaGraphLaunch(replay, stream_), "cudaGraphLaunch");
    check(cudaStreamSynchronize(stream_), "the warm-up");
    bench_.step.arrive_and_wait();
    check(cudaEventRecord(events_[0], stream_), "cudaEventRecord");
    for (size_t i = 1; i < events_.size(); ++i) {
      check(cudaGraphLaunch(replay, stream_), "cudaGraphLaunch");
      check(cudaEventRecord(events_[i], stream_), "cudaEventRecord");
    }
    check(cudaStreamSynchronize(stream_), "the replays");
    bench_.step.arrive_and_wait();
    if (load_) or_fail([this] { load_->stop(); });
    std::vector<float>& us = bench_.us[rank_];
    us.resize(events_.size() - 1);
    for (size_t i = 0; i < us.size(); ++i) {
      check(cudaEventElapsedTime(&us[i], events_[i], events_[i + 1]), "cudaEventElapsedTime");
      us[i] *= 1000.0F / kPairs;
    }
  }

  void copy(void* to, const void* from, size_t bytes) {
    check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, stream_), "cudaMemcpyAsync");
    check(cudaStreamSynchronize(stream_), "cudaMemcpyAsync");
  }

  Bench& bench_;
  const Nccl& nccl_;
  size_t rank_;
  ncclComm_t comm_;
  cudaStream_t stream_ = nullptr;
  std::vector<cudaEvent_t> events_;
  Buffers plain_, symmetric_;
  std::vector<ncclWindow_t> windows_;
  std::unique_ptr<Load> load_;
};

struct Times {
  double median_us, p99_us;
};

/// Of each replay the slower rank's time.
Times summary(const std::vector<std::vector<float>>& us) {
  std::vector<float> slowest = us[0];
  for (const std::vector<float>& rank : us)
    for (size_t i = 0; i < slowest.size(); ++i) slowest[i] = std::max(slowest[i], rank[i]);
  std::sort(slowest.begin(), slowest.end());
  return {slowest[slowest.size() / 2], slowest[(slowest.size() * 99 + 99) / 100 - 1]};
}

void print_title(const Bench& bench) {
  std::printf("\nus per pair (dispatch + combine)%s, median (p99) of %d replays of %d pairs; values checked\n",
              bench.options.load ? " beside a kernel that streams memory on all multiprocessors" : "",
              bench.options.replays, kPairs);
  std::printf("%-47s %-6s", "collectives", "rows");
  for (size_t tokens : bench.options.tokens) std::printf(" %15s", ("T=" + std::to_string(tokens)).c_str());
}

/// Case i as the table has it, at once: what was measured is seen even should a later case hang.
void print_case(const Bench& bench, size_t i, bool ran) {
  const Case& c = bench.cases[i];
  const bool first = i % bench.options.tokens.size() == 0;
  if (first) std::printf("\n%-47s %-6s", c.system.name, c.format.name);
  if (ran && bench.late) {
    std::printf(" no end within %d s", kStuckS);
  } else if (ran) {
    const Times times = summary(bench.us);
    std::printf(" %7.2f (%5.2f)", times.median_us, times.p99_us);
  } else if (bench.stuck != c.system.name) {
    std::printf(" %15s", "-");  // no windows
  } else if (first) {
    std::printf(" not tried any more");
  }
  std::fflush(stdout);
}

void run_rank(Bench& bench, int rank, ncclComm_t comm) {
  Rank self(bench, rank, comm);
  for (size_t i = 0; i < bench.cases.size(); ++i) {
    const Case& c = bench.cases[i];
    const bool runs = (bench.windows || !c.system.windows) && bench.stuck != c.system.name;
    if (runs) self.run(c);
    if (rank == 0) {
      print_case(bench, i, runs);
      if (bench.late.exchange(false)) bench.stuck = c.system.name;
    }
    bench.step.arrive_and_wait();
  }
}

Options parse(int argc, char** argv) {
  Options o;
  CLI::App app("NCCL pairs as CUDA graphs, Kimi K3's row: latent 3584, top 16", "nccl_pairs");
  app.add_option("--nccl", o.nccl, "the library, 2.28 or newer")->capture_default_str();
  app.add_option("--ranks", o.ranks, "GPUs")->check(CLI::Range(2, kMaxRanks))->capture_default_str();
  app.add_option("--tokens", o.tokens, "tokens of a rank, one column of the table each")
      ->delimiter(',')
      ->check(CLI::Range(1, 4096))
      ->capture_default_str();
  app.add_option("--replays", o.replays, "timed replays of a graph")
      ->check(CLI::Range(200, 100'000))
      ->capture_default_str();
  app.add_flag("--load", o.load, "a kernel streams memory on all multiprocessors of each GPU beside it");
  app.add_option("--limit-s", o.limit_s, "the program ends by itself")
      ->check(CLI::Range(1, 3600))
      ->capture_default_str();
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    std::exit(app.exit(error) == 0 ? 0 : 64);
  }
  return o;
}

/// Prints what is measured on; ends the process when there are too few GPUs.
void describe(const Options& o, const Nccl& nccl) {
  int version = 0, gpus = 0, driver = 0;
  nccl.check(nccl.ncclGetVersion(&version), "ncclGetVersion");
  std::printf("NCCL %d.%d.%d from %s\n", version / 10000, version / 100 % 100, version % 100, o.nccl.c_str());
  const cudaError_t error = cudaGetDeviceCount(&gpus);
  if (error != cudaSuccess)
    fail(2, std::string("no GPU to measure on: ") + cudaGetErrorString(error) + "; it takes an NVIDIA driver and GPUs");
  if (gpus < o.ranks)
    fail(2, "it takes " + std::to_string(o.ranks) + " GPUs and this process sees " + std::to_string(gpus) +
                "; look at nvidia-smi -L and CUDA_VISIBLE_DEVICES");
  check(cudaDriverGetVersion(&driver), "cudaDriverGetVersion");
  for (int rank = 0; rank < o.ranks; ++rank) {
    cudaDeviceProp properties{};
    check(cudaGetDeviceProperties(&properties, rank), "cudaGetDeviceProperties");
    int reach = 1;
    if (rank > 0) check(cudaDeviceCanAccessPeer(&reach, 0, rank), "cudaDeviceCanAccessPeer");
    std::printf("rank %d: %s%s\n", rank, properties.name, reach != 0 ? "" : ", which GPU 0 does not reach");
  }
  std::printf("driver for CUDA %d.%d, NCCL_NVLS_ENABLE=0\n", driver / 1000, driver % 1000 / 10);
}

}  // namespace

int main(int argc, char** argv) {
  const Options options = parse(argc, argv);
  const Watchdog watchdog(std::chrono::seconds(options.limit_s), [&options] {
    fail(1, "not done after --limit-s " + std::to_string(options.limit_s) +
                "; a collective may hang: see NCCL_DEBUG=INFO");
  });
  ::setenv("NCCL_NVLS_ENABLE", "0", 1);  // multicast can take the GPUs of a host out of service
  // With few queues a stream of NCCL may share the load's, and wait for it.
  if (options.load) ::setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 1);
  const Nccl nccl(options.nccl);
  describe(options, nccl);

  Bench bench(options, nccl);
  for (const System& system : kSystems)
    for (const Format& format : kFormats)
      for (size_t tokens : options.tokens)
        bench.cases.push_back({system, format, tokens, static_cast<size_t>(options.ranks)});
  std::vector<ncclComm_t> comms(static_cast<size_t>(options.ranks));
  nccl.check(nccl.ncclCommInitAll(comms.data(), options.ranks, nullptr), "ncclCommInitAll");
  print_title(bench);
  {
    std::vector<std::jthread> threads;
    for (int rank = 0; rank < options.ranks; ++rank)
      threads.emplace_back([&bench, &comms, rank] { run_rank(bench, rank, comms[static_cast<size_t>(rank)]); });
  }
  std::printf("\n");
  if (!bench.windows) std::printf("NCCL gave no symmetric windows here: NCCL_DEBUG=INFO says why\n");
  return bench.stuck.empty() ? 0 : 1;
}
