// Handshakes between daemons of one process over loopback: each pair keeps exactly one connection whatever the order of
// dialling, deaths and returns; whoever does not belong is sent away with one sentence.
#include "control/rendezvous.h"

#include <gtest/gtest.h>

#include <utility>

#include <boost/asio/io_context.hpp>
#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/steady_timer.hpp>
#include <boost/asio/write.hpp>
#include <chrono>
#include <fstream>
#include <map>
#include <random>

#include "tests/support/temp_dir.h"

namespace moed::control {
namespace {

using boost::asio::ip::tcp;
using namespace std::chrono_literals;

/// Ports of this host that nobody listens on just now.
std::vector<std::string> free_peers(boost::asio::io_context& io, uint32_t count) {
  std::vector<tcp::acceptor> held;
  std::vector<std::string> peers;
  for (uint32_t i = 0; i < count; ++i) {
    held.emplace_back(io, tcp::endpoint(boost::asio::ip::address_v4::loopback(), 0));
    peers.push_back("127.0.0.1:" + std::to_string(held.back().local_endpoint().port()));
  }
  return peers;
}

template <class Done>
bool run_until(boost::asio::io_context& io, Done done, std::chrono::milliseconds limit = 5s) {
  const auto end = std::chrono::steady_clock::now() + limit;
  while (!done() && std::chrono::steady_clock::now() < end) io.run_for(2ms);
  return done();
}

struct Node {
  Node(boost::asio::io_context& io, std::vector<std::string> peers, uint32_t rank, KeyRing& keys,
       const std::function<void(RendezvousOptions&)>& change = {}) {
    RendezvousOptions o;
    o.hello.protocol = o.hello.numerics = 1;
    o.hello.rank = rank;
    o.hello.ranks = static_cast<uint32_t>(peers.size());
    o.hello.handle_kinds = 2;
    o.hello.incarnation = 1000 + rank;
    o.listen = peers[rank];
    o.peers = std::move(peers);
    o.ucx_address = {static_cast<uint8_t>(rank), 7};
    o.handshake_ms = 300;
    if (change) change(o);
    RendezvousHandlers h;
    h.refuse = [this](uint32_t r) -> std::optional<std::string> {
      if (linked.contains(r)) return "rank " + std::to_string(r) + " is linked already";
      return {};
    };
    h.greatest_session = [rank](uint32_t) { return rank + 10; };
    h.proven = [this](const Proven& p) {
      ++handshakes;
      linked[p.rank] = p;
    };
    h.open = [this](uint32_t r) { open.push_back(r); };
    h.ended = [this](uint32_t r) { linked.erase(r); };
    h.refused = [this](const std::string& why) { refused.push_back(why); };
    rendezvous = std::make_unique<Rendezvous>(io, std::move(o), std::move(h), keys);
  }
  std::map<uint32_t, Proven> linked;
  std::vector<std::string> refused;
  std::vector<uint32_t> open;  ///< who has said that it knows us, in order
  int handshakes = 0;
  std::unique_ptr<Rendezvous> rendezvous;
};

TEST(Rendezvous, TwoRanksProveEachOtherOnce) {
  boost::asio::io_context io;
  KeyRing keys("");
  const auto peers = free_peers(io, 2);
  Node a(io, peers, 0, keys);
  Node b(io, peers, 1, keys);
  ASSERT_TRUE(run_until(io, [&] { return a.linked.size() == 1 && b.linked.size() == 1; }));
  io.run_for(200ms);  // nothing more comes
  EXPECT_EQ(a.handshakes, 1);
  EXPECT_EQ(b.handshakes, 1);
  EXPECT_EQ(a.open, std::vector<uint32_t>{1});
  EXPECT_EQ(b.open, std::vector<uint32_t>{0});
  const Proven& of_b = a.linked[1];
  const Proven& of_a = b.linked[0];
  EXPECT_EQ(of_b.session, of_a.session);
  EXPECT_EQ(of_b.hello.incarnation, 1001U);
  EXPECT_EQ(of_b.proof.greatest_session, 11U);
  EXPECT_EQ(of_b.proof.address_bytes, 2U);
  EXPECT_EQ(of_b.proof.address[0], 1U);
  EXPECT_EQ(of_a.proof.address[0], 0U);
  EXPECT_TRUE(a.refused.empty() && b.refused.empty());
}

TEST(Rendezvous, EveryPairOfAWorldKeepsOneConnectionWhateverTheOrder) {
  std::mt19937 random(2);
  for (int round = 0; round < 10; ++round) {
    boost::asio::io_context io;
    KeyRing keys("");
    constexpr uint32_t kRanks = 6;
    const auto peers = free_peers(io, kRanks);
    std::vector<uint32_t> order = {0, 1, 2, 3, 4, 5};
    std::shuffle(order.begin(), order.end(), random);
    std::vector<std::unique_ptr<Node>> nodes(kRanks);
    for (const uint32_t r : order) {
      nodes[r] = std::make_unique<Node>(io, peers, r, keys);
      io.run_for(std::chrono::milliseconds(random() % 20));
    }
    const auto complete = [&] {
      return std::all_of(nodes.begin(), nodes.end(), [](const auto& n) { return n->linked.size() == kRanks - 1; });
    };
    ASSERT_TRUE(run_until(io, complete)) << "round " << round;
    io.run_for(100ms);
    for (uint32_t a = 0; a < kRanks; ++a) {
      EXPECT_EQ(nodes[a]->handshakes, static_cast<int>(kRanks - 1)) << "rank " << a;
      for (uint32_t b = 0; b < kRanks; ++b)
        if (a != b) {
          EXPECT_EQ(nodes[a]->linked[b].session, nodes[b]->linked[a].session) << a << " and " << b;
        }
    }
  }
}

TEST(Rendezvous, ADeadRankIsNoticedAndItsSuccessorLinksAtOnce) {
  boost::asio::io_context io;
  KeyRing keys("");
  const auto peers = free_peers(io, 3);
  Node a(io, peers, 0, keys);
  auto b = std::make_unique<Node>(io, peers, 1, keys);
  Node c(io, peers, 2, keys);
  for (int life = 0; life < 5; ++life) {
    ASSERT_TRUE(run_until(io, [&] { return a.linked.size() == 2 && b->linked.size() == 2 && c.linked.size() == 2; }))
        << life;
    const Key before = a.linked[1].session;
    b.reset();
    ASSERT_TRUE(run_until(io, [&] { return !a.linked.contains(1) && !c.linked.contains(1); }));
    EXPECT_TRUE(a.linked.contains(2));  // the others' link is theirs
    io.run_for(std::chrono::milliseconds(life * 50));
    b = std::make_unique<Node>(io, peers, 1, keys);
    ASSERT_TRUE(run_until(io, [&] { return a.linked.contains(1) && c.linked.contains(1); })) << life;
    EXPECT_NE(a.linked[1].session, before);
  }
  ASSERT_TRUE(run_until(io, [&] { return b->linked.size() == 2; }));  // there is something to close on this side, too
  b->rendezvous->close(0);  // our own decision: the other end notices, and both begin again
  b->linked.erase(0);
  EXPECT_TRUE(run_until(io, [&] { return a.handshakes == 8 && a.linked.contains(1) && b->linked.contains(0); }))
      << a.handshakes;
}

/// One sound world of two, and a stranger who connects to rank 0.
class Strangers : public testing::Test {
 protected:
  Strangers() : keys_(""), peers_(free_peers(io_, 3)), a_(io_, peers_, 0, keys_), b_(io_, peers_, 1, keys_) {
    if (!run_until(io_, [&] { return a_.linked.size() == 1 && b_.linked.size() == 1; }))
      throw std::runtime_error("no world");
  }

