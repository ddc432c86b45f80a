// The routed identity call on CUDA back ends in one process, from the host's bell to done: latency as the call's record
// has it. Each rank has a thread that begins, polls and serves without sleeping. Kimi K3's shape; with the norm.
//   cuda_bench [--tokens T,...] [--calls N] [--gpus G]
// Exits 0 measured, 1 a failure or a wrong result, 2 this machine lacks the GPUs.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstring>
#include <exception>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "daemon/abi/arena.h"
#include "daemon/abi/fd.h"
#include "daemon/abi/futex.h"
#include "kernels/backend.h"
#include "tests/bench/percentile.h"
#include "tests/support/cases.h"
#include "tests/support/link.h"
#include "tests/support/oracle.h"
#include "tests/support/tolerance.h"

namespace {

using namespace moed;

constexpr uint32_t kRanks = 2;
constexpr int kLane = 1;
constexpr Nanos kLongest = 10'000'000'000;  ///< a call or a wait for the other rank that takes longer is a failure

struct Options {
  std::vector<uint32_t> tokens{1, 5, 16, 64, 128};
  uint32_t calls = 2000, warmup = 200;
  int gpus = 0;  ///< 0: two where there are two
};

Shape k3_shape() { return make_shape(7168, 3584, 3072, 896, 16); }

/// One rank: its back end, its lane and the call that it repeats. Used by one thread at a time.
class Rank {
 public:
  Rank(uint32_t rank, int gpu, uint32_t max_tokens)
      : shape_(k3_shape()), slot_(arena_slot(shape_, 0, max_tokens)), rank_(rank) {
    BackendOptions options;
    options.shape = shape_;
    options.rank = rank;
    options.ranks = kRanks;
    options.lanes = 1;
    options.max_tokens = max_tokens;
    options.in_process = true;
    options.device = std::to_string(gpu);
    backend_ = make_cuda_backend(std::move(options));
    LaneMemory memory;
    if (backend_->open_lane(kLane, ArenaKind::host, slot_.end, memory) != Status::ok)
      throw std::runtime_error(backend_->last_error());
    arena_ = Mapping(memory.arena, slot_.end);
  }

  Backend& backend() { return *backend_; }
  void ready(uint32_t peer) { backend_->link_changed(static_cast<int>(peer), LinkState::ready, 1); }

  /// Lays out a call of T tokens; from here call() repeats it.
  void prepare(uint32_t tokens) {
    rows_ = make_rows(Routing::random, shape_, kRanks, tokens, 40 + rank_);
    begin_ = {};
    begin_.lane = kLane;
    begin_.call.layer = kIdentityLayer;
    begin_.call.tokens = tokens;
    begin_.call.x = slot_.x;
    begin_.call.ids = slot_.ids;
    begin_.call.weights = slot_.weights;
    begin_.call.out = slot_.out;
    std::memcpy(arena_.data() + slot_.x, rows_.x.data(), rows_.x.size() * sizeof rows_.x[0]);
    std::memcpy(arena_.data() + slot_.ids, rows_.ids.data(), rows_.ids.size() * sizeof rows_.ids[0]);
    std::memcpy(arena_.data() + slot_.weights, rows_.weights.data(), rows_.weights.size() * sizeof rows_.weights[0]);
  }

  /// One call, serving meanwhile.
  void call(CallRecord& record) {
    begin_.number = ++number_;
    begin_.seen = now_ns();
    begin_.deadline = begin_.seen + kLongest;
    if (backend_->begin(begin_) != Status::ok) throw std::runtime_error(backend_->last_error());
    for (Nanos now = begin_.seen; !backend_->poll(kLane, now, record); now = now_ns()) {
      if (now > begin_.deadline + kLongest) throw std::runtime_error("a call has no end 10 s after its deadline");
      serve(now);
    }
    const auto status = static_cast<Status>(record.status);
    if (status != Status::ok) throw std::runtime_error(std::string("a call ended as ") + name(status));
  }

  void serve(Nanos now) { static_cast<void>(backend_->serve(now, served_)); }

