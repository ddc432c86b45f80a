// Two ends may dial each other at once. The lower rank decides: it sends its Proof on one connection per peer at a
// time, and that connection stays. So both ends always keep the same one.
#include "control/rendezvous.h"

#include <utility>

#include <algorithm>
#include <boost/asio/connect.hpp>
#include <boost/asio/io_context.hpp>
#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/read.hpp>
#include <boost/asio/steady_timer.hpp>
#include <boost/asio/write.hpp>
#include <chrono>
#include <cstring>
#include <set>
#include <stdexcept>

#include "control/tcp.h"
#include "control/world.h"
#include "daemon/abi/text.h"

namespace moed::control {
namespace {

namespace asio = boost::asio;
using asio::ip::tcp;
using std::chrono::milliseconds;

constexpr char kHere = '+';
constexpr const char* kBrokeOff = "a handshake that broke off";

}  // namespace

class Rendezvous::Impl : public std::enable_shared_from_this<Impl> {
 public:
  /// One connection, from accept or connect to its end.
  struct Connection {
    Connection(asio::io_context& io, Side s) : socket(io), limit(io), side(s) {}
    tcp::socket socket;
    asio::steady_timer limit;
    const Side side;
    uint32_t rank = kMaxRanks;  ///< as dialled, or as proven
    bool over = false, kept = false;
    Hello ours, theirs;
    Proof our_proof, their_proof;
    Key key{};
    char extra = 0;
    const Hello& dialler() const { return side == Side::dialler ? ours : theirs; }
    const Hello& listener() const { return side == Side::dialler ? theirs : ours; }
  };
  using ConnectionPtr = std::shared_ptr<Connection>;

  Impl(asio::io_context& io, RendezvousOptions options, RendezvousHandlers handlers, KeyRing& keys)
      : io_(io),
        options_(std::move(options)),
        handlers_(std::move(handlers)),
        keys_(keys),
        acceptor_(listen_on(io, options_.listen)),
        port_(acceptor_.local_endpoint().port()),
        pause_(io) {
    for (uint32_t r = 0; r < options_.peers.size(); ++r) slots_.push_back(std::make_unique<Slot>(io));
    for (const std::string& peer : options_.peers) split(peer);  // what is no address is refused now, not at a dial
  }

  void start() {
    accept();
    for (uint32_t r = 0; r < slots_.size(); ++r)
      if (r != options_.hello.rank) dial(r);
  }

  void stop() {
    stopped_ = true;
    boost::system::error_code ignored;
    acceptor_.close(ignored);
    pause_.cancel();
    for (const auto& slot : slots_) {
      slot->again.cancel();
      slot->resolver.cancel();
    }
    for (const ConnectionPtr& c : std::set<ConnectionPtr>(connections_)) drop(c);
  }

  void leave() {
    leaving_ = true;
    boost::system::error_code ignored;
    acceptor_.close(ignored);
    for (const auto& slot : slots_) slot->again.cancel();
    for (const ConnectionPtr& c : std::set<ConnectionPtr>(connections_))
      if (!c->kept) drop(c);
  }

  uint16_t port() const { return port_; }
  void settled(uint32_t rank) { slots_[rank]->backoff = milliseconds(0); }

  void close(uint32_t rank) {
    const ConnectionPtr c = slots_[rank]->chosen;
    if (c) return drop(c);
    retry(rank);
  }

 private:
  struct Slot {
    explicit Slot(asio::io_context& io) : resolver(io), again(io) {}
    tcp::resolver resolver;
    asio::steady_timer again;
    milliseconds backoff{0};
    bool dialling = false;
    ConnectionPtr chosen;  ///< the connection on which the lower rank has sent its Proof, or that is kept
  };

  void accept() {
    auto c = std::make_shared<Connection>(io_, Side::listener);
    acceptor_.async_accept(c->socket, [self = shared_from_this(), c](boost::system::error_code error) {
      if (self->stopped_ || self->leaving_) return;
      if (error) {
        self->pause_.expires_after(milliseconds(self->options_.backoff_most_ms));
        self->pause_.async_wait([self](boost::system::error_code stopped) {
          if (!stopped) self->accept();
        });
        return;
      }
      self->make_room();
      self->begin(c);
      self->read_hello(c);
      self->accept();
    });
  }

