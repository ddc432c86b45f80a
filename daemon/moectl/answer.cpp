// Asking a daemon, and what status and top share of its JSON.
#include "daemon/moectl/answer.h"

#include <cstdarg>
#include <cstdio>

#include "daemon/abi/attach.h"

namespace moed::ctl {

Status ask(const std::string& socket, Nanos limit, std::span<const std::byte> question, Heard& heard, Sentence& why) {
  const Nanos until = now_ns() + limit;
  SocketPath path = {};
  Fd fd;
  Status status = find_socket(socket.empty() ? nullptr : socket.c_str(), path, why);
  if (status == Status::ok) status = connect_socket(path, until, fd, why);
  if (status == Status::ok) status = send_within(fd, question.data(), question.size(), until, why);
  if (status == Status::ok) status = receive_within(fd, heard.answer, heard.fds, until, heard.got, why);
  if (status != Status::ok && now_ns() >= until) {  // the sentences of connect.h name libmoed's own limit
    why.set("no answer from %s within %llu ms: is the daemon stopped?", path,
            static_cast<unsigned long long>(limit / 1'000'000));
    return Status::daemon_lost;
  }
  return status;
}

Status ask_status(const std::string& socket, Nanos limit, std::string& json, Sentence& why) {
  const StatusQuery query;
  std::vector<std::byte> buffer(kMaxStatusBytes);
  Heard heard{.answer = buffer};
  const Status status = ask(socket, limit, std::as_bytes(std::span(&query, 1)), heard, why);
  if (status == Status::ok) json.assign(reinterpret_cast<const char*>(buffer.data()), heard.got);
  return status;
}

void append(std::string& to, const char* format, ...) {
  char line[512];
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(line, sizeof line, format, arguments);
  va_end(arguments);
  to += line;
}

const Json& child(const Json& object, const char* key) {
  static const Json empty;
  const auto at = object.find(key);
  return at == object.end() ? empty : *at;
}

std::string readiness(const Json& state) {
  if (get(state, "ready", false)) return "ready";
  std::string missing;
  for (const Json& m : child(state, "missing"))
    if (m.is_string()) missing += (missing.empty() ? "" : ", ") + m.get<std::string>();
  return missing.empty() ? "not ready" : "not ready (" + missing + ")";
}

}  // namespace moed::ctl
