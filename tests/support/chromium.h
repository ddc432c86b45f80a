// A headless Chromium that a test drives through its debugging pipe: one page, of whatever size, light or dark.
// Messages are JSON, each ended by a zero byte: https://chromedevtools.github.io/devtools-protocol.
#pragma once

#include <fcntl.h>
#include <openssl/evp.h>
#include <poll.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <nlohmann/json.hpp>
#include <stdexcept>
#include <string>
#include <vector>

#include "daemon/abi/fd.h"
#include "daemon/abi/futex.h"
#include "tests/support/temp_dir.h"

namespace moed::test {

class Chromium {
 public:
  using Json = nlohmann::json;
  static constexpr const char* kProgram = "/usr/bin/chromium";
  static constexpr int kPatienceMs = 60'000;  ///< of every wait

  static bool installed() { return ::access(kProgram, X_OK) == 0; }

  Chromium() {
    start();
    const Json target = command("Target.createTarget", {{"url", "about:blank"}});
    session_ =
        command("Target.attachToTarget", {{"targetId", target.at("targetId")}, {"flatten", true}}).at("sessionId");
    for (const char* domain : {"Page.enable", "Runtime.enable", "Log.enable"}) command(domain);
  }
  Chromium(const Chromium&) = delete;
  Chromium& operator=(const Chromium&) = delete;
  ~Chromium() {
    ::kill(-pid_, SIGKILL);  // with its zygotes and renderers
    ::waitpid(pid_, nullptr, 0);
  }

  /// The page's size in CSS pixels, one pixel each.
  void resize(int width, int height) {
    command("Emulation.setDeviceMetricsOverride",
            {{"width", width}, {"height", height}, {"deviceScaleFactor", 1}, {"mobile", width < 600}});
  }
  void prefer(const std::string& scheme) {
    const Json feature = {{"name", "prefers-color-scheme"}, {"value", scheme}};
    command("Emulation.setEmulatedMedia", {{"features", Json::array({feature})}});
  }
  void open(const std::string& url) { command("Page.navigate", {{"url", url}}); }

  /// What an expression gives in the page; throws where it throws.
  Json value(const std::string& expression) {
    const Json answer = command("Runtime.evaluate", {{"expression", expression}, {"returnByValue", true}});
    if (answer.contains("exceptionDetails")) throw std::runtime_error(expression + ": " + answer.dump());
    return answer.at("result").value("value", Json());
  }
  /// Until an expression is true in the page; false when it never is.
  bool becomes(const std::string& expression) {
    for (const Nanos end = deadline(); now_ns() < end; ::usleep(50'000))
      if (value("Boolean(" + expression + ")") == true) return true;
    return false;
  }

  /// The bytes of a PNG file: what is in view, or the whole page.
  std::string screenshot(bool whole = false) {
    const std::string base64 =
        command("Page.captureScreenshot", {{"format", "png"}, {"captureBeyondViewport", whole}}).at("data");
    std::string bytes(base64.size() / 4 * 3, '\0');
    if (EVP_DecodeBlock(reinterpret_cast<unsigned char*>(bytes.data()),
                        reinterpret_cast<const unsigned char*>(base64.data()), static_cast<int>(base64.size())) < 0)
      throw std::runtime_error("the screenshot is not base64");
    bytes.resize(bytes.size() - static_cast<size_t>(std::count(base64.end() - 2, base64.end(), '=')));
    return bytes;
  }

  /// What the browser complained of so far: failed requests, violations of the page's policy, exceptions.
  const std::vector<std::string>& complaints() const { return complaints_; }

 private:
  static Nanos deadline() { return now_ns() + Nanos{kPatienceMs} * 1'000'000; }

  void start() {
    int in[2], out[2];
    if (::pipe2(in, O_CLOEXEC) != 0 || ::pipe2(out, O_CLOEXEC) != 0) throw std::runtime_error("no pipe");
    to_ = Fd(in[1]);
    from_ = Fd(out[0]);
    const Fd theirs_in(in[0]), theirs_out(out[1]);
    const std::string data = "--user-data-dir=" + dir_.path(), log = dir_.path() + "/log";
    const char* arguments[] = {kProgram,
                               "--headless",
                               "--no-sandbox",
                               "--disable-gpu",
                               "--disable-dev-shm-usage",
                               "--no-first-run",
                               "--hide-scrollbars",
                               "--disable-background-networking",
                               "--remote-debugging-pipe",
                               data.c_str(),
                               "about:blank",
                               nullptr};
    ::signal(SIGPIPE, SIG_IGN);  // a browser that is gone is an error of write
    pid_ = ::fork();
    if (pid_ < 0) throw std::runtime_error("fork failed");
    if (pid_ != 0) return;
    ::setpgid(0, 0);
    ::prctl(PR_SET_PDEATHSIG, SIGKILL);
    const int file = ::open(log.c_str(), O_WRONLY | O_CREAT, 0600);
    ::dup2(file, STDOUT_FILENO);
    ::dup2(file, STDERR_FILENO);
    // Both ends are moved away first: either may be 3 or 4, where the browser looks for them.
    const int read_end = ::fcntl(in[0], F_DUPFD, 10), write_end = ::fcntl(out[1], F_DUPFD, 10);
    ::dup2(read_end, 3);
    ::dup2(write_end, 4);
    ::execv(kProgram, const_cast<char**>(arguments));
    ::_exit(127);
  }

  Json command(const std::string& method, const Json& parameters = Json::object()) {
    Json message = {{"id", ++last_}, {"method", method}, {"params", parameters}};
    if (!session_.empty()) message["sessionId"] = session_;
    const std::string text = message.dump();
    if (::write(to_.get(), text.c_str(), text.size() + 1) != static_cast<ssize_t>(text.size() + 1))
      throw std::runtime_error("the browser does not read");
    for (const Nanos end = deadline();;) {
      const Json answer = next(method, end);
      if (answer.value("id", 0) != last_) {
        note(answer);
        continue;
      }
      if (answer.contains("error")) throw std::runtime_error(method + ": " + answer.dump());
      return answer.at("result");
    }
  }

  Json next(const std::string& method, Nanos end) {
    size_t zero = 0;
    while ((zero = heard_.find('\0')) == std::string::npos) {
      pollfd ready{from_.get(), POLLIN, 0};
      char part[65536];
      const Nanos now = now_ns();
      if (now >= end || ::poll(&ready, 1, static_cast<int>((end - now) / 1'000'000) + 1) == 0)
        throw std::runtime_error("no answer to " + method + " in time");
      const ssize_t got = ::read(from_.get(), part, sizeof part);
      if (got <= 0) throw std::runtime_error("the browser is gone");
      heard_.append(part, static_cast<size_t>(got));
    }
    Json message = Json::parse(heard_.substr(0, zero));
    heard_.erase(0, zero + 1);
    return message;
  }

  void note(const Json& event) {
    const std::string method = event.value("method", "");
    if (method == "Log.entryAdded" || method == "Runtime.exceptionThrown" || method == "Runtime.consoleAPICalled")
      complaints_.push_back(event.at("params").dump());
  }

  TempDir dir_;
  Fd to_, from_;
  pid_t pid_ = 0;
  int last_ = 0;
  std::string session_, heard_;
  std::vector<std::string> complaints_;
};

}  // namespace moed::test
