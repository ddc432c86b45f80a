// Remembers the last ended calls and serve passes in a memory file (daemon/abi/record.h) that others map and cannot
// write: moectl trace reads it while the daemon works, without a message for any record.
#pragma once

#include <cstdint>

#include "daemon/abi/fd.h"
#include "daemon/abi/record.h"

namespace moed {

struct RecorderOptions {
  uint32_t calls = 4096;  ///< how many are kept; of serve passes as many
  uint32_t rank = 0, ranks = 1;
  uint64_t incarnation = 0;
};

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

 private:
  template <class Record>
  RecordSlot<Record>& slot(uint64_t at, uint64_t n) {
    return reinterpret_cast<RecordSlot<Record>*>(memory_.data() + at)[n % capacity_];
  }
  RecorderHeader& header() { return *reinterpret_cast<RecorderHeader*>(memory_.data()); }

  Mapping memory_;
  Fd fd_;  ///< after memory_, which is made with it
  const uint64_t capacity_;
  std::size_t call_bytes_ = 0;  ///< of a record, up to the last rank of this world
  uint64_t calls_ = 0, passes_ = 0;
};

}  // namespace moed
