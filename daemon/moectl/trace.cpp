// Read from run_trace() upwards: recorders, tracks, events.
#include "daemon/moectl/trace.h"

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <map>
#include <memory>

#include "daemon/abi/call.h"
#include "daemon/moectl/answer.h"
#include "daemon/moectl/lane.h"

namespace moed::ctl {
namespace {

constexpr std::size_t kNamedPeers = 4;  ///< waits are written of the peers that were waited for longest
constexpr const char* kPhases[] = {"dispatch", "wait", "reduce"};
constexpr const char* kSteps[] = {"gather", "experts", "send"};

/// "12.345": microseconds, exact to the nanosecond.
std::string microseconds(uint64_t ns) {
  std::string text;
  append(text, "%llu.%03llu", static_cast<unsigned long long>(ns / 1000), static_cast<unsigned long long>(ns % 1000));
  return text;
}

std::string number(uint64_t n) { return std::to_string(n); }

/// One track's events in the making: each has a time since 1970, its own parts and its arguments.
struct Event {
  int64_t start = 0;
  uint64_t duration = 0;
  std::string name, category, arguments;
  struct Part {
    const char* name;
    uint64_t duration;
  };
  std::vector<Part> parts;
};

struct Track {
  uint32_t process = 0, thread = 0;
  std::vector<Event> events;
};

/// The ranks of a set of 128 bits as a JSON array.
std::string rank_array(const uint64_t (&ranks)[2]) {
  std::string list;
  for (uint32_t r = 0; r < kMaxRanks; ++r)
    if ((ranks[r / 64] >> (r % 64) & 1) != 0) list += (list.empty() ? "" : ",") + number(r);
  return "[" + list + "]";
}

/// The waits by cause of the peers that mattered: the longest, longest first. The wire's share is what the peer's own
/// times leave of the wait, as in moed_peer_wait_seconds_total.
std::string waits(const CallRecord& r, uint32_t ranks) {
  std::vector<uint32_t> order;
  for (uint32_t rank = 0; rank < ranks; ++rank)
    if (r.peer[rank].wait != 0) order.push_back(rank);
  std::stable_sort(order.begin(), order.end(),
                   [&r](uint32_t a, uint32_t b) { return r.peer[a].wait > r.peer[b].wait; });
  order.resize(std::min(order.size(), kNamedPeers));
  std::string text;
  for (const uint32_t rank : order) {
    const CallRecord::Peer& p = r.peer[rank];
    const uint64_t own = uint64_t{p.queue} + p.experts + p.send;
    text += (text.empty() ? "" : ",") + ("\"rank " + number(rank)) + "\":{\"wait_us\":" + microseconds(p.wait) +
            ",\"queue_us\":" + microseconds(p.queue) + ",\"experts_us\":" + microseconds(p.experts) +
            ",\"send_us\":" + microseconds(p.send) + ",\"wire_us\":" + microseconds(p.wait > own ? p.wait - own : 0) +
            "}";
  }
  return "{" + text + "}";
}

Event call_event(const CallRecord& r, const Flight& flight) {
  Event e;
  e.start = static_cast<int64_t>(r.start) + flight.realtime_ahead_ns;
  e.duration = r.total_ns;
  e.name = "layer " + layer_name(r.layer);
  e.category = "call";
  const std::string layer = r.layer == kIdentityLayer ? "\"identity\"" : number(r.layer);
  e.arguments = "\"layer\":" + layer + ",\"tokens\":" + number(r.tokens) + ",\"status\":\"" +
                name(static_cast<Status>(r.status)) + "\",\"number\":" + number(r.number) +
                ",\"count\":" + number(r.count) + ",\"kind\":\"" + (r.kind == 0 ? "routed" : "layer") +
                "\",\"path\":\"" + (r.path == static_cast<uint16_t>(CallPath::host) ? "host" : "stream") +
                "\",\"last\":" + (r.last == kNoRank ? "null" : number(r.last)) + ",\"ranks\":" + rank_array(r.ranks) +
                ",\"waits\":" + waits(r, flight.ranks);
  for (uint32_t p = 0; p < std::size(kPhases); ++p) e.parts.push_back({kPhases[p], r.phase_ns[p]});
  return e;
}

Event pass_event(const ServeRecord& r, const Flight& flight) {
  Event e;
  e.start = static_cast<int64_t>(r.start) + flight.realtime_ahead_ns;
  e.duration = r.gather_ns + r.experts_ns + r.send_ns;
  e.name = "serve " + number(r.rows) + " rows";
  e.category = "pass";
  e.arguments = "\"rows\":" + number(r.rows) + ",\"sources\":" + number(r.sources) + ",\"pairs\":" + number(r.pairs) +
                ",\"refused\":" + number(r.refused) + ",\"weight_bytes\":" + number(r.weight_bytes) +
                ",\"waited_us\":" + microseconds(r.wait_ns);
  const uint64_t steps[] = {r.gather_ns, r.experts_ns, r.send_ns};
  for (uint32_t s = 0; s < std::size(kSteps); ++s) e.parts.push_back({kSteps[s], steps[s]});
  return e;
}

/// Puts the events in order, none reaching into the next.
void lay_out(std::vector<Event>& events) {
  std::stable_sort(events.begin(), events.end(), [](const Event& a, const Event& b) { return a.start < b.start; });
  for (std::size_t i = events.size(); i-- > 1;) {
    const int64_t latest = events[i].start - static_cast<int64_t>(events[i - 1].duration);
    events[i - 1].start = std::min(events[i - 1].start, latest);
  }
}

std::vector<Track> tracks_of(const Flight& flight) {
  std::map<uint32_t, Track> tracks;
  const auto track = [&](uint32_t thread) -> std::vector<Event>& {
    Track& t = tracks[thread];
    t.process = rank_process(flight.rank);
    t.thread = thread;
    return t.events;
  };
  for (const CallRecord& r : flight.calls) track(lane_track(r.lane)).push_back(call_event(r, flight));
  for (const ServeRecord& r : flight.passes) track(kServeTrack).push_back(pass_event(r, flight));
  std::vector<Track> all;
  for (auto& [thread, t] : tracks) {
    lay_out(t.events);
    all.push_back(std::move(t));
  }
  return all;
}

/// The text of the events, one a line.
class Writer {
 public:
  explicit Writer(int64_t begin) : begin_(begin) {}

