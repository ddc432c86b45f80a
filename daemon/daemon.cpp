// Read from run() downwards.
#include "daemon/daemon.h"

#include <algorithm>
#include <csignal>
#include <random>

#include "control/ucx.h"
#include "daemon/abi/text.h"
#include "daemon/backends.h"
#include "daemon/check.h"
#include "daemon/log.h"
#include "daemon/version.h"

namespace moed {
namespace {

constexpr Nanos kLongestDrain = (kMaxTimeoutUs + 1'000'000) * Nanos{1000};  ///< every call has ended by its deadline
constexpr Nanos kLastBells = 100'000'000;  ///< how long engines hear `draining` before the daemon is gone
constexpr std::chrono::milliseconds kTick{200};
constexpr std::chrono::milliseconds kDrainLook{5};

uint64_t random_incarnation() {
  std::random_device device;
  const uint64_t number = uint64_t{device()} << 32 | device();
  return number != 0 ? number : 1;
}

}  // namespace

Daemon::Daemon(const Config& config)
    : config_(config),
      incarnation_(random_incarnation()),
      started_(now_ns()),
      model_(open_model(config)),
      lock_(config.run_dir, config.group, config.rank),
      metrics_(metrics_info()),
      links_(io_, config_, model_, incarnation_, metrics_),
      backend_(loaded_backend()),
      signals_(io_, SIGTERM, SIGINT),
      recorder_(
          {.calls = config.recorder.calls, .rank = config.rank, .ranks = config.ranks(), .incarnation = incarnation_}),
      service_(*backend_, metrics_, service_options()),
      canary_(make_canary()),
      attach_(io_, attach_options(), *backend_, service_, metrics_, attach_handlers()),
      timer_(io_),
      drain_timer_(io_) {
  if (!config.http.listen.empty())
    http_ = std::make_unique<HttpServer>(
        io_, config.http.listen, [this](std::string_view path) { return page(path); },
        [this] { metrics_.refused(Refused::http); });
}

Status Daemon::run() {
  wait_for_signal();
  tick();
  log_info("listening", {{"socket", attach_.path()},
                         {"http", http_ ? std::to_string(http_->port()) : "off"},
                         {"control", links_.port()}});
  links_.start(*backend_, [this] { links_changed(); });
  if (canary_) canary_->start([this] { return links_.lives(); }, [this] { readiness_changed(); });
  readiness_changed();
  warn_about_drills();
  io_.run();
  if (http_) http_->stop();
  attach_.stop();
  if (health_ != Status::ok) return health_;
  service_.stop();
  log_info("left", {{"calls", metrics_.calls(Status::ok)}});
  return Status::ok;
}

void Daemon::links_changed() {
  if (canary_) canary_->look();
  readiness_changed();
}

/// Says once that every link is ready and every rank has answered, and again whenever it is so again.
void Daemon::readiness_changed() {
  const bool all = links_.missing().empty() && (!canary_ || canary_->missing().empty());
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

void Daemon::tick() {
  metrics_.tick(LoopId::control, now_ns());
  if (failed()) return io_.stop();
  links_.refresh_keys();
  static_cast<void>(backend_->memory());  // frees what retired links held
  timer_.expires_after(kTick);
  timer_.async_wait([this](boost::system::error_code error) {
    if (!error) tick();
  });
}

/// A fault of the back end is for good: engines and peers hear of it by the end of this process.
bool Daemon::failed() {
  health_ = backend_->health();
  if (health_ == Status::ok) return false;
  log_error("the back end has failed", {{"status", name(health_)}, {"reason", backend_->last_error()}});
  return true;
}

void Daemon::wait_for_signal() {
  signals_.async_wait([this](boost::system::error_code error, int number) {
    if (error) return;
    log_info("leaving", {{"signal", number}, {"in_flight", service_.in_flight()}});
    if (draining_) return io_.stop();  // asked twice: at once
    draining_ = true;
    if (canary_) canary_->stop();
    attach_.drain();
    links_.drain();
    service_.drain();
    drained_since_ = now_ns();
    wait_for_signal();
    look_whether_drained();
  });
}

/// First our own calls end, then the peers are told, then theirs that still run here end.
void Daemon::look_whether_drained() {
  const Nanos now = now_ns();
  if (now > drained_since_ + kLongestDrain) return io_.stop();
  const uint64_t sources = metrics_.sources_served();
  if (sources != sources_ || backend_->serving()) {  // a pass may take longer than kLastBells
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

std::unique_ptr<Backend> Daemon::loaded_backend() {
  if (worth_loading(config_)) load_weights(model_, config_);
  BackendOptions options = whole_backend_options(config_, model_.shape);
  options.weights = model_.weights;
  options.incarnation = incarnation_;
  std::unique_ptr<Backend> backend = make_backend(config_, std::move(options));
  if (config_.backend == BackendKind::cuda) drop_weights(model_);  // the GPU has its own copy
  return backend;
}

MetricsInfo Daemon::metrics_info() const {
  MetricsInfo info;
  info.version = kVersion;
  info.commit = kCommit;
  info.backend = name(config_.backend);
  info.transport = name(config_.transport);
  info.digest = hex(model_.digest);
  info.revision = config_.model.revision;
  info.ucx = control::UcxWorker::version();
  info.handles = "fd";
  if (config_.backend == BackendKind::cuda) {
    info.handles = name(config_.gpu.handles);
    info.sharing = name(config_.gpu.sharing);
  }
  info.cuda = built_cuda_version();
  info.nccl = "none";
  info.rank = config_.rank;
  info.ranks = config_.ranks();
  return info;
}

ServiceOptions Daemon::service_options() {
  ServiceOptions o;
  o.shape = model_.shape;
  o.idle = {config_.service.spin_us, config_.service.cpu};
  o.lanes = config_.limits.lanes;
  o.deadline_ms = config_.calls.deadline_ms;
  o.first_deadline_ms = config_.calls.first_deadline_ms;
  o.loop_delay_us = config_.debug.loop_delay_us;
  o.delay_for_ms = config_.debug.for_ms;
  o.recorder = &recorder_;
  return o;
}

std::unique_ptr<Canary> Daemon::make_canary() {
  if (config_.canary.period_ms == 0) return nullptr;
  CanaryOptions o;
  o.shape = model_.shape;
  o.rank = config_.rank;
  o.ranks = config_.ranks();
  o.max_call_tokens = config_.limits.max_call_tokens;
  o.experts = config_.model.source != ModelSource::identity;
  o.period_ms = config_.canary.period_ms;
  o.longest_ms = std::max(config_.calls.deadline_ms, config_.calls.first_deadline_ms);
  return std::make_unique<Canary>(io_, o, *backend_, service_, metrics_);
}

AttachHandlers Daemon::attach_handlers() {
  return {.status_json = [this] { return to_json(report()); },
          .fetch = [this](const Fetch& fetch, std::string& why) { return links_.take(fetch, why); },
          .trace = [this] { return recorder_.descriptor(); }};
}

AttachOptions Daemon::attach_options() const {
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
  i.backend = static_cast<uint32_t>(config_.backend);
  if (config_.backend == BackendKind::cuda) i.sharing = static_cast<uint32_t>(config_.gpu.sharing);
  i.incarnation = incarnation_;
  std::copy(model_.digest.begin(), model_.digest.end(), i.model_digest);
  return o;
}

void Daemon::warn_about_drills() const {
  const DebugConfig& d = config_.debug;
  const bool ours = d.flip_expert >= first_expert(model_.shape, config_.rank, config_.ranks()) &&
                    d.flip_expert < first_expert(model_.shape, config_.rank + 1, config_.ranks());
  if (d.flip_after_ms != 0 && ours)
    log_warn("drill: this daemon flips a bit of its weights",
             {{"layer", d.flip_layer}, {"expert", d.flip_expert}, {"after_ms", d.flip_after_ms}});
  if ((d.experts_delay_us | d.loop_delay_us | d.send_delay_us | d.call_delay_us) == 0) return;
  log_warn("drill: this daemon is slowed on purpose", {{"experts_delay_us", d.experts_delay_us},
                                                       {"loop_delay_us", d.loop_delay_us},
                                                       {"send_delay_us", d.send_delay_us},
                                                       {"call_delay_us", d.call_delay_us},
                                                       {"for_ms", d.for_ms}});
}

}  // namespace moed
