// Whoever does not belong to a world is refused with one line that says why, with both values where there are two, and
// the ranks that do belong go on: every call that runs meanwhile is right and no link is lost. Keys change under load.
#include <gtest/gtest.h>

#include <array>
#include <fstream>
#include <nlohmann/json.hpp>
#include <random>

#include "control/messages.h"
#include "tests/support/caller.h"
#include "tests/support/daemons.h"
#include "tests/support/scrape.h"
#include "tests/support/tcp.h"

namespace moed {
namespace {

using test::Caller;
using test::Daemon;
using test::Tcp;
using test::wait_until;
using Sets = std::vector<std::string>;

constexpr uint32_t kRanks = 4, kAbsent = 3;  // rank 3 is not there: the strangers want its place
constexpr uint32_t kExperts = 8, kTopK = 2;

/// The directory of a checkpoint that the float64 oracle's script makes: one shape, weights by seed.
std::string make_checkpoint(const std::string& directory, int seed) {
  const std::string out = directory + "/" + std::to_string(seed);
  const pid_t pid = test::spawn({"/usr/bin/python3", std::string(MOED_SOURCE) + "/tests/golden/make.py", out, "--seed",
                                 std::to_string(seed), "--hidden", "128", "--latent", "64", "--inter", "32",
                                 "--experts", std::to_string(kExperts), "--topk", std::to_string(kTopK)},
                                directory + "/make.log");
  const int status = test::wait_for(pid, 60'000);
  if (status != 0) throw std::runtime_error("make.py: " + test::read_file(directory + "/make.log"));
  return out + "/checkpoint";
}

/// A directory of keys. A file is there whole or not at all.
class Keys {
 public:
  Keys() { std::filesystem::create_directory(path()); }
  std::string path() const { return dir_.path() + "/keys"; }
  void put(const std::string& id, char fill) const {
    std::ofstream(dir_.path() + "/new") << std::string(32, fill);
    std::filesystem::rename(dir_.path() + "/new", path() + "/" + id);
  }
  void remove(const std::string& id) const { std::filesystem::remove(path() + "/" + id); }

 private:
  test::TempDir dir_;
};

std::string refusal(const std::string& sentence) { return "warn handshake refused reason=\"" + sentence + "\"\n"; }

/// The number behind `field` in the last line of the log that has it: "http=" or "control=".
uint16_t port_of(const Daemon& daemon, const std::string& field) {
  const std::string log = daemon.log();
  return static_cast<uint16_t>(std::stoul(log.substr(log.rfind(" " + field) + 1 + field.size(), 5)));
}

std::string metrics_of(const Daemon& daemon) { return test::get_page(port_of(daemon, "http="), "/metrics"); }

double refused(const Daemon& daemon) {
  return test::metric(metrics_of(daemon), "moed_refused_total{where=\"handshake\"}");
}

std::string missing(const Daemon& daemon) { return nlohmann::json::parse(daemon.status_json()).at("missing").dump(); }

Sets calm() {  // nothing here is about time
  return {"service.spin_us=0", "limits.arena_mb=1", "calls.deadline_ms=10000", "calls.first_deadline_ms=10000",
          "heartbeat.lost_after_ms=5000"};
}

/// Three ranks of a world of four, on a checkpoint and with a key, and a lane that calls through all three.
struct World {
  World() : checkpoint(make_checkpoint(dir.path(), 11)), ports(test::free_ports(kRanks)) {
    keys.put("first", 'k');
    for (uint32_t r = 0; r < kAbsent; ++r) daemons.push_back(std::make_unique<Daemon>(sets({}), dir.path(), r));
    for (const auto& d : daemons)
      if (!wait_until([&] { return d->count("link ready") == 2; }, 30'000)) throw std::runtime_error(d->log());
    caller = std::make_unique<Caller>(daemons[0]->socket(), kAbsent);
  }

  /// What every rank of this world is started with, and then `own`.
  Sets sets(const Sets& own) const {
    Sets all = calm();
    for (const std::string& s : {test::peers_of(ports), "control.secret_dir=" + keys.path(),
                                 std::string("model.source=huggingface"), "model.path=" + checkpoint})
      all.push_back(s);
    all.insert(all.end(), own.begin(), own.end());
    return all;
  }

  test::TempDir dir;
  Keys keys;
  std::string checkpoint;
  std::vector<uint16_t> ports;
  std::vector<std::unique_ptr<Daemon>> daemons;
  std::unique_ptr<Caller> caller;
};

class Strangers : public testing::Test {
 protected:
  static void SetUpTestSuite() { world_ = std::make_unique<World>(); }
  static void TearDownTestSuite() { world_.reset(); }
  static Daemon& daemon(uint32_t rank) { return *world_->daemons[rank]; }

  void SetUp() override {
    for (uint32_t r = 0; r < kAbsent; ++r) before_[r] = refused(daemon(r));
  }

  /// The service is undisturbed.
  void TearDown() override {
    EXPECT_TRUE(world_->caller->more(20));
    EXPECT_EQ(world_->caller->faults(), "");
    for (uint32_t r = 0; r < kAbsent; ++r) {
      for (uint32_t p = 0; p < kAbsent; ++p) {
        const std::string peer = " peer=" + std::to_string(p) + " ";
        EXPECT_EQ(daemon(r).count("link ready" + peer), p == r ? 0U : 1U) << daemon(r).log();
        EXPECT_EQ(daemon(r).count("link lost" + peer) + daemon(r).count("link not made" + peer), 0U) << daemon(r).log();
      }
      EXPECT_TRUE(missing(daemon(r)) == "[\"link 3: connecting\"]" || missing(daemon(r)) == "[\"link 3: lost\"]")
          << missing(daemon(r));
    }
  }

  /// The line comes, and comes once. A sentence is provoked by one test only: it is said once a minute.
  static void expect_line(const Daemon& d, const std::string& sentence) {
    EXPECT_TRUE(wait_until([&] { return d.count(refusal(sentence)) > 0; })) << sentence << "\n" << d.log();
    EXPECT_EQ(d.count(refusal(sentence)), 1U) << d.log();
  }
  /// So many refusals since the test began, and no more. Tests that count come first: a daemon that is stopped may
  /// leave a handshake behind that counts a second later.
  void expect_counted(uint32_t rank, int times) {
    EXPECT_TRUE(wait_until([&] { return refused(daemon(rank)) >= before_[rank] + times; })) << rank;
    EXPECT_EQ(refused(daemon(rank)), before_[rank] + times) << daemon(rank).log();
  }

  static std::unique_ptr<World> world_;
  std::array<double, kAbsent> before_{};
};
std::unique_ptr<World> Strangers::world_;

TEST_F(Strangers, GarbageIsSentAwayAtOnce) {
  const std::string sentence = "a connection that does not speak this protocol";
  const Tcp zeros(world_->ports[0]);
  EXPECT_TRUE(zeros.send(std::string(256, '\0')));
  EXPECT_TRUE(zeros.closed());
  expect_counted(0, 1);
  expect_line(daemon(0), sentence);
  std::mt19937 random(11);
  int said = 0;
  for (const size_t length : {4U, 5U, 351U, 352U, 353U, 1416U, 4096U, 100'000U}) {
    std::string bytes(length, '\0');
    for (char& ch : bytes) ch = static_cast<char>(random());
    const Tcp noise(world_->ports[1]);
    noise.send(bytes);  // it may be hung up on before it has said all
    EXPECT_TRUE(noise.closed()) << length;
    expect_counted(1, ++said);
  }
  expect_line(daemon(1), sentence);
  const Tcp http(world_->ports[2]);
  EXPECT_TRUE(http.send("GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n"));
  EXPECT_EQ(http.receive(1), "");
  expect_counted(2, 1);
  expect_line(daemon(2), sentence);
}

/// A Hello as rank 3 would say it, as bytes.
std::string hello(const char* key_id) {
  control::Hello h;
  h.protocol = h.numerics = 1;
  h.rank = kAbsent;
  h.ranks = kRanks;
  h.incarnation = 5;
  std::snprintf(h.group, sizeof h.group, "moed");
  std::snprintf(h.key_id, sizeof h.key_id, "%s", key_id);
  return {reinterpret_cast<const char*>(&h), sizeof h};
}

TEST_F(Strangers, HalvesOfHandshakesAndMadeUpProofsAreRefused) {
  const std::string whole = hello("first");
  {
    const Tcp half(world_->ports[0]);
    EXPECT_TRUE(half.send(whole.substr(0, whole.size() / 2)));
  }
  {
    const Tcp without_proof(world_->ports[1]);
    EXPECT_TRUE(without_proof.send(whole));
    EXPECT_EQ(without_proof.receive(whole.size()).size(), whole.size());
  }
  const Tcp unknown(world_->ports[2]);
  EXPECT_TRUE(unknown.send(hello("nobody's")));
  EXPECT_EQ(unknown.receive(1), "");  // and learns nothing
  expect_line(daemon(2), "a peer with key id 'nobody's', which is not in control.secret_dir");
  expect_counted(2, 1);
  for (const uint32_t rank : {0U, 1U}) {
    expect_counted(rank, 1);
    EXPECT_GE(daemon(rank).count(refusal("a handshake that broke off")), 1U);
  }
  const Tcp forger(world_->ports[1]);
  EXPECT_TRUE(forger.send(whole));
  EXPECT_EQ(forger.receive(whole.size()).size(), whole.size());
  EXPECT_TRUE(forger.send(std::string(sizeof(control::Proof), 'p')));
  EXPECT_EQ(forger.receive(1), "");
  expect_counted(1, 2);
}

TEST_F(Strangers, SlowOnesAreNotWaitedFor) {
  const std::string whole = hello("first");
  const Tcp drop_by_drop(world_->ports[0]);
  const Tcp unfinished(world_->ports[1]);
  const Tcp silent(world_->ports[2]);
  EXPECT_TRUE(unfinished.send(whole.substr(0, whole.size() - 1)));
  for (size_t i = 0; i < whole.size() && drop_by_drop.send(whole.substr(i, 1)); ++i) test::sleep_ms(20);
  EXPECT_TRUE(drop_by_drop.closed() && unfinished.closed() && silent.closed());
  for (uint32_t r = 0; r < kAbsent; ++r) {
    expect_line(daemon(r), "a handshake that took more than 5000 ms");
    expect_counted(r, 1);
  }
}

/// The digest's beginning, as a daemon's page tells it.
std::string digest_of(const Daemon& daemon) {
  const std::string page = metrics_of(daemon);
  return page.substr(page.find("digest=\"") + 8, 16) + "..";
}

TEST_F(Strangers, DaemonsThatDifferAreRefusedWithBothValues) {
  const Keys other_keys;
  other_keys.put("first", 'x');
  std::vector<uint16_t> five = world_->ports;
  five.push_back(test::free_ports(1)[0]);
  const struct {
    Sets own;
    std::string what, there, here;  ///< one value only: there is empty
  } cases[] = {
      {{"control.secret_dir=" + other_keys.path()}, "a peer whose proof does not hold under key id 'first'", "", ""},
      {{"group=other"}, "group", "other", "moed"},
      {{test::peers_of(five)}, "ranks", "5", "4"},
      {{"limits.max_tokens=64"}, "max_tokens", "64", "128"},
      {{"limits.lanes=3"}, "lanes", "3", "2"},
      {{"model.path=" MOED_GOLDEN "/checkpoint"}, "shape: hidden", "512", "128"},
      {{"model.path=" + make_checkpoint(world_->dir.path(), 12)}, "model digest", "", digest_of(daemon(0))},
      {{"model.revision=newer"}, "weights revision", "'newer'", "''"},
  };
  for (const auto& c : cases) {
    Daemon stranger(world_->sets(c.own), world_->dir.path(), kAbsent);
    ASSERT_TRUE(wait_until([&] { return stranger.count("listening") == 1; })) << stranger.log();
    const std::string there = c.what == "model digest" ? digest_of(stranger) : c.there;
    const auto sentence = [&c](uint32_t peer, const std::string& that, const std::string& ours) {
      if (ours.empty()) return c.what;
      return "peer " + std::to_string(peer) + ": " + c.what + " " + that + ", here " + ours;
    };
    EXPECT_TRUE(there != c.here || c.here.empty()) << c.what;
    for (uint32_t r = 0; r < kAbsent; ++r) {
      expect_line(daemon(r), sentence(kAbsent, there, c.here));
      expect_line(stranger, sentence(r, c.here, there));
      EXPECT_EQ(daemon(r).count("link ready peer=3"), 0U) << daemon(r).log();
    }
    EXPECT_EQ(stranger.count("link ready"), 0U) << stranger.log();
    EXPECT_EQ(stranger.stop(), 0);
    test::sleep_ms(250);  // a daemon logs at most five refusals a second
  }
  for (uint32_t r = 0; r < kAbsent; ++r) EXPECT_GE(refused(daemon(r)), before_[r] + 8);
}

TEST_F(Strangers, ARankHasOneHolder) {
  Daemon same_place(world_->sets({}), world_->dir.path(), 1);
  EXPECT_EQ(same_place.reap(10'000), 74);
  const std::string held = "rank 1 of group moed is held by pid " + std::to_string(daemon(1).pid());
  EXPECT_NE(same_place.log().find(held), std::string::npos) << same_place.log();
  const test::TempDir elsewhere;
  const std::string listen = "control.listen=127.0.0.1:" + std::to_string(test::free_ports(1)[0]);
  Daemon second(world_->sets({listen}), elsewhere.path(), 1);
  for (const uint32_t r : {0U, 2U}) expect_line(daemon(r), "rank 1 is linked already (ready)");
  EXPECT_EQ(second.count("link ready"), 0U) << second.log();
  EXPECT_EQ(daemon(1).count("handshake refused reason=\"rank"), 0U) << daemon(1).log();
  EXPECT_EQ(second.stop(), 0);
}

/// Whoever was refused may come again as it should be.
TEST_F(Strangers, ACorrectedRankIsTaken) {
  {
    Daemon wrong(world_->sets({"limits.max_tokens=65"}), world_->dir.path(), kAbsent);
    for (uint32_t r = 0; r < kAbsent; ++r) expect_line(daemon(r), "peer 3: max_tokens 65, here 128");
    EXPECT_EQ(wrong.stop(), 0);
  }
  Daemon right(world_->sets({}), world_->dir.path(), kAbsent);
  right.wait_ready();
  for (uint32_t r = 0; r < kAbsent; ++r)
    EXPECT_TRUE(wait_until([&] { return missing(daemon(r)) == "[]"; })) << missing(daemon(r));
  world_->caller->use(kRanks);
  EXPECT_TRUE(world_->caller->more(20));
  world_->caller->use(kAbsent);
  EXPECT_EQ(right.stop(), 0);
  for (uint32_t r = 0; r < kAbsent; ++r)
    EXPECT_TRUE(wait_until([&] { return daemon(r).count("link lost peer=3 reason=leaving") == 1; })) << daemon(r).log();
}

TEST(Keys, ChangeUnderLoadWithoutALinkLost) {
  constexpr uint32_t kWorld = 3, kRestarted = 2;
  const Keys keys;
  keys.put("first", 'a');
  Sets sets = calm();
  for (const char* s : {"model.source=synthetic",
                        "model.shape={hidden: 128, latent: 64, intermediate: 32, experts: 8, top_k: 2, layers: 2}"})
    sets.emplace_back(s);
  sets.emplace_back("heartbeat.lost_after_ms=1500");
  sets.push_back("control.secret_dir=" + keys.path());
  const test::Daemons world(kWorld, sets);
  Caller caller(world[0].socket(), kWorld);
  const auto read_times = [&](size_t times) {
    for (uint32_t r = 0; r < kWorld; ++r)
      EXPECT_TRUE(wait_until([&] { return world[r].count("keys read newest=second") == times; })) << world[r].log();
  };
  keys.put("second", 'b');
  read_times(1);
  EXPECT_TRUE(caller.more(200));
  keys.remove("first");
  read_times(2);
  test::sleep_ms(2000);  // longer than heartbeat.lost_after_ms: a link whose messages no longer verify would be lost
  EXPECT_TRUE(caller.more(200));
  for (uint32_t r = 0; r < kWorld; ++r) {
    EXPECT_EQ(world[r].count("link lost") + world[r].count("keys not read"), 0U) << world[r].log();
    EXPECT_EQ(world[r].count("link ready"), kWorld - 1) << world[r].log();
  }
  const Tcp late(world.port(0));
  EXPECT_TRUE(late.send(hello("first")));
  EXPECT_EQ(late.receive(1), "");
  const std::string unknown = refusal("a peer with key id 'first', which is not in control.secret_dir");
  EXPECT_TRUE(wait_until([&] { return world[0].count(unknown) == 1; })) << world[0].log();

  caller.use(kRestarted);
  world[kRestarted].kill();
  world[kRestarted].start();
  world.wait_ready();
  for (const uint32_t r : {0U, 1U}) {
    EXPECT_TRUE(wait_until([&] { return missing(world[r]) == "[]"; })) << world[r].log();
    EXPECT_EQ(world[r].count("link ready peer=2 session=2"), 1U) << world[r].log();
    EXPECT_EQ(world[r].count("link lost"), 1U) << world[r].log();
  }
  caller.use(kWorld);
  EXPECT_TRUE(caller.more(20));
  EXPECT_EQ(caller.faults(), "");
}

}  // namespace
}  // namespace moed
