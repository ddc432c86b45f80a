// Read from run_top() upwards: frames, ranks, rows.
#include "daemon/moectl/top.h"

#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdio>

#include "daemon/moectl/answer.h"
#include "daemon/moectl/lane.h"

namespace moed::ctl {
namespace {

constexpr Nanos kLookLimit = 1'000'000'000;  ///< a stopped daemon must not hold up the view of the others for long
constexpr const char* kCauseNames[] = {"queue", "experts", "send", "wire"};
constexpr const char* kHome = "\x1b[H";       ///< cursor to the top left
constexpr const char* kLineEnd = "\x1b[K\n";  ///< the rest of the line is cleared
constexpr const char* kScreenEnd = "\x1b[J";  ///< and the rest of the screen

/// Two looks at one life of a daemon, parsed. Counters that went back are another life's.
struct Pair {
  Json before, now;
  double seconds = 0;  ///< between them; 0: there is no earlier look
};

Pair pair_of(const std::optional<Look>& before, const Look& now) {
  Pair p;
  p.now = Json::parse(now.json, nullptr, false);
  if (!before || before->json.empty() || now.at <= before->at) return p;
  p.before = Json::parse(before->json, nullptr, false);
  const std::string life = get(p.now, "incarnation", std::string());
  if (p.before.is_object() && get(p.before, "incarnation", std::string()) == life)
    p.seconds = static_cast<double>(now.at - before->at) * 1e-9;
  return p;
}

std::string rate(double much, double seconds) {
  if (seconds <= 0) return "-";
  std::string text;
  append(text, much / seconds < 100 ? "%.1f" : "%.0f", much / seconds);
  return text;
}

std::string share(double part, double all) {
  return all > 0 ? std::to_string(std::lround(part / all * 100)) + " %" : std::string("-");
}

/// Calls so far: ok and all.
std::pair<uint64_t, uint64_t> calls_of(const Json& state) {
  const Json& calls = child(state, "calls");
  uint64_t all = 0;
  for (const auto& [status, count] : calls.items())
    if (count.is_number_unsigned()) all += count.get<uint64_t>();
  return {get(calls, "ok", uint64_t{0}), all};
}

double grown(uint64_t before, uint64_t now) { return static_cast<double>(now - std::min(now, before)); }

std::string rank_line(const Pair& p) {
  const auto [ok_before, all_before] = calls_of(p.before);
  const auto [ok, all] = calls_of(p.now);
  const double more = grown(all_before, all);
  std::string line = "rank " + std::to_string(get(p.now, "rank", uint64_t{0})) + " of " +
                     std::to_string(get(p.now, "ranks", uint64_t{0})) + "  " + readiness(p.now) + "  lanes " +
                     std::to_string(child(p.now, "lanes").size()) + "  calls/s " + rate(more, p.seconds) +
                     "  not ok/s " + rate(more - grown(ok_before, ok), p.seconds);
  if (p.now.contains("tokens"))
    line +=
        "  tokens/s " + rate(grown(get(p.before, "tokens", uint64_t{0}), get(p.now, "tokens", uint64_t{0})), p.seconds);
  const Json& us = child(p.now, "call_us");
  append(line, "  p50 %.1f us  p99 %.1f us\n", get(us, "p50", 0.0), get(us, "p99", 0.0));
  return line;
}

/// One peer's waits between the two looks, seconds, by cause and in all.
struct PeerWaits {
  double by[std::size(kCauseNames)] = {};
  double all = 0;
  double last = 0;
};

const Json& peer_before(const Pair& p, uint64_t rank) {
  static const Json none;
  for (const Json& peer : child(p.before, "peers"))
    if (get(peer, "rank", ~uint64_t{0}) == rank) return peer;
  return none;
}

PeerWaits waits_of(const Pair& p, const Json& peer) {
  PeerWaits w;
  if (p.seconds <= 0) return w;
  const Json& then = peer_before(p, get(peer, "rank", uint64_t{0}));
  for (std::size_t c = 0; c < std::size(kCauseNames); ++c) {
    const double before = then.is_object() ? get(child(then, "wait_by"), kCauseNames[c], 0.0) : 0;
    w.by[c] = std::max(0.0, get(child(peer, "wait_by"), kCauseNames[c], 0.0) - before);
    w.all += w.by[c];
  }
  w.last = grown(get(then, "last", uint64_t{0}), get(peer, "last", uint64_t{0}));
  return w;
}

std::string peer_rows(const Pair& p) {
  const Json& peers = child(p.now, "peers");
  if (peers.empty()) return {};
  std::vector<PeerWaits> waits;
  double all = 0;
  for (const Json& peer : peers) {
    waits.push_back(waits_of(p, peer));
    all += waits.back().all;
  }
  std::string text = "  peer  link        waits  queue  experts   send   wire   last/s\n";
  auto at = waits.begin();
  for (const Json& peer : peers) {
    const PeerWaits& w = *at++;
    append(text, "  %4llu  %-10s  %5s  %5s  %7s  %5s  %5s  %7s\n",
           static_cast<unsigned long long>(get(peer, "rank", uint64_t{0})),
           get(peer, "link", std::string("unknown")).c_str(), share(w.all, all).c_str(), share(w.by[0], w.all).c_str(),
           share(w.by[1], w.all).c_str(), share(w.by[2], w.all).c_str(), share(w.by[3], w.all).c_str(),
           rate(w.last, p.seconds).c_str());
  }
  return text;
}

/// A rank with its sockets and its last look.
struct Watched {
  std::string socket;
  std::optional<Look> look;
};

Look look_at(const std::string& socket) {
  Look look;
  Sentence why;
  if (ask_status(socket, kLookLimit, look.json, why) != Status::ok) {
    look.json.clear();
    look.why = why.text;
  }
  look.at = now_ns();
  return look;
}

void show(const std::string& frame, bool terminal, bool first) {
  std::string text = terminal ? kHome : first ? "" : "\n";
  for (const char c : frame) {
    if (terminal && c == '\n')
      text += kLineEnd;
    else
      text += c;
  }
  if (terminal) text += kScreenEnd;
  std::fputs(text.c_str(), stdout);
  std::fflush(stdout);
}

void sleep_until(Nanos until) {
  const timespec t = to_timespec(until);
  while (::clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &t, nullptr) == EINTR) {
  }
}

}  // namespace

