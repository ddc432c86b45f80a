// Handshakes over loopback TCP with rendezvous.cpp, auth.cpp and world.cpp as they are. The input plays up to three
// peers or strangers, one after another, who dial or are dialled: with the right key and wild fields (the target
// computes the HMAC), with a wrong key, with reflected bytes, cut short, or with bytes of any kind. Nobody is accepted
// without the key, or with a Hello that differs; whoever is accepted said exactly what the handler is told.
#include <netinet/in.h>
#include <sys/socket.h>

#include <boost/asio/io_context.hpp>
#include <chrono>
#include <memory>
#include <optional>

#include "control/rendezvous.h"
#include "control/world.h"
#include "tests/fuzz/fuzz.h"

namespace moed::control {
namespace {

using fuzz::Input;
using fuzz::require;
using fuzz::require_sentence;

constexpr uint32_t kRanks = 3, kOurs = 1;  // one peer's rank is lower, one is higher
constexpr size_t kMostPeers = 3;

/// How one conversation goes, by bits of two bytes; 0: as a good peer's.
enum How : uint16_t {
  wrong_key = 1,
  reflect_hello = 2,
  reflect_proof = 4,
  patch_after = 8,  // of the Proof, when its HMAC is there
  cut_hello = 16,
  cut_proof = 32,
  stays = 64,  // the connection outlives the conversation
  raw = 128,   // nothing but the input's bytes
  is_dialled = 256,
  no_here = 512,
  more_after = 1024,
};

/// An end of a TCP connection that resets it when it goes, so that no port stays in use.
class Wire {
 public:
  explicit Wire(Fd fd) : fd_(std::move(fd)) {
    const linger at_once{1, 0};
    require(::setsockopt(fd_.get(), SOL_SOCKET, SO_LINGER, &at_once, sizeof at_once) == 0, "SO_LINGER can be set");
  }
  void write(std::span<const uint8_t> bytes) const {  // a peer that is gone takes nothing: no failure of ours
    [[maybe_unused]] const ssize_t sent = ::send(fd_.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
  }
  bool read(void* to, size_t size) const {
    return ::recv(fd_.get(), to, size, MSG_DONTWAIT | MSG_PEEK) == static_cast<ssize_t>(size) &&
           ::recv(fd_.get(), to, size, MSG_DONTWAIT) == static_cast<ssize_t>(size);
  }

 private:
  Fd fd_;
};

sockaddr_in loopback(uint16_t port) {
  sockaddr_in at{};
  at.sin_family = AF_INET;
  at.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  at.sin_port = htons(port);
  return at;
}

/// Where the daemon's own dials arrive.
class Door {
 public:
  Door() : fd_(::socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0)) {
    sockaddr_in at = loopback(0);
    socklen_t bytes = sizeof at;
    auto* address = reinterpret_cast<sockaddr*>(&at);
    require(::bind(fd_.get(), address, sizeof at) == 0 && ::listen(fd_.get(), 64) == 0 &&
                ::getsockname(fd_.get(), address, &bytes) == 0,
            "a listener on loopback");
    port_ = ntohs(at.sin_port);
  }
  uint16_t port() const { return port_; }
  std::optional<Wire> accept() const {
    Fd fd(::accept4(fd_.get(), nullptr, nullptr, SOCK_CLOEXEC));
    if (!fd) return {};
    return Wire(std::move(fd));
  }

 private:
  Fd fd_;
  uint16_t port_ = 0;
};

/// Not the world's, which is the one that a KeyRing without a directory has.
Key strangers_key() {
  Key key{};
  key.fill(0x5A);
  return key;
}

Hello hello_of(uint32_t rank) {
  Hello h;
  h.protocol = h.numerics = 1;
  h.rank = rank;
  h.ranks = kRanks;
  h.lanes = 2;
  h.max_tokens = 128;
  h.handle_kinds = 2;
  h.incarnation = 100 + rank;
  std::strcpy(h.group, "moed");
  std::strcpy(h.key_id, "none");
  return h;
}

/// One daemon's rendezvous and what it has been told by whom.
class Stage {
 public:
  Stage(boost::asio::io_context& io, const Door& door, bool refuses) : io_(io), door_(door), keys_("") {
    RendezvousOptions o;
    o.hello = hello_of(kOurs);
    o.peers.assign(kRanks, "127.0.0.1:" + std::to_string(door.port()));
    o.listen = "127.0.0.1:0";
    o.ucx_address.assign(40, 9);
    o.connections = 2;
    o.handshake_ms = 60'000;
    o.backoff_most_ms = 50;  // how long what is over lives on
    RendezvousHandlers h;
    h.refuse = [refuses](uint32_t rank) -> std::optional<std::string> {
      require(rank < kRanks && rank != kOurs, "only peers are asked about");
      if (refuses) return "not now";
      return {};
    };
    h.greatest_session = [](uint32_t rank) { return rank + 7; };
    h.proven = [this](const Proven& who) { proven(who); };
    h.open = [this](uint32_t rank) { require(linked_[rank] && here_, "open follows proven and the peer's word"); };
    h.ended = [this](uint32_t rank) { require(std::exchange(linked_[rank], false), "only a link ends"); };
    h.refused = [](const std::string& why) { require_sentence(why); };
    rendezvous_ = std::make_unique<Rendezvous>(io, std::move(o), std::move(h), keys_);
  }
  ~Stage() {
    rendezvous_.reset();
    settle();
    while (door_.accept()) continue;
  }
  Stage(const Stage&) = delete;
  Stage& operator=(const Stage&) = delete;

  void settle() const {
    io_.restart();
    while (io_.poll() != 0) continue;
  }

