// What a daemon's recorder holds, read out of its memory file while the daemon goes on writing.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "daemon/abi/fd.h"
#include "daemon/abi/record.h"
#include "daemon/abi/status.h"
#include "daemon/client/connect.h"

namespace moed::ctl {

/// The records of one rank, oldest first.
struct Flight {
  uint32_t rank = 0, ranks = 1;
  uint64_t incarnation = 0;
  int64_t realtime_ahead_ns = 0;  ///< added to a record's start it gives nanoseconds since 1970
  std::vector<CallRecord> calls;
  std::vector<ServeRecord> passes;
  uint64_t overwritten = 0;  ///< records that were replaced while they were read; they are not among these
};

/// Reads the last `last` calls and the last `last` passes (0: all there are) of a recorder's file. version: the file is
/// another daemon release's or no recorder's; no_memory: it cannot be mapped.
Status read_flight(const Fd& file, uint64_t last, Flight& out, Sentence& why);

/// The same of the daemon at `socket` (empty: libmoed's choice). Also daemon_lost, denied, and what ask() gives.
Status fetch_flight(const std::string& socket, uint64_t last, Flight& out, Sentence& why);

}  // namespace moed::ctl
