// moectl status: one message to the daemon's socket, no lane is taken.
#include "daemon/moectl/status.h"

#include <cmath>
#include <cstdio>

#include "daemon/moectl/answer.h"
#include "daemon/moectl/lane.h"

namespace moed::ctl {
namespace {

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
  const Status status = ask_status(socket, kAnswerLimit, answer, why);
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
