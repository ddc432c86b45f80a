// The status page in a real browser: what it shows of a world of real daemons is what their /metrics say, what engines
// call themselves stays text, and a daemon that has gone silent is said to be so.
#include <gtest/gtest.h>

#include <cmath>
#include <filesystem>
#include <fstream>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "tests/support/chromium.h"
#include "tests/support/daemons.h"
#include "tests/support/questions.h"
#include "tests/support/scrape.h"

namespace moed {
namespace {

using test::Asker;
using test::Chromium;
using test::Daemons;
using test::metric;
using test::Question;
using test::QuestionModel;

constexpr uint32_t kRanks = 4, kSlow = 2, kCalls = 100;
constexpr const char* kCauses[] = {"queue", "experts", "send", "wire"};
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr const char* kDelay = "debug.experts_delay_us=20000";  // what nobody delays takes ten times as long
#else
constexpr const char* kDelay = "debug.experts_delay_us=2000";
#endif

uint16_t http_port(const test::Daemon& daemon) {
  const std::string log = daemon.log();
  const size_t at = log.rfind(" http=");
  return static_cast<uint16_t>(std::stoul(log.substr(at + 6)));
}
std::string url(const test::Daemon& daemon) { return "http://127.0.0.1:" + std::to_string(http_port(daemon)) + "/"; }

/// What calls at this daemon waited for `peer`, in nanoseconds: how finely the daemon counts.
int64_t waited_ns(const test::Daemon& daemon, uint32_t peer) {
  const std::string page = test::get_page(http_port(daemon), "/metrics");
  int64_t ns = 0;
  for (const char* cause : kCauses)
    ns += std::llround(1e9 * metric(page, "moed_peer_wait_seconds_total{peer=\"" + std::to_string(peer) +
                                              "\",cause=\"" + cause + "\"}"));
  return ns;
}

void keep(const std::string& name, const std::string& bytes) {
  const std::string signature = "\x89PNG\r\n\x1a\n";
  EXPECT_EQ(bytes.substr(0, signature.size()), signature) << name;
  EXPECT_EQ(bytes.substr(bytes.size() - 8, 4), "IEND") << name;
  std::filesystem::create_directories(MOED_ARTEFACTS);
  std::ofstream(std::string(MOED_ARTEFACTS) + "/" + name, std::ios::binary) << bytes;
}

/// A world in which rank 2 has slow experts, seen by a browser; the daemons are started by the thread that stays.
class StatusPage : public testing::Test {
 protected:
  void SetUp() override {
    if (!Chromium::installed())
      GTEST_SKIP() << "no " << Chromium::kProgram << ": deploy/dependencies --test installs it";
    Daemons::Sets sets = QuestionModel::sets();
    sets.emplace_back("calls.deadline_ms=20000");  // a busy machine makes no rank late
    world_ = std::make_unique<Daemons>(kRanks, sets, [](uint32_t rank) {
      return rank == kSlow ? Daemons::Sets{kDelay, "debug.for_ms=3600000"} : Daemons::Sets{};
    });
    browser_ = std::make_unique<Chromium>();
    browser_->resize(1280, 900);
  }

  /// One engine at each of the first ranks calls experts of all, one engine after another; all have left at the end.
  void call(uint32_t ranks) {
    const Question q = test::question(1, 5, kRanks, 1, [](uint32_t) { return true; });
    for (uint32_t rank = 0; rank < ranks; ++rank) {
      Asker asker((*world_)[rank].socket());
      for (uint32_t i = 0; i < kCalls; ++i) ASSERT_EQ(asker.ask(q).status, uint32_t{MOED_OK});
    }
  }

  /// The number of a cell, and the text that a person sees there.
  double cell(uint32_t row, uint32_t column) {
    return std::stod(browser_->value(at(row, column) + ".dataset.ms").get<std::string>());
  }
  static std::string at(uint32_t row, uint32_t column) {
    return "document.querySelector('#heat td[data-row=\"" + std::to_string(row) + "\"][data-column=\"" +
           std::to_string(column) + "\"]')";
  }
  /// Until the page has all rows and has been told what the daemon counts now.
  bool has_caught_up() {
    return browser_->becomes(at(0, kSlow) + " && Math.round(" + at(0, kSlow) +
                             ".dataset.ms * 1e6) === " + std::to_string(waited_ns((*world_)[0], kSlow)));
  }
  /// Nothing makes a person scroll sideways. Not innerWidth, which a phone's browser widens for a page that does not
  /// fit.
  bool fits(int width) {
    return browser_->value("document.documentElement.scrollWidth <= " + std::to_string(width)).get<bool>();
  }

