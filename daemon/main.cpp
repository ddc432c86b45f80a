// moed serve | check | version: builds everything in order, runs, stops in reverse.
#include <CLI/CLI.hpp>
#include <utility>

#include <boost/asio/io_context.hpp>
#include <boost/asio/signal_set.hpp>
#include <boost/asio/steady_timer.hpp>
#include <csignal>
#include <filesystem>
#include <iostream>
#include <numeric>
#include <random>

#include "control/ucx.h"
#include "daemon/abi/text.h"
#include "daemon/attach_server.h"
#include "daemon/check.h"
#include "daemon/config.h"
#include "daemon/http.h"
#include "daemon/links.h"
#include "daemon/log.h"
#include "daemon/metrics.h"
#include "daemon/model.h"
#include "daemon/rank_lock.h"
#include "daemon/report.h"
#include "daemon/service_loop.h"
#include "daemon/version.h"

namespace moed {
namespace {

namespace asio = boost::asio;
using std::chrono::milliseconds;

/// Exit codes of interfaces.md section 13.
enum Exit {
  kLeft = 0,
  kUsage = 64,
  kConfig = 65,
  kWeights = 66,
  kPort = 69,
  kInternal = 70,
  kMemory = 73,
  kIdentity = 74
};

constexpr Nanos kAlive = 2'000'000'000;  ///< a loop whose last tick is older is not alive
constexpr Nanos kLongestDrain = (kMaxTimeoutUs + 1'000'000) * Nanos{1000};  ///< every call has ended by its deadline
constexpr Nanos kLastBells = 100'000'000;  ///< how long engines hear `draining` before the daemon is gone
constexpr milliseconds kTick{200};
constexpr milliseconds kDrainLook{5};

uint64_t random_incarnation() {
  std::random_device device;
  const uint64_t number = uint64_t{device()} << 32 | device();
  return number != 0 ? number : 1;
}

/// What the configuration asks for and this build cannot do.
void refuse_unbuilt(const Config& config) {
  if (config.backend != BackendKind::cpu) throw ConfigError("backend = cuda, but this build has the cpu back end only");
  if (config.transport != Transport::heap) throw ConfigError("transport = nccl, but this build has heap only");
}

/// A running daemon. Members are in the order in which they are made; destruction is the reverse.
class Daemon {
 public:
  explicit Daemon(const Config& config)
      : config_(config),
        model_(open_model(config)),
        lock_(config.run_dir, config.group, config.rank),
        metrics_(metrics_info()),
        links_(io_, config_, model_, incarnation_, metrics_),
        backend_(make_backend()),
        service_(*backend_, metrics_, service_options()),
        attach_(io_, attach_options(), *backend_, service_, metrics_, attach_handlers()),
        signals_(io_, SIGTERM, SIGINT),
        timer_(io_),
        drain_timer_(io_) {
    if (!config.http.listen.empty())
      http_ = std::make_unique<HttpServer>(
          io_, config.http.listen, [this](std::string_view path) { return page(path); },
          [this] { metrics_.refused(Refused::http); });
  }

  int run() {
    wait_for_signal();
    tick();
    log_info("listening", {{"socket", attach_.path()},
                           {"http", http_ ? std::to_string(http_->port()) : "off"},
                           {"control", links_.port()}});
    links_.start(*backend_, [this] { links_changed(); });
    links_changed();
    warn_about_drills();
    io_.run();
    if (http_) http_->stop();
    attach_.stop();
    service_.stop();
    log_info("left", {{"calls", metrics_.calls(Status::ok)}});
    return kLeft;
  }

 private:
  /// Says once that every link is ready, and again whenever it is so again.
  void links_changed() {
    const bool all = links_.missing().empty();
    if (all && !all_ready_)
      log_info("ready", {{"rank", config_.rank},
                         {"ranks", config_.ranks()},
                         {"backend", name(config_.backend)},
                         {"model", name(config_.model.source)},
                         {"lanes", config_.limits.lanes},
                         {"took_ms", (now_ns() - started_) / 1'000'000},
                         {"version", kVersion}});
    all_ready_ = all;
  }

  std::unique_ptr<Backend> make_backend() {
    load_weights(model_, config_);
    BackendOptions options = backend_options(config_, model_.shape);
    options.weights = model_.weights;
    options.incarnation = incarnation_;
    return make_cpu_backend(std::move(options));
  }

