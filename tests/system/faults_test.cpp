// Faults that others met in the field, played with real daemons: late calls, wrong clocks, too little memory, engines
// that die, too many engines, taken ports. docs/faults.md says which is which.
#include <gtest/gtest.h>

#include <sys/resource.h>
#include <sys/stat.h>

#include <nlohmann/json.hpp>
#include <random>
#include <set>

#include "daemon/abi/attach.h"
#include "daemon/abi/socket.h"
#include "tests/support/caller.h"
#include "tests/support/daemons.h"
#include "tests/support/fault_daemon.h"

namespace moed {
namespace {

using test::Caller;
using test::Daemon;
using test::Daemons;
using test::empty_call;
using test::fault_settings;
using test::Lane;
using test::wait_until;
using Sets = Daemons::Sets;

/// F17. Until its first good call a lane has a budget of its own; then the steady one holds, and who is late is named.
TEST(FaultsOfTime, TheFirstCallHasABudgetOfItsOwn) {
  const Daemon slow({"debug.experts_delay_us=300000", "calls.deadline_ms=100", "calls.first_deadline_ms=10000",
                     "canary.period_ms=0"});
  const Lane lane(slow.socket());
  moed_call_t call = lane.slot(MOED_LAYER_IDENTITY, 2);
  lane.put(call.ids, std::vector<int32_t>(uint64_t{2} * lane.info().top_k, 1));
  moed_reply_t reply{};
  EXPECT_EQ(moed_call(lane.get(), &call, &reply), uint32_t{MOED_OK});
  EXPECT_EQ(moed_call(lane.get(), &call, &reply), uint32_t{MOED_PEER_TIMEOUT});
  EXPECT_EQ(reply.ranks[0], 1U);
  EXPECT_EQ(reply.layer, uint32_t{MOED_LAYER_IDENTITY});
}

/// F19. Rank 2's wall clock is a day ahead and jumps by hours while calls run.
TEST(FaultsOfTime, WrongClocksChangeNothing) {
  if (test::kSanitized) GTEST_SKIP() << "a sanitizer does not let another library be loaded before it";
  const test::TempDir dir;
  const Sets sets = fault_settings({test::peers_of(test::free_ports(3))});
  Daemon zero(sets, dir.path(), 0);
  Daemon one(sets, dir.path(), 1);
  ::setenv("LD_PRELOAD", MOED_WRONG_CLOCK, 1);
  Daemon two(sets, dir.path(), 2);
  ::unsetenv("LD_PRELOAD");
  for (Daemon* d : {&zero, &one, &two}) d->wait_ready();
  ASSERT_NE(two.log().substr(0, 10), zero.log().substr(0, 10)) << "the clock is not wrong";
  {
    const Caller from_right(zero.socket(), 3);
    const Caller from_wrong(two.socket(), 3);
    test::sleep_ms(1000);  // ten times set
    EXPECT_TRUE(from_right.more(100) && from_wrong.more(100));
    EXPECT_EQ(from_right.faults() + from_wrong.faults(), "");
  }
  for (const Daemon* d : {&zero, &one, &two}) {
    EXPECT_EQ(d->count("link lost"), 0U) << d->log();
    const std::string page = test::metrics_of(*d);
    for (size_t at = page.find("_sum"); at != std::string::npos; at = page.find("_sum", at + 1)) {
      const std::string line = page.substr(at, page.find('\n', at) - at);
      EXPECT_EQ(line.find(" -"), std::string::npos) << line;
    }
    for (const char* peer : {"0", "1", "2"}) {
      const std::string age = std::string("moed_heartbeat_age_seconds{peer=\"") + peer + "\"}";
      if (page.find(age) == std::string::npos) continue;  // its own
      EXPECT_GE(test::metric(page, age), 0);
      EXPECT_LT(test::metric(page, age), 5) << page;
    }
  }
}

/// While it lives, processes that are started can make files of at most so many bytes; memory files count.
class FileLimit {
 public:
  explicit FileLimit(uint64_t bytes) {
    ::getrlimit(RLIMIT_FSIZE, &before_);
    rlimit now = before_;
    now.rlim_cur = bytes;
    ::signal(SIGXFSZ, SIG_IGN);
    ::setrlimit(RLIMIT_FSIZE, &now);
  }
  FileLimit(const FileLimit&) = delete;
  FileLimit& operator=(const FileLimit&) = delete;
  ~FileLimit() {
    ::setrlimit(RLIMIT_FSIZE, &before_);
    ::signal(SIGXFSZ, SIG_DFL);
  }

