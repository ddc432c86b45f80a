#include "control/net_loop.h"

#include <pthread.h>

#include <utility>

#include <algorithm>
#include <atomic>
#include <boost/asio/executor_work_guard.hpp>
#include <boost/asio/io_context.hpp>
#include <boost/asio/post.hpp>
#include <boost/asio/steady_timer.hpp>
#include <chrono>
#include <cstring>
#include <future>
#include <thread>

#include "control/rendezvous.h"
#include "control/ucx.h"

namespace moed::control {
namespace {

namespace asio = boost::asio;

constexpr Nanos kStall = 10'000'000;

size_t heartbeat_bytes(uint32_t ranks) { return offsetof(HeartbeatBody, wait_us) + ranks * sizeof(uint32_t); }

}  // namespace

class NetLoop::Impl {
 public:
  Impl(NetOptions options, NetHandlers handlers, KeyRing keys)
      : options_(std::move(options)),
        handlers_(std::move(handlers)),
        shown_(options_.hello.ranks),
        keys_(std::move(keys)),
        world_(options_.hello.rank, options_.hello.ranks, Nanos{options_.lost_after_ms} * 1'000'000),
        links_(options_.hello.ranks),
        timer_(io_) {
    for (uint32_t r = 0; r < links_.size(); ++r) show(r);
    std::promise<void> started;
    std::future<void> result = started.get_future();
    thread_ = std::thread([this, &started] { run(started); });
    try {
      result.get();
    } catch (...) {
      thread_.join();
      throw;
    }
  }

  ~Impl() {
    io_.stop();
    thread_.join();
  }

  template <class Work>
  void post(Work work) {
    asio::post(io_, std::move(work));
  }

  uint16_t port() const { return port_; }

  std::vector<PeerView> peers() const {
    std::vector<PeerView> views;
    for (const SharedPeer& peer : shown_) views.push_back(peer.view());
    return views;
  }

  std::vector<WaitRow> waits() const {
    std::vector<WaitRow> rows;
    for (const SharedPeer& peer : shown_) rows.push_back(peer.row(options_.hello.ranks));
    return rows;
  }

  void offer(LinkLife life, const SegmentBody& body) {
    if (lives(life)) say(life.rank, MessageId::segment, bytes_of(body));
  }

  void mapped(LinkLife life) {
    if (!lives(life)) return;
    say(life.rank, MessageId::mapped, {});
    if (lives(life) && world_.we_mapped(life.rank)) usable(life.rank);
  }

  void ready(LinkLife life) {
    if (!lives(life)) return;
    say(life.rank, MessageId::ready, bytes_of(ReadyBody{.session = world_.peer(life.rank).session}));
    if (lives(life) && world_.we_are_ready(life.rank)) settled(life.rank);
  }

  void lose(LinkLife life, const std::string& why) {
    if (lives(life)) lose(life.rank, Loss::error, why);
  }

  void keys(KeyRing keys) { keys_ = std::move(keys); }

  void leave() {
    rendezvous_->leave();
    for (uint32_t r = 0; r < links_.size(); ++r)
      if (links_[r].open) say(r, MessageId::leaving, {});
  }

 private:
  struct Link {
    uint64_t life = 0;
    UcxWorker::Endpoint endpoint = 0;
    Key session{};
    uint64_t counter = 0;
    Nanos since = 0;
    bool open = false;  ///< the peer knows the session key
  };

  /// The worker belongs to the thread that made it.
  void run(std::promise<void>& started) {
    ::pthread_setname_np(::pthread_self(), "moed-net");
    try {
      start();
    } catch (...) {
      stop();
      return started.set_exception(std::current_exception());
    }
    started.set_value();
    io_.run();
    stop();
  }

  void start() {
    ucx_ = std::make_unique<UcxWorker>(
        io_,
        UcxWorker::Handlers{
            .message = [this](auto header, auto body) { heard(header, body); },
            .failed = [this](UcxWorker::Endpoint endpoint, const std::string& why) { failed(endpoint, why); }},
        options_.ucx_ports, options_.ucx_devices);
    RendezvousOptions o;
    o.hello = options_.hello;
    o.peers = options_.peers;
    o.listen = options_.listen;
    o.ucx_address = ucx_->address();
    RendezvousHandlers h;
    h.refuse = [this](uint32_t rank) { return refuse(rank); };
    h.greatest_session = [this](uint32_t rank) { return world_.peer(rank).greatest_session; };
    h.proven = [this](const Proven& who) { proven(who); };
    h.open = [this](uint32_t rank) { open(rank); };
    h.ended = [this](uint32_t rank) { lose(rank, Loss::error, "the connection ended"); };
    h.refused = [this](const std::string& why) { handlers_.refused(why); };
    rendezvous_ = std::make_unique<Rendezvous>(io_, std::move(o), std::move(h), keys_);
    port_ = rendezvous_->port();
    last_tick_ = now_ns();
    tick();
  }

