// Read from accept() downwards: a connection, its messages, an attach, a hang-up.
#include "daemon/attach_server.h"

#include <sys/socket.h>
#include <sys/stat.h>

#include <utility>

#include <boost/asio/post.hpp>
#include <boost/asio/steady_timer.hpp>
#include <chrono>
#include <cstring>
#include <set>

#include "daemon/abi/arena.h"
#include "daemon/abi/socket.h"
#include "daemon/abi/text.h"
#include "daemon/log.h"
#include "daemon/seq_packet.h"

namespace moed {
namespace {

namespace asio = boost::asio;

constexpr size_t kSpareConnections =
    32;  ///< beyond one a lane and one a peer: status queries, engines that are refused
constexpr size_t kMaxMessage = 512;
constexpr std::chrono::seconds kMayIdle{5};             ///< a connection without a lane and without a message
constexpr std::chrono::milliseconds kAcceptPause{100};  ///< after an error of accept, such as no descriptor left
constexpr uint64_t kMinArena = 4096;

}  // namespace

class AttachServer::Impl : public std::enable_shared_from_this<Impl> {
 public:
  struct Connection {
    explicit Connection(SeqPacket::socket s) : socket(std::move(s)) {}
    SeqPacket::socket socket;
    uint32_t lane = 0;  ///< 0: not attached
    int32_t pid = 0;
    uint32_t uid = 0;
    bool dry = false;
    std::string name;
    std::chrono::steady_clock::time_point heard = std::chrono::steady_clock::now();
  };
  using ConnectionPtr = std::shared_ptr<Connection>;

  Impl(asio::io_context& io, AttachOptions options, Backend& backend, ServiceLoop& service, Metrics& metrics,
       AttachHandlers handlers)
      : io_(io),
        options_(std::move(options)),
        backend_(backend),
        service_(service),
        metrics_(metrics),
        handlers_(std::move(handlers)),
        acceptor_(io),
        pause_(io),
        sweep_(io),
        taken_(options_.lanes + 1, Taken::no) {
    path_ = options_.run_dir + "/" + options_.group + "/" + std::to_string(options_.rank) + ".sock";
    ::unlink(path_.c_str());  // the rank is ours, so whoever made it is gone
    acceptor_.open(SeqPacket());
    boost::system::error_code failed;
    acceptor_.bind(SeqPacket::endpoint(path_), failed);
    if (!failed) acceptor_.listen(static_cast<int>(limit()), failed);
    if (failed) throw std::runtime_error("cannot listen on " + path_ + ": " + failed.message());
    ::chmod(path_.c_str(), 0660);
  }

  void accept() {
    acceptor_.async_accept([self = shared_from_this()](boost::system::error_code error, SeqPacket::socket socket) {
      if (error == asio::error::operation_aborted) return;
      if (!error) {
        self->welcome(std::move(socket));
        return self->accept();
      }
      log_error("accept failed", {{"path", self->path_}, {"reason", error.message()}});
      self->pause_.expires_after(kAcceptPause);
      self->pause_.async_wait([self](boost::system::error_code stopped) {
        if (!stopped) self->accept();
      });
    });
  }

  /// Once a second: whoever holds no lane and says nothing makes room for others.
  void sweep() {
    sweep_.expires_after(std::chrono::seconds(1));
    sweep_.async_wait([self = shared_from_this()](boost::system::error_code stopped) {
      if (stopped) return;
      const auto limit = std::chrono::steady_clock::now() - kMayIdle;
      for (const ConnectionPtr& c : std::vector<ConnectionPtr>(self->connections_.begin(), self->connections_.end()))
        if (c->lane == 0 && c->heard < limit) self->hang_up(c);
      self->sweep();
    });
  }

  const std::string& path() const { return path_; }

  std::vector<LaneInfo> lanes() const {
    std::vector<LaneInfo> all;
    for (const ConnectionPtr& c : connections_)
      if (c->lane != 0) all.push_back({c->lane, c->name, c->pid, service_.calls(c->lane), c->dry});
    std::sort(all.begin(), all.end(), [](const LaneInfo& a, const LaneInfo& b) { return a.lane < b.lane; });
    return all;
  }

  void drain() { draining_ = true; }

  void stop() {
    boost::system::error_code ignored;
    acceptor_.close(ignored);
    pause_.cancel();
    sweep_.cancel();
    ::unlink(path_.c_str());
    const auto all = std::exchange(connections_, {});
    for (const ConnectionPtr& c : all) c->socket.close(ignored);
  }

