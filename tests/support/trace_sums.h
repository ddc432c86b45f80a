// A trace's durations added up, and those of the records that it was made of.
#pragma once

#include <cmath>
#include <cstdint>
#include <map>
#include <nlohmann/json.hpp>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include "daemon/moectl/flight.h"
#include "daemon/moectl/trace.h"

namespace moed::test {

/// One complete event; times in nanoseconds.
struct Slice {
  uint64_t process = 0, thread = 0;
  std::string name, category;
  int64_t start = 0;
  uint64_t duration = 0;
  nlohmann::json arguments;
};

/// The complete events of a trace, as they come. Throws when the text is no JSON.
inline std::vector<Slice> parse_trace(const std::string& text) {
  const auto nanoseconds = [](const nlohmann::json& us) { return std::llround(us.get<double>() * 1000); };
  std::vector<Slice> all;
  const nlohmann::json trace = nlohmann::json::parse(text);
  for (const auto& e : trace.at("traceEvents"))
    if (e.at("ph") == "X")
      all.push_back({e.at("pid"), e.at("tid"), e.at("name"), e.at("cat"), nanoseconds(e.at("ts")),
                     static_cast<uint64_t>(nanoseconds(e.at("dur"))), e.value("args", nlohmann::json())});
  return all;
}

/// Nanoseconds by process, thread and what took them: "call", "pass", or the name of a part.
using Sums = std::map<std::tuple<uint64_t, uint64_t, std::string>, uint64_t>;

inline Sums sums_of(const std::vector<Slice>& slices) {
  Sums sums;
  for (const Slice& s : slices) {
    const bool whole = s.category == "call" || s.category == "pass";
    sums[{s.process, s.thread, whole ? s.category : s.name}] += s.duration;
  }
  return sums;
}

/// Adds what the records say. Parts without any time do not appear in a trace.
inline void add_records(Sums& sums, const ctl::Flight& flight) {
  const uint64_t process = ctl::rank_process(flight.rank);
  const auto part = [&](uint64_t thread, const char* name, uint64_t ns) {
    if (ns != 0) sums[{process, thread, name}] += ns;
  };
  for (const CallRecord& r : flight.calls) {
    const uint64_t lane = ctl::lane_track(r.lane);
    sums[{process, lane, "call"}] += r.total_ns;
    part(lane, "dispatch", r.phase_ns[0]);
    part(lane, "wait", r.phase_ns[1]);
    part(lane, "reduce", r.phase_ns[2]);
  }
  for (const ServeRecord& r : flight.passes) {
    sums[{process, ctl::kServeTrack, "pass"}] += r.gather_ns + r.experts_ns + r.send_ns;
    part(ctl::kServeTrack, "gather", r.gather_ns);
    part(ctl::kServeTrack, "experts", r.experts_ns);
    part(ctl::kServeTrack, "send", r.send_ns);
  }
}

}  // namespace moed::test