  void stop() {
    timer_.cancel();
    rendezvous_.reset();
    ucx_.reset();
  }

  bool lives(LinkLife life) const {
    return life.rank < links_.size() && life.number != 0 && links_[life.rank].life == life.number;
  }
  LinkLife life(uint32_t rank) const { return {rank, links_[rank].life}; }

  std::optional<std::string> refuse(uint32_t rank) const {
    if (!world_.alive(rank)) return {};
    return "rank " + std::to_string(rank) + " is linked already (" + name(world_.peer(rank).state) + ")";
  }

  void proven(const Proven& who) {
    Link link;
    std::string why;
    // Another link of the same pair may have come and gone since we sent our Proof: then the ends would not agree.
    if (who.greatest_sent != world_.peer(who.rank).greatest_session) return rendezvous_->close(who.rank);
    if (const auto no = world_.proven(who.rank, who.hello.incarnation, who.proof.greatest_session, now_ns())) {
      handlers_.refused(*no);
      return rendezvous_->close(who.rank);
    }
    link.life = ++last_life_;
    link.session = who.session;
    link.since = now_ns();
    link.endpoint = ucx_->connect({who.proof.address, who.proof.address_bytes}, why);
    links_[who.rank] = link;
    if (link.endpoint == 0) return lose(who.rank, Loss::error, why);
    show(who.rank);
  }

  /// On the peer's byte over TCP or on its first message over UCX, whichever is here first.
  void open(uint32_t rank) {
    if (std::exchange(links_[rank].open, true)) return;
    handlers_.open(life(rank), world_.peer(rank).session);
  }

  void usable(uint32_t rank) {
    show(rank);
    handlers_.usable(life(rank), world_.peer(rank).session);
  }

  void settled(uint32_t rank) {
    rendezvous_->settled(rank);
    show(rank);
    handlers_.ready(life(rank), world_.peer(rank).session, now_ns() - links_[rank].since);
  }

  void lose(uint32_t rank, Loss why, const std::string& text) {
    const Peer& peer = world_.peer(rank);
    const bool was_up = peer.state == State::mapped || peer.state == State::ready;
    const Loss reason = peer.leaving ? Loss::leaving : why;
    const Link link = std::exchange(links_[rank], {});
    if (!world_.lose(rank, why)) return;
    ucx_->close(link.endpoint);
    rendezvous_->close(rank);
    show(rank);
    handlers_.lost({rank, link.life}, reason, text, was_up);
  }

  void failed(UcxWorker::Endpoint endpoint, const std::string& why) {
    for (uint32_t r = 0; r < links_.size(); ++r)
      if (links_[r].endpoint == endpoint) return lose(r, Loss::error, "ucx: " + why);
  }

  /// Signs and sends; a link that cannot be sent on is lost.
  void say(uint32_t rank, MessageId id, std::span<const uint8_t> body) {
    Link& link = links_[rank];
    MessageHeader header;
    header.id = id;
    header.rank = options_.hello.rank;
    header.incarnation = options_.hello.incarnation;
    header.counter = ++link.counter;
    const auto mac = sign(link.session, header, body);
    std::memcpy(header.hmac, mac.data(), mac.size());
    if (!ucx_->send(link.endpoint, bytes_of(header), body)) lose(rank, Loss::error, "messages cannot be sent");
  }

  /// Whoever has our address can send: nothing is believed before the MAC holds.
  void heard(std::span<const uint8_t> header_bytes, std::span<const uint8_t> body) {
    MessageHeader header;
    if (!rendezvous_) return;  // we are stopping
    if (!take(header_bytes, header) || header.rank >= links_.size() || links_[header.rank].life == 0 ||
        !verify(links_[header.rank].session, header, body) ||
        !world_.heard(header.rank, header.incarnation, header.counter, now_ns()))
      return handlers_.dropped();
    const uint32_t rank = header.rank;
    open(rank);
    bool sound = true;
    SegmentBody segment;
    ReadyBody ready;
    switch (header.id) {
      case MessageId::segment:
        sound = take(body, segment);
        if (sound) handlers_.segment(life(rank), header.incarnation, segment);
        break;
      case MessageId::mapped:
        if (world_.they_mapped(rank)) usable(rank);
        break;
      case MessageId::ready:
        sound = take(body, ready) && ready.session == world_.peer(rank).session;
        if (sound && world_.they_are_ready(rank, ready.session)) settled(rank);
        break;
      case MessageId::heartbeat:
        sound = beat(rank, body);
        break;
      case MessageId::leaving:
        if (world_.they_leave(rank)) handlers_.leaving(life(rank), world_.peer(rank).session);
        break;
      default:
        sound = false;
    }
    if (!sound) give_up(life(rank), header.id, body.size());
    show(rank);
  }