std::string top_rank(const std::string& socket, const std::optional<Look>& before, const Look& now) {
  const std::string who = socket.empty() ? "the daemon" : socket;
  if (now.json.empty()) return who + "  not reachable: " + now.why + "\n";
  const Pair p = pair_of(before, now);
  if (!p.now.is_object()) return who + "  not understood: daemon and moectl are of different versions\n";
  return rank_line(p) + peer_rows(p);
}

int run_top(const TopOptions& options) {
  std::vector<Watched> ranks;
  for (const std::string& socket : options.sockets) ranks.push_back({socket, {}});
  if (ranks.empty()) ranks.emplace_back();
  for (Watched& w : ranks) w.look = look_at(w.socket);
  const bool terminal = ::isatty(STDOUT_FILENO) != 0;
  const Nanos interval = Nanos{options.interval_ms} * 1'000'000;
  Nanos next = now_ns();
  bool reached = false;
  for (uint64_t frames = 0; options.count == 0 || frames < options.count; ++frames) {
    next = std::max(next + interval, now_ns());
    sleep_until(next);
    std::string frame;
    reached = false;
    for (Watched& w : ranks) {
      Look now = look_at(w.socket);
      reached = reached || !now.json.empty();
      frame += top_rank(w.socket, w.look, now);
      w.look = std::move(now);
    }
    show(frame, terminal, frames == 0);
    if (std::ferror(stdout) != 0) return kNo;
  }
  return reached ? kDone : kUnreachable;
}

}  // namespace moed::ctl
