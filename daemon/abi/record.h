// What is remembered of a call and of a serve pass, and the ring that holds the last ones. Metrics, moectl status and
// traces are made of these two records.
//
//   file: | RecorderHeader | calls: slot 0 .. capacity - 1 | passes: slot 0 .. capacity - 1 |
//   slot: | sequence | the record as 64-bit words |
//
// The file is mapped by one writer, the service thread, and read-only by any number of readers. Record n (from 0) lies
// in slot n % capacity. The slot's sequence is 2n + 1 while record n is written and 2n + 2 once it is whole; a reader
// that finds 2n + 2 before and after its copy has record n, and one that does not has lost it. No reader ever writes.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "daemon/abi/shape.h"

namespace moed {

enum class CallPath : uint16_t { host = 0, stream = 1 };
enum class Phase : uint32_t { dispatch = 0, wait = 1, reduce = 2 };

/// One ended call. Times are nanoseconds; start is CLOCK_MONOTONIC.
struct CallRecord {
  uint64_t number;  ///< of its attach's calls, from 1
  uint64_t count;   ///< the lane's count when it ended: pieces take one each
  uint64_t start;
  uint32_t kind;
  uint32_t layer;
  uint32_t tokens;  ///< as asked for
  uint32_t status;  ///< Status
  uint16_t path;    ///< CallPath
  uint16_t lane;
  uint32_t last;         ///< rank whose return line came last, or did not come; kNoRank: none was awaited
  uint64_t phase_ns[3];  ///< dispatch, wait, reduce
  uint64_t ranks[2];     ///< as Reply::ranks
  uint32_t token, slot, field, dropped;
  int64_t value;
  uint64_t limit;
  uint64_t total_ns;
  struct Peer {
    uint32_t wait, queue, experts, send;  ///< saturating; wait is ours, the others are the server's own times
  } peer[kMaxRanks];
};
static_assert(sizeof(CallRecord) == 2176);
inline constexpr uint32_t kNoRank = 0xFFFFFFFFu;

/// One ended serve pass.
struct ServeRecord {
  uint64_t start;  ///< CLOCK_MONOTONIC, ns
  uint32_t rows;
  uint32_t sources;
  uint32_t pairs;         ///< (row, local expert) pairs computed
  uint32_t refused;       ///< sources whose rows did not pass gather's checks
  uint64_t weight_bytes;  ///< of the distinct experts touched
  uint64_t wait_ns;       ///< from the first call line seen to the start of gather
  uint64_t gather_ns;
  uint64_t experts_ns;
  uint64_t send_ns;
  uint64_t reserved[8];
};
static_assert(sizeof(ServeRecord) == 128);

inline constexpr uint64_t kRecorderMagic = 0x3143'4552'4445'4f4dULL;  // "MOEDREC1"
inline constexpr uint32_t kRecorderVersion = 1;

/// The beginning of the file. Written once, before the descriptor is given away, except the last three fields, which
/// are read and written as atomics.
struct RecorderHeader {
  uint64_t magic;  ///< stored last
  uint32_t version, header_bytes;
  uint64_t incarnation;
  uint32_t rank, ranks;
  uint32_t call_bytes, pass_bytes;            ///< of a record
  uint32_t call_slot_bytes, pass_slot_bytes;  ///< of a slot
  uint32_t call_capacity, pass_capacity;      ///< slots
  uint64_t calls_at, passes_at;               ///< where slot 0 lies
  /// CLOCK_REALTIME minus CLOCK_MONOTONIC, ns, as measured when the descriptor was given away last: what lays the
  /// records of several ranks side by side. One word and not a pair, so that no reader sees halves of two measurements.
  int64_t realtime_ahead_ns;
  alignas(64) uint64_t calls;   ///< written so far
  alignas(64) uint64_t passes;  ///< written so far
};
static_assert(sizeof(RecorderHeader) == 256);

template <class Record>
struct alignas(64) RecordSlot {
  static_assert(sizeof(Record) % sizeof(uint64_t) == 0);
  uint64_t sequence;
  uint64_t word[sizeof(Record) / sizeof(uint64_t)];
};

/// Bytes of the whole file for so many calls and as many passes.
constexpr uint64_t recorder_bytes(uint64_t capacity) {
  return sizeof(RecorderHeader) + capacity * (sizeof(RecordSlot<CallRecord>) + sizeof(RecordSlot<ServeRecord>));
}

/// A shared word; readers map it read-only and only load.
inline std::atomic_ref<uint64_t> shared_word(const uint64_t& word) {
  return std::atomic_ref(const_cast<uint64_t&>(word));
}

/// Writes record n into its slot. Only the first `bytes`, a multiple of 8; the rest of the slot stays as it was.
template <class Record>
void store_slot(RecordSlot<Record>& slot, uint64_t n, const Record& record, std::size_t bytes = sizeof(Record)) {
  shared_word(slot.sequence).store(2 * n + 1, std::memory_order_relaxed);
  // Pairs with the fence of load_slot: whoever reads one of the words below finds the odd sequence afterwards.
  std::atomic_thread_fence(std::memory_order_release);
  const auto* from = reinterpret_cast<const std::byte*>(&record);
  for (std::size_t i = 0; i < bytes / sizeof(uint64_t); ++i) {
    uint64_t word = 0;
    std::memcpy(&word, from + i * sizeof word, sizeof word);
    shared_word(slot.word[i]).store(word, std::memory_order_relaxed);
  }
  shared_word(slot.sequence).store(2 * n + 2, std::memory_order_release);
}

/// Copies record n, or its first `bytes` (a multiple of 8), out of its slot. False: it is not there any more, not yet,
/// or was overwritten meanwhile; `out` is then rubbish.
template <class Record>
bool load_slot(const RecordSlot<Record>& slot, uint64_t n, Record& out, std::size_t bytes = sizeof(Record)) {
  if (shared_word(slot.sequence).load(std::memory_order_acquire) != 2 * n + 2) return false;
  auto* to = reinterpret_cast<std::byte*>(&out);
  for (std::size_t i = 0; i < bytes / sizeof(uint64_t); ++i) {
    const uint64_t word = shared_word(slot.word[i]).load(std::memory_order_relaxed);
    std::memcpy(to + i * sizeof word, &word, sizeof word);
  }
  std::atomic_thread_fence(std::memory_order_acquire);
  return shared_word(slot.sequence).load(std::memory_order_relaxed) == 2 * n + 2;
}

}  // namespace moed
