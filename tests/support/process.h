// A real daemon as a child process, in a run directory of its own, and a lane of it through libmoed.
#pragma once

#include <fcntl.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "daemon/abi/attach.h"
#include "daemon/abi/socket.h"
#include "daemon/client/moed.h"
#include "tests/support/binaries.h"
#include "tests/support/temp_dir.h"

namespace moed::test {

inline void sleep_ms(int ms) { std::this_thread::sleep_for(std::chrono::milliseconds(ms)); }

inline std::string read_file(const std::string& path) {
  std::ifstream file(path);
  std::stringstream text;
  text << file.rdbuf();
  return text.str();
}

/// Starts `arguments` with stderr going to a file. The child ends with the thread that calls this.
inline pid_t spawn(const std::vector<std::string>& arguments, const std::string& log) {
  std::vector<char*> argv;
  for (const std::string& a : arguments) argv.push_back(const_cast<char*>(a.c_str()));
  argv.push_back(nullptr);
  const pid_t pid = ::fork();
  if (pid < 0) throw std::runtime_error("fork failed");
  if (pid != 0) return pid;
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);  // a test that is stopped leaves nothing running
  const int fd = ::open(log.c_str(), O_WRONLY | O_CREAT | O_APPEND, 0600);
  ::dup2(fd, STDERR_FILENO);
  ::dup2(fd, STDOUT_FILENO);
  ::execv(argv[0], argv.data());
  ::_exit(127);
}

/// Waits for a child at most `ms`; its wait status, or -1 when it still runs.
inline int wait_for(pid_t pid, int ms) {
  for (int waited = 0;; waited += 5) {
    int status = 0;
    if (::waitpid(pid, &status, WNOHANG) == pid) return status;
    if (waited >= ms) return -1;
    sleep_ms(5);
  }
}