  /// Beyond the limit the oldest handshake goes: a peer's takes milliseconds, a stranger may take its time.
  void make_room() {
    ConnectionPtr oldest;
    size_t under_way = 0;
    for (const ConnectionPtr& c : connections_) {
      if (c->side != Side::listener || c->kept) continue;
      ++under_way;
      if (!oldest || c->limit.expiry() < oldest->limit.expiry()) oldest = c;
    }
    if (under_way >= options_.connections)
      refuse(oldest, "more than " + std::to_string(options_.connections) + " handshakes at once");
  }

  /// Dials at once; later attempts follow from retry().
  void dial(uint32_t rank) {
    Slot& slot = *slots_[rank];
    if (stopped_ || leaving_ || slot.dialling || slot.chosen) return;
    slot.dialling = true;
    const HostPort at = split(options_.peers[rank]);
    slot.resolver.async_resolve(
        at.host, at.port,
        [self = shared_from_this(), rank](boost::system::error_code error, const tcp::resolver::results_type& found) {
          if (self->stopped_ || self->leaving_) return;
          if (error) {
            self->slots_[rank]->dialling = false;
            return self->retry(rank);
          }
          auto c = std::make_shared<Connection>(self->io_, Side::dialler);
          c->rank = rank;
          self->begin(c);
          asio::async_connect(c->socket, found, [self, c](boost::system::error_code failed, const tcp::endpoint&) {
            if (c->over) return;
            if (failed) return self->drop(c);
            self->say_hello(c);
            self->write(c, c->ours, [self, c] { self->read_hello(c); });
          });
        });
  }

  void retry(uint32_t rank) {
    Slot& slot = *slots_[rank];
    if (stopped_ || leaving_ || slot.dialling || slot.chosen) return;
    slot.backoff =
        std::clamp(slot.backoff * 2, milliseconds(options_.backoff_least_ms), milliseconds(options_.backoff_most_ms));
    slot.again.expires_after(slot.backoff);
    slot.again.async_wait([self = shared_from_this(), rank](boost::system::error_code stopped) {
      if (!stopped) self->dial(rank);
    });
  }

  void begin(const ConnectionPtr& c) {
    connections_.insert(c);
    c->limit.expires_after(milliseconds(options_.handshake_ms));
    c->limit.async_wait([self = shared_from_this(), c](boost::system::error_code stopped) {
      if (stopped || c->over || c->kept) return;
      if (c->side == Side::listener)
        self->handlers_.refused("a handshake that took more than " + std::to_string(self->options_.handshake_ms) +
                                " ms");
      self->drop(c);
    });
  }

  void say_hello(const ConnectionPtr& c) {
    c->ours = options_.hello;
    const std::string id = c->side == Side::dialler ? keys_.newest() : field_text(c->theirs.key_id);
    id.copy(c->ours.key_id, sizeof c->ours.key_id - 1);
    const auto nonce = fresh_nonce();
    std::copy(nonce.begin(), nonce.end(), c->ours.nonce);
  }

  template <class T, class Then>
  void read(const ConnectionPtr& c, T& to, size_t from, Then then) {
    asio::async_read(c->socket, asio::buffer(reinterpret_cast<char*>(&to) + from, sizeof to - from),
                     [self = shared_from_this(), c, then](boost::system::error_code error, size_t) {
                       if (c->over) return;
                       if (error) return self->broke_off(c);
                       then();
                     });
  }

  template <class T, class Then>
  void write(const ConnectionPtr& c, const T& what, Then then) {
    asio::async_write(c->socket, asio::buffer(&what, sizeof what),
                      [self = shared_from_this(), c, then](boost::system::error_code error, size_t) {
                        if (c->over) return;
                        if (error) return self->drop(c);
                        then();
                      });
  }

  /// The magic first, so that whoever speaks another protocol is sent away at once.
  void read_hello(const ConnectionPtr& c) {
    asio::async_read(c->socket, asio::buffer(&c->theirs.magic, sizeof c->theirs.magic),
                     [self = shared_from_this(), c](boost::system::error_code error, size_t) {
                       if (c->over) return;
                       if (error) return self->broke_off(c);
                       if (c->theirs.magic != kHelloMagic)
                         return self->refuse(c, "a connection that does not speak this protocol");
                       self->read(c, c->theirs, sizeof c->theirs.magic, [self, c] { self->heard_hello(c); });
                     });
  }