  std::unique_ptr<Daemons> world_;
  std::unique_ptr<Chromium> browser_;
};

TEST_F(StatusPage, ShowsWhoIsWaitedForAsTheMetricsDo) {
  call(kRanks);
  const int64_t before = waited_ns((*world_)[0], kSlow);
  browser_->open(url((*world_)[0]));
  ASSERT_TRUE(has_caught_up());
  for (const uint32_t row : {1U, 3U})  // the last heartbeat of a peer may still be on its way
    ASSERT_TRUE(browser_->becomes(at(row, kSlow) + ".dataset.ms > " +
                                  std::to_string(static_cast<double>(waited_ns((*world_)[row], kSlow)) * 1e-6 - 0.01)));
  for (const uint32_t row : {0U, 1U, 3U})
    for (const uint32_t column : {0U, 1U, 3U}) EXPECT_GT(cell(row, kSlow), cell(row, column)) << row << " " << column;
  const auto sum = [this](uint32_t c) {
    return std::stod(browser_->value("document.querySelector('[data-sum=\"" + std::to_string(c) + "\"]').dataset.ms")
                         .get<std::string>());
  };
  for (const uint32_t column : {0U, 1U, 3U}) EXPECT_GT(sum(kSlow), sum(column));

  EXPECT_EQ(waited_ns((*world_)[0], kSlow), before) << "nobody calls any more";
  for (uint32_t peer = 0; peer < kRanks; ++peer) {
    const int64_t ns = waited_ns((*world_)[0], peer);
    EXPECT_EQ(std::llround(cell(0, peer) * 1e6), ns) << peer;
    if (peer == 0) continue;
    const std::string row = "document.querySelector('.wait[data-peer=\"" + std::to_string(peer) + "\"]')";
    const double printed = std::stod(browser_->value(row + ".textContent").get<std::string>());
    EXPECT_LE(std::abs(printed - static_cast<double>(ns) * 1e-9), 0.0005 + 1e-9) << peer;
  }
  const auto waits = browser_->value(
      "[...document.querySelectorAll('#ranks .wait')].sort((a, b) => b.textContent - a.textContent)[0].dataset.peer");
  EXPECT_EQ(waits, "2");
  EXPECT_EQ(browser_->value("[...document.querySelectorAll('#phases tr')].map((r) => r.cells[0].textContent).join()"),
            "dispatch,wait,reduce,gather,experts,send");
  EXPECT_EQ(browser_->value("document.querySelector('#statuses').textContent"), "ok100");
  EXPECT_TRUE(browser_->becomes("document.querySelector('#state').textContent === 'ready'"));
  EXPECT_TRUE(fits(1280));
  keep("status_page.png", browser_->screenshot(true));
  browser_->prefer("dark");
  keep("status_page_dark.png", browser_->screenshot(true));
  browser_->prefer("light");
  browser_->resize(390, 844);
  EXPECT_TRUE(fits(390));
  keep("status_page_phone.png", browser_->screenshot());
  browser_->value("document.querySelector('#recent').click()");
  EXPECT_EQ(cell(0, kSlow), 0) << "nobody has called since the page was opened";
  call(1);
  EXPECT_TRUE(browser_->becomes(at(0, kSlow) + ".dataset.ms > 0"));
  EXPECT_TRUE(browser_->becomes(at(0, kSlow) + ".dataset.ms === '0'")) << "nobody has waited in the last ten seconds";
  browser_->value("document.querySelector('#total').click()");
  EXPECT_TRUE(has_caught_up());
  EXPECT_GT(cell(0, kSlow) * 1e6, static_cast<double>(before));
  for (const std::string& complaint : browser_->complaints()) ADD_FAILURE() << complaint;
}

TEST_F(StatusPage, WhatAnEngineCallsItselfIsText) {
  const std::string name = "<img src=x onerror=alert()>";
  moed_options options{};
  options.name = name.c_str();
  const test::Lane engine((*world_)[0].socket(), options);
  browser_->open(url((*world_)[0]));
  ASSERT_TRUE(browser_->becomes("document.querySelector('#engines tr')"));
  EXPECT_EQ(browser_->value("document.querySelector('#engines .text').textContent"), name);
  EXPECT_EQ(browser_->value("document.querySelectorAll('#engines img').length"), 0);
  // And if it ever became markup, the policy would not run it: this is what such a mistake would look like.
  browser_->value("document.querySelector('#engines .text').innerHTML = '<img src=x onerror=\"window.ran = true\">'");
  ASSERT_TRUE(browser_->becomes("!document.querySelector('#engines img')")) << "the next answer makes it text again";
  EXPECT_EQ(browser_->value("window.ran === undefined"), true);
  EXPECT_FALSE(browser_->complaints().empty()) << "the browser says that the policy forbids it";
}

TEST_F(StatusPage, ASilentDaemonIsSaidToBeSilent) {
  test::Daemon& daemon = (*world_)[0];
  browser_->open(url(daemon));
  ASSERT_TRUE(browser_->becomes("document.querySelector('#state')?.textContent === 'ready'"));
  EXPECT_EQ(browser_->value("document.querySelector('#banner').hidden"), true);
  daemon.freeze();  // it takes connections still, and answers none
  ASSERT_TRUE(browser_->becomes("document.querySelector('#state').textContent === 'no answer'"));
  EXPECT_EQ(browser_->value("getComputedStyle(document.querySelector('main')).opacity < 1"), true);
  EXPECT_EQ(browser_->value("/^No answer since 20\\d\\d-\\d\\d-\\d\\d .*, for /.test("
                            "document.querySelector('#banner').textContent)"),
            true);
  keep("status_page_silent.png", browser_->screenshot());
  daemon.thaw();
  ASSERT_TRUE(browser_->becomes("document.querySelector('#state').textContent.endsWith('ready')"));
  EXPECT_EQ(browser_->value("document.querySelector('#banner').hidden"), true);
  daemon.kill();  // connections are refused
  ASSERT_TRUE(browser_->becomes("document.querySelector('#state').textContent === 'no answer'"));
}

TEST_F(StatusPage, NamesTheRankThatIsLost) {
  browser_->open(url((*world_)[0]));
  ASSERT_TRUE(browser_->becomes("document.querySelector('#state')?.textContent === 'ready'"));
  (*world_)[3].kill();
  ASSERT_TRUE(browser_->becomes("document.querySelector('#missing').textContent === 'link 3: lost'"));
  EXPECT_EQ(browser_->value("document.querySelector('#state').textContent"), "not ready");
  EXPECT_EQ(browser_->value("document.querySelectorAll('#ranks .link')[2].textContent"), "lost");
  EXPECT_TRUE(browser_->becomes("document.querySelectorAll('#heat tbody tr')[3].className === 'old'"))
      << "what it told last is not shown as new";
}

}  // namespace
}  // namespace moed