  /// Sends bytes to rank 0, closes if asked to, and gives the sentence that follows.
  std::string say(const std::string& bytes, bool close) {
    const size_t before = a_.refused.size();
    tcp::socket socket(io_);
    socket.connect(tcp::endpoint(boost::asio::ip::address_v4::loopback(), a_.rendezvous->port()));
    boost::system::error_code ignored;
    boost::asio::write(socket, boost::asio::buffer(bytes), ignored);
    if (close) socket.close();
    EXPECT_TRUE(run_until(io_, [&] { return a_.refused.size() > before; })) << bytes.substr(0, 20);
    io_.run_for(20ms);
    EXPECT_EQ(a_.refused.size(), before + 1) << "one sentence";
    return a_.refused.size() > before ? a_.refused.back() : "";
  }

  void expect_undisturbed() {
    EXPECT_EQ(a_.handshakes, 1);
    EXPECT_TRUE(a_.linked.contains(1) && b_.linked.contains(0));
  }

  boost::asio::io_context io_;
  KeyRing keys_;
  std::vector<std::string> peers_;
  Node a_, b_;
};

TEST_F(Strangers, GarbageAndSlowOnesAreSentAway) {
  EXPECT_NE(say(std::string(256, '\0'), false).find("does not speak"), std::string::npos);
  EXPECT_NE(say("GET / HTTP/1.1\r\nHost: x\r\n\r\n", false).find("does not speak"), std::string::npos);
  std::mt19937 random(1);
  for (int i = 0; i < 20; ++i) {
    std::string bytes(4 + random() % 3000, '\0');
    for (char& ch : bytes) ch = static_cast<char>(random());
    say(bytes, i % 2 == 0);
  }
  Hello half;
  const std::string start(reinterpret_cast<const char*>(&half), 100);
  EXPECT_NE(say(start, true).find("broke off"), std::string::npos);
  EXPECT_NE(say(start, false).find("more than 300 ms"), std::string::npos);
  EXPECT_NE(say("", false).find("more than 300 ms"), std::string::npos);
  expect_undisturbed();
}

TEST_F(Strangers, WrongKeysAreNamed) {
  const test::TempDir dir;
  std::ofstream(dir.path() + "/other") << std::string(32, 'k');
  KeyRing other(dir.path());
  {
    const Node stranger(io_, peers_, 2, other);
    EXPECT_TRUE(run_until(io_, [&] { return !a_.refused.empty(); }));
    EXPECT_NE(a_.refused[0].find("key id 'other'"), std::string::npos) << a_.refused[0];
  }
  std::ofstream(dir.path() + "/none") << std::string(32, 'k');  // the right id and a wrong key
  std::filesystem::remove(dir.path() + "/other");
  KeyRing same_id(dir.path());
  a_.refused.clear();
  const Node stranger(io_, peers_, 2, same_id);
  const auto complains = [&] {
    return std::any_of(a_.refused.begin(), a_.refused.end(),
                       [](const std::string& s) { return s.find("does not hold") != std::string::npos; });
  };
  EXPECT_TRUE(run_until(io_, complains));
  EXPECT_TRUE(stranger.linked.empty());
  expect_undisturbed();
}

TEST_F(Strangers, DifferencesAreNamedOnBothSides) {
  const Node stranger(io_, peers_, 2, keys_, [](RendezvousOptions& o) { o.hello.max_tokens = 256; });
  const auto said = [](const Node& n, const char* what) {
    return std::any_of(n.refused.begin(), n.refused.end(),
                       [what](const std::string& s) { return s.find(what) != std::string::npos; });
  };
  EXPECT_TRUE(run_until(io_, [&] { return said(a_, "peer 2: max_tokens 256, here 0"); }));
  EXPECT_TRUE(run_until(io_, [&] { return said(stranger, "max_tokens 0, here 256"); }));
  EXPECT_TRUE(stranger.linked.empty());
  expect_undisturbed();
}

TEST_F(Strangers, ASecondHolderOfARankIsRefusedWhileTheFirstLives) {
  const Node second(io_, peers_, 1, keys_, [](RendezvousOptions& o) {
    o.listen = "127.0.0.1:0";
    o.hello.incarnation = 9;
  });
  EXPECT_TRUE(run_until(io_, [&] { return !a_.refused.empty(); }));
  EXPECT_NE(a_.refused[0].find("rank 1 is linked already"), std::string::npos) << a_.refused[0];
  ASSERT_TRUE(run_until(io_, [&] { return !second.refused.empty(); })) << "the second is not told";
  EXPECT_EQ(second.refused[0], "peer 0 refuses: rank 1 is linked already");
  EXPECT_TRUE(second.linked.empty());
  expect_undisturbed();
}

/// 256 silent connections hold no place for ever: who comes after them is served at once.
TEST(Rendezvous, ManySilentConnectionsKeepNobodyOut) {
  boost::asio::io_context io;
  KeyRing keys("");
  const auto peers = free_peers(io, 2);
  const auto patient = [](RendezvousOptions& o) { o.handshake_ms = 60'000; };
  Node a(io, peers, 0, keys, patient);
  std::vector<tcp::socket> silent;
  const tcp::endpoint at(boost::asio::ip::address_v4::loopback(), a.rendezvous->port());
  for (int i = 0; i < 300; ++i) {
    silent.emplace_back(io);
    silent.back().connect(at);
    io.run_for(1ms);
  }
  // It dials; a's own dials are refused for want of a listener.
  Node b(io, peers, 1, keys, [&](RendezvousOptions& o) {
    patient(o);
    o.listen = "127.0.0.1:0";
  });
  EXPECT_TRUE(run_until(io, [&] { return a.linked.contains(1) && b.linked.contains(0); }));
  ASSERT_FALSE(a.refused.empty());
  EXPECT_EQ(a.refused[0], "more than 256 handshakes at once");
}

TEST(Rendezvous, ATakenAddressIsNamed) {
  boost::asio::io_context io;
  KeyRing keys("");
  const auto peers = free_peers(io, 1);
  const Node first(io, peers, 0, keys);
  try {
    const Node second(io, peers, 0, keys);
    FAIL() << "two listeners on " << peers[0];
  } catch (const std::runtime_error& e) {
    EXPECT_NE(std::string(e.what()).find(peers[0]), std::string::npos) << e.what();
  }
}

}  // namespace
}  // namespace moed::control
