// Faults of operation that others met in the field, played with real daemons: scrapes under load, probes, SIGTERM,
// engines in other containers. docs/faults.md says which is which.
#include <gtest/gtest.h>

#include <grp.h>
#include <sched.h>
#include <sys/stat.h>

#include <nlohmann/json.hpp>
#include <set>
#include <sstream>
#include <thread>

#include "tests/support/caller.h"
#include "tests/support/daemons.h"
#include "tests/support/fault_daemon.h"
#include "tests/support/tcp.h"

namespace moed {
namespace {

using test::Caller;
using test::Daemon;
using test::empty_call;
using test::fault_settings;
using test::http_port;
using test::Lane;
using test::metrics_of;
using test::wait_until;
using Sets = std::vector<std::string>;

/// The names and labels of all series of a page.
std::set<std::string> series_of(const std::string& page) {
  std::set<std::string> all;
  std::istringstream lines(page.substr(page.find("\r\n\r\n") + 4));
  for (std::string line; std::getline(lines, line);)
    if (!line.empty() && line[0] != '#') all.insert(line.substr(0, line.rfind(' ')));
  return all;
}

/// F27. Twenty scrapers, a reader that takes a byte at a time and an engine with a hostile name, under load: the series
/// stay the same ones, memory stays flat, answers stay right.
TEST(FaultsOfMetrics, ScrapesUnderLoad) {
  const Daemon daemon(fault_settings());
  const Caller caller(daemon.socket(), 1);
  const uint16_t port = http_port(daemon);
  EXPECT_TRUE(caller.more(50));
  const std::set<std::string> before = series_of(metrics_of(daemon));
  EXPECT_GT(before.size(), 100U);
  std::string hostile;
  while (hostile.size() < 10'000) hostile += "\"}\n\\ moed_ready 7\n";
  moed_options options{};
  options.name = hostile.c_str();
  const Lane engine(daemon.socket(), options);
  const test::Tcp byte_by_byte(port);
  EXPECT_TRUE(byte_by_byte.send("GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n"));
  const auto scrape = [&](int times) {
    std::vector<std::thread> scrapers;
    for (int i = 0; i < 20; ++i)
      scrapers.emplace_back([&] {
        for (int n = 0; n < times; ++n) EXPECT_EQ(series_of(test::get_page(port, "/metrics")).size(), before.size());
      });
    for (int i = 0; i < 20; ++i) EXPECT_EQ(byte_by_byte.receive(1).size(), 1U);
    for (std::thread& scraper : scrapers) scraper.join();
  };
  scrape(10);
  const double resident = test::metric(metrics_of(daemon), "process_resident_memory_bytes");
  scrape(50);
  const std::string page = metrics_of(daemon);
  EXPECT_EQ(series_of(page), before);
  EXPECT_EQ(test::metric(page, "moed_ready"), 1);
  EXPECT_EQ(nlohmann::json::parse(daemon.status_json())["lanes"].size(), 2U);
  if (!test::kSanitized) {
    EXPECT_LE(test::metric(page, "process_resident_memory_bytes"), resident * 1.05);
  }
  EXPECT_TRUE(caller.more(20));
  EXPECT_EQ(caller.faults(), "");
}

/// Whether a page's status is this and, with `part`, its body has it.
bool answers(const Daemon& daemon, const char* path, int status, const char* part = "") {
  const std::string page = test::get_page(http_port(daemon), path);
  return page.starts_with("HTTP/1.1 " + std::to_string(status)) && page.find(part) != std::string::npos;
}

/// F29. A missing or dead peer is no reason to be restarted: live all the time, ready with all peers only.
TEST(FaultsOfProbes, LiveWithoutAPeerReadyWithAll) {
  const test::TempDir dir;
  const Sets sets = fault_settings({test::peers_of(test::free_ports(2))});
  Daemon zero(sets, dir.path(), 0);
  ASSERT_TRUE(wait_until([&] { return zero.count(" listening ") == 1; }));
  EXPECT_TRUE(wait_until([&] { return answers(zero, "/livez", 200); }));
  EXPECT_TRUE(answers(zero, "/readyz", 503, "link 1: connecting"));
  Daemon one(sets, dir.path(), 1);
  EXPECT_TRUE(wait_until([&] { return answers(zero, "/readyz", 200); }));
  one.kill();
  EXPECT_TRUE(wait_until([&] { return answers(zero, "/readyz", 503, "link 1: lost"); }));
  for (int i = 0; i < 20; ++i, test::sleep_ms(50)) EXPECT_TRUE(answers(zero, "/livez", 200));
  one.start();
  EXPECT_TRUE(wait_until([&] { return answers(zero, "/readyz", 200); }));
  EXPECT_EQ(one.stop(), 0);
  EXPECT_TRUE(answers(zero, "/livez", 200));
  EXPECT_EQ(zero.stop(), 0);
}

/// F29. SIGTERM before the world has come together ends a daemon as well, and its socket goes.
TEST(FaultsOfProbes, SigtermWhileAPeerIsMissing) {
  const test::TempDir dir;
  Daemon zero(fault_settings({test::peers_of(test::free_ports(2))}), dir.path(), 0);
  ASSERT_TRUE(wait_until([&] { return zero.count(" listening ") == 1; }));
  EXPECT_TRUE(std::filesystem::exists(zero.socket()));
  EXPECT_EQ(zero.stop(), 0) << zero.log();
  EXPECT_FALSE(std::filesystem::exists(zero.socket()));
}

/// Runs `engine` in a process of its own after `prepare`; its exit code, 125 when `prepare` is not permitted.
template <class Prepare, class Engine>
int in_a_process(Prepare prepare, Engine engine) {
  const pid_t pid = ::fork();
  if (pid == 0) {
    if (!prepare()) ::_exit(125);
    const pid_t inner = ::fork();  // the first process of a new pid namespace
    if (inner == 0) ::_exit(engine());
    int status = 0;
    ::waitpid(inner, &status, 0);
    ::_exit(WIFEXITED(status) ? WEXITSTATUS(status) : 124);
  }
  const int status = test::wait_for(pid, 10'000);
  return status != -1 && WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

/// F33. An engine in pid and IPC namespaces of its own is served: all it needs comes over the socket.
TEST(FaultsOfContainers, AnEngineInOtherNamespacesIsServed) {
  const Daemon daemon(fault_settings());
  const int code = in_a_process([] { return ::unshare(CLONE_NEWPID | CLONE_NEWIPC) == 0; },
                                [&] { return empty_call(Lane(daemon.socket())) == MOED_OK ? 0 : 1; });
  if (code == 125) GTEST_SKIP() << "this user may not make namespaces";
  EXPECT_EQ(code, 0);
}

/// F33. An engine of another user is told so.
TEST(FaultsOfContainers, AnEngineOfAnotherUserIsDenied) {
  if (::geteuid() != 0) GTEST_SKIP() << "only root may become another user";
  const test::TempDir dir;
  const Daemon daemon(fault_settings(), dir.path());
  ::chmod(dir.path().c_str(), 0755);
  ::chmod((dir.path() + "/moed").c_str(), 0755);
  ::chmod(daemon.socket().c_str(), 0666);
  const int code = in_a_process([] { return ::setgroups(0, nullptr) == 0 && ::setuid(65'534) == 0; },
                                [&] {
                                  moed_options options{};
                                  options.size = sizeof options;
                                  moed_lane* lane = nullptr;
                                  if (moed_attach(daemon.socket().c_str(), &options, &lane) != MOED_DENIED) return 1;
                                  const std::string why = moed_last_error(nullptr);
                                  return why.find("uid 65534") != std::string::npos ? 0 : 2;
                                });
  EXPECT_EQ(code, 0);
  EXPECT_EQ(empty_call(Lane(daemon.socket())), uint32_t{MOED_OK});
}

}  // namespace
}  // namespace moed
