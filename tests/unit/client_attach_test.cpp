// libmoed's attach against a scripted daemon: what it accepts, what it refuses and what it says then.
#include "daemon/client/moed.h"

#include <gtest/gtest.h>

#include <fstream>
#include <string>
#include <vector>

#include "tests/support/fake_daemon.h"

extern "C" moed_status attach_from_c(const char* path, moed_lane** lane);

namespace {

using namespace moed::fake;
using moed::Fd;
using moed::Mapping;
using moed::MessageType;
using moed::now_ns;

/// Attaches to a daemon that makes this offer; the status, and its sentence in `why`.
moed_status attach_status(const Offer& offer, std::string& why) {
  FakeDaemon daemon({[&](const Fd& c) { give(c, offer); }});
  const Engine engine(daemon.path());
  why = moed_last_error(nullptr);
  EXPECT_EQ(engine.status == MOED_OK, engine.lane != nullptr);
  return engine.status;
}

TEST(Attach, CarriesOptionsAndInfo) {
  Offer offer;
  moed::Attach request;
  uint8_t digest[32] = {1, 2, 3};
  moed_options options{};
  options.size = sizeof options;
  options.arena_bytes = 4096;
  options.dry = 1;
  options.model_digest = digest;
  options.name = "a name of more than thirty-two bytes, cut";
  {
    FakeDaemon daemon({[&](const Fd& c) {
      request = give(c, offer);
      until_left(c);
    }});
    const Engine engine(daemon.path(), &options);
    ASSERT_EQ(engine.status, MOED_OK) << moed_last_error(nullptr);
    moed_info info{};
    info.size = sizeof info;
    EXPECT_EQ(moed_get_info(engine.lane, &info), MOED_OK);
    EXPECT_EQ(info.latent, 128U);
    EXPECT_EQ(info.incarnation, 77U);
    info.size = 127;
    EXPECT_EQ(moed_get_info(engine.lane, &info), MOED_BAD_CALL);
    const Mapping theirs(offer.arena_fd, kArena);
    static_cast<char*>(moed_arena(engine.lane))[100] = 'x';
    EXPECT_EQ(static_cast<char>(theirs.data()[100]), 'x');
  }
  EXPECT_EQ(request.dry, 1U);
  EXPECT_EQ(request.arena_bytes, 4096U);
  EXPECT_EQ(request.has_digest, 1U);
  EXPECT_EQ(request.model_digest[2], 3);
  EXPECT_EQ(std::string(request.name, 32), "a name of more than thirty-two b");
}

TEST(Attach, GivesSlots) {
  Offer offer;
  FakeDaemon daemon({[&](const Fd& c) { give(c, offer), until_left(c); }});
  const Engine engine(daemon.path());
  ASSERT_EQ(engine.status, MOED_OK);
  moed_call_t slot;
  ASSERT_EQ(moed_slot(engine.lane, 1, &slot), MOED_OK);
  // 20 tokens: x 10240 bytes, scales 160 -> 256, ids 320 -> 512, weights 160 -> 256, out 10240, valid 4 -> 256
  EXPECT_EQ(slot.x, 21760U);
  EXPECT_EQ(slot.scales, 32000U);
  EXPECT_EQ(slot.ids, 32256U);
  EXPECT_EQ(slot.weights, 32768U);
  EXPECT_EQ(slot.out, 33024U);
  EXPECT_EQ(slot.valid, 43264U);
  EXPECT_EQ(slot.tokens, 0U);
  int32_t valid = 0;
  std::memcpy(&valid, static_cast<char*>(moed_arena(engine.lane)) + slot.valid, sizeof valid);
  EXPECT_EQ(valid, INT32_MAX);
  EXPECT_EQ(moed_slot(engine.lane, 2, &slot), MOED_BAD_CALL);
  EXPECT_TRUE(says(moed_last_error(engine.lane), "slot is 2, the arena has 2"));
}

TEST(Attach, TellsWhyTheDaemonRefused) {
  Offer offer;
  offer.answer.status = MOED_BUSY;
  offer.descriptors = 0;
  std::strcpy(offer.answer.text, "2 lanes of 2 are taken: raise limits.lanes");
  std::string why;
  EXPECT_EQ(attach_status(offer, why), MOED_BUSY);
  EXPECT_EQ(why, "2 lanes of 2 are taken: raise limits.lanes");
}

TEST(Attach, RefusesWhatItCannotTrust) {
  const struct {
    const char* what;
    std::function<void(Offer&)> change;
    moed_status status;
    const char* says;
  } cases[] = {
      {"another abi", [](Offer& o) { o.answer.info.abi = 2; }, MOED_VERSION, "abi 2"},
      {"a short answer", [](Offer& o) { o.bytes = 100; }, MOED_VERSION, "100 bytes"},
      {"another message", [](Offer& o) { o.answer.header.type = MessageType::answer; }, MOED_VERSION, "type 5"},
      {"no descriptors", [](Offer& o) { o.descriptors = 0; }, MOED_NO_MEMORY, "0 descriptors"},
      {"one descriptor", [](Offer& o) { o.descriptors = 1; }, MOED_NO_MEMORY, "1 descriptors"},
      {"a small mailbox", [](Offer& o) { o.mailbox_fd = moed::make_sealed_memory("m", 800); }, MOED_VERSION, "800"},
      {"a small arena", [](Offer& o) { o.arena_fd = moed::make_sealed_memory("a", kArena - 1); }, MOED_VERSION,
       "65535"},
      {"an arena not sealed",
       [](Offer& o) {
         o.arena_fd = Fd(::memfd_create("a", MFD_CLOEXEC | MFD_ALLOW_SEALING));
         ASSERT_EQ(::ftruncate(o.arena_fd.get(), kArena), 0);
       },
       MOED_INTERNAL, "arena is not sealed"},
      {"another daemon's mailbox", [](Offer& o) { o.box().header.incarnation.store(78); }, MOED_INTERNAL, "4e"},
      {"a mailbox not ready", [](Offer& o) { o.box().header.incarnation.store(0); }, MOED_INTERNAL, "incarnation 0"},
      {"another mailbox", [](Offer& o) { o.box().header.magic = 1; }, MOED_VERSION, "mailbox"},
      {"another arena size", [](Offer& o) { o.box().header.arena_bytes = 1; }, MOED_VERSION, "mailbox"},
  };
  for (const auto& c : cases) {
    Offer offer;
    c.change(offer);
    std::string why;
    EXPECT_EQ(attach_status(offer, why), c.status) << c.what;
    EXPECT_TRUE(says(why.c_str(), c.says)) << c.what << ": " << why;
  }
}

TEST(Attach, TellsThatNobodyAnswers) {
  const Directory directory;
  moed_lane* lane = nullptr;
  EXPECT_EQ(attach_from_c((directory / "none.sock").c_str(), &lane), MOED_DAEMON_LOST);
  EXPECT_TRUE(says(moed_last_error(nullptr), "none.sock: No such file"));
  EXPECT_EQ(attach_from_c(std::string(200, 'x').c_str(), &lane), MOED_BAD_CALL);
  EXPECT_TRUE(says(moed_last_error(nullptr), "200 bytes, at most 107"));
  FakeDaemon daemon({[](const Fd& c) {
    moed::Attach request;
    receive(c, request);
  }});
  EXPECT_EQ(attach_from_c(daemon.path(), &lane), MOED_DAEMON_LOST);
  EXPECT_TRUE(says(moed_last_error(nullptr), "without an answer"));
  EXPECT_EQ(lane, nullptr);
}

TEST(Attach, ChecksOptions) {
  moed_lane* lane = nullptr;
  struct {
    moed_options known;
    uint64_t more;
  } options = {};
  for (const uint32_t size : {0U, 47U, 5000U}) {
    options.known.size = size;
    EXPECT_EQ(moed_attach("/none", &options.known, &lane), MOED_BAD_CALL) << size;
  }
  options.known.size = 56;
  EXPECT_EQ(moed_attach("/none", &options.known, &lane), MOED_DAEMON_LOST) << "unknown fields that are 0 are fine";
  options.more = 1;
  EXPECT_EQ(moed_attach("/none", &options.known, &lane), MOED_UNSUPPORTED);
  options.known.size = 48;
  options.known.arena = 1;
  EXPECT_EQ(moed_attach("/none", &options.known, &lane), MOED_UNSUPPORTED);
  options.known.arena = 0;
  options.known.spin_us = 1'000'001;
  EXPECT_EQ(moed_attach("/none", &options.known, &lane), MOED_BAD_CALL);
  EXPECT_EQ(moed_attach("/none", nullptr, nullptr), MOED_BAD_CALL);
}

TEST(Connect, FindsTheOnlySocket) {
  const Directory directory;
  const std::string pattern = directory / "*.sock";
  moed::SocketPath path = {};
  moed::Sentence why;
  ::unsetenv("MOED_SOCKET");
  EXPECT_EQ(moed::find_socket(nullptr, path, why, pattern.c_str()), moed::Status::daemon_lost);
  std::ofstream(directory / "0.sock").put('x');
  EXPECT_EQ(moed::find_socket(nullptr, path, why, pattern.c_str()), moed::Status::ok);
  EXPECT_EQ(path, directory / "0.sock");
  std::ofstream(directory / "1.sock").put('x');
  EXPECT_EQ(moed::find_socket(nullptr, path, why, pattern.c_str()), moed::Status::bad_call);
  EXPECT_TRUE(says(why.text, "2 sockets") && says(why.text, "1.sock"));
  ::setenv("MOED_SOCKET", "/from/environment", 1);
  EXPECT_EQ(moed::find_socket(nullptr, path, why, pattern.c_str()), moed::Status::ok);
  EXPECT_STREQ(path, "/from/environment");
  EXPECT_EQ(moed::find_socket("/asked", path, why, pattern.c_str()), moed::Status::ok);
  EXPECT_STREQ(path, "/asked");
  ::unsetenv("MOED_SOCKET");
}

TEST(Connect, StopsWaitingAtItsLimit) {
  int ends[2] = {-1, -1};
  ASSERT_EQ(::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, ends), 0);
  const Fd here(ends[0]);
  Fd there(ends[1]);
  std::byte buffer[8];
  std::vector<Fd> fds;
  std::size_t got = 0;
  moed::Sentence why;
  EXPECT_EQ(moed::receive_within(here, buffer, fds, now_ns() + 20'000'000, got, why), moed::Status::peer_timeout);
  ASSERT_TRUE(moed::send_message(there.get(), "too long a message", 18));
  EXPECT_EQ(moed::receive_within(here, buffer, fds, now_ns() + kSecond, got, why), moed::Status::version);
  while (::send(here.get(), buffer, sizeof buffer, 0) > 0) {
  }
  EXPECT_EQ(moed::send_within(here, buffer, sizeof buffer, now_ns() + 20'000'000, why), moed::Status::peer_timeout);
  there.reset();
  EXPECT_EQ(moed::send_within(here, buffer, sizeof buffer, now_ns() + kSecond, why), moed::Status::daemon_lost);
}

}  // namespace
