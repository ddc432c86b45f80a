// Net threads of one process over loopback, with owners that answer by hand: links come up and go for the reason given,
// sessions never repeat, answers for a life that is over are nobody's, and a peer that has proven itself can spoil its
// own link only.
#include "control/net_loop.h"

#include <gtest/gtest.h>

#include <utility>

#include <boost/asio/io_context.hpp>

#include <set>

#include "control/rendezvous.h"
#include "control/ucx.h"
#include "tests/support/net_owner.h"

namespace moed::control {
namespace {

using std::chrono::milliseconds;
using test::Event;
using test::free_peers;
using test::hello_of;
using test::kUcxPorts;
using test::linked;
using test::Owner;
using test::pump_for;
using test::pump_until;
using test::What;

bool equal(const SegmentBody& a, const SegmentBody& b) { return std::memcmp(&a, &b, sizeof a) == 0; }

TEST(NetLoop, EveryPairBecomesReadyOnceWithWhatTheOtherOffered) {
  const auto peers = free_peers(3);
  Owner a(peers, 0);
  Owner b(peers, 1);
  Owner c(peers, 2);
  const std::vector<Owner*> owners{&a, &b, &c};
  ASSERT_TRUE(pump_until({&a, &b, &c}, [&] {
    return std::all_of(owners.begin(), owners.end(),
                       [](const Owner* o) { return linked(*o, 0) && linked(*o, 1) && linked(*o, 2); });
  }));
  pump_for({&a, &b, &c}, milliseconds(200));  // nothing more comes
  for (uint32_t r = 0; r < 3; ++r)
    for (uint32_t p = 0; p < 3; ++p) {
      if (p == r) continue;
      std::vector<What> order;
      for (const Event& e : owners[r]->all)
        if (e.life.rank == p) order.push_back(e.what);
      EXPECT_EQ(order, (std::vector<What>{What::open, What::segment, What::usable, What::ready})) << r << " of " << p;
      const Event segment = owners[r]->of(What::segment, p).at(0);
      EXPECT_EQ(segment.incarnation, owners[p]->incarnation);
      EXPECT_TRUE(equal(segment.body, owners[p]->segment_of(owners[p]->of(What::open, r).at(0).life)));
      EXPECT_EQ(owners[r]->of(What::ready, p).at(0).session, 1U);
    }
  EXPECT_EQ(a.dropped + b.dropped + c.dropped, 0);
  EXPECT_EQ(a.refused + b.refused + c.refused, 0);
}

TEST(NetLoop, HeartbeatsTellWhatThePeerSaysOfItself) {
  const auto peers = free_peers(2);
  Owner a(peers, 0, {.interval_ms = 10, .lost_after_ms = 1000});
  Owner b(peers, 1);
  ASSERT_TRUE(pump_until({&a, &b}, [&] { return linked(a, 1) && linked(b, 0); }));
  b.age_us = 4711;
  b.busy = Busy::mapping;
  b.waited_us = 1'000'000;  // to both ranks; the greatest is named once, and is an increment
  ASSERT_TRUE(pump_until({&a, &b}, [&] {
    const PeerView v = a.loop->peers()[1];
    return v.service_age_us == 4711 && v.busy == Busy::mapping && v.waits_us == 1'000'000 && v.waits_for == 0U;
  }));
  ASSERT_TRUE(pump_until({&a, &b}, [&] { return a.loop->peers()[1].waits_us == 0; }));
  EXPECT_FALSE(a.loop->peers()[1].waits_for.has_value());
  pump_for({&a, &b}, milliseconds(1500));  // longer than lost_after: beats keep a link
  EXPECT_EQ(a.count(What::lost, 1), 0U);
  EXPECT_TRUE(a.loop->peers()[1].heard.has_value());
  EXPECT_EQ(a.loop->peers()[0].state, State::ready);
}

TEST(NetLoop, ADeadPeerIsLostOnceAndEachReturnHasTheNextSession) {
  const auto peers = free_peers(2);
  std::unique_ptr<Owner> ends[2] = {std::make_unique<Owner>(peers, 0), std::make_unique<Owner>(peers, 1)};
  for (uint32_t life = 1; life <= 6; ++life) {
    const auto both_ready = [&] { return ends[0]->latest_session(1) == life && ends[1]->latest_session(0) == life; };
    ASSERT_TRUE(pump_until({ends[0].get(), ends[1].get()}, both_ready))
        << life << ": " << ends[0]->latest_session(1) << ", " << ends[1]->latest_session(0);
    const uint32_t dies = life / 2 % 2;
    const uint32_t stays = 1 - dies;
    const LinkLife last = ends[stays]->of(What::ready, dies).back().life;
    const size_t before = ends[stays]->count(What::lost, dies);
    ends[dies].reset();
    Owner& other = *ends[stays];
    ASSERT_TRUE(pump_until({&other}, [&] { return other.count(What::lost, dies) > before; }));
    pump_for({&other}, milliseconds(100));
    const Event lost = other.of(What::lost, dies).back();
    EXPECT_EQ(other.count(What::lost, dies), before + 1);
    EXPECT_EQ(lost.life, last);
    EXPECT_EQ(lost.loss, Loss::error);
    EXPECT_TRUE(lost.was_up);
    EXPECT_EQ(other.state(dies), State::lost);
    ends[dies] = std::make_unique<Owner>(peers, dies);
  }
}

TEST(NetLoop, AFarewellIsHeardBeforeTheEndAndNoLinkFollowsIt) {
  const auto peers = free_peers(3);
  Owner a(peers, 0);
  auto b = std::make_unique<Owner>(peers, 1);
  ASSERT_TRUE(pump_until({&a, b.get()}, [&] { return linked(a, 1) && linked(*b, 0); }));
  b->loop->leave();
  ASSERT_TRUE(pump_until({&a, b.get()}, [&] { return a.count(What::leaving, 1) == 1; }));
  EXPECT_EQ(a.of(What::leaving, 1)[0].session, 1U);
  EXPECT_TRUE(a.loop->peers()[1].leaving);
  EXPECT_EQ(a.state(1), State::mapped);
  Owner c(peers, 2);  // finds a, and not b
  ASSERT_TRUE(pump_until({&a, b.get(), &c}, [&] { return linked(a, 2) && linked(c, 0); }));
  pump_for({&a, b.get(), &c}, milliseconds(200));
  EXPECT_EQ(a.count(What::lost, 1), 0U);  // it is still there
  EXPECT_EQ(b->count(What::open, 2) + c.count(What::open, 1), 0U);
  b.reset();
  ASSERT_TRUE(pump_until({&a, &c}, [&] { return a.count(What::lost, 1) == 1; }));
  EXPECT_EQ(a.of(What::lost, 1)[0].loss, Loss::leaving);
  EXPECT_TRUE(a.of(What::lost, 1)[0].was_up);
  EXPECT_EQ(a.loop->peers()[1].losses, (std::array<uint64_t, 3>{0, 0, 1}));
  EXPECT_FALSE(a.loop->peers()[1].leaving);
  EXPECT_TRUE(linked(a, 2));
}

/// The peer never beats: its interval is a minute.
TEST(NetLoop, ASilentPeerIsLostByItsHeartbeatAndTriedAgain) {
  const auto peers = free_peers(2);
  Owner a(peers, 0, {.interval_ms = 10, .lost_after_ms = 500});
  Owner silent(peers, 1, {.interval_ms = 60'000, .lost_after_ms = 120'000});
  ASSERT_TRUE(pump_until({&a, &silent}, [&] { return a.count(What::lost, 1) >= 2; }));
  ASSERT_TRUE(pump_until({&a, &silent}, [&] { return silent.count(What::lost, 0) >= 2; }));
  for (const Event& e : a.of(What::lost, 1)) {
    EXPECT_EQ(e.loss, Loss::heartbeat);
    EXPECT_NE(e.why.find("heartbeat.lost_after_ms 500"), std::string::npos) << e.why;
  }
  EXPECT_TRUE(a.of(What::lost, 1)[0].was_up);
  for (const Event& e : silent.of(What::lost, 0)) EXPECT_EQ(e.loss, Loss::error) << e.why;  // it was hung up on
  EXPECT_EQ(a.of(What::open, 1)[1].session, 2U);
}

TEST(NetLoop, WhatTheOwnerGivesUpIsTriedAgain) {
  const auto peers = free_peers(2);
  Owner a(peers, 0);
  Owner b(peers, 1);
  ASSERT_TRUE(pump_until({&a, &b}, [&] { return linked(a, 1) && linked(b, 0); }));
  a.loop->lose(a.of(What::open, 1)[0].life, "no memory");
  ASSERT_TRUE(pump_until({&a, &b}, [&] { return a.count(What::ready, 1) == 2 && b.count(What::ready, 0) == 2; }));
  ASSERT_EQ(a.count(What::lost, 1), 1U);
  ASSERT_EQ(b.count(What::lost, 0), 1U);
  const Event lost = a.of(What::lost, 1)[0];
  EXPECT_EQ(lost.loss, Loss::error);
  EXPECT_EQ(lost.why, "no memory");
  EXPECT_TRUE(lost.was_up && b.of(What::lost, 0)[0].was_up);
  EXPECT_EQ(a.of(What::ready, 1)[1].session, 2U);
  EXPECT_EQ(a.loop->peers()[1].losses, (std::array<uint64_t, 3>{1, 0, 0}));
}

TEST(NetLoop, AnswersForALifeThatIsOverAreNobodys) {
  const auto peers = free_peers(2);
  Owner a(peers, 0);
  a.answers = false;
  Owner b(peers, 1);
  ASSERT_TRUE(pump_until({&a, &b}, [&] { return a.count(What::segment, 1) == 1; }));
  const LinkLife old = a.of(What::open, 1)[0].life;
  a.loop->lose(old, "first");
  ASSERT_TRUE(pump_until({&a, &b}, [&] { return a.count(What::open, 1) == 2 && a.count(What::segment, 1) == 2; }));
  ASSERT_EQ(a.count(What::lost, 1), 1U);
  EXPECT_FALSE(a.of(What::lost, 1)[0].was_up);
  EXPECT_EQ(a.state(1), State::connecting);  // it never was up
  const LinkLife now = a.of(What::open, 1)[1].life;
  EXPECT_NE(now.number, old.number);
  for (const LinkLife life : {old, LinkLife{1, 0}, LinkLife{0, now.number}, LinkLife{99, now.number}}) {
    a.loop->offer(life, a.segment_of(life));
    a.loop->mapped(life);
    a.loop->ready(life);
    a.loop->lose(life, "not mine");
  }
  a.answers = true;
  for (const Event& e : {a.of(What::open, 1)[1], a.of(What::segment, 1)[1]}) a.answer(e);
  ASSERT_TRUE(pump_until({&a, &b}, [&] { return linked(a, 1) && linked(b, 0); }));
  pump_for({&a, &b}, milliseconds(100));
  EXPECT_EQ(a.count(What::lost, 1), 1U);
  EXPECT_EQ(b.count(What::lost, 0), 1U);
  ASSERT_EQ(b.count(What::segment, 0), 1U);
  EXPECT_TRUE(equal(b.of(What::segment, 0)[0].body, a.segment_of(now)));
}

/// A peer without a NetLoop: it knows the key and says what it likes, as rank 1 of two.
class Liar {
 public:
  explicit Liar(std::vector<std::string> peers)
      : keys_(""),
        worker_(
            io_,
            {.message = [this](std::span<const uint8_t> header, std::span<const uint8_t> body) { hear(header, body); },
             .failed = [](UcxWorker::Endpoint, const std::string&) {}},
            kUcxPorts, "lo") {
    RendezvousOptions o;
    o.hello = hello_of(1, static_cast<uint32_t>(peers.size()));
    o.listen = peers[1];
    o.peers = std::move(peers);
    o.ucx_address = worker_.address();
    o.backoff_most_ms = 50;
    incarnation = o.hello.incarnation;
    RendezvousHandlers h;
    h.refuse = [](uint32_t) { return std::optional<std::string>(); };
    h.greatest_session = [](uint32_t) { return 0U; };
    h.proven = [this](const Proven& who) {
      session_ = who.session;
      counter = heard_ = 0;
      std::string why;
      end_ = worker_.connect({who.proof.address, who.proof.address_bytes}, why);
      EXPECT_NE(end_, 0U) << why;
    };
    h.open = [this](uint32_t) { ++links; };
    h.ended = [this](uint32_t) { worker_.close(end_); };
    h.refused = [](const std::string&) {};
    rendezvous_ = std::make_unique<Rendezvous>(io_, std::move(o), std::move(h), keys_);
  }