  /// Later, because nothing may be closed inside a callback of UCX.
  void give_up(LinkLife life, MessageId id, size_t bytes) {
    post([this, life, id, bytes] {
      lose(life, "a message that makes no sense (id " + std::to_string(static_cast<uint32_t>(id)) + ", " +
                     std::to_string(bytes) + " bytes)");
    });
  }

  bool beat(uint32_t rank, std::span<const uint8_t> body) {
    HeartbeatBody beat;
    if (body.size() != heartbeat_bytes(options_.hello.ranks)) return false;
    std::memcpy(&beat, body.data(), body.size());
    world_.beat(rank, beat);
    shown_[rank].add(beat, now_ns());
    return true;
  }

  /// Every interval: who is silent is lost, the others hear from us.
  void tick() {
    const Nanos now = now_ns();
    const Nanos interval = Nanos{options_.interval_ms} * 1'000'000;
    handlers_.tick(now);
    const Nanos late = now - last_tick_ > interval ? now - last_tick_ - interval : 0;
    last_tick_ = now;
    if (late > kStall) handlers_.stall();
    if (late > Nanos{options_.lost_after_ms} * 500'000) world_.was_away(now);
    for (const uint32_t rank : world_.silent(now)) {
      const Nanos silent = now - world_.peer(rank).heard;
      lose(rank, Loss::heartbeat,
           "silent for " + std::to_string(silent / 1'000'000) + " ms, heartbeat.lost_after_ms " +
               std::to_string(options_.lost_after_ms));
    }
    send_beats();
    timer_.expires_after(std::chrono::milliseconds(options_.interval_ms));
    timer_.async_wait([this](boost::system::error_code stopped) {
      if (!stopped) tick();
    });
  }

  void send_beats() {
    const HeartbeatBody total = handlers_.beat();
    HeartbeatBody beat = total;
    for (uint32_t r = 0; r < links_.size(); ++r) beat.wait_us[r] = total.wait_us[r] - waited_us_[r];
    std::memcpy(waited_us_, total.wait_us, sizeof waited_us_);
    const std::span<const uint8_t> body = bytes_of(beat).first(heartbeat_bytes(options_.hello.ranks));
    for (uint32_t r = 0; r < links_.size(); ++r)
      if (links_[r].open) say(r, MessageId::heartbeat, body);
  }

  /// Copies what the world knows of a peer to where other threads look.
  void show(uint32_t rank) { shown_[rank].show(world_.peer(rank), options_.hello.ranks); }

  const NetOptions options_;
  const NetHandlers handlers_;
  std::vector<SharedPeer> shown_;
  uint16_t port_ = 0;
  asio::io_context io_{1};
  // The net thread's alone:
  KeyRing keys_;
  World world_;
  std::vector<Link> links_;
  uint64_t last_life_ = 0;
  Nanos last_tick_ = 0;
  uint32_t waited_us_[kMaxRanks] = {};
  asio::steady_timer timer_;
  std::unique_ptr<UcxWorker> ucx_;
  std::unique_ptr<Rendezvous> rendezvous_;
  std::thread thread_;  // last: it uses what is above
};

NetLoop::NetLoop(NetOptions options, NetHandlers handlers, KeyRing keys)
    : impl_(std::make_unique<Impl>(std::move(options), std::move(handlers), std::move(keys))) {}
NetLoop::~NetLoop() = default;
uint16_t NetLoop::port() const { return impl_->port(); }
std::vector<PeerView> NetLoop::peers() const { return impl_->peers(); }
std::vector<WaitRow> NetLoop::waits() const { return impl_->waits(); }
void NetLoop::offer(LinkLife life, const SegmentBody& body) {
  impl_->post([impl = impl_.get(), life, body] { impl->offer(life, body); });
}
void NetLoop::mapped(LinkLife life) {
  impl_->post([impl = impl_.get(), life] { impl->mapped(life); });
}
void NetLoop::ready(LinkLife life) {
  impl_->post([impl = impl_.get(), life] { impl->ready(life); });
}
void NetLoop::lose(LinkLife life, const std::string& why) {
  impl_->post([impl = impl_.get(), life, why] { impl->lose(life, why); });
}
void NetLoop::keys(KeyRing keys) {
  impl_->post([impl = impl_.get(), keys = std::move(keys)] { impl->keys(keys); });
}
void NetLoop::leave() {
  impl_->post([impl = impl_.get()] { impl->leave(); });
}

}  // namespace moed::control
