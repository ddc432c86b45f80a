// A link's life reads from open() downwards.
#include "daemon/links.h"

#include <algorithm>
#include <boost/asio/post.hpp>
#include <cstring>
#include <numeric>
#include <utility>

#include "control/auth.h"
#include "daemon/backends.h"
#include "daemon/log.h"
#include "daemon/version.h"
#include "kernels/heap.h"

namespace moed {
namespace {

using control::LinkLife;

constexpr Nanos kSayAgain = 60'000'000'000;  ///< a refusal that repeats is logged once a minute
constexpr size_t kMostRefusals = 256;

template <size_t N>
void copy_text(const std::string& text, char (&to)[N]) {
  text.copy(to, N - 1);
}

bool all_loopback(const ControlConfig& control) {
  return std::all_of(control.peers.begin(), control.peers.end(),
                     [](const std::string& peer) { return is_loopback(parse_endpoint(peer)->host); });
}

/// Whether a handle of this kind is a descriptor, which a one-time token stands for on the wire; a fabric handle is its
/// own 64 bytes.
bool by_descriptor(HandleKind kind) { return kind == HandleKind::memfd || kind == HandleKind::cuda_fd; }

const char* kind_name(HandleKind kind) {
  switch (kind) {
    case HandleKind::memfd:
      return "memfd";
    case HandleKind::cuda_fd:
      return "cuda fd";
    case HandleKind::fabric:
      return "fabric";
    case HandleKind::address:
      break;  // never on the wire
  }
  return "unknown";
}

/// "cuda fd, fabric".
std::string kind_names(uint32_t kinds) {
  std::string names;
  for (const HandleKind kind : {HandleKind::memfd, HandleKind::cuda_fd, HandleKind::fabric})
    if ((kinds >> static_cast<uint32_t>(kind) & 1U) != 0)
      names += (names.empty() ? "" : ", ") + std::string(kind_name(kind));
  return names;
}

}  // namespace

std::string listen_address(const Config& config) {
  if (!config.control.listen.empty()) return config.control.listen;
  const Endpoint own = *parse_endpoint(config.control.peers[config.rank]);
  if (!all_loopback(config.control)) return ":" + std::to_string(own.port);
  return config.control.peers[config.rank];
}

Links::Links(boost::asio::io_context& io, const Config& config, const Model& model, uint64_t incarnation,
             Metrics& metrics)
    : io_(io),
      config_(config),
      incarnation_(incarnation),
      metrics_(metrics),
      links_(config.ranks()),
      keys_(config.control.secret_dir) {
  if (config.ranks() > 1) net_ = std::make_unique<control::NetLoop>(net_options(model), net_handlers(), keys_);
}

Links::~Links() = default;

control::NetOptions Links::net_options(const Model& model) const {
  control::NetOptions o;
  control::Hello& h = o.hello;
  h.protocol = kProtocol;
  h.numerics = kNumerics;
  h.rank = config_.rank;
  h.ranks = config_.ranks();
  h.lanes = config_.limits.lanes;
  h.max_tokens = config_.limits.max_tokens;
  h.transport = static_cast<uint32_t>(config_.transport);
  h.handle_kinds = allowed_handle_kinds(config_);  // the back end is not there yet: it may still be loading
  h.incarnation = incarnation_;
  copy_text(config_.group, h.group);
  copy_text(config_.model.revision, h.revision);
  copy_text(std::string(kVersion) + " " + kCommit, h.build);
  std::copy(model.digest.begin(), model.digest.end(), h.model_digest);
  h.shape = model.shape;
  o.peers = config_.control.peers;
  o.listen = listen_address(config_);
  const PortRange ports = config_.control.ucx_ports;
  o.ucx_ports = std::to_string(ports.low) + "-" + std::to_string(ports.high);
  if (all_loopback(config_.control)) o.ucx_devices = "lo";
  o.interval_ms = config_.heartbeat.interval_ms;
  o.lost_after_ms = config_.heartbeat.lost_after_ms;
  return o;
}

/// Everything that needs the back end is posted to the control thread; the rest is atomics.
control::NetHandlers Links::net_handlers() {
  const auto post = [this](auto work) { boost::asio::post(io_, std::move(work)); };
  control::NetHandlers h;
  h.open = [this, post](LinkLife life, uint32_t) { post([this, life] { open(life); }); };
  h.segment = [this, post](LinkLife life, uint64_t incarnation, const control::SegmentBody& body) {
    post([this, life, incarnation, body] { segment(life, incarnation, body); });
  };
  h.usable = [this, post](LinkLife life, uint32_t session) { post([this, life, session] { usable(life, session); }); };
  h.ready = [this, post](LinkLife life, uint32_t session, Nanos took) {
    post([this, life, session, took] { ready(life, session, took); });
  };
  h.leaving = [this, post](LinkLife life, uint32_t session) {
    post([this, life, session] { leaving(life, session); });
  };
  h.lost = [this, post](LinkLife life, control::Loss why, const std::string& text, bool was_up) {
    post([this, life, why, text, was_up] { lost(life, why, text, was_up); });
  };
  h.refused = [this, post](const std::string& why) { post([this, why] { refused(why); }); };
  h.dropped = [this] { metrics_.refused(Refused::message); };
  h.beat = [this] { return beat(); };
  h.tick = [this](Nanos now) { metrics_.tick(LoopId::net, now); };
  h.stall = [this] { metrics_.stall(LoopId::net); };
  return h;
}

control::HeartbeatBody Links::beat() const {
  control::HeartbeatBody beat;
  beat.service_age_us =
      static_cast<uint32_t>(std::min<Nanos>(metrics_.tick_age(LoopId::service, now_ns()) / 1000, UINT32_MAX));
  beat.busy = busy_.load();
  for (uint32_t r = 0; r < config_.ranks(); ++r)
    beat.wait_us[r] = static_cast<uint32_t>(static_cast<uint64_t>(metrics_.peer_wait(r) * 1e6));
  return beat;
}

void Links::start(Backend& backend, std::function<void()> changed) {
  backend_ = &backend;
  changed_ = std::move(changed);
  show_busy();
}

/// A sentence that repeats is said once a minute; one that the log held back is said when it comes again.
void Links::refused(const std::string& why) {
  metrics_.refused(Refused::handshake);
  const Nanos now = now_ns();
  std::erase_if(refused_, [now](const auto& said) { return now > said.second + kSayAgain; });
  if (refused_.size() < kMostRefusals && !refused_.contains(why) &&
      log_line(LogLevel::warn, "handshake refused", {{"reason", why}}))
    refused_[why] = now;
}

/// The peer has proven who it is: it gets a segment of its own, new and zeroed.
void Links::open(LinkLife life) {
  links_[life.rank].life = life;
  Handle segment;
  Handle doorbell;
  const int rank = static_cast<int>(life.rank);
  if (backend_->make_segment(rank, segment) != Status::ok || backend_->make_doorbell(doorbell) != Status::ok)
    return net_->lose(life, backend_->last_error());
  control::SegmentBody body;
  body.kind = static_cast<uint32_t>(segment.kind);
  body.bytes = segment.bytes;
  const Token segment_token = token_of(life, segment);
  const Token doorbell_token = token_of(life, doorbell);
  std::memcpy(body.segment, segment_token.data(), segment_token.size());
  std::memcpy(body.doorbell, doorbell_token.data(), doorbell_token.size());
  net_->offer(life, body);
}

/// What stands for a handle on the wire; zeros for a descriptor that is not there: a back end that needs no doorbell.
Links::Token Links::token_of(LinkLife life, Handle& handle) {
  if (by_descriptor(handle.kind)) return handle.fd ? offer(life, std::move(handle.fd)) : Token{};
  Token token{};
  std::memcpy(token.data(), handle.token.data(), token.size());
  return token;
}

Links::Token Links::offer(LinkLife life, Fd fd) {
  Token token{};
  for (size_t half = 0; half < token.size(); half += 32) {
    const auto nonce = control::fresh_nonce();
    std::copy(nonce.begin(), nonce.end(), token.begin() + static_cast<std::ptrdiff_t>(half));
  }
  offered_[token] = {life, std::move(fd)};
  return token;
}

Fd Links::take(const Fetch& fetch, std::string& why) {
  Token token{};
  std::memcpy(token.data(), fetch.token, token.size());
  const auto at = offered_.find(token);
  if (fetch.protocol != kProtocol)
    why = "protocol " + std::to_string(fetch.protocol) + ", here " + std::to_string(kProtocol);
  else if (fetch.incarnation != incarnation_)
    why = "this daemon is another one than was asked for";
  else if (at == offered_.end() || at->second.life.rank != fetch.rank)
    why = "no such token of rank " + std::to_string(fetch.rank);
  if (!why.empty()) return {};
  Fd fd = std::move(at->second.fd);
  offered_.erase(at);
  return fd;
}

/// What we may write at the peer, if we can map what it gives.
void Links::segment(LinkLife life, uint64_t incarnation, const control::SegmentBody& body) {
  if (!lives(life) || std::exchange(links_[life.rank].asked, true)) return;
  const auto kind = static_cast<HandleKind>(body.kind);
  const uint32_t kinds = backend_->handle_kinds();
  if (body.kind >= 32 || (kinds >> body.kind & 1U) == 0)
    return net_->lose(life, "rank " + std::to_string(life.rank) + " gives handles of kind " + kind_name(kind) + " (" +
                                std::to_string(body.kind) + "), this rank takes " + kind_names(kinds) +
                                ": set gpu.handles alike on all ranks");
  if (by_descriptor(kind)) return fetch(life, incarnation, body);
  map(life, body, {});
}

/// Descriptors come over the peer's Unix socket, which both can open.
void Links::fetch(LinkLife life, uint64_t incarnation, const control::SegmentBody& body) {
  const Token doorbell = std::to_array(body.doorbell);
  std::vector<Fetch> requests(doorbell == Token{} ? 1 : 2);
  for (Fetch& request : requests) {
    request.rank = config_.rank;
    request.incarnation = incarnation;
  }
  std::memcpy(requests[0].token, body.segment, sizeof body.segment);
  if (requests.size() > 1) std::memcpy(requests[1].token, body.doorbell, sizeof body.doorbell);
  const std::string path = config_.run_dir + "/" + config_.group + "/" + std::to_string(life.rank) + ".sock";
  links_[life.rank].fetcher = std::make_unique<Fetcher>(
      io_, path, std::move(requests), [this, life, body](std::vector<Fd> fds, const std::string& why) {
        links_[life.rank].fetcher.reset();
        show_busy();
        if (!why.empty())
          return net_->lose(life, why + " (ranks that pass descriptors share one host and one run_dir)");
        map(life, body, std::move(fds));
      });
  show_busy();
}

void Links::show_busy() {
  const bool mapping = std::any_of(links_.begin(), links_.end(), [](const Link& l) { return l.fetcher != nullptr; });
  busy_.store(draining_ ? control::Busy::draining : mapping ? control::Busy::mapping : control::Busy::no);
}

void Links::map(LinkLife life, const control::SegmentBody& body, std::vector<Fd> fds) {
  Handle segment;
  segment.kind = static_cast<HandleKind>(body.kind);
  segment.bytes = body.bytes;
  fds.resize(2);
  segment.fd = std::move(fds[0]);
  std::memcpy(segment.token.data(), body.segment, sizeof body.segment);
  Handle doorbell;
  doorbell.kind = segment.kind;
  doorbell.bytes = sizeof(Doorbell);
  doorbell.fd = std::move(fds[1]);
  std::memcpy(doorbell.token.data(), body.doorbell, sizeof body.doorbell);
  if (backend_->map_segment(static_cast<int>(life.rank), segment, doorbell) != Status::ok)
    return net_->lose(life, backend_->last_error());
  net_->mapped(life);
}

/// Both ends have mapped: from here calls may go through the link.
void Links::usable(LinkLife life, uint32_t session) {
  if (!lives(life)) return;
  backend_->link_changed(static_cast<int>(life.rank), LinkState::ready, session);
  net_->ready(life);
}

void Links::ready(LinkLife life, uint32_t session, Nanos took) {
  if (!lives(life)) return;
  log_info("link ready", {{"peer", life.rank}, {"session", session}, {"took_ms", took / 1'000'000}});
  changed_();
}

/// Calls that wait for the peer go on; new ones that need it end with peer_lost.
void Links::leaving(LinkLife life, uint32_t session) {
  if (!lives(life)) return;
  log_info("peer leaving", {{"peer", life.rank}, {"session", session}});
  backend_->link_changed(static_cast<int>(life.rank), LinkState::mapped, session);
  changed_();
}

void Links::lost(LinkLife life, control::Loss why, const std::string& text, bool was_up) {
  if (lives(life)) {
    links_[life.rank] = {};
    std::erase_if(offered_, [life](const auto& o) { return o.second.life == life; });
    const int rank = static_cast<int>(life.rank);
    backend_->link_changed(rank, LinkState::lost, 0);
    backend_->retire(rank);
    show_busy();
  }
  if (was_up)
    log_line(why == control::Loss::leaving ? LogLevel::info : LogLevel::warn, "link lost",
             {{"peer", life.rank}, {"reason", name(why)}, {"why", text}});
  else
    log_info("link not made", {{"peer", life.rank}, {"why", text}});
  changed_();
}

void Links::refresh_keys() {
  const control::KeyRing::Refreshed refreshed = keys_.refresh();
  if (refreshed.fault) log_warn("keys not read: the old ones stay", {{"reason", *refreshed.fault}});
  if (!refreshed.changed) return;
  log_info("keys read", {{"newest", keys_.newest()}});
  if (net_) net_->keys(keys_);
}

std::vector<control::PeerView> Links::peers() const {
  if (net_) return net_->peers();
  return {control::PeerView{.state = control::State::ready}};
}

std::vector<uint64_t> Links::lives() const {
  std::vector<uint64_t> all;
  for (const control::PeerView& v : peers())
    all.push_back(v.state == control::State::ready ? 1 + std::accumulate(v.losses.begin(), v.losses.end(), uint64_t{0})
                                                   : 0);
  return all;
}

std::vector<control::WaitRow> Links::waits() const { return net_ ? net_->waits() : std::vector<control::WaitRow>(1); }

std::vector<std::string> Links::missing() const {
  std::vector<std::string> all;
  const std::vector<control::PeerView> views = peers();
  for (uint32_t r = 0; r < views.size(); ++r) {
    const control::PeerView& v = views[r];
    const std::string why = control::why_not_ready(v.state, v.leaving, v.busy);
    if (!why.empty()) all.push_back("link " + std::to_string(r) + ": " + why);
  }
  return all;
}

}  // namespace moed
