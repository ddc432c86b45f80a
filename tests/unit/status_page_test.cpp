// The status page as it is served: the file's bytes, with a policy that names its script and style by hash, and nothing
// in it that a browser would fetch from elsewhere.
#include "daemon/status_page.h"

#include <gtest/gtest.h>
#include <stdio.h>

#include <utility>  // Asio 1.74 uses std::exchange without including it

#include <boost/asio/io_context.hpp>
#include <fstream>
#include <iterator>
#include <regex>
#include <string>
#include <thread>
#include <vector>

#include "tests/support/scrape.h"
#include "tests/support/temp_dir.h"

namespace moed {
namespace {

std::string read(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}
std::string source() { return read(MOED_SOURCE "/daemon/status_page.html"); }

/// The answer to GET /, headers and body.
std::pair<std::string, std::string> served() {
  boost::asio::io_context io;
  HttpServer http(
      io, "127.0.0.1:0", [](std::string_view path) { return path == "/" ? status_page() : HttpAnswer{}; }, [] {});
  std::thread thread([&io] { io.run(); });
  const std::string answer = test::get_page(http.port(), "/");
  http.stop();
  thread.join();
  const size_t end = answer.find("\r\n\r\n");
  return {answer.substr(0, end + 2), answer.substr(end + 4)};
}

/// By coreutils and by hand: the daemon has both from OpenSSL.
std::string sha256_base64(const std::string& text) {
  const test::TempDir dir;
  std::ofstream(dir.path() + "/text", std::ios::binary) << text;
  FILE* sum = ::popen(("sha256sum " + dir.path() + "/text").c_str(), "r");
  char hex[65] = {};
  EXPECT_EQ(::fread(hex, 1, 64, sum), 64U);
  ::pclose(sum);
  unsigned bits = 0, held = 0;
  std::string out;
  for (size_t i = 0; i < 64; i += 2) {
    held = held << 8 | static_cast<unsigned>(std::stoul(std::string(hex + i, 2), nullptr, 16));
    for (bits += 8; bits >= 6; bits -= 6)
      out += "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/"[held >> (bits - 6) & 63U];
  }
  out += "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/"[held << (6 - bits) & 63U];
  return out + "=";  // 32 bytes: 43 digits and one to fill up
}

std::string inside(const std::string& text, const std::string& from, const std::string& to) {
  const size_t begin = text.find(from) + from.size();
  return text.substr(begin, text.find(to, begin) - begin);
}

size_t count(const std::string& text, const std::string& part) {
  size_t n = 0;
  for (size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + 1)) ++n;
  return n;
}

TEST(StatusPage, IsTheFileByteForByte) {
  ASSERT_GT(source().size(), 10'000U);
  EXPECT_TRUE(served().second == source()) << "build again: the page was changed after it was embedded";
}

TEST(StatusPage, IsServedAsHtmlWithAPolicyThatNamesWhatMayRun) {
  const std::string head = served().first;
  EXPECT_TRUE(head.starts_with("HTTP/1.1 200 OK\r\n")) << head;
  EXPECT_NE(head.find("\r\nContent-Type: text/html; charset=utf-8\r\n"), std::string::npos) << head;
  EXPECT_NE(head.find("\r\nX-Content-Type-Options: nosniff\r\n"), std::string::npos) << head;
  const std::string page = source();
  for (const char* tag : {"script", "style"}) EXPECT_EQ(count(page, std::string("<") + tag), 1U) << tag;
  EXPECT_EQ(inside(head, "\r\nContent-Security-Policy: ", "\r\n"),
            "default-src 'none'; script-src 'sha256-" + sha256_base64(inside(page, "<script>", "</script>")) +
                "'; style-src 'sha256-" + sha256_base64(inside(page, "<style>", "</style>")) +
                "'; connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'");
}

TEST(StatusPage, NeedsNothingFromElsewhere) {
  const std::string page = source();
  for (const char* outside : {"http:", "https:", "//cdn", "@import", "url(", "src=", "innerHTML", "eval("})
    EXPECT_EQ(count(page, outside), 0U) << outside;
  const std::regex link("href=\"([^\"]*)\"");
  size_t links = 0;
  for (std::sregex_iterator at(page.begin(), page.end(), link), end; at != end; ++at, ++links) {
    const std::string to = (*at)[1];
    EXPECT_TRUE(to.starts_with("data:image/png;base64,") || to.find_first_of(":/") == std::string::npos) << to;
  }
  EXPECT_EQ(links, count(page, "href=")) << "each is quoted, so each was looked at";
  EXPECT_GT(links, 1U);
}

TEST(StatusPage, OtherAnswersHaveNoPolicy) {
  EXPECT_TRUE(HttpAnswer{}.policy.empty());
  EXPECT_FALSE(status_page().policy.empty());
}

}  // namespace
}  // namespace moed
