// Routed identity calls from bell to done with no CPU between: a kernel on each GPU rings its rank's bell, waits for
// done and rings again, one event pair round all of it. Two ranks, both call at once.
//   chain_bench [--latent L --top-k K --experts E] [--tokens T,...] [--calls N] [--one-gpu] [--load] [--ablate]
// Exits 0 measured, 1 a failure or a wrong result, 2 this machine lacks two GPUs, or one for --one-gpu.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <atomic>
#include <cstdio>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "tests/bench/chain_rank.cuh"
#include "tests/bench/percentile.h"
#include "tests/support/link.h"

namespace {

using namespace moed;
using bench::kRanks;
using bench::kWarmUp;
using bench::Load;
using bench::Options;
using bench::percentile;
using bench::Rank;

constexpr double kShares[] = {0.5, 0.95, 0.99, 0.999, 1.0};

struct Row {
  double mean = 0;                           ///< us of a call by the events; the slower rank's, as all here
  double quantile[std::size(kShares)] = {};  ///< of single calls
  double phase[3] = {};                      ///< medians
};

int gpus(const Options& o) { return o.one_gpu ? 1 : kRanks; }

class Bench {
 public:
  explicit Bench(const Options& o) : options_(o) {
    const uint32_t most = *std::max_element(o.tokens.begin(), o.tokens.end());
    for (int gpu = 0; o.load && gpu < gpus(o); ++gpu) loads_.push_back(std::make_unique<Load>(gpu, o.load_block));
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
    for (auto& load : loads_) load->end();
    stop_ = true;
    for (std::thread& t : threads_) t.join();
    for (int r = 0; r < kRanks; ++r) rank_[r]->backend().link_changed(1 - r, LinkState::lost, 0);
    for (int r = 0; r < kRanks; ++r) rank_[r]->backend().retire(1 - r);
  }

  double load_rate() const { return loads_.empty() ? 0.0 : loads_[0]->rate(); }
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
      for (size_t q = 0; q < std::size(kShares); ++q)
        row.quantile[q] = std::max(row.quantile[q], percentile(cycles[r], kShares[q]) * each);
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
    for (auto& load : loads_) load->start();
    for (auto& r : rank_) r->start(numbers, calls);
    const Nanos until = now_ns() + 20'000'000'000ULL;
    for (bool all = false; !all;) {
      all = true;
      for (auto& r : rank_) all = r->ended() && all;
      if (now_ns() > until) throw std::runtime_error("a chain of calls has no end within 20 s");
    }
    for (auto& load : loads_) load->stop();
  }

  const Options& options_;
  std::vector<std::unique_ptr<Load>> loads_;  ///< one a GPU; before rank_, whose kernels have to be gone before they go
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
  std::printf("tokens   chain     p50     p95     p99   p99.9     max  dispatch    wait  reduce\n");
  const auto print = [](const std::string& name, const Row& r) {
    std::printf("%-7s %6.2f", name.c_str(), r.mean);
    for (const double q : r.quantile) std::printf("  %6.2f", q);
    std::printf("    %6.2f  %6.2f  %6.2f\n", r.phase[0], r.phase[1], r.phase[2]);
    std::fflush(stdout);
  };
  for (const uint32_t t : o.tokens) print(std::to_string(t), bench.measure({t}));
  if (o.tokens.size() > 1) print("mixed", bench.measure(o.tokens));
  if (o.load) std::printf("the load read %.2f TB/s on GPU 0 beside the last of them\n", bench.load_rate() * 1e-12);
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
  app.add_flag("--one-gpu", o.one_gpu, "both ranks on GPU 0");
  app.add_flag("--load", o.load, "a kernel streams memory on all multiprocessors beside it");
  app.add_option("--load-threads", o.load_block.threads, "threads of each of its blocks")
      ->check(CLI::Range(32U, 512U))
      ->capture_default_str();
  app.add_option("--load-shared", o.load_block.shared_bytes, "bytes of shared memory of each of its blocks")
      ->check(CLI::Range(0U, 227U << 10))
      ->capture_default_str();
  app.add_flag("--ablate", ablate, "then a table of variants: what else was tried, and whether it is safe");
  app.add_option("--call-blocks", o.tuning.call_blocks, "blocks of a call loop; 0: as the back end chooses");
  app.add_option("--serve-blocks", o.tuning.serve_blocks, "blocks of the serve loop");
  CLI11_PARSE(app, argc, argv);
  try {
    const int needed = gpus(o), have = gpu_count();
    if (have < needed) {
      std::fprintf(stderr, "chain_bench: needs %d GPU%s, there are %d%s\n", needed, needed == 1 ? "" : "s", have,
                   have == 1 ? "; --one-gpu takes one" : "");
      return 2;
    }
    std::printf("routed identity call with norm, latent %u, top_k %u of %u experts, 2 ranks on %d GPU%s", o.latent,
                o.top_k, o.experts, needed, needed == 1 ? "" : "s");
    if (o.load)
      std::printf(", beside a kernel that streams memory on all multiprocessors (blocks of %u threads and %u KiB)",
                  o.load_block.threads, o.load_block.shared_bytes >> 10);
    std::printf("\n");
    print_table(o);
    if (ablate) print_variants(o);
    return 0;
  } catch (const std::exception& e) {
    std::fprintf(stderr, "chain_bench: %s\n", e.what());
    return 1;
  }
}
