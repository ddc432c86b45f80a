// Who may attach, what a daemon does with garbage on its socket, how it leaves, and what an engine sees of its death.
#include <gtest/gtest.h>

#include <fcntl.h>
#include <netinet/in.h>
#include <sys/mman.h>
#include <sys/socket.h>

#include <random>

#include "daemon/abi/attach.h"
#include "daemon/abi/futex.h"
#include "daemon/abi/mailbox.h"
#include "daemon/abi/socket.h"
#include "tests/support/process.h"

namespace moed {
namespace {

using test::Daemon;
using test::Lane;

/// Options with everything left out but what `set` sets.
template <class Set>
moed_options with(Set set) {
  moed_options options{};
  set(options);
  return options;
}

std::string attach_error(const Daemon& daemon, moed_options options, moed_status want) {
  options.size = sizeof options;
  moed_lane* lane = nullptr;
  EXPECT_EQ(moed_attach(daemon.socket().c_str(), &options, &lane), want);
  EXPECT_EQ(lane, nullptr);
  moed_detach(lane);
  return moed_last_error(nullptr);
}

void expect_in(const std::string& text, std::initializer_list<const char*> parts) {
  for (const char* part : parts) EXPECT_NE(text.find(part), std::string::npos) << "no '" << part << "' in: " << text;
}

moed_status empty_call(const Lane& lane) {
  moed_call_t call = lane.slot(MOED_LAYER_IDENTITY, 0);
  moed_reply_t reply{};
  return moed_call(lane.get(), &call, &reply);
}

TEST(Attach, EachRefusalSaysWhy) {
  Daemon daemon({"limits.lanes=1", "limits.arena_mb=2"});
  const Lane holder(daemon.socket(), with([](auto& o) { o.name = "engine-a"; }));
  expect_in(attach_error(daemon, {}, MOED_BUSY), {"1 lanes are taken", "engine-a", std::to_string(::getpid()).c_str()});
  expect_in(attach_error(daemon, with([](auto& o) { o.arena_bytes = (2 << 20) + 1; }), MOED_NO_MEMORY),
            {"2097153", "2097152", "arena_mb"});
  expect_in(attach_error(daemon, with([](auto& o) { o.arena_bytes = 4096; }), MOED_NO_MEMORY),
            {"4096", "holds no token"});
  uint8_t digest[32] = {1, 2, 3};
  expect_in(attach_error(daemon, with([&](auto& o) { o.model_digest = digest; }), MOED_VERSION),
            {"model digest", "0102030000000000"});
  attach_error(daemon, with([](auto& o) { o.arena = 1; }), MOED_UNSUPPORTED);
  EXPECT_EQ(empty_call(holder), uint32_t{MOED_OK});
  Attach old;
  old.abi = 99;
  const Fd fd = test::connect_raw(daemon.socket());
  ASSERT_TRUE(send_message(fd.get(), &old, sizeof old));
  Attached answer;
  std::vector<Fd> fds;
  ASSERT_EQ(receive_message(fd.get(), std::as_writable_bytes(std::span(&answer, 1)), fds),
            static_cast<ssize_t>(sizeof answer));
  EXPECT_EQ(answer.status, static_cast<uint32_t>(Status::version));
  EXPECT_TRUE(fds.empty());
  expect_in(answer.text, {"abi 99", "here 1"});
  EXPECT_EQ(daemon.stop(), 0);
}

TEST(Attach, TheRightDigestIsWelcome) {
  Daemon daemon({});
  const Lane first(daemon.socket());
  const Lane second(daemon.socket(), with([&](auto& o) { o.model_digest = first.info().model_digest; }));
  EXPECT_EQ(empty_call(second), uint32_t{MOED_OK});
}

TEST(Attach, GarbageClosesItsConnectionAndNoOther) {
  Daemon daemon({"limits.lanes=2"});
  const Lane lane(daemon.socket());
  std::mt19937 random(3);
  for (int i = 0; i < 300; ++i) {
    const Fd fd = test::connect_raw(daemon.socket());
    std::vector<std::byte> bytes(1 + random() % 2000);
    for (std::byte& b : bytes) b = static_cast<std::byte>(random());
    if (i % 3 == 0) {  // a sound header, then nonsense
      const MessageHeader header{kAttachMagic, static_cast<MessageType>(random() % 8)};
      bytes.resize(std::max(bytes.size(), sizeof header));
      std::memcpy(bytes.data(), &header, sizeof header);
      if (header.type == MessageType::status && bytes.size() == sizeof header) continue;
    }
    send_message(fd.get(), bytes.data(), bytes.size());
    std::byte answer[sizeof(Attached)];
    std::vector<Fd> fds;
    const ssize_t got = receive_message(fd.get(), answer, fds);  // closed, nothing said
    EXPECT_TRUE(got == 0 || (got < 0 && errno == ECONNRESET)) << got << " " << errno;
  }
  EXPECT_EQ(empty_call(lane), uint32_t{MOED_OK});
  EXPECT_EQ(daemon.stop(), 0);
}

TEST(Attach, ConnectionsAreBoundedAndIdleOnesMakeRoom) {
  constexpr int kLimit = 2 + 32;  // lanes and spare ones
  Daemon daemon({"limits.lanes=2"});
  const Lane lane(daemon.socket());
  std::vector<Fd> idle;
  for (int i = 0; i < 200; ++i) idle.push_back(test::connect_raw(daemon.socket()));
  EXPECT_EQ(empty_call(lane), uint32_t{MOED_OK});
  const auto closed = [&] {
    int count = 0;
    for (const Fd& fd : idle) {
      char byte = 0;
      const ssize_t got = ::recv(fd.get(), &byte, 1, MSG_DONTWAIT);
      count += got == 0 || (got < 0 && errno != EAGAIN) ? 1 : 0;
    }
    return count;
  };
  for (int i = 0; i < 400 && closed() < 200 - kLimit; ++i) test::sleep_ms(5);
  EXPECT_GE(closed(), 200 - kLimit);
  EXPECT_LT(closed(), 200);  // the first ones may stay for a while
  for (int i = 0; i < 200 && closed() < 200; ++i) test::sleep_ms(50);
  EXPECT_EQ(closed(), 200);
  const Lane another(daemon.socket());
  EXPECT_EQ(empty_call(another), uint32_t{MOED_OK});
  EXPECT_EQ(empty_call(lane), uint32_t{MOED_OK});  // a lane is no idle connection
}

/// F22: what an engine does to its memory and to its call after the bell cannot hurt the daemon.
TEST(Attach, AnEngineCannotShrinkItsMemoryAndMayScribbleInIt) {
  Daemon daemon({"limits.lanes=2", "debug.experts_delay_us=2000"});
  const Lane witness(daemon.socket());
  Attach ask;
  ask.arena_bytes = 1 << 20;
  const Fd fd = test::connect_raw(daemon.socket());
  ASSERT_TRUE(send_message(fd.get(), &ask, sizeof ask));
  Attached answer;
  std::vector<Fd> fds;
  ASSERT_EQ(receive_message(fd.get(), std::as_writable_bytes(std::span(&answer, 1)), fds),
            static_cast<ssize_t>(sizeof answer));
  ASSERT_EQ(fds.size(), 2U);
  for (const Fd& memory : fds) {
    EXPECT_NE(::ftruncate(memory.get(), 0), 0);
    EXPECT_NE(::ftruncate(memory.get(), 1 << 30), 0);
  }
  Mapping memory(fds[0], sizeof(HostMailbox));
  Mapping arena(fds[1], 1 << 20);
  auto& box = *reinterpret_cast<HostMailbox*>(memory.data());
  auto* words = reinterpret_cast<uint64_t*>(arena.data());
  std::mt19937_64 random(5);
  int ran = 0;
  for (uint64_t round = 1; round <= 300; ++round) {
    Call call{};
    call.layer = MOED_LAYER_IDENTITY;
    call.tokens = static_cast<uint32_t>(random() % 8);
    call.flags = MOED_FLAG_MASK;
    call.x = 1024, call.ids = 65536, call.weights = 131072, call.out = 262144, call.valid = 16;
    if (round % 5 == 0) reinterpret_cast<uint64_t*>(&call)[random() % 16] = random();
    box.call = call;
    box.bell.store(random() % 10 == 0 ? random() : (round << 32));  // wild numbers too
    for (int i = 0; i < 200; ++i) {  // while the call runs: ids, weights, valid, the record, the reply
      words[2 + random() % 60000] = random();
      if (round % 2 == 0) reinterpret_cast<uint64_t*>(&box.call)[random() % 16] = random();
      box.done_asleep.store(static_cast<uint32_t>(random()));
    }
    test::sleep_ms(1);
    const uint32_t status = box.reply.status;
    ran += status == MOED_OK || status == MOED_MASKED ? 1 : 0;
  }
  EXPECT_GE(ran, 20);
  EXPECT_EQ(empty_call(witness), uint32_t{MOED_OK});
  EXPECT_EQ(daemon.stop(), 0);
}

/// Whoever reads our log may go away.
TEST(Attach, ALogWithoutReaderIsNoReasonToEnd) {
  const test::TempDir dir;
  int fds[2];
  ASSERT_EQ(::pipe2(fds, O_CLOEXEC), 0);
  const Daemon daemon({}, dir.path());
  const std::string other = dir.path() + "/other";
  const pid_t pid = ::fork();
  if (pid == 0) {
    ::dup2(fds[1], STDERR_FILENO);
    const std::string run = "run_dir=" + other;
    ::execl(MOED_BINARY, MOED_BINARY, "serve", "--set", run.c_str(), "--set", "http.listen=", nullptr);
    ::_exit(127);
  }
  ::close(fds[1]);
  std::string text;
  char part[256];
  while (text.find(" info ready ") == std::string::npos) {
    const ssize_t got = ::read(fds[0], part, sizeof part);
    ASSERT_GT(got, 0) << text;
    text.append(part, static_cast<size_t>(got));
  }
  ::close(fds[0]);
  {
    const Lane lane(other + "/moed/0.sock");  // attach and detach write to the log
    EXPECT_EQ(empty_call(lane), uint32_t{MOED_OK});
  }
  const Lane again(other + "/moed/0.sock");
  EXPECT_EQ(empty_call(again), uint32_t{MOED_OK});
  ::kill(pid, SIGTERM);
  const int status = test::wait_for(pid, 10'000);
  EXPECT_TRUE(status != -1 && WIFEXITED(status) && WEXITSTATUS(status) == 0) << status;
}

TEST(Leaving, SigtermLetsACallEndAndRefusesNewOnes) {
  Daemon daemon({"debug.experts_delay_us=400000"});
  const Lane lane(daemon.socket());
  const Lane other(daemon.socket());
  moed_call_t call = lane.slot(MOED_LAYER_IDENTITY, 2);
  ASSERT_EQ(moed_submit(lane.get(), &call), uint32_t{MOED_OK});
  test::sleep_ms(50);
  daemon.signal(SIGTERM);
  test::sleep_ms(50);
  EXPECT_EQ(empty_call(other), uint32_t{MOED_DRAINING});
  expect_in(attach_error(daemon, {}, MOED_DRAINING), {"leaving"});
  moed_reply_t reply{};
  EXPECT_EQ(moed_wait(lane.get(), &reply, 5'000'000), uint32_t{MOED_OK});
  EXPECT_EQ(daemon.reap(10'000), 0);
}

/// An engine that keeps calling hears `draining` first, and only then that the daemon is gone.
TEST(Leaving, IdleLanesHearThatTheDaemonDrains) {
  for (int i = 0; i < 5; ++i) {
    Daemon daemon({});
    const Lane lane(daemon.socket());
    ASSERT_EQ(empty_call(lane), uint32_t{MOED_OK});
    daemon.signal(SIGTERM);
    moed_status status = MOED_OK;
    for (const Nanos until = now_ns() + 5'000'000'000; status == MOED_OK && now_ns() < until;)
      status = empty_call(lane);
    EXPECT_EQ(status, uint32_t{MOED_DRAINING});
    EXPECT_EQ(daemon.reap(10'000), 0);
  }
}

TEST(Leaving, TwoSigtermsEndAtOnce) {
  Daemon daemon({"debug.experts_delay_us=900000"});
  const Lane lane(daemon.socket());
  moed_call_t call = lane.slot(MOED_LAYER_IDENTITY, 2);
  ASSERT_EQ(moed_submit(lane.get(), &call), uint32_t{MOED_OK});
  test::sleep_ms(50);
  daemon.signal(SIGTERM);
  test::sleep_ms(50);
  daemon.signal(SIGTERM);
  EXPECT_EQ(daemon.reap(3000), 0);
  moed_reply_t reply{};
  EXPECT_EQ(moed_wait(lane.get(), &reply, 1'000'000), uint32_t{MOED_DAEMON_LOST});
}

TEST(Leaving, AKilledDaemonIsLostAndItsSuccessorTakesTheEngineBack) {
  Daemon daemon({"debug.experts_delay_us=300000"});
  const Lane lane(daemon.socket());
  uint8_t* const arena = lane.arena();
  moed_call_t call = lane.slot(MOED_LAYER_IDENTITY, 2);
  ASSERT_EQ(moed_submit(lane.get(), &call), uint32_t{MOED_OK});
  test::sleep_ms(30);
  std::thread killer([&] {
    test::sleep_ms(50);
    daemon.signal(SIGKILL);
  });
  moed_reply_t reply{};
  const Nanos start = now_ns();
  EXPECT_EQ(moed_wait(lane.get(), &reply, 5'000'000), uint32_t{MOED_DAEMON_LOST});
  EXPECT_LE(now_ns() - start, 400'000'000U);
  killer.join();
  EXPECT_EQ(moed_submit(lane.get(), &call), uint32_t{MOED_DAEMON_LOST});
  daemon.restart();
  ASSERT_EQ(moed_reattach(lane.get()), uint32_t{MOED_OK}) << moed_last_error(lane.get());
  EXPECT_EQ(lane.arena(), arena);
  EXPECT_EQ(empty_call(lane), uint32_t{MOED_OK});
}

/// Runs `moed serve` with arguments that must fail; its exit code and what it said.
std::pair<int, std::string> failing_daemon(const std::vector<std::string>& sets) {
  const test::TempDir dir;
  std::vector<std::string> arguments{MOED_BINARY, "serve"};
  for (const std::string& s : sets) {
    arguments.emplace_back("--set");
    arguments.push_back(s);
  }
  const pid_t pid = test::spawn(arguments, dir.path() + "/log");
  const int status = test::wait_for(pid, 5000);
  if (status == -1) {
    ::kill(pid, SIGKILL);
    ::waitpid(pid, nullptr, 0);
    return {-1, "still running after 5 s"};
  }
  return {WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status), test::read_file(dir.path() + "/log")};
}

TEST(Starting, WhatCannotWorkIsRefusedWithItsExitCode) {
  const test::TempDir dir;
  const std::string run = "run_dir=" + dir.path();
  const Daemon daemon({}, dir.path());
  auto [code, text] = failing_daemon({run, "http.listen="});
  EXPECT_EQ(code, 74);
  expect_in(text, {"rank 0 of group moed is held by pid", std::to_string(daemon.pid()).c_str()});
  std::tie(code, text) = failing_daemon({run, "limits.lanes=65"});
  EXPECT_EQ(code, 65);
  expect_in(text, {"limits.lanes", "65", "64"});
  std::tie(code, text) = failing_daemon({run, "transport=nccl"});
  EXPECT_EQ(code, 65);
  std::tie(code, text) = failing_daemon({run, "rank=2", "control.peers=[\"127.0.0.1:1\",\"127.0.0.1:2\"]"});
  EXPECT_EQ(code, 65);
  std::tie(code, text) = failing_daemon({run, "model.source=huggingface", "model.path=" + dir.path()});
  EXPECT_EQ(code, 66);
  expect_in(text, {"config.json"});
  std::tie(code, text) = failing_daemon({"run_dir=/proc/nothing", "http.listen="});
  EXPECT_EQ(code, 69);
  expect_in(text, {"/proc/nothing"});
}

/// F26: a taken port is a sentence with the port and an exit code, and the rank can start again at once.
TEST(Starting, ATakenPortIsNamed) {
  const Fd taken(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  ASSERT_EQ(::bind(taken.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address), 0);
  ASSERT_EQ(::listen(taken.get(), 1), 0);
  socklen_t bytes = sizeof address;
  ::getsockname(taken.get(), reinterpret_cast<sockaddr*>(&address), &bytes);
  const std::string port = std::to_string(ntohs(address.sin_port));
  const test::TempDir dir;
  const auto [code, text] = failing_daemon({"run_dir=" + dir.path(), "http.listen=127.0.0.1:" + port});
  EXPECT_EQ(code, 69);
  expect_in(text, {port.c_str()});
  Daemon daemon({}, dir.path());
  EXPECT_EQ(daemon.stop(), 0);
}

}  // namespace
}  // namespace moed