  MetricsInfo metrics_info() const {
    MetricsInfo info;
    info.version = kVersion;
    info.commit = kCommit;
    info.backend = name(config_.backend);
    info.transport = name(config_.transport);
    info.digest = hex(model_.digest);
    info.revision = config_.model.revision;
    info.ucx = control::UcxWorker::version();
    info.handles = "fd";
    info.cuda = info.nccl = "none";
    info.rank = config_.rank;
    info.ranks = config_.ranks();
    return info;
  }

  ServiceOptions service_options() const {
    ServiceOptions o;
    o.shape = model_.shape;
    o.idle = {config_.service.spin_us, config_.service.cpu};
    o.lanes = config_.limits.lanes;
    o.deadline_ms = config_.calls.deadline_ms;
    o.first_deadline_ms = config_.calls.first_deadline_ms;
    o.loop_delay_us = config_.debug.loop_delay_us;
    o.delay_for_ms = config_.debug.for_ms;
    return o;
  }

  AttachHandlers attach_handlers() {
    return {.status_json = [this] { return to_json(report()); },
            .fetch = [this](const Fetch& fetch, std::string& why) { return links_.take(fetch, why); }};
  }

  AttachOptions attach_options() const {
    AttachOptions o;
    o.run_dir = config_.run_dir;
    o.group = config_.group;
    o.rank = config_.rank;
    o.shape = model_.shape;
    o.lanes = config_.limits.lanes;
    o.slots = config_.limits.slots;
    o.max_call_tokens = config_.limits.max_call_tokens;
    o.arena_bytes = uint64_t{config_.limits.arena_mb} << 20;
    o.deadline_ms = config_.calls.deadline_ms;
    o.first_deadline_ms = config_.calls.first_deadline_ms;
    Info& i = o.info;
    i.size = sizeof(Info);
    i.abi = kAbi;
    i.protocol = kProtocol;
    i.numerics = kNumerics;
    i.rank = config_.rank;
    i.ranks = config_.ranks();
    i.hidden = model_.shape.hidden;
    i.latent = model_.shape.latent;
    i.intermediate = model_.shape.intermediate;
    i.experts = model_.shape.experts;
    i.top_k = model_.shape.top_k;
    i.first_layer = model_.shape.first_layer;
    i.layers = model_.shape.layers;
    i.max_tokens = config_.limits.max_tokens;
    i.max_call_tokens = config_.limits.max_call_tokens;
    i.slots = config_.limits.slots;
    i.incarnation = incarnation_;
    std::copy(model_.digest.begin(), model_.digest.end(), i.model_digest);
    return o;
  }

  /// Why this daemon is not ready; empty: it is.
  std::vector<std::string> missing() {
    std::vector<std::string> all = links_.missing();
    if (draining_) all.emplace_back("draining");
    if (metrics_.tick_age(LoopId::service, now_ns()) > kAlive) all.emplace_back("service loop: stalled");
    if (backend_->health() != Status::ok) all.push_back("back end: " + backend_->last_error());
    return all;
  }

  Report report() {
    Report r;
    r.rank = config_.rank;
    r.ranks = config_.ranks();
    r.missing = missing();
    r.ready = r.missing.empty();
    r.backend = name(config_.backend);
    r.transport = name(config_.transport);
    r.incarnation = incarnation_;
    r.uptime_s = static_cast<double>(now_ns() - started_) * 1e-9;
    r.version = kVersion;
    r.socket = attach_.path();
    r.http = http_ ? config_.http.listen : "";
    r.lanes_max = config_.limits.lanes;
    for (const LaneInfo& lane : attach_.lanes())
      r.lanes.push_back({lane.lane, lane.name, lane.pid, lane.calls, lane.dry});
    for (uint32_t s = 0; s < kStatuses; ++s) r.calls[s] = metrics_.calls(static_cast<Status>(s));
    r.p50_us = metrics_.call_quantile(0.5);
    r.p99_us = metrics_.call_quantile(0.99);
    r.peers = peer_reports();
    const Backend::Memory memory = backend_->memory();
    r.heap = memory.heap;
    r.weights = memory.weights;
    return r;
  }