 private:
  enum class Taken : uint8_t { no, yes, leaving };

  size_t limit() const { return options_.lanes + options_.info.ranks + kSpareConnections; }

  void welcome(SeqPacket::socket socket) {
    if (connections_.size() >= limit()) {
      metrics_.refused(Refused::attach);
      log_warn("connection refused", {{"reason", "too many"}, {"limit", limit()}});
      return;
    }
    auto c = std::make_shared<Connection>(std::move(socket));
    ucred peer{.pid = 0, .uid = static_cast<uid_t>(-1), .gid = 0};
    socklen_t bytes = sizeof peer;
    ::getsockopt(c->socket.native_handle(), SOL_SOCKET, SO_PEERCRED, &peer, &bytes);
    c->pid = peer.pid;
    c->uid = peer.uid;
    connections_.insert(c);
    listen(c);
  }

  void listen(const ConnectionPtr& c) {
    c->socket.async_wait(SeqPacket::socket::wait_read, [self = shared_from_this(), c](boost::system::error_code error) {
      if (error == asio::error::operation_aborted || !c->socket.is_open()) return self->hang_up(c);
      bool goes_on = false;
      try {
        goes_on = !error && self->hear(c);
      } catch (const std::exception& e) {  // no memory for an answer is this connection's end, not the daemon's
        log_error("message failed", {{"pid", c->pid}, {"reason", e.what()}});
      }
      if (!goes_on) return self->hang_up(c);
      self->listen(c);
    });
  }

