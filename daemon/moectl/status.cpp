// moectl status: one message to the daemon's socket, no lane is taken.
#include "daemon/moectl/status.h"

#include <cmath>
#include <cstdarg>
#include <cstdio>
#include <nlohmann/json.hpp>
#include <vector>

#include "daemon/abi/attach.h"
#include "daemon/client/connect.h"
#include "daemon/moectl/lane.h"

namespace moed::ctl {
namespace {

using Json = nlohmann::json;

__attribute__((format(printf, 2, 3))) void append(std::string& to, const char* format, ...) {
  char line[512];
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(line, sizeof line, format, arguments);
  va_end(arguments);
  to += line;
}

/// A member of an object whose type may be another than expected in a newer daemon.
template <class T>
T get(const Json& object, const char* key, T otherwise) {
  const auto at = object.find(key);
  if (!object.is_object() || at == object.end()) return otherwise;
  if constexpr (std::is_same_v<T, std::string>) {
    return at->is_string() ? at->template get<std::string>() : otherwise;
  } else if constexpr (std::is_same_v<T, bool>) {
    return at->is_boolean() ? at->template get<bool>() : otherwise;
  } else if constexpr (std::is_integral_v<T>) {
    return at->is_number_unsigned() ? at->template get<T>() : otherwise;
  } else {
    return at->is_number() ? at->template get<T>() : otherwise;
  }
}

const Json& child(const Json& object, const char* key) {
  static const Json empty;
  const auto at = object.find(key);
  return at == object.end() ? empty : *at;
}

std::string age(double ms) {
  std::string text;
  if (ms < 1000)
    append(text, "%.0f ms", ms);
  else
    append(text, "%.1f s", ms / 1000);
  return text;
}

std::string microseconds(double us) {
  std::string text;
  append(text, us < 10 ? "%.1f us" : "%.0f us", us);
  return text;
}

std::string readiness(const Json& state) {
  if (get(state, "ready", false)) return "ready";
  std::string missing;
  for (const Json& m : child(state, "missing"))
    if (m.is_string()) missing += (missing.empty() ? "" : ", ") + m.get<std::string>();
  return missing.empty() ? "not ready" : "not ready (" + missing + ")";
}

std::string lanes_line(const Json& state) {
  const Json& lanes = child(state, "lanes");
  std::string who;
  for (const Json& lane : lanes) {
    const std::string name = get(lane, "name", std::string());
    who += (who.empty() ? "" : "; ") + (name.empty() ? "lane " + std::to_string(get(lane, "lane", uint64_t{0})) : name);
    who += ", pid " + std::to_string(get(lane, "pid", uint64_t{0}));
  }
  std::string line = "lanes";
  if (const uint64_t all = get(child(state, "limits"), "lanes", uint64_t{0}); all > 0)
    line += " " + std::to_string(all);
  line += ": " + std::to_string(lanes.size()) + " attached" + (who.empty() ? "" : " (" + who + ")");
  const Json& calls = child(state, "calls");
  uint64_t other = 0;
  for (const auto& [status, count] : calls.items())
    if (status != "ok" && count.is_number_unsigned()) other += count.get<uint64_t>();
  line += "   calls " + std::to_string(get(calls, "ok", uint64_t{0})) + " ok, " + std::to_string(other) + " other";
  const Json& us = child(state, "call_us");
  line += "   p50 " + microseconds(get(us, "p50", 0.0)) + "  p99 " + microseconds(get(us, "p99", 0.0)) + "\n";
  return line;
}

/// The cause that took most of the time that calls waited for a peer; "-" when they never did.
std::string cause_of(const Json& peer) {
  std::string most = "-";
  double least = 0;
  const Json& causes = child(peer, "wait_by");
  for (const auto& [cause, seconds] : causes.items())
    if (seconds.is_number() && seconds.get<double>() > least) {
      least = seconds.get<double>();
      most = cause;
    }
  return most;
}

std::string peers_table(const Json& peers) {
  if (peers.empty()) return {};
  double all = 0;
  for (const Json& p : peers) all += get(p, "wait_s", 0.0);
  std::string table = "peer  link        heartbeat  wait share  mostly       last  losses\n";
  for (const Json& p : peers) {
    std::string link = get(p, "link", std::string("unknown"));
    std::string share = "-";
    if (all > 0 && link == "ready") share = std::to_string(std::lround(get(p, "wait_s", 0.0) / all * 100)) + " %";
    if (const std::string busy = get(p, "busy", std::string()); link == "connecting" && !busy.empty()) link = busy;
    const double heartbeat = get(p, "heartbeat_ms", -1.0);
    append(table, "%4llu  %-10s  %9s  %10s  %-7s  %8llu  %6llu\n",
           static_cast<unsigned long long>(get(p, "rank", uint64_t{0})), link.c_str(),
           heartbeat < 0 ? "-" : age(heartbeat).c_str(), share.c_str(), cause_of(p).c_str(),
           static_cast<unsigned long long>(get(p, "last", uint64_t{0})),
           static_cast<unsigned long long>(get(p, "losses", uint64_t{0})));
  }
  return table;
}

Status ask(const std::string& socket, std::string& json, Sentence& why) {
  const Nanos until = now_ns() + kAnswerLimit;
  SocketPath path = {};
  Fd fd;
  const StatusQuery query;
  std::vector<std::byte> buffer(kMaxStatusBytes);
  std::vector<Fd> fds;
  std::size_t got = 0;
  Status status = find_socket(socket.empty() ? nullptr : socket.c_str(), path, why);
  if (status == Status::ok) status = connect_socket(path, until, fd, why);
  if (status == Status::ok) status = send_within(fd, &query, sizeof query, until, why);
  if (status == Status::ok) status = receive_within(fd, buffer, fds, until, got, why);
  if (status == Status::ok) json.assign(reinterpret_cast<const char*>(buffer.data()), got);
  return status == Status::peer_timeout ? Status::daemon_lost : status;
}

}  // namespace

std::string status_table(const std::string& json) {
  const Json state = Json::parse(json, nullptr, false);
  if (!state.is_object()) return {};
  const std::string sharing = get(state, "sharing", std::string());
  std::string text = "rank " + std::to_string(get(state, "rank", uint64_t{0})) + " of " +
                     std::to_string(get(state, "ranks", uint64_t{0})) + "  " + readiness(state) + "  " +
                     get(state, "backend", std::string()) + " " + get(state, "transport", std::string()) +
                     (sharing.empty() ? "" : " " + sharing) + "  incarnation " +
                     get(state, "incarnation", std::string()).substr(0, 8);
  append(text, "  uptime %.0f s", get(state, "uptime_s", 0.0));
  text += "  version " + get(state, "version", std::string("unknown")) + "\n";
  return text + lanes_line(state) + peers_table(child(state, "peers"));
}

int run_status(const std::string& socket, bool json) {
  std::string answer;
  Sentence why;
  const Status status = ask(socket, answer, why);
  if (status != Status::ok) {
    std::fprintf(stderr, "moectl: %s: %s\n", name(status), why.text);
    return exit_of(static_cast<moed_status>(status));
  }
  const std::string text = json ? answer + "\n" : status_table(answer);
  if (text.empty()) {
    std::fprintf(
        stderr,
        "moectl: the daemon's answer of %zu bytes is no JSON object: daemon and moectl are of different versions\n",
        answer.size());
    return kNo;
  }
  std::fputs(text.c_str(), stdout);
  return kDone;
}

}  // namespace moed::ctl