  /// The next dial of the daemon's, one for each peer; it needs a moment to resolve the address.
  std::optional<Wire> dialled() {
    if (dials_++ >= kRanks - 1) return {};
    for (int i = 0; i < 20; ++i) {
      settle();
      if (auto wire = door_.accept()) return wire;
      io_.run_one_for(std::chrono::milliseconds(1));
    }
    return {};
  }

  std::optional<Wire> dial() const {
    Fd fd(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    const sockaddr_in at = loopback(rendezvous_->port());
    if (!fd || ::connect(fd.get(), reinterpret_cast<const sockaddr*>(&at), sizeof at) != 0) return {};
    return Wire(std::move(fd));
  }

  void converse(const Wire& wire, uint16_t how, Input& in);

  void close(uint32_t rank) {
    linked_[rank] = false;
    rendezvous_->close(rank);
  }
  void settled(uint32_t rank) const { rendezvous_->settled(rank); }
  void leave() const { rendezvous_->leave(); }

 private:
  /// Only for the peer whose Proof was good and whose Hello fits.
  void proven(const Proven& who) {
    const auto same = [&who](const Proven& said) {
      return std::memcmp(&who.hello, &said.hello, sizeof who.hello) == 0 &&
             std::memcmp(&who.proof, &said.proof, sizeof who.proof) == 0 && who.session == said.session;
    };
    require(std::any_of(said_.begin(), said_.end(), same), "who is accepted has the key, and said what we heard");
    require(who.greatest_sent == who.rank + 7, "the greatest session is the one that the peer was told");
    require(who.rank == who.hello.rank && !disagreement(hello_of(kOurs), who.hello), "both ends agree", "a difference");
    require(who.proof.address_bytes <= kMaxUcxAddress && who.proof.refused == 0, "the Proof is sound");
    require(!std::exchange(linked_[who.rank], true), "one link a peer");
  }

  boost::asio::io_context& io_;
  const Door& door_;
  KeyRing keys_;
  std::vector<Proven> said_;  ///< with a Proof that holds
  bool here_ = false;         ///< some peer has said that it is there
  bool linked_[kRanks] = {};
  uint32_t dials_ = 0;
  std::unique_ptr<Rendezvous> rendezvous_;
};

/// A peer's side of one handshake, as `how` says.
void Stage::converse(const Wire& wire, uint16_t how, Input& in) {
  const bool dials = (how & is_dialled) == 0;
  Hello ours = hello_of(in.take<uint8_t>() % 2 == 0 ? 0 : 2);
  in.patch(&ours, sizeof ours, in.take<uint8_t>() % 4);
  Hello theirs;
  const size_t hello_bytes = (how & cut_hello) != 0 ? in.take<uint16_t>() % sizeof ours : sizeof ours;
  if (!dials && !wire.read(&theirs, sizeof theirs)) return;
  if ((how & reflect_hello) != 0) ours = theirs;
  wire.write(bytes_of(ours).first(hello_bytes));
  settle();
  if (dials && !wire.read(&theirs, sizeof theirs)) return;
  Proof their_proof;
  if (!dials && !wire.read(&their_proof, sizeof their_proof)) return;

  Proof proof;
  proof.address_bytes = 32;
  in.patch(&proof, sizeof proof, in.take<uint8_t>() % 4);
  const Key key = (how & wrong_key) != 0 ? strangers_key() : Key{};
  const Hello& dialler = dials ? ours : theirs;
  const Hello& listener = dials ? theirs : ours;
  const Hmac mac = prove(key, dials ? Side::dialler : Side::listener, dialler, listener, proof);
  std::memcpy(proof.hmac, mac.data(), mac.size());
  const Proof sound = proof;
  if ((how & patch_after) != 0) in.patch(&proof, sizeof proof, 1);
  if ((how & reflect_proof) != 0 && !dials) proof = their_proof;
  const size_t proof_bytes = (how & cut_proof) != 0 ? in.take<uint16_t>() % sizeof proof : sizeof proof;
  if ((how & wrong_key) == 0 && proof_bytes == sizeof proof && std::memcmp(&proof, &sound, sizeof proof) == 0)
    said_.push_back({ours.rank, ours, proof, 0, session_key(key, dialler, listener)});
  wire.write(bytes_of(proof).first(proof_bytes));
  settle();
  here_ = here_ || (how & no_here) == 0;
  if ((how & no_here) == 0) wire.write(std::span<const uint8_t>(reinterpret_cast<const uint8_t*>("+"), 1));
  settle();
  if ((how & more_after) != 0) {
    const auto more = in.bytes(16);
    here_ = here_ || std::find(more.begin(), more.end(), '+') != more.end();
    wire.write(more);
  }
  settle();
}

}  // namespace
}  // namespace moed::control

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace moed::control;
  static boost::asio::io_context io;
  static Door door;
  moed::fuzz::Input in(data, size);
  const auto whole = in.take<uint8_t>();
  Stage stage(io, door, (whole & 1) != 0);
  std::vector<Wire> open;
  for (size_t i = 0; i < kMostPeers && !in.empty(); ++i) {
    const auto how = in.take<uint16_t>();
    auto wire = (how & is_dialled) != 0 ? stage.dialled() : stage.dial();
    if (!wire) continue;
    stage.settle();
    if ((how & raw) != 0)
      wire->write(in.bytes(2048));
    else
      stage.converse(*wire, how, in);
    stage.settle();
    if ((how & stays) != 0) open.push_back(std::move(*wire));
    wire.reset();
    stage.settle();
  }
  if ((whole & 2) != 0) stage.close(0);
  if ((whole & 4) != 0) stage.settled(2);
  if ((whole & 8) != 0) stage.leave();
  stage.settle();
  return 0;
}
