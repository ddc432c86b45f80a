// Active messages as a peer, or whoever has our address, may send them: net_loop.cpp, world.cpp and auth.cpp as they
// are, with a UCX worker and a rendezvous that this target plays. The input is a script: links are proven, opened and
// lost, messages come with good and bad MACs, the owner answers. A message that no link vouches for changes nothing;
// a vouched one that makes no sense ends its link; events of a link come in order.
#include <boost/asio/io_context.hpp>
#include <boost/asio/post.hpp>
#include <chrono>
#include <future>
#include <set>

#include "control/net_loop.h"
#include "control/rendezvous.h"
#include "control/ucx.h"
#include "tests/fuzz/fuzz.h"

namespace moed::control {
namespace {

using fuzz::Input;
using fuzz::require;
using fuzz::require_sentence;

constexpr uint32_t kRanks = 3;  // rank 0 is under test
constexpr size_t kMostSteps = 64;
constexpr int kInputsALoop = 200;
constexpr size_t kWholeBeat = offsetof(HeartbeatBody, wait_us) + kRanks * sizeof(uint32_t);

/// What the played peer of one rank knows of the link.
struct Played {
  bool kept = false;   ///< the rendezvous holds its connection
  bool alive = false;  ///< messages are vouched for
  bool said_open = false;
  Key key{};
  uint64_t incarnation = 0, counter = 0;
  uint32_t session = 0;
  LinkLife life;  ///< as the owner was told last
  bool opened = false, usable = false, ready = false;
};

/// What one NetLoop is told and says: the net thread's alone while the loop lives.
struct Stage {
  boost::asio::io_context* io = nullptr;
  UcxWorker::Handlers ucx;
  RendezvousHandlers rendezvous;
  Played peers[kRanks];
  UcxWorker::Endpoint last_endpoint = 0;
  UcxWorker::Endpoint endpoints[kRanks] = {};
  uint32_t connecting = kRanks;  ///< rank whose proven() runs
  uint64_t proofs = 0, dropped = 0, events = 0;
  bool connects = true, sends = true, in_message = false;
  bool used_up = false;  ///< a peer has said that there are no sessions left
  uint64_t lives = 0;    ///< the greatest number of a life
  uint64_t lives_before = 0;
  std::set<uint64_t> lost, doomed;  ///< lives of this input
};
Stage* stage = nullptr;

}  // namespace

class UcxWorker::Impl {
 public:
  std::vector<uint8_t> address = std::vector<uint8_t>(64, 7);
};

UcxWorker::UcxWorker(boost::asio::io_context& io, Handlers handlers, const std::string&, const std::string&)
    : impl_(std::make_unique<Impl>()) {
  stage->io = &io;
  stage->ucx = std::move(handlers);
}
UcxWorker::~UcxWorker() = default;
const std::vector<uint8_t>& UcxWorker::address() const { return impl_->address; }
UcxWorker::Endpoint UcxWorker::connect(std::span<const uint8_t> address, std::string& why) {
  require(stage->connecting < kRanks, "an endpoint is made for a proven peer only");
  require(address.size() <= kMaxUcxAddress, "an address fits the Proof");
  ++stage->lives;
  why = "the target refuses";
  if (!stage->connects) return 0;
  return stage->endpoints[stage->connecting] = ++stage->last_endpoint;
}
bool UcxWorker::send(Endpoint endpoint, std::span<const uint8_t> header, std::span<const uint8_t> body) {
  require(endpoint != 0 && endpoint <= stage->last_endpoint, "messages go to endpoints that were made");
  require(header.size() == sizeof(MessageHeader) && body.size() <= kMaxBody, "a message within its limits");
  return stage->sends;
}
void UcxWorker::close(Endpoint) { require(!stage->in_message, "nothing is closed inside a callback of UCX"); }

class Rendezvous::Impl {};
Rendezvous::Rendezvous(boost::asio::io_context&, RendezvousOptions, RendezvousHandlers handlers, KeyRing&) {
  stage->rendezvous = std::move(handlers);
}
Rendezvous::~Rendezvous() = default;
uint16_t Rendezvous::port() const { return 1; }
void Rendezvous::close(uint32_t rank) { stage->peers[rank].kept = stage->peers[rank].alive = false; }
void Rendezvous::settled(uint32_t rank) { require(stage->peers[rank].alive, "a link that settles is alive"); }
void Rendezvous::leave() {}

namespace {

/// The owner's side: every event belongs to a link that is alive, and comes in its turn.
NetHandlers handlers() {
  const auto peer = [](LinkLife life) -> Played& {
    ++stage->events;
    require(life.rank > 0 && life.rank < kRanks && life.number != 0, "an event names a link");
    require(!stage->lost.contains(life.number), "a life that is over has no events");
    return stage->peers[life.rank];
  };
  NetHandlers h;
  h.open = [peer](LinkLife life, uint32_t session) {
    Played& p = peer(life);
    require(life.number > p.life.number && session == p.session, "a new life with the session of both ends");
    p.life = life, p.opened = true, p.usable = p.ready = false;
  };
  h.segment = [peer](LinkLife life, uint64_t incarnation, const SegmentBody&) {
    const Played& p = peer(life);
    require(p.life == life && p.opened && incarnation == p.incarnation, "a segment comes on an open link");
  };
  h.usable = [peer](LinkLife life, uint32_t) {
    Played& p = peer(life);
    require(p.life == life && p.opened && !p.usable, "a link becomes usable once, when it is open");
    p.usable = true;
  };
  h.ready = [peer](LinkLife life, uint32_t session, Nanos) {
    Played& p = peer(life);
    require(p.usable && !p.ready && session == p.session, "a link becomes ready once, when it is usable");
    p.ready = true;
  };
  h.leaving = [peer](LinkLife life, uint32_t) { require(peer(life).ready, "who leaves was ready"); };
  h.lost = [peer](LinkLife life, Loss, const std::string& why, bool was_up) {
    const Played& p = peer(life);
    require(!was_up || (p.life == life && p.usable), "a link that was up was usable");
    require_sentence(why);
    stage->lost.insert(life.number);
  };
  h.refused = [](const std::string& why) { require_sentence(why); };
  h.dropped = [] { ++stage->dropped; };
  h.beat = [] { return HeartbeatBody{}; };
  h.tick = [](Nanos) {};
  h.stall = [] {};
  return h;
}

/// A handshake that held, as the rendezvous reports one: never while it keeps a connection of that rank.
void prove_peer(uint32_t rank, Input& in) {
  Played& p = stage->peers[rank];
  const auto how = in.take<uint8_t>();
  const auto wild = in.take<uint32_t>();
  if (p.kept || stage->rendezvous.refuse(rank)) return;
  Proven who;
  who.rank = who.hello.rank = rank;
  who.hello.incarnation = ++stage->proofs * 100 + rank;
  who.greatest_sent = (how & 1) != 0 ? wild : stage->rendezvous.greatest_session(rank);
  who.proof.greatest_session = (how & 2) != 0 ? wild : 0;
  who.proof.address_bytes = static_cast<uint16_t>((how & 4) != 0 ? kMaxUcxAddress : 16);
  who.session.fill(static_cast<uint8_t>(stage->proofs * 4 + rank));
  p.kept = p.alive = true;
  p.said_open = false;
  p.key = who.session;
  p.incarnation = who.hello.incarnation;
  p.counter = 0;
  p.session = std::max(stage->rendezvous.greatest_session(rank), who.proof.greatest_session) + 1;
  stage->used_up = stage->used_up || p.session > (1U << 19);
  stage->connecting = rank;
  stage->rendezvous.proven(who);
  stage->connecting = kRanks;
}

size_t right_size(MessageId id) {
  if (id == MessageId::segment) return sizeof(SegmentBody);
  if (id == MessageId::ready) return sizeof(ReadyBody);
  return id == MessageId::heartbeat ? kWholeBeat : 0;
}

/// Whether a vouched message makes sense.
bool is_sound(const MessageHeader& header, std::span<const uint8_t> body, uint32_t session) {
  switch (header.id) {
    case MessageId::mapped:
    case MessageId::leaving:
      return true;
    case MessageId::ready: {
      ReadyBody ready;
      return take(body, ready) && ready.session == session;
    }
    case MessageId::segment:
    case MessageId::heartbeat:
      return body.size() == right_size(header.id);
    default:
      return false;
  }
}

/// How a message is made, by bits of one byte; 0: as a good peer does.
enum How : uint8_t { bad_mac = 1, other_life = 2, old_counter = 4, free_size = 8, wild_rank = 16, wild_header = 32 };

void deliver(uint32_t rank, Input& in) {
  Played& p = stage->peers[rank];
  const auto how = in.take<uint8_t>();
  const auto id = in.take<uint8_t>();
  MessageHeader header;
  header.id = static_cast<MessageId>(id < 0xF0 ? id % 8 : in.take<uint32_t>());
  header.rank = (how & wild_rank) != 0 ? in.take<uint32_t>() : rank;
  header.incarnation = p.incarnation + ((how & other_life) != 0 ? 1 : 0);
  header.counter = (how & old_counter) != 0 ? p.counter : p.counter + 1 + in.take<uint8_t>();
  std::vector<uint8_t> body((how & free_size) != 0 ? in.take<uint16_t>() % (UcxWorker::kMaxBody + 1)
                                                   : right_size(header.id));
  in.fill(body.data(), body.size());
  if (header.id == MessageId::ready && (how & free_size) == 0) std::memcpy(body.data(), &p.session, sizeof p.session);
  const auto mac = sign(p.key, header, body);
  std::memcpy(header.hmac, mac.data(), mac.size());
  if ((how & bad_mac) != 0) header.hmac[in.take<uint8_t>() % sizeof header.hmac] ^= 1;

  std::vector<uint8_t> wire(bytes_of(header).begin(), bytes_of(header).end());
  if ((how & wild_header) != 0) {
    const auto size = in.take<uint8_t>();
    wire.resize(size);
    in.patch(wire.data(), std::max<size_t>(wire.size(), 1), wire.empty() ? 0 : 1);
  }
  const bool same = wire.size() == sizeof header && std::memcmp(wire.data(), &header, sizeof header) == 0;
  const bool vouched = same && p.alive && header.rank == rank && (how & (bad_mac | other_life | old_counter)) == 0;
  const uint64_t dropped = stage->dropped, events = stage->events;
  const bool sound = is_sound(header, body, p.session);
  if (vouched) p.counter = header.counter;
  stage->in_message = true;
  stage->ucx.message(wire, body);
  stage->in_message = false;
  require(stage->dropped == dropped + (vouched ? 0 : 1), "what no link vouches for is dropped, and nothing else");
  require(vouched || stage->events == events, "what is dropped changes nothing");
  if (vouched && !sound) stage->doomed.insert(p.life.number);
}

/// What happens on the net thread.
void step(uint8_t what, uint32_t rank, Input& in) {
  Played& p = stage->peers[rank];
  switch (what) {
    case 0:
      return prove_peer(rank, in);
    case 1:
      if (p.kept && !std::exchange(p.said_open, true)) stage->rendezvous.open(rank);
      return;
    case 2:
      if (std::exchange(p.kept, false)) stage->rendezvous.ended(rank);
      return;
    case 3:
      return stage->ucx.failed(stage->endpoints[rank], "the target's wish");
    case 4:
      stage->connects = (in.take<uint8_t>() & 1) == 0;
      return;
    case 5:
      stage->sends = (in.take<uint8_t>() & 1) == 0;
      return;
    default:
      return deliver(rank, in);
  }
}

/// What the owner says. It is no stranger: it says ready only of a link that is usable, or was.
void answer(NetLoop& loop, uint8_t what, LinkLife life) {
  const Played& p = stage->peers[life.rank];
  const bool may_be_ready = stage->lost.contains(life.number) || (p.usable && p.life == life);
  if (what == 0) return loop.offer(life, SegmentBody{});
  if (what == 1) return loop.mapped(life);
  if (what == 2) return may_be_ready ? loop.ready(life) : loop.mapped(life);
  if (what == 3) return loop.lose(life, "the owner's wish");
  if (what == 4) return loop.leave();
  loop.keys(KeyRing(""));
}

NetOptions options() {
  NetOptions o;
  o.hello.ranks = kRanks;
  o.hello.incarnation = 1;
  o.peers.assign(kRanks, "127.0.0.1:1");
  o.interval_ms = 60'000;  // no heartbeat is due while an input runs
  o.lost_after_ms = 600'000;
  return o;
}

/// A loop and its stage. Making one takes far longer than an input: it serves many, and their links are over in
/// between.
struct Daemon {
  Stage whole;
  NetLoop loop;
  int inputs = 0;