  void heard_hello(const ConnectionPtr& c) {
    const std::string id = field_text(c->theirs.key_id);
    const Key* key = keys_.find(c->side == Side::dialler ? std::string(c->ours.key_id) : id);
    if (key == nullptr)
      return refuse(c, "a peer with key id '" + printable(id) + "', which is not in control.secret_dir");
    c->key = *key;
    if (c->side == Side::dialler) return send_proof(c);
    say_hello(c);
    write(c, c->ours, [self = shared_from_this(), c] { self->read_proof(c); });
  }

  /// The lower rank's Proof is its choice of this connection.
  void send_proof(const ConnectionPtr& c) {
    const uint32_t rank = c->rank;
    if (options_.hello.rank < rank) {
      Slot& slot = *slots_[rank];
      if (slot.chosen && slot.chosen != c) return drop(c);
      slot.chosen = c;
    }
    c->our_proof.greatest_session = handlers_.greatest_session(rank);
    c->our_proof.address_bytes = static_cast<uint16_t>(options_.ucx_address.size());
    std::copy(options_.ucx_address.begin(), options_.ucx_address.end(), c->our_proof.address);
    const Hmac hmac = prove(c->key, c->side, c->dialler(), c->listener(), c->our_proof);
    std::copy(hmac.begin(), hmac.end(), c->our_proof.hmac);
    write(c, c->our_proof, [self = shared_from_this(), c] {
      if (c->side == Side::dialler)
        self->read_proof(c);
      else
        self->agree(c);
    });
  }

  void read_proof(const ConnectionPtr& c) {
    read(c, c->their_proof, 0, [self = shared_from_this(), c] {
      const Side other = c->side == Side::dialler ? Side::listener : Side::dialler;
      const Hmac want = prove(c->key, other, c->dialler(), c->listener(), c->their_proof);
      if (!equal_in_constant_time(want, c->their_proof.hmac))
        return self->refuse(c, "a peer whose proof does not hold under key id '" + std::string(c->ours.key_id) + "'");
      if (c->their_proof.address_bytes > kMaxUcxAddress)
        return self->refuse(c, "a peer with an address of " + std::to_string(c->their_proof.address_bytes) + " bytes");
      self->proven(c);
    });
  }

  /// From here the Hello is the peer's own word.
  void proven(const ConnectionPtr& c) {
    if (c->side == Side::listener) c->rank = c->theirs.rank;
    const auto different = disagreement(options_.hello, c->theirs);
    const bool no_peer = c->rank >= slots_.size() || c->rank == options_.hello.rank;
    if (different && (no_peer || slots_[c->rank]->chosen)) return refuse(c, *different);
    if (c->theirs.rank != c->rank)
      return refuse(
          c, "peer " + std::to_string(c->theirs.rank) + " answers at the address of rank " + std::to_string(c->rank));
    if (c->their_proof.refused != 0)
      return refuse(
          c, "peer " + std::to_string(c->rank) + " refuses: " +
                 printable({reinterpret_cast<const char*>(c->their_proof.address), c->their_proof.address_bytes}));
    // The same life of the same peer on a second connection: both ends dialled, and one of the two is enough.
    const ConnectionPtr& chosen = slots_[c->rank]->chosen;
    if (!different && chosen && chosen != c && chosen->theirs.incarnation == c->theirs.incarnation) return drop(c);
    if (c->side == Side::dialler) return agree(c);
    // A listener lets the dialler know who it is even if they differ, so that both can name both values.
    if (!different) {
      if (const auto no = handlers_.refuse(c->rank)) return turn_away(c, *no);
    }
    send_proof(c);
  }

  /// Tells a proven dialler why there is no link, so that its log says so, too.
  void turn_away(const ConnectionPtr& c, const std::string& why) {
    handlers_.refused(why);
    Proof& p = c->our_proof;
    p.refused = 1;
    p.address_bytes = static_cast<uint16_t>(std::min<size_t>(why.size(), sizeof p.address));
    std::copy_n(why.begin(), p.address_bytes, p.address);
    const Hmac hmac = prove(c->key, c->side, c->dialler(), c->listener(), p);
    std::copy(hmac.begin(), hmac.end(), p.hmac);
    write(c, p, [self = shared_from_this(), c] { self->drop(c); });
  }

