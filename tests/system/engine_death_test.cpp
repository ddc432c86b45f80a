// An engine is killed with a call in flight, 200 times: its lane is free within 100 ms, nothing is left behind, and an
// engine beside it never notices.
#include <gtest/gtest.h>

#include <poll.h>

#include <atomic>
#include <filesystem>
#include <random>

#include "daemon/abi/futex.h"
#include "tests/support/cases.h"
#include "tests/support/process.h"

namespace moed {
namespace {

using test::Daemon;
using test::Lane;

constexpr int kWarmUp = 20;
constexpr int kKills = 200;
constexpr Nanos kLaneFreeWithin = 100'000'000;

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr bool kCountsMemory = false;  // a sanitizer keeps freed memory for itself
#else
constexpr bool kCountsMemory = true;
#endif
constexpr uint64_t kMayGrow = 2 << 20;

struct Usage {
  size_t descriptors, files;
  uint64_t resident;
};

Usage usage(const Daemon& daemon) {
  const std::string proc = "/proc/" + std::to_string(daemon.pid());
  const auto count = [](const std::string& path) {
    return static_cast<size_t>(
        std::distance(std::filesystem::directory_iterator(path), std::filesystem::directory_iterator()));
  };
  uint64_t pages = 0;
  std::ifstream statm(proc + "/statm");
  statm >> pages >> pages;
  return {count(proc + "/fd"), count(std::filesystem::path(daemon.socket()).parent_path()) + count("/dev/shm"),
          pages * static_cast<uint64_t>(::sysconf(_SC_PAGESIZE))};
}

/// The engine that is to die: attaches, submits, says 's', and says 'd' should its call end first.
[[noreturn]] void doomed_engine(const std::string& socket, int say) {
  moed_options options{};
  options.size = sizeof options;
  options.arena_bytes = 1 << 20;
  moed_lane* lane = nullptr;
  moed_status attached = MOED_BUSY;
  for (int i = 0; i < 2000 && attached == MOED_BUSY; ++i) {  // the engine before may still be leaving
    attached = moed_attach(socket.c_str(), &options, &lane);
    if (attached == MOED_BUSY) ::usleep(500);
  }
  if (attached != MOED_OK) ::_exit(3);
  moed_call_t call{};
  if (moed_slot(lane, 0, &call) != MOED_OK) ::_exit(4);
  call.layer = MOED_LAYER_IDENTITY;
  call.tokens = 4;
  call.valid = 0;
  if (moed_submit(lane, &call) != MOED_OK) ::_exit(5);
  if (::write(say, "s", 1) != 1) ::_exit(6);
  moed_reply_t reply;
  while (moed_wait(lane, &reply, 1'000'000) == MOED_PENDING) {
  }
  if (::write(say, "d", 1) != 1) ::_exit(7);
  ::pause();
  ::_exit(0);
}

/// One life and death. True: the call was pending when the engine died.
bool kill_one(const Daemon& daemon, int delay_us) {
  int pipe_fds[2];
  if (::pipe(pipe_fds) != 0) throw std::runtime_error("pipe failed");
  const pid_t pid = ::fork();
  if (pid == 0) doomed_engine(daemon.socket(), pipe_fds[1]);
  ::close(pipe_fds[1]);
  char said = 0;
  pollfd ready{pipe_fds[0], POLLIN, 0};
  EXPECT_EQ(::poll(&ready, 1, 10'000), 1);
  EXPECT_EQ(::read(pipe_fds[0], &said, 1), 1);
  EXPECT_EQ(said, 's');
  ::usleep(static_cast<useconds_t>(delay_us));
  ::kill(pid, SIGKILL);
  const Nanos killed = now_ns();
  int status = 0;
  ::waitpid(pid, &status, 0);
  EXPECT_TRUE(WIFSIGNALED(status)) << "exit " << WEXITSTATUS(status);
  const bool pending = ::read(pipe_fds[0], &said, 1) == 0;
  ::close(pipe_fds[0]);
  for (moed_status attached = MOED_BUSY; attached != MOED_OK;) {  // the only other lane: free when it can be had again
    moed_options options{};
    options.size = sizeof options;
    options.arena_bytes = 1 << 20;
    moed_lane* lane = nullptr;
    attached = moed_attach(daemon.socket().c_str(), &options, &lane);
    EXPECT_LE(now_ns() - killed, kLaneFreeWithin);
    if (now_ns() - killed > 20 * kLaneFreeWithin) throw std::runtime_error("the lane does not come back");
    if (attached == MOED_OK)
      moed_detach(lane);
    else
      ::usleep(500);
  }
  return pending;
}

/// Lanes that the daemon's status lists.
size_t lanes_attached(const Daemon& daemon) {
  const std::string json = daemon.status_json();
  size_t lanes = 0;
  for (size_t at = json.find("\"lane\":"); at != std::string::npos; at = json.find("\"lane\":", at + 1)) ++lanes;
  return lanes;
}

/// The usage once the last detach is through and only the engine beside is there.
Usage settled(const Daemon& daemon) {
  for (int i = 0; i < 400 && lanes_attached(daemon) != 1; ++i) test::sleep_ms(5);
  EXPECT_EQ(lanes_attached(daemon), 1U);
  test::sleep_ms(50);  // the lane's memory goes right after it leaves the list
  return usage(daemon);
}

TEST(EngineDeath, TwoHundredTimesWithACallPending) {
  Daemon daemon({"limits.lanes=2", "limits.arena_mb=2", "debug.experts_delay_us=30000"});
  std::atomic<bool> stop{false};
  std::atomic<int> steady_calls{0};
  Lane steady(daemon.socket());
  const oracle::Rows rows = make_rows(Routing::random, make_shape(512, 256, 128, 32, 4), 1, 3, 1);
  moed_call_t call = steady.slot(MOED_LAYER_IDENTITY, 3);
  call.flags = MOED_FLAG_NO_NORM;
  steady.put(call.x, rows.x);
  steady.put(call.ids, rows.ids);
  steady.put(call.weights, rows.weights);
  const std::vector<uint16_t> want = oracle::routed(oracle_layer(make_shape(512, 256, 128, 32, 4)), rows, 1).latent;
  std::thread beside([&] {
    while (!stop) {
      moed_reply_t reply{};
      ASSERT_EQ(moed_call(steady.get(), &call, &reply), uint32_t{MOED_OK});
      ASSERT_EQ(steady.out(call), want);
      ++steady_calls;
    }
  });
  std::mt19937 random(1);
  Usage before{};
  int pending = 0;
  for (int i = 0; i < kWarmUp + kKills; ++i) {
    if (i == kWarmUp) before = settled(daemon);
    const bool met = kill_one(daemon, static_cast<int>(random() % 10'000));
    if (i >= kWarmUp) pending += met ? 1 : 0;
  }
  const Usage after = settled(daemon);
  stop = true;
  beside.join();
  EXPECT_GE(pending, kKills * 9 / 10);
  EXPECT_EQ(after.descriptors, before.descriptors);
  EXPECT_EQ(after.files, before.files);
  if (kCountsMemory) {
    EXPECT_LE(after.resident, before.resident + kMayGrow);
  }
  EXPECT_GE(steady_calls.load(), 20);
  std::printf("%d of %d kills met a pending call; resident %lu -> %lu bytes; %d calls beside\n", pending, kKills,
              static_cast<unsigned long>(before.resident), static_cast<unsigned long>(after.resident),
              steady_calls.load());
  EXPECT_EQ(daemon.stop(), 0);
}

}  // namespace
}  // namespace moed