  /// Takes one message. False: the connection is over.
  bool hear(const ConnectionPtr& c) {
    alignas(128) std::array<std::byte, kMaxMessage> buffer{};
    std::vector<Fd> fds;
    const ssize_t got = receive_message(c->socket.native_handle(), buffer, fds, MSG_DONTWAIT);
    if (got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return true;
    if (got == 0 || (got < 0 && errno == ECONNRESET)) return false;
    c->heard = std::chrono::steady_clock::now();
    MessageHeader header;
    if (got < static_cast<ssize_t>(sizeof header)) return refuse_message(c, got);
    std::memcpy(&header, buffer.data(), sizeof header);
    const auto is = [&](MessageType type, size_t bytes) {
      return header.magic == kAttachMagic && header.type == type && got == static_cast<ssize_t>(bytes);
    };
    if (is(MessageType::attach, sizeof(Attach))) {
      Attach attach;
      std::memcpy(&attach, buffer.data(), sizeof attach);
      return this->attach(c, attach);
    }
    if (is(MessageType::status, sizeof(StatusQuery))) return send_status(c);
    if (is(MessageType::trace, sizeof(TraceQuery))) return send_trace(c);
    if (is(MessageType::fetch, sizeof(Fetch))) {
      Fetch fetch;
      std::memcpy(&fetch, buffer.data(), sizeof fetch);
      return this->fetch(c, fetch);
    }
    if (is(MessageType::dry, sizeof(Dry)) && c->lane != 0) {
      Dry dry;
      std::memcpy(&dry, buffer.data(), sizeof dry);
      c->dry = dry.on != 0;
      backend_.set_dry(static_cast<int>(c->lane), c->dry);
      return answer(c, Status::ok, "");
    }
    if (is(MessageType::record, sizeof(Record)) && c->lane != 0)
      return answer(c, Status::unsupported, "stream calls need a CUDA daemon");
    return refuse_message(c, got);
  }

  /// What speaks against giving a descriptor to this user; empty: nothing.
  static std::string foreign(const Connection& c) {
    if (c.uid == ::geteuid()) return {};
    return "uid " + std::to_string(c.uid) + " is not this daemon's, " + std::to_string(::geteuid());
  }

  bool send_trace(const ConnectionPtr& c) {
    const std::string why = foreign(*c);
    if (!why.empty()) {
      metrics_.refused(Refused::attach);
      log_warn("trace refused", {{"pid", c->pid}, {"reason", why}});
      return answer(c, Status::denied, why);
    }
    const int fds[] = {handlers_.trace()};
    return answer(c, Status::ok, "", fds);
  }

  /// A peer daemon's token for a descriptor of ours.
  bool fetch(const ConnectionPtr& c, const Fetch& f) {
    std::string why = foreign(*c);
    Fd fd;
    if (why.empty()) fd = handlers_.fetch(f, why);
    if (!fd) {
      metrics_.refused(Refused::message);
      log_warn("fetch refused", {{"pid", c->pid}, {"rank", f.rank}, {"reason", why}});
    }
    const int fds[] = {fd.get()};
    return answer(c, fd ? Status::ok : Status::denied, why, {fds, size_t{fd ? 1U : 0U}}) && fd;
  }

  bool refuse_message(const ConnectionPtr& c, ssize_t bytes) {
    metrics_.refused(Refused::attach);
    log_warn("message refused", {{"pid", c->pid}, {"bytes", static_cast<int64_t>(bytes)}});
    return false;
  }

  bool answer(const ConnectionPtr& c, Status status, const std::string& text, std::span<const int> fds = {}) {
    Answer a;
    a.status = static_cast<uint32_t>(status);
    text.copy(a.text, sizeof a.text - 1);
    return send_message(c->socket.native_handle(), &a, sizeof a, fds);
  }

  bool send_status(const ConnectionPtr& c) {
    const std::string json = handlers_.status_json();
    return send_message(c->socket.native_handle(), json.data(), std::min<size_t>(json.size(), kMaxStatusBytes));
  }

  /// What speaks against an attach; empty: nothing.
  std::pair<Status, std::string> objection(const Connection& c, const Attach& a, uint64_t bytes) const {
    if (a.abi != kAbi)
      return {Status::version, "abi " + std::to_string(a.abi) + ", here " + std::to_string(kAbi) +
                                   ": use libmoed of this daemon's release"};
    if (c.uid != ::geteuid())
      return {Status::denied,
              "uid " + std::to_string(c.uid) + " may not attach to a daemon of uid " + std::to_string(::geteuid())};
    if (c.lane != 0) return {Status::busy, "this connection already holds lane " + std::to_string(c.lane)};
    if (draining_) return {Status::draining, "this daemon is leaving"};
    if (a.has_digest != 0 && std::memcmp(a.model_digest, options_.info.model_digest, sizeof a.model_digest) != 0)
      return {Status::version, "model digest " + hex(std::span(a.model_digest).first(8)) +
                                   ".. expected, this daemon serves " +
                                   hex(std::span(options_.info.model_digest).first(8)) + ".."};
    if (a.arena_kind != static_cast<uint32_t>(ArenaKind::host))
      return {Status::unsupported, "arena kind " + std::to_string(a.arena_kind) +
                                       (cuda() ? "; GPU arenas come with stream calls, ask for host memory (0)"
                                               : "; a CPU daemon has host memory (0) only")};
    if (bytes > options_.arena_bytes)
      return {Status::no_memory, "an arena of " + std::to_string(bytes) + " bytes, limits.arena_mb allows " +
                                     std::to_string(options_.arena_bytes)};
    if (slot_tokens(options_.shape, options_.slots, bytes, options_.max_call_tokens) == 0)
      return {Status::no_memory, "an arena of " + std::to_string(bytes) + " bytes holds no token in " +
                                     std::to_string(options_.slots) + " slots; one needs " +
                                     std::to_string(options_.slots * arena_slot(options_.shape, 0, 1).end)};
    return {Status::ok, ""};
  }

  bool cuda() const { return options_.info.backend != 0; }

  uint32_t free_lane() const {
    for (uint32_t lane = 1; lane < taken_.size(); ++lane)
      if (taken_[lane] == Taken::no) return lane;
    return 0;
  }

  bool attach(const ConnectionPtr& c, const Attach& a) {
    const uint64_t bytes = a.arena_bytes == 0 ? options_.arena_bytes : std::max(a.arena_bytes, kMinArena);
    auto [status, text] = objection(*c, a, bytes);
    const uint32_t lane = free_lane();
    if (status == Status::ok && lane == 0) {
      status = Status::busy;
      text = "all " + std::to_string(options_.lanes) + " lanes are taken:";
      for (const LaneInfo& l : lanes()) text += " " + l.name + " (pid " + std::to_string(l.pid) + ")";
    }
    LaneMemory memory;
    Mapping box;
    if (status == Status::ok) {
      status = backend_.open_lane(static_cast<int>(lane), static_cast<ArenaKind>(a.arena_kind), bytes, memory);
      if (status != Status::ok) text = backend_.last_error();
    }
    if (status == Status::ok) {
      box = Mapping(memory.host_mailbox, sizeof(HostMailbox));
      if (!box) {
        status = Status::no_memory;
        text = "the mailbox cannot be mapped";
        backend_.close_lane(static_cast<int>(lane));
      }
    }
    if (status != Status::ok) return reject(c, a, status, text);
    c->name = field_text(a.name);
    c->dry = a.dry != 0;
    return grant(c, a.arena_kind, lane, memory, std::move(box));
  }

  bool reject(const ConnectionPtr& c, const Attach& a, Status status, const std::string& text) {
    metrics_.refused(Refused::attach);
    log_warn("attach refused",
             {{"name", field_text(a.name)}, {"pid", c->pid}, {"status", name(status)}, {"reason", text}});
    Attached reply;
    reply.status = static_cast<uint32_t>(status);
    reply.info = options_.info;
    text.copy(reply.text, sizeof reply.text - 1);
    return send_message(c->socket.native_handle(), &reply, sizeof reply);
  }

  bool grant(const ConnectionPtr& c, uint32_t arena_kind, uint32_t lane, const LaneMemory& memory, Mapping box) {
    std::vector<int> fds{memory.host_mailbox.get()};
    if (memory.device_mailbox) fds.push_back(memory.device_mailbox.get());
    fds.push_back(memory.arena.get());
    Attached reply;
    reply.descriptors = static_cast<uint32_t>(fds.size());
    reply.deadline_ms = options_.deadline_ms;
    reply.first_deadline_ms = options_.first_deadline_ms;
    reply.info = options_.info;
    reply.info.lane = lane;
    reply.info.arena_bytes = memory.arena_bytes;
    reply.info.slot_tokens = slot_tokens(options_.shape, options_.slots, memory.arena_bytes, options_.max_call_tokens);
    MailboxHeader& header = reinterpret_cast<HostMailbox*>(box.data())->header;
    header.magic = kMailboxMagic;
    header.abi = kAbi;
    header.bytes = sizeof(HostMailbox);
    header.arena_kind = arena_kind;
    header.arena_bytes = memory.arena_bytes;
    header.incarnation.store(options_.info.incarnation, std::memory_order_release);
    taken_[lane] = Taken::yes;
    c->lane = lane;
    backend_.set_dry(static_cast<int>(lane), c->dry);
    service_.attach(lane, std::move(box));
    log_info("engine attached",
             {{"lane", lane}, {"name", c->name}, {"pid", c->pid}, {"arena_bytes", memory.arena_bytes}});
    return send_message(c->socket.native_handle(), &reply, sizeof reply, fds);
  }

  void hang_up(const ConnectionPtr& c) {
    boost::system::error_code ignored;
    c->socket.close(ignored);
    connections_.erase(c);
    const uint32_t lane = std::exchange(c->lane, 0);
    if (lane == 0) return;
    taken_[lane] = Taken::leaving;
    log_info("engine detached", {{"lane", lane}, {"name", c->name}, {"pid", c->pid}, {"calls", service_.calls(lane)}});
    service_.detach(lane, [self = shared_from_this(), lane] {
      asio::post(self->io_, [self, lane] {
        self->backend_.close_lane(static_cast<int>(lane));
        self->taken_[lane] = Taken::no;
      });
    });
  }

  asio::io_context& io_;
  AttachOptions options_;
  Backend& backend_;
  ServiceLoop& service_;
  Metrics& metrics_;
  AttachHandlers handlers_;
  SeqPacket::acceptor acceptor_;
  asio::steady_timer pause_, sweep_;
  std::vector<Taken> taken_;
  std::set<ConnectionPtr> connections_;
  std::string path_;
  bool draining_ = false;
};

AttachServer::AttachServer(asio::io_context& io, AttachOptions options, Backend& backend, ServiceLoop& service,
                           Metrics& metrics, AttachHandlers handlers)
    : impl_(std::make_shared<Impl>(io, std::move(options), backend, service, metrics, std::move(handlers))) {
  impl_->accept();
  impl_->sweep();
}

AttachServer::~AttachServer() { stop(); }
const std::string& AttachServer::path() const { return impl_->path(); }
std::vector<LaneInfo> AttachServer::lanes() const { return impl_->lanes(); }
void AttachServer::drain() { impl_->drain(); }
void AttachServer::stop() { impl_->stop(); }

}  // namespace moed