 private:
  rlimit before_{};
};

/// F20. Shared memory is reserved when it is made: with a page too little the daemon says what it needs and ends, with
/// just enough it serves; an engine's arena that does not fit is that engine's refusal.
TEST(FaultsOfMemory, TooLittleIsRefusedAndJustEnoughServes) {
  const Sets sets =
      fault_settings({"limits.lanes=64", "limits.max_tokens=832", "limits.arena_mb=1024", "recorder.calls=1"});
  const std::string said = "no memory for a segment of ";
  uint64_t need = 0;
  {
    const FileLimit limit(1 << 20);
    Daemon poor(sets, test::TempDir().path() + "/run", 0);
    EXPECT_EQ(poor.reap(10'000), 73) << poor.log();
    const std::string log = poor.log();
    ASSERT_NE(log.find(said), std::string::npos) << log;
    need = std::stoull(log.substr(log.find(said) + said.size()));
  }
  ASSERT_GT(need, uint64_t{1} << 20);
  const test::TempDir dir;
  {
    const FileLimit limit(need - 4096);
    Daemon poor(sets, dir.path(), 0);
    EXPECT_EQ(poor.reap(10'000), 73) << poor.log();
    EXPECT_NE(poor.log().find(said + std::to_string(need) + " bytes"), std::string::npos) << poor.log();
  }
  const FileLimit limit(need);
  Daemon enough(sets, dir.path());
  moed_options options{};
  options.size = sizeof options;
  options.arena_bytes = need + 4096;
  moed_lane* lane = nullptr;
  EXPECT_EQ(moed_attach(enough.socket().c_str(), &options, &lane), uint32_t{MOED_NO_MEMORY});
  options.arena_bytes = 1 << 20;
  EXPECT_EQ(empty_call(Lane(enough.socket(), options)), uint32_t{MOED_OK});
  EXPECT_EQ(enough.stop(), 0);
}

/// F20. What an engine is given has its blocks already: touching it cannot end in SIGBUS.
TEST(FaultsOfMemory, WhatIsGivenIsReserved) {
  const Daemon daemon(fault_settings());
  Attach ask;
  ask.arena_bytes = 1 << 20;
  const Fd fd = test::connect_raw(daemon.socket());
  ASSERT_TRUE(send_message(fd.get(), &ask, sizeof ask));
  Attached answer;
  std::vector<Fd> fds;
  ASSERT_GT(receive_message(fd.get(), std::as_writable_bytes(std::span(&answer, 1)), fds), 0);
  ASSERT_EQ(fds.size(), 2U);
  for (const Fd& memory : fds) {
    struct stat facts {};
    ASSERT_EQ(::fstat(memory.get(), &facts), 0);
    EXPECT_GT(facts.st_size, 0);
    EXPECT_GE(facts.st_blocks * 512, facts.st_size);
  }
}

std::set<std::string> files_in(const std::filesystem::path& directory) {
  std::set<std::string> names;
  for (const auto& entry : std::filesystem::recursive_directory_iterator(directory)) names.insert(entry.path());
  return names;
}

/// F20. A daemon that is killed leaves nothing that grows: neither in /dev/shm nor in its run directory.
TEST(FaultsOfMemory, KilledDaemonsLeaveNothingBehind) {
  const test::TempDir dir;
  Daemon daemon(fault_settings(), dir.path());
  const auto before = files_in(dir.path());
  const auto shared = files_in("/dev/shm");
  for (int kill = 0; kill < 20; ++kill) {
    const Lane lane(daemon.socket());
    ASSERT_EQ(empty_call(lane), uint32_t{MOED_OK});
    daemon.restart();
  }
  EXPECT_EQ(files_in(dir.path()), before);
  EXPECT_EQ(files_in("/dev/shm"), shared);
}

/// An engine that calls through both ranks until it is killed; says so after its first call.
[[noreturn]] void doomed_engine(const std::string& socket, int say) {
  moed_options options{};
  options.size = sizeof options;
  moed_lane* lane = nullptr;
  moed_status attached = MOED_BUSY;
  for (int i = 0; i < 2000 && attached == MOED_BUSY; ++i) {  // the engine before may still be leaving
    attached = moed_attach(socket.c_str(), &options, &lane);
    if (attached == MOED_BUSY) ::usleep(500);
  }
  moed_call_t call{};
  if (attached != MOED_OK || moed_slot(lane, 0, &call) != MOED_OK) ::_exit(3);
  call.layer = 1;
  call.tokens = 4;
  call.valid = 0;
  auto* ids = reinterpret_cast<int32_t*>(static_cast<uint8_t*>(moed_arena(lane)) + call.ids);
  for (int32_t i = 0; i < 8; ++i) ids[i] = i;
  for (bool said = false;; said = true) {
    moed_reply_t reply{};
    if (moed_call(lane, &call, &reply) != MOED_OK) ::_exit(4);
    if (!said && ::write(say, "c", 1) != 1) ::_exit(5);
  }
}

/// F21. Engines are killed wherever their calls just are, while engines of both ranks call through both: nobody else
/// notices, and the lane is free again for the next.
TEST(FaultsOfEngines, KilledAnywhereInACallPeersDoNotNotice) {
  const Daemons world(2, fault_settings({"limits.lanes=2"}));
  const Caller beside(world[0].socket(), 2);
  const Caller at_peer(world[1].socket(), 2);
  std::mt19937 random(21);
  for (int i = 0; i < 100 && !HasFailure(); ++i) {
    int ends[2];
    ASSERT_EQ(::pipe2(ends, O_CLOEXEC), 0);
    const pid_t pid = ::fork();
    if (pid == 0) doomed_engine(world[0].socket(), ends[1]);
    ::close(ends[1]);
    char said = 0;
    EXPECT_EQ(::read(ends[0], &said, 1), 1);  // it ends by itself within a second when it cannot attach
    ::usleep(static_cast<useconds_t>(random() % 1000));
    ::kill(pid, SIGKILL);
    int status = 0;
    ::waitpid(pid, &status, 0);
    EXPECT_TRUE(WIFSIGNALED(status)) << "exit " << WEXITSTATUS(status);
    ::close(ends[0]);
  }
  EXPECT_TRUE(beside.more(20) && at_peer.more(20));
  EXPECT_EQ(beside.faults() + at_peer.faults(), "");
  EXPECT_EQ(world[0].count("link lost") + world[1].count("link lost"), 0U);
}

/// F23. Sixty-four engines of one name have a lane each; the next is told who is there, and none of them notices.
TEST(FaultsOfEngines, TheSixtyFifthIsRefused) {
  const Daemon daemon(fault_settings({"limits.lanes=64"}));
  moed_options options{};
  options.name = "the same name";
  std::vector<std::unique_ptr<Lane>> lanes;
  std::set<uint32_t> numbers;
  for (int i = 0; i < 64; ++i) {
    lanes.push_back(std::make_unique<Lane>(daemon.socket(), options));
    numbers.insert(lanes.back()->info().lane);
  }
  EXPECT_EQ(numbers.size(), 64U);
  for (int i = 0; i < 10; ++i) {
    options.size = sizeof options;
    moed_lane* lane = nullptr;
    EXPECT_EQ(moed_attach(daemon.socket().c_str(), &options, &lane), uint32_t{MOED_BUSY});
    EXPECT_NE(std::string(moed_last_error(nullptr)).find("64 lanes are taken"), std::string::npos);
  }
  for (const auto& lane : lanes) EXPECT_EQ(empty_call(*lane), uint32_t{MOED_OK});
  lanes.pop_back();
  EXPECT_TRUE(wait_until([&] {  // a lane is free a moment after its engine has left the list
    moed_lane* lane = nullptr;
    const bool attached = moed_attach(daemon.socket().c_str(), &options, &lane) == MOED_OK;
    if (attached) moed_detach(lane);
    return attached;
  }));
}

/// F26. A taken control port is a sentence and an exit code, too.
TEST(FaultsOfStart, ATakenControlPortIsNamed) {
  const uint16_t port = test::free_ports(1)[0];
  const Fd taken = test::hold_port(port);
  ASSERT_EQ(::listen(taken.get(), 1), 0);
  const test::TempDir dir;
  Daemon daemon(fault_settings({test::peers_of({port, test::free_ports(1)[0]})}), dir.path(), 0);
  EXPECT_EQ(daemon.reap(5000), 69) << daemon.log();
  EXPECT_NE(daemon.log().find(std::to_string(port)), std::string::npos) << daemon.log();
}

}  // namespace
}  // namespace moed
