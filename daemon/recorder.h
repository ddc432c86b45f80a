// Remembers the last ended calls and serve passes in a memory file (daemon/abi/record.h) that others map and cannot
// write: moectl trace reads it while the daemon works, without a message for any record.
#pragma once

#include <array>
#include <cstdint>

#include "daemon/abi/fd.h"
#include "daemon/abi/record.h"

namespace moed {

struct RecorderOptions {
  uint32_t calls = 4096;  ///< how many are kept; of serve passes as many
  uint32_t rank = 0, ranks = 1;
  uint64_t incarnation = 0;
};

/// Of one phase in the records looked at, ns.
struct PhaseTimes {
  uint64_t seen = 0;  ///< records in which it took any time; without them the others say nothing
  uint64_t p50 = 0, p99 = 0;
};
inline constexpr std::array kPhaseNames = {"dispatch", "wait", "reduce", "gather", "experts", "send"};

/// All memory is taken and touched at the beginning. The constructor throws std::system_error when there is none.
class Recorder {
 public:
  explicit Recorder(const RecorderOptions& options);

  // Service thread only; neither ever waits, whatever readers do.

  void call_ended(const CallRecord& record) noexcept;
  void pass_ended(const ServeRecord& record) noexcept;

  /// The file, for readers; it stays the recorder's. Sealed: through it, a copy of it or its path under /proc nothing
  /// can be written. Measures the clocks anew. One thread at a time.
  int descriptor();

  /// Of the last 1024 calls and serve passes, by kPhaseNames. Any thread.
  std::array<PhaseTimes, kPhaseNames.size()> phases() const;

 private:
  template <class Record, class Use>
  void last(uint64_t at, const uint64_t& count, std::size_t bytes, Use use) const;
  template <class Record>
  RecordSlot<Record>& slot(uint64_t at, uint64_t n) {
    return reinterpret_cast<RecordSlot<Record>*>(memory_.data() + at)[n % capacity_];
  }
  const RecorderHeader& header() const { return *reinterpret_cast<const RecorderHeader*>(memory_.data()); }
  RecorderHeader& header() { return *reinterpret_cast<RecorderHeader*>(memory_.data()); }

  Mapping memory_;
  Fd fd_;  ///< after memory_, which is made with it
  const uint64_t capacity_;
  std::size_t call_bytes_ = 0;  ///< of a record, up to the last rank of this world
  uint64_t calls_ = 0, passes_ = 0;
};

}  // namespace moed
