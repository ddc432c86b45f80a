// moectl trace: the last calls and serve passes of one or several ranks as Chrome trace events, for chrome://tracing
// and Perfetto.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "daemon/moectl/flight.h"

namespace moed::ctl {

struct TraceOptions {
  std::vector<std::string> sockets;  ///< empty: libmoed's choice
  uint64_t last = 0;                 ///< of calls and of passes, per rank; 0: all that the recorders hold
  std::string out;                   ///< file; empty: standard output
};

// Numbers of the events: process and thread 0 stand for an idle machine in Perfetto, so that everything is one higher.
inline constexpr uint32_t kServeTrack = 100;  ///< tid of serve passes; lane l has l + 1
constexpr uint32_t lane_track(uint32_t lane) { return lane + 1; }
constexpr uint32_t rank_process(uint32_t rank) { return rank + 1; }

/// The trace as JSON text. ts and dur are microseconds with three decimals, which is every nanosecond; ts counts from
/// the earliest event, whose time since 1970 is otherData.begin_unix_ns. Durations are the records' own. An event that
/// would reach into the next one of its track begins earlier by so much: a start that a back end estimates is at most
/// too late.
std::string trace_json(const std::vector<Flight>& flights);

/// Reads every recorder, prints or writes the trace; an exit code.
int run_trace(const TraceOptions& options);

}  // namespace moed::ctl