  std::vector<Report::Peer> peer_reports() const {
    std::vector<Report::Peer> all;
    const Nanos now = now_ns();
    const std::vector<control::PeerView> views = links_.peers();
    for (uint32_t rank = 0; rank < views.size(); ++rank) {
      if (rank == config_.rank) continue;
      const control::PeerView& v = views[rank];
      Report::Peer& p = all.emplace_back();
      p.rank = rank;
      p.link = v.leaving ? "leaving" : control::name(v.state);
      if (v.heard) p.heartbeat_ms = static_cast<double>(now - std::min(now, *v.heard)) * 1e-6;
      p.wait_s = metrics_.peer_wait(rank);
      p.last = metrics_.peer_last(rank);
      p.losses = std::accumulate(v.losses.begin(), v.losses.end(), uint64_t{0});
      p.busy = control::name(v.busy);
      p.loop_ms = v.service_age_us * 1e-3;
      p.waits_for = v.waits_for;
      p.waits_ms = v.waits_us * 1e-3;
    }
    return all;
  }

  Gauges gauges() {
    const Backend::Memory memory = backend_->memory();
    Gauges g;
    g.ready = missing().empty();
    g.lanes_attached = static_cast<uint32_t>(attach_.lanes().size());
    const Nanos now = now_ns();
    for (const control::PeerView& v : links_.peers())
      g.links.push_back({.state = static_cast<uint32_t>(v.state), .losses = v.losses, .heartbeat_age = {}});
    for (uint32_t rank = 0; const control::PeerView& v : links_.peers()) {
      if (v.heard) g.links[rank].heartbeat_age = now - std::min(now, *v.heard);
      ++rank;
    }
    g.heap = memory.heap;
    g.weights = memory.weights;
    g.arena = memory.arena;
    g.scratch = memory.scratch;
    return g;
  }

  HttpAnswer page(std::string_view path) {
    if (path == "/metrics") return {200, metrics_.text(gauges()), kTypeMetrics};
    if (path == "/status.json") return {200, to_json(report()), kTypeJson};
    if (path == "/livez") {
      std::vector<std::string> stalled;
      const Nanos now = now_ns();
      if (metrics_.tick_age(LoopId::service, now) > kAlive) stalled.emplace_back("service loop: stalled");
      if (metrics_.tick_age(LoopId::net, now) > kAlive + net_interval()) stalled.emplace_back("net loop: stalled");
      return {stalled.empty() ? 200U : 503U, health_json(stalled.empty(), stalled), kTypeJson};
    }
    if (path == "/readyz") {
      const std::vector<std::string> why = missing();
      return {why.empty() ? 200U : 503U, health_json(why.empty(), why), kTypeJson};
    }
    return {404, "no such page: /metrics /livez /readyz /status.json\n"};
  }

  Nanos net_interval() const { return Nanos{config_.heartbeat.interval_ms} * 1'000'000; }

  void tick() {
    metrics_.tick(LoopId::control, now_ns());
    links_.refresh_keys();
    static_cast<void>(backend_->memory());  // frees what retired links held
    timer_.expires_after(kTick);
    timer_.async_wait([this](boost::system::error_code error) {
      if (!error) tick();
    });
  }

  void wait_for_signal() {
    signals_.async_wait([this](boost::system::error_code error, int number) {
      if (error) return;
      log_info("leaving", {{"signal", number}, {"in_flight", service_.in_flight()}});
      if (draining_) return io_.stop();  // asked twice: at once
      draining_ = true;
      attach_.drain();
      links_.drain();
      service_.drain();
      drained_since_ = now_ns();
      wait_for_signal();
      look_whether_drained();
    });
  }

  /// First our own calls end, then the peers are told, then theirs that still run here end.
  void look_whether_drained() {
    const Nanos now = now_ns();
    if (now > drained_since_ + kLongestDrain) return io_.stop();
    const uint64_t sources = metrics_.sources_served();
    if (sources != sources_) {
      sources_ = sources;
      quiet_since_ = now;
    }
    // A bell that rang just before or after still gets its answer: draining.
    const bool own = service_.in_flight() == 0 && (now > drained_since_ + kLastBells || attach_.lanes().empty());
    if (own && !left_) {
      left_ = true;
      links_.leave();
      quiet_since_ = now;
    }
    if (left_ && own && (config_.ranks() == 1 || now > quiet_since_ + kLastBells)) return io_.stop();
    drain_timer_.expires_after(kDrainLook);
    drain_timer_.async_wait([this](boost::system::error_code error) {
      if (!error) look_whether_drained();
    });
  }