  void metadata(const char* what, uint32_t process, uint32_t thread, const std::string& argument) {
    next();
    text_ += "{\"ph\":\"M\",\"name\":\"" + std::string(what) + "\"," + place(process, thread) + ",\"args\":{" +
             argument + "}}";
  }

  /// The event and, one after the other from its start, its parts. Parts that took no time are left out.
  void event(const Track& track, const Event& e) {
    slice(track, e.name, e.category, e.start, e.duration, e.arguments);
    int64_t at = e.start;
    for (const Event::Part& part : e.parts) {
      if (part.duration != 0) slice(track, part.name, e.category + "-part", at, part.duration, {});
      at += static_cast<int64_t>(part.duration);
    }
  }

  std::string take() { return std::move(text_); }

 private:
  static std::string place(uint32_t process, uint32_t thread) {
    return "\"pid\":" + number(process) + ",\"tid\":" + number(thread);
  }

  void next() { text_ += text_.empty() ? "" : ",\n"; }

  void slice(const Track& track, const std::string& name, const std::string& category, int64_t start, uint64_t duration,
             const std::string& arguments) {
    next();
    text_ += "{\"ph\":\"X\",\"name\":\"" + name + "\",\"cat\":\"" + category + "\"," +
             place(track.process, track.thread) + ",\"ts\":" + microseconds(static_cast<uint64_t>(start - begin_)) +
             ",\"dur\":" + microseconds(duration);
    if (!arguments.empty()) text_ += ",\"args\":{" + arguments + "}";
    text_ += "}";
  }

