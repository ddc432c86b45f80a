// What a scrape of a rank in a large world costs, and what scrapes do to calls: times over HTTP, from connect to the
// last byte, of a real daemon whose links are all ready; then calls of one token to the rank's own experts (identity,
// through libmoed), without scrapes and with, in turn. It judges nothing: it prints.
//   scrape_bench [--ranks N] [--others still|run] [--scrapes N] [--calls N] [--runs N] [--rates S,...]
// `still`: the other daemons are stopped once all links are ready, so that the one rank has the machine to itself, as
// it would have on a node of its own; its links stay ready. `run`: all of them go on, on the cores that there are.
// Exits 0 measured, 1 a failure: a call that is not ok, a page that is not whole, a link that was lost.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <cmath>
#include <condition_variable>
#include <cstdio>
#include <exception>
#include <map>
#include <mutex>
#include <stdexcept>
#include <stop_token>
#include <string>
#include <thread>
#include <vector>

#include "daemon/abi/futex.h"
#include "tests/support/daemons.h"
#include "tests/support/fault_daemon.h"

namespace {

using namespace moed;
using test::Daemons;

constexpr uint32_t kTopK = 4;         // experts of a rank, too: a call needs no other rank
constexpr uint32_t kWarmup = 10'000;  // calls, and a thousandth of it in scrapes

struct Options {
  uint32_t ranks = 72, scrapes = 200, calls = 100'000, runs = 5;
  std::string others = "still";
  std::vector<double> rates{1, 10};  ///< scrapes a second
};

/// Nearest rank.
double quantile(std::vector<double> values, double q) {
  if (values.empty()) return std::nan("");
  const auto last = static_cast<double>(values.size() - 1);
  const auto at = static_cast<ptrdiff_t>(std::clamp(std::ceil(q * (last + 1)) - 1, 0.0, last));
  std::nth_element(values.begin(), values.begin() + at, values.end());
  return values[static_cast<size_t>(at)];
}

double ms_since(Nanos start) { return static_cast<double>(now_ns() - start) * 1e-6; }

/// One whole page; throws for anything else.
std::string scrape(uint16_t port) {
  std::string page = test::get_page(port, "/metrics");
  const size_t length = page.find("Content-Length: "), body = page.find("\r\n\r\n");
  if (!page.starts_with("HTTP/1.1 200") || length == page.npos || body == page.npos ||
      page.size() - body - 4 != std::stoul(page.substr(length + 16)))
    throw std::runtime_error("a page is not whole: " + page.substr(0, 200));
  return page;
}

void expect_ready(uint16_t port, uint32_t ranks) {
  const std::string page = scrape(port);
  double losses = 0;
  for (uint32_t r = 0; r < ranks; ++r)
    for (const std::string reason : {"error", "heartbeat", "leaving"})
      losses +=
          test::metric(page, "moed_link_losses_total{peer=\"" + std::to_string(r) + "\",reason=\"" + reason + "\"}");
  if (test::metric(page, "moed_ready") != 1 || losses != 0)
    throw std::runtime_error("links were lost: what was measured is not a rank of a whole world");
}

/// Scrapes at a fixed pace on a thread of its own until it goes.
class Scraper {
 public:
  Scraper(uint16_t port, double rate)
      : thread_(
            [this, port, period = std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(1 / rate))](
                const std::stop_token& stop) { run(stop, port, period); }) {}

  /// Milliseconds of every scrape that was made.
  std::vector<double> finish() {
    thread_.request_stop();
    thread_.join();
    if (failure_) std::rethrow_exception(failure_);
    return ms_;
  }

 private:
  using Clock = std::chrono::steady_clock;

  void run(const std::stop_token& stop, uint16_t port, Clock::duration period) noexcept {
    try {
      std::unique_lock lock(mutex_);
      for (auto next = Clock::now() + period / 2; !stop.stop_requested(); next += period) {
        wake_.wait_until(lock, stop, next, [] { return false; });
        if (stop.stop_requested()) return;
        const Nanos start = now_ns();
        scrape(port);
        ms_.push_back(ms_since(start));
      }
    } catch (...) {
      failure_ = std::current_exception();
    }
  }

  std::mutex mutex_;
  std::condition_variable_any wake_;
  std::vector<double> ms_;
  std::exception_ptr failure_;
  std::jthread thread_;  // last: it uses what is above
};

/// The engine: one token, each of its slots to an expert of the rank that is asked.
class Engine {
 public:
  explicit Engine(const std::string& socket) : lane_(socket), call_(lane_.slot(MOED_LAYER_IDENTITY, 1)) {
    call_.flags = MOED_FLAG_NO_NORM;
    lane_.put(call_.x, std::vector<uint16_t>(lane_.info().latent, 0x3F80));
    lane_.put(call_.ids, std::vector<int32_t>{0, 1, 2, 3});
    lane_.put(call_.weights, std::vector<float>(kTopK, 0.25F));
    call(kWarmup);
  }

  /// Microseconds of each of so many calls.
  std::vector<double> call(uint32_t calls) const {
    std::vector<double> us(calls);
    for (double& one : us) {
      const Nanos start = now_ns();
      moed_reply_t reply{};
      const moed_status status = moed_call(lane_.get(), &call_, &reply);
      one = static_cast<double>(now_ns() - start) * 1e-3;
      if (status != MOED_OK)
        throw std::runtime_error(std::string("a call ended ") + moed_status_name(status) + ": " +
                                 moed_last_error(lane_.get()));
    }
    if (lane_.out(call_) != std::vector<uint16_t>(lane_.info().latent, 0x3F80))
      throw std::runtime_error("a wrong answer");
    return us;
  }