  Daemon() : loop((stage = &whole, options()), handlers(), KeyRing("")) {}
  void begin() {
    for (Played& p : whole.peers) p = {};
    whole.connects = whole.sends = true;
    whole.lives_before = whole.lives;
    whole.lost.clear();
    whole.doomed.clear();
  }
  void end() const {
    for (const PeerView& view : loop.peers())
      require(name(view.state) != std::string("unknown"), "a state that has a name");
    for (const uint64_t life : whole.doomed)
      require(whole.lost.contains(life), "a message without sense ends its link");
  }
};

/// The whole input on the net thread, one step a turn, so that what a step posts comes before the next.
class Script {
 public:
  Script(NetLoop& loop, Input in) : loop_(loop), in_(in) {}

  void play() {
    boost::asio::post(*stage->io, [this] { next(); });
    const auto ended = done_.get_future().wait_for(std::chrono::seconds(20));
    require(ended == std::future_status::ready, "the net thread goes on");
  }

 private:
  void next() {
    if (in_.empty() || left_-- == 0) {
      for (uint32_t rank = 1; rank < kRanks; ++rank) step(2, rank, in_);
      // Twice, for what the last step has posted.
      return boost::asio::post(*stage->io, [this] { boost::asio::post(*stage->io, [this] { done_.set_value(); }); });
    }
    const auto what = in_.take<uint8_t>();
    const uint32_t rank = 1 + what % 2;
    const uint8_t kind = what / 2 % 20;
    if (kind < 14)
      step(kind, rank, in_);
    else  // lives are numbered one by one: a small step leads to one that was, is, or will be
      answer(loop_, static_cast<uint8_t>(kind - 14), {rank, stage->lives_before + in_.take<uint8_t>() % 5U});
    boost::asio::post(*stage->io, [this] { next(); });
  }

  NetLoop& loop_;
  Input in_;
  size_t left_ = kMostSteps;
  std::promise<void> done_;
};

}  // namespace
}  // namespace moed::control

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace moed::control;
  [[maybe_unused]] static const Hmac first =
      hmac(Key{}, {});  // OpenSSL ends after the loop's thread only if it began before
  static std::unique_ptr<Daemon> daemon;
  if (!daemon || daemon->inputs++ == kInputsALoop || stage->used_up) {
    daemon.reset();
    daemon = std::make_unique<Daemon>();
  }
  daemon->begin();
  Script(daemon->loop, moed::fuzz::Input(data, size)).play();
  daemon->end();
  return 0;
}
