// Finding a daemon's socket, connecting to it and exchanging messages, each within a limit. Used by libmoed and moectl.
#pragma once

#include <glob.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>

#include <cerrno>
#include <cstdarg>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <span>
#include <vector>

#include "daemon/abi/fd.h"
#include "daemon/abi/futex.h"
#include "daemon/abi/socket.h"
#include "daemon/abi/status.h"

namespace moed {

inline constexpr Nanos kAnswerLimit = 5'000'000'000U;
inline constexpr const char* kSocketPattern = "/run/moed/*/*.sock";

/// One sentence about the last failure. Fixed size: saying that memory ran out must not need memory.
struct Sentence {
  char text[384] = {};

  __attribute__((format(printf, 2, 3))) void set(const char* format, ...) {
    va_list arguments;
    va_start(arguments, format);
    std::vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
  }
};

/// The path of a Unix socket.
using SocketPath = char[sizeof(sockaddr_un::sun_path)];

/// What errno means, in words.
class ErrnoText {
 public:
  explicit ErrnoText(int number) : text_(::strerror_r(number, buffer_, sizeof buffer_)) {}
  ErrnoText(const ErrnoText&) = delete;
  ErrnoText& operator=(const ErrnoText&) = delete;
  const char* get() const { return text_; }

 private:
  char buffer_[64] = {};
  const char* text_;
};

/// Chooses the socket: `asked`, else $MOED_SOCKET, else the only one that matches `pattern`. bad_call: the path is too
/// long, or there are several; daemon_lost: there is none.
inline Status find_socket(const char* asked, SocketPath& path, Sentence& why, const char* pattern = kSocketPattern) {
  const char* chosen = asked != nullptr ? asked : std::getenv("MOED_SOCKET");
  glob_t found{};
  if (chosen == nullptr || *chosen == '\0') {
    if (::glob(pattern, 0, nullptr, &found) == 0 && found.gl_pathc > 0) chosen = found.gl_pathv[0];
  }
  Status status = Status::ok;
  if (found.gl_pathc > 1) {
    why.set("%zu sockets match %s, among them %s and %s: name one, or set MOED_SOCKET", found.gl_pathc, pattern,
            found.gl_pathv[0], found.gl_pathv[1]);
    status = Status::bad_call;
  } else if (chosen == nullptr || *chosen == '\0') {
    why.set("no socket matches %s: start a daemon, name its socket, or set MOED_SOCKET", pattern);
    status = Status::daemon_lost;
  } else if (std::strlen(chosen) >= sizeof path) {
    why.set("socket path of %zu bytes, at most %zu fit: %.64s...", std::strlen(chosen), sizeof path - 1, chosen);
    status = Status::bad_call;
  } else {
    std::strcpy(path, chosen);
  }
  ::globfree(&found);
  return status;
}

/// Connects a new non-blocking SOCK_SEQPACKET socket to `path`. daemon_lost: nobody listens there, or the daemon takes
/// no connection until `until`; denied: no permission; no_memory: no descriptor.
inline Status connect_socket(const SocketPath& path, Nanos until, Fd& out, Sentence& why) {
  Fd fd(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!fd) {
    why.set("no socket can be made: %s", ErrnoText(errno).get());
    return Status::no_memory;
  }
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  std::memcpy(address.sun_path, path, sizeof address.sun_path);
  // A full backlog is EAGAIN here, and poll() does not wait for it.
  while (::connect(fd.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address) != 0) {
    const int error = errno;
    if (error == EINTR) continue;
    if (error == EAGAIN && now_ns() < until) {
      const timespec pause{0, 2'000'000};
      ::nanosleep(&pause, nullptr);
      continue;
    }
    if (error == EAGAIN)
      why.set("%s takes no connection within its limit of 5 s: is the daemon stopped?", path);
    else
      why.set("no daemon can be reached at %s: %s", path, ErrnoText(error).get());
    return error == EACCES || error == EPERM ? Status::denied : Status::daemon_lost;
  }
  out = std::move(fd);
  return Status::ok;
}

/// Waits until the socket is ready for `events`, or gone, or the time is `until`; false: the time is up.
inline bool wait_socket(const Fd& socket, short events, Nanos until) {
  for (;;) {
    const Nanos now = now_ns();
    if (now >= until) return false;
    pollfd p{socket.get(), events, 0};
    if (::poll(&p, 1, static_cast<int>((until - now) / 1'000'000U) + 1) > 0) return true;
  }
}

/// Sends one message by `until`. peer_timeout: the socket stayed full; daemon_lost: it is closed.
inline Status send_within(const Fd& socket, const void* data, std::size_t bytes, Nanos until, Sentence& why) {
  while (!send_message(socket.get(), data, bytes)) {
    if (errno != EAGAIN) {
      why.set("the daemon closed the socket: %s", ErrnoText(errno).get());
      return Status::daemon_lost;
    }
    if (!wait_socket(socket, POLLOUT, until)) {
      why.set("the daemon takes no message within its limit of 5 s: is it stopped?");
      return Status::peer_timeout;
    }
  }
  return Status::ok;
}

/// Receives one message by `until`; `got` is its length. peer_timeout: none came; daemon_lost: the socket is closed;
/// version: it is longer than `buffer`.
inline Status receive_within(const Fd& socket, std::span<std::byte> buffer, std::vector<Fd>& fds, Nanos until,
                             std::size_t& got, Sentence& why) {
  for (;;) {
    const ssize_t n = receive_message(socket.get(), buffer, fds);
    if (n > 0) {
      got = static_cast<std::size_t>(n);
      return Status::ok;
    }
    if (n < 0 && errno == EMSGSIZE) {
      why.set("the daemon's answer is longer than %zu bytes: daemon and client are of different versions",
              buffer.size());
      return Status::version;
    }
    if (n == 0 || errno != EAGAIN) {
      why.set("the daemon closed the socket without an answer: its log says why");
      return Status::daemon_lost;
    }
    if (!wait_socket(socket, POLLIN, until)) {
      why.set("the daemon gives no answer within its limit of 5 s: is it stopped?");
      return Status::peer_timeout;
    }
  }
}

}  // namespace moed