 private:
  const test::Lane lane_;
  moed_call_t call_;
};

void measure_scrapes(uint16_t port, uint32_t scrapes) {
  for (uint32_t i = 0; i < kWarmup / 1000; ++i) scrape(port);
  std::vector<double> ms(scrapes);
  for (double& one : ms) {
    const Nanos start = now_ns();
    scrape(port);
    one = ms_since(start);
  }
  const std::string page = scrape(port);
  const std::string body = page.substr(page.find("\r\n\r\n") + 4);
  size_t series = 0;
  for (size_t at = 0; at < body.size(); at = body.find('\n', at) + 1) series += body[at] != '#' ? 1 : 0;
  std::printf("\nscrapes, one after the other\nscrapes    bytes  series   p50 ms   p99 ms   max ms\n");
  std::printf("%7u %8zu %7zu %8.2f %8.2f %8.2f\n", scrapes, body.size(), series, quantile(ms, 0.5), quantile(ms, 0.99),
              quantile(ms, 1));
}

/// Runs without scrapes and with them take turns: none, the first rate, none, the second rate, ...
void measure_calls(const Daemons& world, uint16_t port, const Options& options) {
  const Engine engine(world[0].socket());
  std::map<double, std::vector<double>> p50, p99, scrapes;  // by rate
  std::printf(
      "\ncalls, T = 1, identity, own experts\nrun  scrapes/s  scrapes    calls   p50 us   p99 us  p99.9 us   max us\n");
  const auto one = [&](uint32_t run, double rate) {
    std::vector<double> us, ms;
    if (rate > 0) {
      Scraper scraper(port, rate);
      us = engine.call(options.calls);
      ms = scraper.finish();
    } else {
      us = engine.call(options.calls);
    }
    p50[rate].push_back(quantile(us, 0.5));
    p99[rate].push_back(quantile(us, 0.99));
    scrapes[rate].insert(scrapes[rate].end(), ms.begin(), ms.end());
    std::printf("%3u %10.1f %8zu %8u %8.2f %8.2f %9.2f %8.1f\n", run, rate, ms.size(), options.calls, p50[rate].back(),
                p99[rate].back(), quantile(us, 0.999), quantile(us, 1));
    std::fflush(stdout);
  };
  for (uint32_t run = 1; run <= options.runs; ++run)
    for (const double rate : options.rates) {
      one(run, 0);
      one(run, rate);
    }
  std::printf(
      "\nover all runs\nscrapes/s  runs  p50 us: median  p99 us: median  lowest  highest  scrape ms: p50     max\n");
  for (const auto& [rate, all] : p99) {
    std::printf("%9.1f %5zu %15.2f %15.2f %7.2f %8.2f", rate, all.size(), quantile(p50[rate], 0.5), quantile(all, 0.5),
                quantile(all, 0), quantile(all, 1));
    if (rate > 0) std::printf(" %15.2f %7.2f", quantile(scrapes[rate], 0.5), quantile(scrapes[rate], 1));
    std::printf("\n");
  }
}

void measure(const Options& options) {
  const bool still = options.others == "still";
  const uint32_t beat_ms = std::max(100U, 10 * options.ranks);
  const Daemons world(options.ranks,
                      {"model.source=synthetic",
                       "model.shape={hidden: 512, latent: 256, intermediate: 128, experts: " +
                           std::to_string(kTopK * options.ranks) + ", top_k: " + std::to_string(kTopK) + ", layers: 2}",
                       "canary.period_ms=0",  // whoever stands still answers none
                       "limits.max_tokens=32", "limits.arena_mb=8", "heartbeat.interval_ms=" + std::to_string(beat_ms),
                       "heartbeat.lost_after_ms=" + std::to_string(still ? 600'000 : 10 * beat_ms)},
                      [](uint32_t rank) { return rank == 0 ? Daemons::Sets{"service.spin_us=50"} : Daemons::Sets{}; });
  const uint16_t port = test::http_port(world[0]);
  for (uint32_t r = 1; still && r < options.ranks; ++r) world[r].freeze();
  std::printf("rank 0 of %u, all links ready; the other daemons %s; %u cores\n", options.ranks,
              still ? "stand still" : "run", std::thread::hardware_concurrency());
  expect_ready(port, options.ranks);
  measure_scrapes(port, options.scrapes);
  measure_calls(world, port, options);
  expect_ready(port, options.ranks);
}

}  // namespace

int main(int argc, char** argv) {
  Options options;
  CLI::App app("what a scrape of a rank in a large world costs, and what scrapes do to the times of calls");
  app.add_option("--ranks", options.ranks, "daemons")->check(CLI::Range(1U, 128U))->capture_default_str();
  app.add_option("--others", options.others, "still: the other daemons are stopped once all links are ready; run: not")
      ->check(CLI::IsMember({"still", "run"}))
      ->capture_default_str();
  app.add_option("--scrapes", options.scrapes, "scrapes that count, one after the other")
      ->check(CLI::Range(1U, 1'000'000U))
      ->capture_default_str();
  app.add_option("--calls", options.calls, "calls of a run")
      ->check(CLI::Range(1U, 100'000'000U))
      ->capture_default_str();
  app.add_option("--runs", options.runs, "runs with each rate")->check(CLI::Range(1U, 1000U))->capture_default_str();
  app.add_option("--rates", options.rates, "scrapes a second")
      ->delimiter(',')
      ->check(CLI::Range(0.01, 1000.0))
      ->capture_default_str();
  CLI11_PARSE(app, argc, argv);
  try {
    measure(options);
    return 0;
  } catch (const std::exception& e) {
    std::fprintf(stderr, "scrape_bench: %s\n", e.what());
    return 1;
  }
}
