// Log lines as they leave the process, what is escaped in them, and how often equal ones come.
#include "daemon/log.h"

#include <gtest/gtest.h>
#include <regex.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <fstream>
#include <string>
#include <thread>
#include <vector>

namespace moed {
namespace {

/// Sends stderr to a file while it lives.
class CapturedStderr {
 public:
  CapturedStderr() {
    char name[] = "/tmp/moed-log-XXXXXX";
    directory_ = ::mkdtemp(name);
    file_ = directory_ + "/stderr";
    saved_ = ::dup(STDERR_FILENO);
    if (std::freopen(file_.c_str(), "w", stderr) == nullptr) std::abort();
  }
  ~CapturedStderr() {
    restore();
    ::unlink(file_.c_str());
    ::rmdir(directory_.c_str());
  }
  std::vector<std::string> lines() {
    restore();
    std::vector<std::string> out;
    std::ifstream file(file_);
    for (std::string line; std::getline(file, line);) out.push_back(line);
    return out;
  }

 private:
  void restore() {
    if (saved_ < 0) return;
    std::fflush(stderr);
    ::dup2(saved_, STDERR_FILENO);
    ::close(saved_);
    saved_ = -1;
  }
  std::string directory_, file_;
  int saved_ = -1;
};

/// Whether `text` matches a POSIX extended pattern.
bool matches(const std::string& text, const std::string& pattern) {
  regex_t compiled;
  if (::regcomp(&compiled, pattern.c_str(), REG_EXTENDED | REG_NOSUB) != 0) ADD_FAILURE() << "bad pattern " << pattern;
  const bool found = ::regexec(&compiled, text.c_str(), 0, nullptr, 0) == 0;
  ::regfree(&compiled);
  return found;
}

const std::string kTime = "^[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}[.][0-9]{3}Z ";

TEST(Log, LineIsTimeLevelMessageFields) {
  CapturedStderr captured;
  log_info("link ready", {{"peer", 3}, {"session", 2U}, {"took_ms", 41L}});
  log_warn("slow", {{"ratio", 0.5}, {"name", std::string("engine-a")}, {"ok", true}});
  log_error("lost");
  const auto lines = captured.lines();
  ASSERT_EQ(lines.size(), 3U);
  EXPECT_TRUE(matches(lines[0], kTime + "info link ready peer=3 session=2 took_ms=41$")) << lines[0];
  EXPECT_TRUE(matches(lines[1], kTime + "warn slow ratio=0[.]5 name=engine-a ok=true$")) << lines[1];
  EXPECT_TRUE(matches(lines[2], kTime + "error lost$")) << lines[2];
}

TEST(Log, TimeIsUtc) {
  ::setenv("TZ", "Asia/Tokyo", 1);
  ::tzset();
  const std::time_t before = std::time(nullptr);
  CapturedStderr captured;
  log_info("what time is it");
  const auto lines = captured.lines();
  const std::time_t after = std::time(nullptr);
  ::unsetenv("TZ");
  ::tzset();
  ASSERT_EQ(lines.size(), 1U);
  std::tm parts{};
  ASSERT_NE(::strptime(lines[0].c_str(), "%Y-%m-%dT%H:%M:%S", &parts), nullptr);
  const std::time_t logged = ::timegm(&parts);
  EXPECT_GE(logged, before);
  EXPECT_LE(logged, after);
}

TEST(Log, LevelsBelowTheThresholdAreLeftOut) {
  CapturedStderr captured;
  log_debug("level test debug");
  set_level(LogLevel::warn);
  log_info("level test info");
  log_warn("level test warn");
  set_level(LogLevel::debug);
  EXPECT_TRUE(log_enabled(LogLevel::debug));
  log_debug("level test debug");
  set_level(LogLevel::info);
  EXPECT_FALSE(log_enabled(LogLevel::debug));
  const auto lines = captured.lines();
  ASSERT_EQ(lines.size(), 2U);
  EXPECT_TRUE(lines[0].ends_with("Z warn level test warn")) << lines[0];
  EXPECT_TRUE(lines[1].ends_with("Z debug level test debug")) << lines[1];
}

TEST(Log, ValuesAreQuotedAndEscapedWhereNeeded) {
  const auto value = [](std::string_view text) { return format_line(LogLevel::info, "m", {{"k", text}}); };
  EXPECT_EQ(value("plain/value-1.2:3"), "info m k=plain/value-1.2:3");
  EXPECT_EQ(value(""), "info m k=\"\"");
  EXPECT_EQ(value("two words"), "info m k=\"two words\"");
  EXPECT_EQ(value("a=b"), "info m k=\"a=b\"");
  EXPECT_EQ(value("say \"hi\" \\ bye"), R"(info m k="say \"hi\" \\ bye")");
  EXPECT_EQ(value("a\nb\rc\td"), R"(info m k="a\nb\rc\td")");
  EXPECT_EQ(value(std::string_view("\0\x1b[31m\x7f\xc2\x9b", 9)), R"(info m k="\x00\x1b[31m\x7f\xc2\x9b")");
  EXPECT_EQ(value(std::string(5000, 'x')), "info m k=" + std::string(1024, 'x') + "...");
}

TEST(Log, NumbersKeepTheirWholeRange) {
  EXPECT_EQ(
      format_line(LogLevel::error, "m", {{"a", INT64_MIN}, {"b", UINT64_MAX}, {"c", int8_t{-1}}, {"d", uint8_t{255}}}),
      "error m a=-9223372036854775808 b=18446744073709551615 c=-1 d=255");
  const char* nothing = nullptr;
  EXPECT_EQ(format_line(LogLevel::debug, "m", {{"n", nothing}, {"f", false}}), "debug m n=\"\" f=false");
}

TEST(Log, EveryByteInMessageKeyAndValueStaysOnOneLine) {
  std::string all;
  for (int b = 0; b < 256; ++b) all += static_cast<char>(b);
  const std::string line = format_line(LogLevel::warn, all, {{"k", all}});
  for (const char c : line) EXPECT_TRUE(c >= ' ' && c <= '~') << static_cast<int>(c);
}

TEST(RateLimit, FiveASecondThenTheCount) {
  RateLimit limit;
  constexpr uint64_t start = 7'000'000'000, second = 1'000'000'000;
  for (int i = 0; i < 5; ++i) EXPECT_EQ(limit.admit("a", start + static_cast<uint64_t>(i)), 0U);
  for (int i = 0; i < 17; ++i) EXPECT_EQ(limit.admit("a", start + second - 1), std::nullopt);
  EXPECT_EQ(limit.admit("b", start + second - 1), 0U) << "another text has its own count";
  EXPECT_EQ(limit.admit("a", start + second), 17U);
  for (int i = 0; i < 4; ++i) EXPECT_EQ(limit.admit("a", start + second + 1), 0U);
  EXPECT_EQ(limit.admit("a", start + second + 2), std::nullopt);
  EXPECT_EQ(limit.admit("a", start + 100 * second), 1U);
}

TEST(RateLimit, ManyTextsDoNotGrowItWithoutLimit) {
  RateLimit limit;
  for (int i = 0; i < 10'000; ++i) EXPECT_EQ(limit.admit("text " + std::to_string(i), 1), 0U);
  EXPECT_EQ(limit.admit("text 9999", 1), 0U);
}

TEST(Log, ThreadsNeitherMixNorLoseLines) {
  constexpr int kThreads = 8, kLines = 200;
  CapturedStderr captured;
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t)
    threads.emplace_back([t] {
      for (int i = 0; i < kLines; ++i)
        log_info("thread " + std::to_string(t) + " line " + std::to_string(i), {{"filler", std::string(100, 'x')}});
    });
  for (auto& thread : threads) thread.join();
  const auto lines = captured.lines();
  EXPECT_EQ(lines.size(), std::size_t{kThreads} * kLines);
  const std::string whole = kTime + "info thread [0-9] line [0-9]+ filler=x{100}$";
  for (const auto& line : lines) EXPECT_TRUE(matches(line, whole)) << line;
}

TEST(Log, WhatIsHeldBackIsCounted) {
  constexpr unsigned kLines = 1000;
  CapturedStderr captured;
  for (unsigned i = 0; i < kLines; ++i) log_warn("flood");
  ::usleep(1'100'000);
  log_warn("flood");
  const auto lines = captured.lines();
  unsigned total = 0;
  for (const auto& line : lines) {
    ++total;
    const auto at = line.find(" suppressed=");
    if (at != line.npos) total += static_cast<unsigned>(std::stoul(line.substr(at + 12)));
  }
  EXPECT_EQ(total, kLines + 1);
  EXPECT_LT(lines.size(), kLines);
}

}  // namespace
}  // namespace moed