  /// Both proofs hold and are exchanged.
  void agree(const ConnectionPtr& c) {
    if (const auto different = disagreement(options_.hello, c->theirs)) return refuse(c, *different);
    if (const auto no = handlers_.refuse(c->rank)) return refuse(c, *no);
    Slot& slot = *slots_[c->rank];
    if (slot.chosen && slot.chosen != c) return drop(c);
    slot.chosen = c;
    c->kept = true;
    c->limit.cancel();
    slot.again.cancel();
    Proven who;
    who.rank = c->rank;
    who.hello = c->theirs;
    who.proof = c->their_proof;
    who.greatest_sent = c->our_proof.greatest_session;
    who.session = session_key(c->key, c->dialler(), c->listener());
    handlers_.proven(who);
    if (c->over) return;
    write(c, kHere, [] {});
    watch(c, false);
  }

  /// One byte says that the peer is there, too; whatever else comes is the connection's end.
  void watch(const ConnectionPtr& c, bool opened) {
    asio::async_read(c->socket, asio::buffer(&c->extra, 1),
                     [self = shared_from_this(), c, opened](boost::system::error_code error, size_t) {
                       if (c->over) return;
                       if (!error && !opened && c->extra == kHere) {
                         self->watch(c, true);
                         return self->handlers_.open(c->rank);
                       }
                       self->drop(c);
                       self->handlers_.ended(c->rank);
                     });
  }

  /// A dialler's failures are daily business until its peer is there; a stranger's are worth a line. But a peer that
  /// dialled us while we dialled it drops one of the two: then the other is there, or will be in a moment.
  void broke_off(const ConnectionPtr& c) {
    drop(c);
    if (c->side != Side::listener) return;
    if (c->theirs.rank >= slots_.size()) return handlers_.refused(kBrokeOff);
    auto later = std::make_shared<asio::steady_timer>(io_, milliseconds(options_.backoff_most_ms));
    later->async_wait([self = shared_from_this(), c, later](boost::system::error_code) {
      if (self->stopped_) return;
      const ConnectionPtr& other = self->slots_[c->theirs.rank]->chosen;
      if (!other || other->theirs.incarnation != c->theirs.incarnation) self->handlers_.refused(kBrokeOff);
    });
  }

  void refuse(const ConnectionPtr& c, const std::string& why) {
    drop(c);
    handlers_.refused(why);
  }

  void drop(const ConnectionPtr& c) {
    if (c->over) return;
    c->over = true;
    c->limit.cancel();
    boost::system::error_code ignored;
    c->socket.close(ignored);
    connections_.erase(c);
    if (c->rank >= slots_.size()) return;
    Slot& slot = *slots_[c->rank];
    if (slot.chosen == c) slot.chosen = nullptr;
    if (c->side == Side::dialler) slot.dialling = false;
    retry(c->rank);
  }

  asio::io_context& io_;
  const RendezvousOptions options_;
  RendezvousHandlers handlers_;
  KeyRing& keys_;
  tcp::acceptor acceptor_;
  const uint16_t port_;
  asio::steady_timer pause_;
  std::vector<std::unique_ptr<Slot>> slots_;
  std::set<ConnectionPtr> connections_;
  bool stopped_ = false, leaving_ = false;
};

Rendezvous::Rendezvous(asio::io_context& io, RendezvousOptions options, RendezvousHandlers handlers, KeyRing& keys)
    : impl_(std::make_shared<Impl>(io, std::move(options), std::move(handlers), keys)) {
  impl_->start();
}
Rendezvous::~Rendezvous() { impl_->stop(); }
uint16_t Rendezvous::port() const { return impl_->port(); }
void Rendezvous::close(uint32_t rank) { impl_->close(rank); }
void Rendezvous::settled(uint32_t rank) { impl_->settled(rank); }
void Rendezvous::leave() { impl_->leave(); }

}  // namespace moed::control