  /// Throws unless the answer in the arena is within one ulp of the oracle's, element by element.
  void check() const {
    const oracle::Result want = oracle::routed(oracle_layer(shape_), rows_, kRanks);
    for (size_t i = 0; i < want.out.size(); ++i) {
      uint16_t got = 0;
      std::memcpy(&got, arena_.data() + slot_.out + i * sizeof got, sizeof got);
      if (bf16_ulps(got, want.out[i]) > kNormUlps)
        throw std::runtime_error("wrong answer at token " + std::to_string(i / shape_.latent) + " element " +
                                 std::to_string(i % shape_.latent));
    }
  }
  void poison() { std::memset(arena_.data() + slot_.out, 0xFF, slot_.valid - slot_.out); }

 private:
  const Shape shape_;
  const ArenaSlot slot_;
  const uint32_t rank_;
  std::unique_ptr<Backend> backend_;
  Mapping arena_;
  oracle::Rows rows_;
  Begin begin_{};
  ServeRecord served_{};
  uint64_t number_ = 0;
};

/// Times of one row of a table, in nanoseconds, of all calls that count. gpu: from the gate that saw the bell to done,
/// by the GPU's clock; total: by the host's, with the copies of a host arena.
struct Times {
  std::vector<uint64_t> total, gpu, phase[3];
  void add(const CallRecord& r) {
    total.push_back(r.total_ns);
    gpu.push_back(r.phase_ns[0] + r.phase_ns[1] + r.phase_ns[2]);
    for (int i = 0; i < 3; ++i) phase[i].push_back(r.phase_ns[i]);
  }
};

/// A percentile of nanoseconds, in microseconds.
double percentile(const std::vector<uint64_t>& values, double share) { return bench::percentile(values, share) * 1e-3; }

class Bench {
 public:
  Bench(const Options& options, int gpus) : options_(options) {
    const uint32_t max_tokens = *std::max_element(options.tokens.begin(), options.tokens.end());
    for (uint32_t r = 0; r < kRanks; ++r)
      ranks_.push_back(std::make_unique<Rank>(r, static_cast<int>(r) % gpus, max_tokens));
    test::give_segment(ranks_[0]->backend(), 0, ranks_[1]->backend(), 1);
    test::give_segment(ranks_[1]->backend(), 1, ranks_[0]->backend(), 0);
    ranks_[0]->ready(1);
    ranks_[1]->ready(0);
  }

  Bench(const Bench&) = delete;
  Bench& operator=(const Bench&) = delete;
  /// The link goes before the back ends: nobody writes to memory that is gone.
  ~Bench() {
    for (uint32_t r = 0; r < kRanks; ++r)
      ranks_[r]->backend().link_changed(1 - static_cast<int>(r), LinkState::lost, 0);
    for (uint32_t r = 0; r < kRanks; ++r) ranks_[r]->backend().retire(1 - static_cast<int>(r));
  }

  /// `callers` ranks call in step; the others serve. Throws what the first failure was.
  Times measure(uint32_t tokens, uint32_t callers) {
    Times times;
    arrived_ = 0;
    ended_ = 0;
    failed_ = false;
    std::vector<Times> by_rank(kRanks);
    std::vector<std::thread> threads;
    for (uint32_t r = 0; r < kRanks; ++r)
      threads.emplace_back([&, r] {
        try {
          if (r < callers) call_in_step(*ranks_[r], tokens, callers, by_rank[r]);
          ++ended_;  // who has nothing to call or is through serves the others to the end
          serve_until(*ranks_[r], ended_, kRanks);
        } catch (const std::exception& e) {
          if (!failed_.exchange(true)) fault_ = "rank " + std::to_string(r) + ": " + e.what();
        }
      });
    for (std::thread& t : threads) t.join();
    if (failed_) throw std::runtime_error(fault_);
    for (const Times& t : by_rank) {
      times.total.insert(times.total.end(), t.total.begin(), t.total.end());
      times.gpu.insert(times.gpu.end(), t.gpu.begin(), t.gpu.end());
      for (int i = 0; i < 3; ++i) times.phase[i].insert(times.phase[i].end(), t.phase[i].begin(), t.phase[i].end());
    }
    return times;
  }

 private:
  void serve_until(Rank& rank, const std::atomic<uint64_t>& counter, uint64_t enough) {
    while (counter < enough && !failed_) rank.serve(now_ns());
  }