  MessageHeader header(MessageId id) {
    MessageHeader h;
    h.id = id;
    h.rank = 1;
    h.incarnation = incarnation;
    h.counter = ++counter;
    return h;
  }

  void say_signed(MessageHeader header, std::span<const uint8_t> body) {
    const auto mac = sign(session_, header, body);
    std::memcpy(header.hmac, mac.data(), mac.size());
    say(bytes_of(header), body);
  }
  void say(std::span<const uint8_t> header, std::span<const uint8_t> body) {
    EXPECT_TRUE(worker_.send(end_, header, body));
  }

  template <class Done>
  bool run_until(Owner& owner, Done done) {
    return pump_until({&owner}, [&] {
      io_.run_for(milliseconds(1));
      return done();
    });
  }
  void run_for(Owner& owner, milliseconds time) {
    const auto end = std::chrono::steady_clock::now() + time;
    run_until(owner, [end] { return std::chrono::steady_clock::now() > end; });
  }

  template <class T>
  static std::span<const uint8_t> bytes_of(const T& value) {
    return {reinterpret_cast<const uint8_t*>(&value), sizeof value};
  }

  uint64_t incarnation = 0, counter = 0;
  int links = 0;                 ///< that the other end has opened
  std::multiset<MessageId> got;  ///< messages with a good MAC and a counter that is greater than the last
  int bad = 0;                   ///< and the others