  int64_t begin_;
  std::string text_;
};

void describe(Writer& out, const Flight& flight, const std::vector<Track>& tracks) {
  const uint32_t process = rank_process(flight.rank);
  char incarnation[17];
  std::snprintf(incarnation, sizeof incarnation, "%016llx", static_cast<unsigned long long>(flight.incarnation));
  out.metadata("process_name", process, 0, "\"name\":\"rank " + number(flight.rank) + "\"");
  out.metadata("process_labels", process, 0, "\"labels\":\"incarnation " + std::string(incarnation) + "\"");
  out.metadata("process_sort_index", process, 0, "\"sort_index\":" + number(flight.rank));
  for (const Track& t : tracks) {
    const std::string name = t.thread == kServeTrack ? "serve passes" : "lane " + number(t.thread - lane_track(0));
    out.metadata("thread_name", process, t.thread, "\"name\":\"" + name + "\"");
    out.metadata("thread_sort_index", process, t.thread, "\"sort_index\":" + number(t.thread));
  }
}

bool write(const std::string& path, const std::string& text) {
  const auto close = [](std::FILE* f) { return std::fclose(f); };
  std::unique_ptr<std::FILE, decltype(close)> file(path.empty() ? nullptr : std::fopen(path.c_str(), "wb"), close);
  std::FILE* to = path.empty() ? stdout : file.get();
  bool written = to != nullptr && std::fwrite(text.data(), 1, text.size(), to) == text.size() && std::fflush(to) == 0;
  if (file) written = std::fclose(file.release()) == 0 && written;
  if (!written)
    std::fprintf(stderr, "moectl: %s cannot be written: %s\n", path.empty() ? "standard output" : path.c_str(),
                 std::strerror(errno));
  return written;
}

}  // namespace

std::string trace_json(const std::vector<Flight>& flights) {
  std::vector<std::vector<Track>> tracks;
  int64_t begin = INT64_MAX;
  for (const Flight& flight : flights) {
    tracks.push_back(tracks_of(flight));
    for (const Track& t : tracks.back()) begin = std::min(begin, t.events.front().start);
  }
  if (begin == INT64_MAX) begin = 0;
  Writer out(begin);
  for (std::size_t i = 0; i < flights.size(); ++i) {
    describe(out, flights[i], tracks[i]);
    for (const Track& t : tracks[i])
      for (const Event& e : t.events) out.event(t, e);
  }
  return "{\"displayTimeUnit\":\"ns\",\"otherData\":{\"begin_unix_ns\":\"" + std::to_string(begin) +
         "\"},\"traceEvents\":[\n" + out.take() + "\n]}\n";
}

int run_trace(const TraceOptions& options) {
  std::vector<std::string> sockets = options.sockets;
  if (sockets.empty()) sockets.emplace_back();
  std::vector<Flight> flights;
  for (const std::string& socket : sockets) {
    Flight flight;
    Sentence why;
    const Status status = fetch_flight(socket, options.last, flight, why);
    if (status != Status::ok) {
      std::fprintf(stderr, "moectl: %s: %s\n", name(status), why.text);
      return exit_of(static_cast<moed_status>(status));
    }
    for (const Flight& other : flights)
      if (other.rank == flight.rank) {
        std::fprintf(stderr, "moectl: two sockets are of rank %u, the second is %s: name each rank once\n", flight.rank,
                     socket.c_str());
        return kUsage;
      }
    if (flight.overwritten != 0)
      std::fprintf(stderr,
                   "moectl: %llu records of rank %u were overwritten while they were read: ask for fewer (--last)\n",
                   static_cast<unsigned long long>(flight.overwritten), flight.rank);
    flights.push_back(std::move(flight));
  }
  return write(options.out, trace_json(flights)) ? kDone : kNo;
}

}  // namespace moed::ctl
