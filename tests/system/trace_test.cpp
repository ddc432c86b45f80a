// moectl trace and moectl top against real daemons: the trace adds up to the recorders' records, foreign users get
// none, reading harms no call; the view shows who is slow, why, and who is gone.
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <algorithm>
#include <atomic>
#include <sstream>
#include <thread>

#include "daemon/abi/attach.h"
#include "daemon/moectl/flight.h"
#include "tests/support/daemons.h"
#include "tests/support/questions.h"
#include "tests/support/trace_sums.h"

namespace moed {
namespace {

using ctl::Flight;
using test::Asker;
using test::Daemons;
using test::Question;
using test::QuestionModel;

constexpr uint32_t kRanks = 2;

Question anything(uint32_t layer, uint32_t tokens, uint64_t seed = 1) {
  return test::question(layer, tokens, kRanks, seed, [](uint32_t) { return true; });
}

/// moectl with these arguments; what it printed is in `text`, stderr too.
int moectl(const std::vector<std::string>& arguments, std::string& text, int limit_ms = 20'000) {
  const test::TempDir dir;
  std::vector<std::string> all{MOECTL_BINARY};
  all.insert(all.end(), arguments.begin(), arguments.end());
  const pid_t pid = test::spawn(all, dir.path() + "/out");
  const int status = test::wait_for(pid, limit_ms);
  if (status == -1) {
    ::kill(pid, SIGKILL);
    ::waitpid(pid, nullptr, 0);
  }
  text = test::read_file(dir.path() + "/out");
  return status != -1 && WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

/// A rank's records once there are so many calls and the world has come to rest.
Flight records_of(const std::string& socket, size_t calls) {
  Flight flight;
  Sentence why;
  for (const Nanos until = now_ns() + 10'000'000'000; now_ns() < until; test::sleep_ms(20)) {
    const size_t passes = flight.passes.size();
    EXPECT_EQ(ctl::fetch_flight(socket, 0, flight, why), Status::ok) << why.text;
    if (flight.calls.size() >= calls && flight.passes.size() == passes) break;
  }
  EXPECT_EQ(flight.calls.size(), calls);
  return flight;
}

/// Without a canary, so that every record is of a call that a test has made.
Daemons::Sets quiet() {
  Daemons::Sets sets = QuestionModel::sets();
  sets.emplace_back("canary.period_ms=0");
  return sets;
}

TEST(Trace, AddsUpToTheRecordersOfAllRanks) {
  const Daemons world(kRanks, quiet());
  std::map<uint32_t, uint32_t> statuses;
  for (const uint32_t rank : {0U, 1U}) {
    Asker a(world[rank].socket()), b(world[rank].socket());
    for (uint32_t i = 0; i < 60; ++i) {
      Question q = anything(1 + i % 2, i % 17, i);
      if (i % 10 == 9) q.rows.ids[0] = 1000;  // no such expert
      if (i % 10 == 8) q.layer = 7;           // no such layer
      ++statuses[(i % 3 == 0 ? a : b).ask(q).status];
    }
  }
  const std::vector<Flight> flights = {records_of(world[0].socket(), 60), records_of(world[1].socket(), 60)};
  const test::TempDir dir;
  std::string text;
  ASSERT_EQ(
      moectl({"trace", "--socket", world[0].socket(), "--socket", world[1].socket(), "--out", dir.path() + "/t"}, text),
      0)
      << text;
  const std::vector<test::Slice> slices = test::parse_trace(test::read_file(dir.path() + "/t"));
  test::Sums expected;
  for (const Flight& f : flights) test::add_records(expected, f);
  EXPECT_EQ(test::sums_of(slices), expected);
  std::map<std::string, uint32_t> named;
  for (const test::Slice& s : slices)
    if (s.category == "call") ++named[s.arguments.at("status")];
  EXPECT_EQ(named["ok"], statuses[MOED_OK]);
  EXPECT_EQ(named["bad_route"], 12U);
  EXPECT_EQ(named["bad_call"], 12U);
  EXPECT_EQ(statuses[MOED_BAD_ROUTE] + statuses[MOED_BAD_CALL] + statuses[MOED_OK], 120U);
  ASSERT_EQ(moectl({"trace", "--socket", world[1].socket(), "--last", "5"}, text), 0) << text;
  const std::vector<test::Slice> last = test::parse_trace(text);
  EXPECT_EQ(std::count_if(last.begin(), last.end(), [](const auto& s) { return s.category == "call"; }), 5);
  EXPECT_EQ(moectl({"trace", "--socket", world[0].socket(), "--socket", world[0].socket()}, text), 2);
  EXPECT_NE(text.find("two sockets are of rank 0"), std::string::npos) << text;
}

TEST(Trace, ASlowPeerStandsInTheCallsThatWaitedForIt) {
  const Daemons world(kRanks, quiet(), [](uint32_t rank) {
    return rank == 1 ? Daemons::Sets{"debug.experts_delay_us=20000"} : Daemons::Sets{};
  });
  {
    Asker asker(world[0].socket());
    for (uint32_t i = 0; i < 5; ++i) ASSERT_EQ(asker.ask(anything(1, 4, i)).status, uint32_t{MOED_OK});
  }
  std::string text;
  records_of(world[0].socket(), 5);
  ASSERT_EQ(moectl({"trace", "--socket", world[0].socket(), "--socket", world[1].socket()}, text), 0) << text;
  int64_t serve_begin = 0, call_begin = 0, call_end = 0;
  for (const test::Slice& s : test::parse_trace(text)) {
    if (s.category == "call") {
      call_begin = s.start, call_end = s.start + static_cast<int64_t>(s.duration);
      EXPECT_EQ(s.arguments.at("last"), 1);
      EXPECT_GE(s.arguments.at("waits").at("rank 1").at("experts_us"), 20'000);
    }
    if (s.process == 2 && s.category == "pass") serve_begin = s.start;
  }
  // The clocks lay both ranks side by side: the last pass of rank 1 began during the last call of rank 0.
  EXPECT_GT(serve_begin, call_begin);
  EXPECT_LT(serve_begin, call_end);
}

TEST(Trace, ReadingARingThatIsBeingOverwrittenHarmsNoCall) {
  std::vector<std::string> sets = quiet();
  sets.emplace_back("recorder.calls=8");
  const Daemons world(1, sets);
  std::atomic<bool> stop{false};
  std::thread reader([&, socket = world[0].socket()] {
    while (!stop) {
      Flight flight;
      Sentence why;
      ASSERT_EQ(ctl::fetch_flight(socket, 0, flight, why), Status::ok) << why.text;
      ASSERT_LE(flight.calls.size(), 8U);
      for (const CallRecord& r : flight.calls) {
        ASSERT_EQ(r.layer, r.tokens % 2 + 1) << "a mixture of two calls";
        ASSERT_EQ(r.number % 16, r.tokens) << "a mixture of two calls";
      }
    }
  });
  Asker asker(world[0].socket());
  for (uint32_t i = 1; i <= 3000; ++i) {
    const Question q = test::question(i % 16 % 2 + 1, i % 16, 1, i, [](uint32_t) { return true; });
    const uint32_t status = asker.ask(q).status;
    EXPECT_EQ(status, uint32_t{MOED_OK});
    if (status != MOED_OK) break;
  }
  stop = true;
  reader.join();
}

TEST(Trace, IsDeniedToOtherUsersAndNobodyCanWriteThroughIt) {
  if (::geteuid() != 0) GTEST_SKIP() << "needs root, to become another user";
  const Daemons world(1, quiet());
  const std::string socket = world[0].socket();
  for (const std::string& path : {world.run_dir(), world.run_dir() + "/moed"}) ::chmod(path.c_str(), 0755);
  ::chmod(socket.c_str(), 0666);
  const pid_t child = ::fork();
  if (child == 0) {
    if (::seteuid(65534) != 0) ::_exit(10);
    Flight flight;
    Sentence why;
    const Status status = ctl::fetch_flight(socket, 0, flight, why);
    ::_exit(status == Status::denied && std::string(why.text) == "uid 65534 is not this daemon's, 0" ? 0 : 11);
  }
  const int status = test::wait_for(child, 10'000);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << WEXITSTATUS(status);
  EXPECT_EQ(world[0].count("trace refused"), 1U);
  const Fd connection = test::connect_raw(socket);
  const TraceQuery query;
  Answer answer;
  std::vector<Fd> fds;
  ASSERT_TRUE(send_message(connection.get(), &query, sizeof query));
  ASSERT_EQ(receive_message(connection.get(), std::as_writable_bytes(std::span(&answer, 1)), fds),
            static_cast<ssize_t>(sizeof answer));
  ASSERT_EQ(fds.size(), 1U);
  EXPECT_TRUE(Mapping(fds[0], 4096, PROT_READ));
  EXPECT_FALSE(Mapping(fds[0], 4096));
  EXPECT_EQ(::pwrite(fds[0].get(), "x", 1, 0), -1);
  EXPECT_EQ(::ftruncate(fds[0].get(), 0), -1);
  ASSERT_TRUE(send_message(connection.get(), &query, sizeof query)) << "the socket stays open";
  EXPECT_GT(receive_message(connection.get(), std::as_writable_bytes(std::span(&answer, 1)), fds), 0);
}

/// Frames of top, each a list of lines.
std::vector<std::vector<std::string>> frames_of(const std::string& text) {
  std::vector<std::vector<std::string>> frames(1);
  std::istringstream in(text);
  for (std::string line; std::getline(in, line);) {
    if (line.empty())
      frames.emplace_back();
    else
      frames.back().push_back(line);
  }
  return frames;
}

TEST(Top, ShowsWhoIsSlowWhyAndWhoIsGone) {
  const Daemons world(kRanks, QuestionModel::sets(), [](uint32_t rank) {
    return rank == 1 ? Daemons::Sets{"debug.experts_delay_us=20000"} : Daemons::Sets{};
  });
  const std::vector<std::string> arguments = {"top",     "--socket", world[0].socket(), world[1].socket(),
                                              "--count", "2",        "--interval-ms",   "500"};
  std::atomic<bool> stop{false};
  std::thread engine([&, socket = world[0].socket()] {
    Asker asker(socket);
    while (!stop) EXPECT_EQ(asker.ask(anything(1, 4)).status, uint32_t{MOED_OK});
  });
  std::string text;
  const int code = moectl(arguments, text);
  stop = true;
  engine.join();
  EXPECT_EQ(code, 0) << text;
  EXPECT_EQ(text.find('\x1b'), std::string::npos) << "no cursor movement where there is no terminal";
  const auto frames = frames_of(text);
  ASSERT_EQ(frames.size(), 2U) << text;
  for (const auto& frame : frames) {
    ASSERT_EQ(frame.size(), 6U) << text;
    double calls = 0;
    unsigned share = 0, queue = 0, experts = 0;
    const size_t at = frame[0].find("calls/s ");
    ASSERT_EQ(frame[0].rfind("rank 0 of 2  ready  lanes 1", 0), 0U) << text;
    ASSERT_EQ(std::sscanf(frame[0].c_str() + at, "calls/s %lf", &calls), 1) << text;
    EXPECT_GT(calls, 2);
    EXPECT_LE(calls, 50) << "a call takes at least 20 ms";
    ASSERT_EQ(std::sscanf(frame[2].c_str(), " 1 ready %u %% %u %% %u %%", &share, &queue, &experts), 3) << text;
    EXPECT_EQ(share, 100U);
    EXPECT_GE(experts, 60U) << text;
    EXPECT_EQ(frame[3].rfind("rank 1 of 2  ready  lanes 0  calls/s 0.0", 0), 0U) << text;
  }
  world[1].kill();
  EXPECT_EQ(moectl(arguments, text), 0) << "rank 0 is there";
  EXPECT_NE(text.find(world[1].socket() + "  not reachable: no daemon can be reached at"), std::string::npos) << text;
  EXPECT_NE(text.find("     1  lost"), std::string::npos) << text;
  world[0].freeze();
  const Nanos start = now_ns();
  EXPECT_EQ(moectl(arguments, text), 3) << text;
  EXPECT_LT(now_ns() - start, 8'000'000'000) << "a stopped daemon holds a frame up for a second";
  EXPECT_NE(
      text.find("  not reachable: no answer from " + world[0].socket() + " within 1000 ms: is the daemon stopped?"),
      std::string::npos)
      << text;
  world[0].thaw();
}

}  // namespace
}  // namespace moed