  void call_in_step(Rank& rank, uint32_t tokens, uint32_t callers, Times& times) {
    rank.prepare(tokens);
    CallRecord record;
    for (uint32_t call = 0; call < options_.warmup + options_.calls && !failed_; ++call) {
      ++arrived_;
      serve_until(rank, arrived_, uint64_t{call + 1} * callers);
      if (call + 1 == options_.warmup + options_.calls) rank.poison();
      rank.call(record);
      if (call >= options_.warmup) times.add(record);
    }
    ++arrived_;  // nobody waits for this rank while it checks
    serve_until(rank, arrived_, (uint64_t{options_.warmup} + options_.calls + 1) * callers);
    if (!failed_) rank.check();
  }

  const Options& options_;
  std::vector<std::unique_ptr<Rank>> ranks_;
  std::atomic<uint64_t> arrived_{0}, ended_{0};
  std::atomic<bool> failed_{false};
  std::string fault_;  ///< of the first rank that failed
};

void print_table(Bench& bench, const Options& options, uint32_t callers, const char* title) {
  std::printf("\n%s: us from bell to done, on the GPU and from the host; medians of the phases\n", title);
  std::printf("tokens  gpu p50     p99  host p50     p99  dispatch    wait  reduce\n");
  for (const uint32_t tokens : options.tokens) {
    const Times t = bench.measure(tokens, callers);
    std::printf("%6u  %7.2f  %6.2f  %8.2f  %6.2f  %8.2f  %6.2f  %6.2f\n", tokens, percentile(t.gpu, 0.5),
                percentile(t.gpu, 0.99), percentile(t.total, 0.5), percentile(t.total, 0.99),
                percentile(t.phase[0], 0.5), percentile(t.phase[1], 0.5), percentile(t.phase[2], 0.5));
    std::fflush(stdout);
  }
}

/// The GPUs to use; 0, said on stderr: they are not to be had.
int choose_gpus(const Options& options) {
  const int have = gpu_count();
  const int wanted = options.gpus != 0 ? options.gpus : std::clamp(have, 1, 2);
  BackendOptions probe;
  probe.shape = k3_shape();
  probe.ranks = kRanks;
  probe.lanes = 1;
  probe.in_process = true;
  bool usable = true;
  for (int gpu = 0; gpu < std::min(wanted, std::max(have, 1)); ++gpu) {
    probe.device = std::to_string(gpu);
    for (const std::string& sentence : gpu_missing(probe)) {
      std::fprintf(stderr, "cuda_bench: %s\n", sentence.c_str());
      usable = false;
    }
  }
  if (usable && have < wanted) std::fprintf(stderr, "cuda_bench: needs %d GPUs, there are %d\n", wanted, have);
  return usable && have >= wanted ? wanted : 0;
}

}  // namespace

int main(int argc, char** argv) {
  Options options;
  CLI::App app("latency of the routed identity call on CUDA back ends in one process, Kimi K3's shape, two ranks");
  app.add_option("--tokens", options.tokens, "tokens of a call, one row of the tables each")
      ->delimiter(',')
      ->check(CLI::Range(1U, kMaxTokens))
      ->capture_default_str();
  app.add_option("--calls", options.calls, "calls of a rank that count, after 200 that do not")
      ->check(CLI::Range(1U, 10'000'000U))
      ->capture_default_str();
  app.add_option("--gpus", options.gpus, "GPUs to spread the ranks over; 0: two where there are two")
      ->check(CLI::Range(0, static_cast<int>(kRanks)))
      ->capture_default_str();
  CLI11_PARSE(app, argc, argv);
  try {
    const int gpus = choose_gpus(options);
    if (gpus == 0) return 2;
    const Shape s = k3_shape();
    std::printf(
        "routed identity call with norm, latent %u, top_k %u of %u experts, %u ranks on %d GPU%s, %u calls a rank\n",
        s.latent, s.top_k, s.experts, kRanks, gpus, gpus == 1 ? "" : "s", options.calls);
    Bench bench(options, gpus);
    print_table(bench, options, kRanks, "both ranks call at once, in step");
    print_table(bench, options, 1, "one rank calls, the other serves");
    return 0;
  } catch (const std::exception& e) {
    std::fprintf(stderr, "cuda_bench: %s\n", e.what());
    return 1;
  }
}