/// A connection to a daemon's socket without libmoed; what is received must come within 5 s.
inline Fd connect_raw(const std::string& socket) {
  Fd fd(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  socket.copy(address.sun_path, sizeof address.sun_path - 1);
  const timeval limit{5, 0};
  ::setsockopt(fd.get(), SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
  if (::connect(fd.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address) != 0)
    throw std::runtime_error("cannot connect to " + socket + ": " + std::strerror(errno));
  return fd;
}

class Daemon {
 public:
  /// sets: "a.b=c". The http port is any free one unless set. Waits until it is ready.
  explicit Daemon(const std::vector<std::string>& sets, const std::string& run_dir = {})
      : sets_(sets), run_dir_(run_dir.empty() ? dir_.path() : run_dir) {
    start();
    wait_ready();
  }
  /// One of several; whoever makes it waits.
  Daemon(const std::vector<std::string>& sets, const std::string& run_dir, uint32_t rank)
      : sets_(sets), run_dir_(run_dir), rank_(rank) {
    start();
  }
  Daemon(const Daemon&) = delete;
  Daemon& operator=(const Daemon&) = delete;
  ~Daemon() {
    if (pid_ > 0) {
      ::kill(pid_, SIGKILL);
      ::waitpid(pid_, nullptr, 0);
    }
  }

  std::string socket() const { return run_dir_ + "/moed/" + std::to_string(rank_) + ".sock"; }
  std::string log() const { return read_file(log_path()); }
  pid_t pid() const { return pid_; }

  /// What moectl status --json prints; empty when the daemon does not answer within 5 s.
  std::string status_json() const {
    const Fd fd = connect_raw(socket());
    const StatusQuery query;
    std::vector<std::byte> answer(kMaxStatusBytes);
    std::vector<Fd> fds;
    if (!send_message(fd.get(), &query, sizeof query)) return {};
    const ssize_t got = receive_message(fd.get(), answer, fds);
    return got <= 0 ? std::string()
                    : std::string(reinterpret_cast<const char*>(answer.data()), static_cast<size_t>(got));
  }

  void signal(int number) const { ::kill(pid_, number); }

  /// Ends it with SIGTERM; its exit code, -1 when it does not leave within 10 s.
  int stop() {
    signal(SIGTERM);
    return reap(10'000);
  }

  int reap(int ms) {
    const int status = wait_for(pid_, ms);
    if (status == -1) return -1;
    pid_ = 0;
    return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
  }

  void restart() {
    kill();
    start();
    wait_ready();
  }

  /// SIGSTOP, and until every thread stands still.
  void freeze() {
    signal(SIGSTOP);
    int status = 0;
    if (::waitpid(pid_, &status, WUNTRACED) != pid_ || !WIFSTOPPED(status))
      throw std::runtime_error("it does not stop");
  }
  void thaw() const { signal(SIGCONT); }

  void kill() {
    signal(SIGKILL);
    reap(10'000);
  }

  /// Log lines with this text so far, over all lives.
  size_t count(const std::string& part) const {
    const std::string text = log();
    size_t count = 0;
    for (size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + 1)) ++count;
    return count;
  }

  /// Starts it and returns at once.
  void start() {
    std::vector<std::string> arguments{moed_binary(), "serve",
                                       "--rank",      std::to_string(rank_),
                                       "--set",       "run_dir=" + run_dir_,
                                       "--set",       "http.listen=127.0.0.1:0"};
    for (const std::string& s : sets_) {
      arguments.emplace_back("--set");
      arguments.push_back(s);
    }
    ready_before_ = count(kReady);
    pid_ = spawn(arguments, log_path());
  }

  /// Until the log says so, for this life: every link is ready.
  void wait_ready() {
    for (int i = 0; i < 6000; ++i) {
      if (count(kReady) > ready_before_) return;
      int status = 0;
      if (::waitpid(pid_, &status, WNOHANG) == pid_) {
        pid_ = 0;
        throw std::runtime_error("the daemon ended: " + log());
      }
      sleep_ms(5);
    }
    throw std::runtime_error("the daemon is not ready after 30 s: " + log());
  }

 private:
  static constexpr const char* kReady = " info ready ";
  std::string log_path() const { return dir_.path() + "/log"; }

  TempDir dir_;
  std::vector<std::string> sets_;
  std::string run_dir_;
  uint32_t rank_ = 0;
  pid_t pid_ = 0;
  size_t ready_before_ = 0;
};

/// One lane through libmoed; detaches at the end.
class Lane {
 public:
  explicit Lane(const std::string& socket, moed_options options = {}) {
    options.size = sizeof options;
    const moed_status status = moed_attach(socket.c_str(), &options, &lane_);
    if (status != MOED_OK)
      throw std::runtime_error(std::string(moed_status_name(status)) + ": " + moed_last_error(nullptr));
    info_.size = sizeof info_;
    if (moed_get_info(lane_, &info_) != MOED_OK) throw std::runtime_error(moed_last_error(lane_));
  }
  Lane(const Lane&) = delete;
  Lane& operator=(const Lane&) = delete;
  ~Lane() { moed_detach(lane_); }

  moed_lane* get() const { return lane_; }
  const moed_info& info() const { return info_; }
  uint8_t* arena() const { return static_cast<uint8_t*>(moed_arena(lane_)); }

  /// Offsets of slot 0, for `tokens` tokens of the routed kind.
  moed_call_t slot(uint32_t layer, uint32_t tokens) const {
    moed_call_t call{};
    if (moed_slot(lane_, 0, &call) != MOED_OK) throw std::runtime_error(moed_last_error(lane_));
    call.layer = layer;
    call.tokens = tokens;
    call.valid = 0;
    return call;
  }

  template <class T>
  void put(uint64_t offset, const std::vector<T>& values) const {
    if (!values.empty()) std::memcpy(arena() + offset, values.data(), values.size() * sizeof(T));
  }

  std::vector<uint16_t> out(const moed_call_t& call) const {
    std::vector<uint16_t> rows(uint64_t{call.tokens} * info_.latent);
    if (!rows.empty()) std::memcpy(rows.data(), arena() + call.out, rows.size() * 2);
    return rows;
  }

 private:
  moed_lane* lane_ = nullptr;
  moed_info info_{};
};

}  // namespace moed::test