 private:
  void hear(std::span<const uint8_t> header_bytes, std::span<const uint8_t> body) {
    MessageHeader h;
    const bool whole = header_bytes.size() == sizeof h;
    if (whole) std::memcpy(&h, header_bytes.data(), sizeof h);
    if (!whole || !verify(session_, h, body) || h.counter <= heard_) {
      ++bad;
      return;
    }
    heard_ = h.counter;
    got.insert(h.id);
  }

  boost::asio::io_context io_;
  KeyRing keys_;
  Key session_{};
  uint64_t heard_ = 0;
  UcxWorker::Endpoint end_ = 0;
  UcxWorker worker_;
  std::unique_ptr<Rendezvous> rendezvous_;
};

class Lies : public testing::Test {
 protected:
  Lies() : peers_(free_peers(2)), a_(peers_, 0), liar_(peers_) {}

  void SetUp() override { ASSERT_TRUE(open()); }
  bool open() {
    const int before = links_;
    const bool opened = liar_.run_until(a_, [&] { return liar_.links > before && a_.count(What::open, 1) > lost(); });
    links_ = liar_.links;
    return opened;
  }
  size_t lost() const { return a_.count(What::lost, 1); }

  std::vector<std::string> peers_;
  Owner a_;
  Liar liar_;
  int links_ = 0;
};

TEST_F(Lies, WhatTheLinksKeyDoesNotVouchForIsDroppedAndChangesNothing) {
  const std::vector<uint8_t> body(48, 5);
  int said = 0;
  const auto dropped_next = [&](const char* what) {
    ++said;
    ASSERT_TRUE(liar_.run_until(a_, [&] { return a_.dropped == said; })) << what << ": " << a_.dropped;
  };
  MessageHeader h = liar_.header(MessageId::mapped);
  liar_.say(Liar::bytes_of(h), {});
  dropped_next("no MAC");
  h.hmac[15] = 1;
  liar_.say(Liar::bytes_of(h), body);
  dropped_next("a wrong MAC");
  for (const size_t size : {size_t{0}, size_t{1}, sizeof h - 1, sizeof h + 1, size_t{200}}) {
    liar_.say(std::vector<uint8_t>(size, 1), body);
    dropped_next("a header of another size");
  }
  for (const uint32_t rank : {0U, 2U, 127U, UINT32_MAX}) {
    h = liar_.header(MessageId::mapped);
    h.rank = rank;
    liar_.say_signed(h, {});
    dropped_next("another rank");
  }
  h = liar_.header(MessageId::mapped);
  ++h.incarnation;
  liar_.say_signed(h, {});
  dropped_next("another incarnation");
  h = liar_.header(MessageId::mapped);
  h.counter = 0;
  liar_.say_signed(h, {});
  dropped_next("counter 0");
  std::mt19937 random(7);
  for (int i = 0; i < 50 && !HasFatalFailure(); ++i) {
    std::vector<uint8_t> noise(sizeof h + random() % 4000);
    for (uint8_t& byte : noise) byte = static_cast<uint8_t>(random());
    liar_.say(std::span(noise).first(sizeof h), std::span(noise).subspan(sizeof h));
    dropped_next("noise");
  }
  EXPECT_EQ(lost(), 0U);
  EXPECT_EQ(a_.count(What::usable, 1), 0U);
  EXPECT_EQ(a_.state(1), State::connecting);
}

TEST_F(Lies, AMessageCountsOnceAndALateOneNotAtAll) {
  const MessageHeader mapped = liar_.header(MessageId::mapped);
  const MessageHeader later = liar_.header(MessageId::segment);
  liar_.say_signed(later, Liar::bytes_of(SegmentBody{}));
  ASSERT_TRUE(liar_.run_until(a_, [&] { return a_.count(What::segment, 1) == 1; }));
  liar_.say_signed(mapped, {});  // overtaken
  liar_.say_signed(later, Liar::bytes_of(SegmentBody{}));
  ASSERT_TRUE(liar_.run_until(a_, [&] { return a_.dropped == 2; }));
  EXPECT_EQ(a_.count(What::segment, 1), 1U);
  EXPECT_EQ(a_.count(What::usable, 1), 0U);
  MessageHeader far = mapped;
  far.counter = UINT64_MAX - 1;  // a gap is no fault
  liar_.say_signed(far, {});
  ASSERT_TRUE(liar_.run_until(a_, [&] { return a_.count(What::usable, 1) == 1; }));
  EXPECT_EQ(lost(), 0U);
}

TEST_F(Lies, SignedNonsenseCostsTheLiarItsLinkAndItMayComeAgain) {
  const struct {
    const char* what;
    uint32_t id;
    size_t bytes;
  } cases[] = {{"no such message", 0, 0},          {"not over this transport", 6, 128},
               {"no such message", 99, 4096},      {"a segment too short", 1, sizeof(SegmentBody) - 1},
               {"a segment too long", 1, 4096},    {"a segment of nothing", 1, 0},
               {"ready of another session", 3, 8}, {"ready too short", 3, 4},
               {"a heartbeat too short", 4, 8},    {"a heartbeat for 128 ranks", 4, sizeof(HeartbeatBody)}};
  size_t before = 0;
  for (const auto& c : cases) {
    ASSERT_EQ(lost(), before) << c.what;
    liar_.say_signed(liar_.header(static_cast<MessageId>(c.id)), std::vector<uint8_t>(c.bytes, 0xEE));
    ASSERT_TRUE(liar_.run_until(a_, [&] { return lost() == before + 1; })) << c.what;
    const Event lost = a_.of(What::lost, 1).back();
    EXPECT_EQ(lost.loss, Loss::error);
    EXPECT_NE(lost.why.find("id " + std::to_string(c.id) + ", " + std::to_string(c.bytes) + " bytes"),
              std::string::npos)
        << lost.why;
    ++before;
    ASSERT_TRUE(open()) << c.what;
  }
  EXPECT_EQ(a_.dropped, 0);
}

TEST_F(Lies, HeartbeatsMaySayAnythingAndNobodyStumbles) {
  const size_t bytes = offsetof(HeartbeatBody, wait_us) + 2 * sizeof(uint32_t);
  liar_.say_signed(liar_.header(MessageId::heartbeat), std::vector<uint8_t>(bytes, 0xFF));
  ASSERT_TRUE(liar_.run_until(a_, [&] { return a_.loop->peers()[1].service_age_us == UINT32_MAX; }));
  const PeerView view = a_.loop->peers()[1];
  EXPECT_STREQ(name(view.busy), "unknown");
  EXPECT_LT(view.waits_for.value_or(0), 2U);
  EXPECT_EQ(why_not_ready(view.state, view.leaving, view.busy), "unknown");
  liar_.say_signed(liar_.header(MessageId::leaving), std::vector<uint8_t>(4096, 1));
  ASSERT_TRUE(liar_.run_until(a_, [&] { return a_.loop->peers()[1].leaving; }));
  liar_.run_for(a_, milliseconds(50));
  EXPECT_GE(liar_.got.count(MessageId::heartbeat), 2U);  // and it goes on hearing from us, all of it in order
  EXPECT_EQ(liar_.got.count(MessageId::segment), 1U);
  EXPECT_EQ(liar_.bad, 0);
  EXPECT_EQ(lost(), 0U);
}

}  // namespace
}  // namespace moed::control