  void warn_about_drills() const {
    const DebugConfig& d = config_.debug;
    if ((d.experts_delay_us | d.loop_delay_us | d.send_delay_us | d.call_delay_us) == 0) return;
    log_warn("drill: this daemon is slowed on purpose", {{"experts_delay_us", d.experts_delay_us},
                                                         {"loop_delay_us", d.loop_delay_us},
                                                         {"send_delay_us", d.send_delay_us},
                                                         {"call_delay_us", d.call_delay_us},
                                                         {"for_ms", d.for_ms}});
  }

  const Config config_;
  const uint64_t incarnation_ = random_incarnation();
  const Nanos started_ = now_ns();
  Model model_;
  RankLock lock_;
  Metrics metrics_;
  asio::io_context io_{1};
  Links links_;
  std::unique_ptr<Backend> backend_;
  ServiceLoop service_;
  AttachServer attach_;
  std::unique_ptr<HttpServer> http_;
  asio::signal_set signals_;
  asio::steady_timer timer_, drain_timer_;
  bool draining_ = false;
  bool all_ready_ = false, left_ = false;
  Nanos drained_since_ = 0, quiet_since_ = 0;
  uint64_t sources_ = 0;
};

/// Runs `what` and turns what it throws into an exit code and one sentence.
int guarded(const std::function<int()>& what) {
  const auto fail = [](int code, const char* text) {
    log_error("ending", {{"reason", text}, {"exit", code}});
    return code;
  };
  try {
    return what();
  } catch (const ConfigError& e) {
    return fail(kConfig, e.what());
  } catch (const WeightsError& e) {
    return fail(kWeights, e.what());
  } catch (const RankHeld& e) {
    return fail(kIdentity, e.what());
  } catch (const std::bad_alloc& e) {
    return fail(kMemory, e.what());
  } catch (const std::system_error& e) {
    return fail(kMemory, e.what());
  } catch (const std::runtime_error& e) {
    return fail(kPort, e.what());
  } catch (const std::exception& e) {
    return fail(kInternal, e.what());
  }
}

int serve(const Config& config) {
  set_level(config.log.level);
  refuse_unbuilt(config);
  return Daemon(config).run();
}

int check(const Config& config) {
  const Shape shape = model_shape(config);
  Backend::Memory planned = planned_memory(backend_options(config, shape));
  planned.weights = local_weight_bytes(config, shape);
  planned.arena = uint64_t{config.limits.lanes} * config.limits.arena_mb << 20;
  std::cout << check_report(config, shape, planned, read_machine(config));
  return 0;
}

int main_of(int argc, char** argv) {
  CLI::App app{"moed serves the routed experts of a mixture-of-experts model"};
  app.require_subcommand(1);
  std::string file;
  std::vector<std::string> sets;
  std::string rank;
  const auto add = [&](const char* name, const char* help) {
    CLI::App* command = app.add_subcommand(name, help);
    command->add_option("--config", file, "YAML file; without it the defaults hold");
    command->add_option("--set", sets, "a.b=c, over the file; repeatable")->take_all();
    command->add_option("--rank", rank, "short for --set rank=");
    return command;
  };
  const CLI::App* serve_command = add("serve", "run one rank in the foreground");
  const CLI::App* check_command = add("check", "print the effective configuration, what it needs and what is missing");
  app.add_subcommand("version", "print version and build");
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? 0 : kUsage;
  }
  if (!rank.empty()) sets.push_back("rank=" + rank);
  if (*serve_command) return guarded([&] { return serve(load_config(file, sets)); });
  if (*check_command) return guarded([&] { return check(load_config(file, sets)); });
  std::cout << "moed " << kVersion << " (" << kCommit << ", abi " << kAbi << ", cuda none, ucx "
            << control::UcxWorker::version() << ", nccl none)\n";
  return 0;
}

}  // namespace
}  // namespace moed

int main(int argc, char** argv) {
  // UCX reads these while its library is loaded, before main: it must not patch mmap, nor own our signals.
  if (std::getenv("UCX_MEM_EVENTS") == nullptr) {
    ::setenv("UCX_MEM_EVENTS", "n", 1);
    ::setenv("UCX_ERROR_SIGNALS", "", 0);
    std::error_code failed;  // where it fails we go on as we are
    const std::string self = std::filesystem::read_symlink("/proc/self/exe", failed);
    if (!failed) ::execv(self.c_str(), argv);
  }
  std::signal(SIGPIPE, SIG_IGN);  // a reader of our log that went away is no reason to end
  return moed::main_of(argc, argv);
}
