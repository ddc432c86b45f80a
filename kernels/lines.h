// Lines: 128 bytes of which 120 are payload and the last 8 the sequence of the call they belong to. A line proves
// itself: whoever reads it takes it when its sequence is the one awaited; there is no flag and no fence beside it.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "kernels/numbers.h"

namespace moed {

inline constexpr uint32_t kLineBytes = 128;
inline constexpr uint32_t kLinePayload = 120;
inline constexpr uint32_t kLineWords = 16;  ///< 64-bit words; the last is the sequence

struct alignas(128) Line {
  uint64_t word[kLineWords];
};
static_assert(sizeof(Line) == kLineBytes);

/// Lines that a record of `bytes` takes.
MOED_HD constexpr uint64_t lines_of(uint64_t bytes) { return (bytes + kLinePayload - 1) / kLinePayload; }

/// sequence = session << 44 | count: the session is the link's, the count the lane's.
inline constexpr uint32_t kSessionShift = 44;
inline constexpr uint64_t kCountMask = (uint64_t{1} << kSessionShift) - 1;
inline constexpr uint32_t kMaxSession = (1U << 20) - 1;
MOED_HD constexpr uint64_t sequence(uint32_t session, uint64_t count) {
  return uint64_t{session} << kSessionShift | (count & kCountMask);
}

/// How a line compares with the sequence awaited.
enum class Seen : uint8_t {
  older,  ///< not written yet
  same,   ///< taken
  newer,  ///< its writer has given this call up and gone on
};

// Host lines: sixteen relaxed 64-bit atomics, the sequence stored last (release) and loaded first (acquire). A line
// that is overwritten while it is read gives a mixture; that is harmless, because the writer has then given that call
// up.

/// Publishes `bytes` (at most 120) as one line; the rest of the payload is zero.
inline void store_line(Line& line, const void* payload, uint32_t bytes, uint64_t sequence) {
  uint64_t word[kLineWords - 1] = {};
  std::memcpy(word, payload, bytes);
  for (uint32_t i = 0; i + 1 < kLineWords; ++i) std::atomic_ref(line.word[i]).store(word[i], std::memory_order_relaxed);
  std::atomic_ref(line.word[kLineWords - 1]).store(sequence, std::memory_order_release);
}

inline uint64_t load_sequence(const Line& line) {
  return std::atomic_ref(const_cast<uint64_t&>(line.word[kLineWords - 1])).load(std::memory_order_acquire);
}

/// Copies the payload of a line whose sequence the caller has seen.
inline void load_payload(const Line& line, void* payload, uint32_t bytes) {
  uint64_t word[kLineWords - 1];
  for (uint32_t i = 0; i + 1 < kLineWords; ++i)
    word[i] = std::atomic_ref(const_cast<uint64_t&>(line.word[i])).load(std::memory_order_relaxed);
  std::memcpy(payload, word, bytes);
}

inline Seen compare(uint64_t seen, uint64_t awaited) {
  if (seen == awaited) return Seen::same;
  return seen > awaited ? Seen::newer : Seen::older;
}

/// Takes a line if it carries `awaited`.
inline Seen load_line(const Line& line, void* payload, uint32_t bytes, uint64_t awaited) {
  const Seen seen = compare(load_sequence(line), awaited);
  if (seen == Seen::same) load_payload(line, payload, bytes);
  return seen;
}

/// Publishes a record of `bytes` as lines_of(bytes) lines from `first`.
inline void store_record(Line* first, const void* record, uint64_t bytes, uint64_t sequence) {
  const auto* from = static_cast<const std::byte*>(record);
  for (uint64_t i = 0; i * kLinePayload < bytes; ++i) {
    const uint64_t left = bytes - i * kLinePayload;
    store_line(first[i], from + i * kLinePayload, static_cast<uint32_t>(left < kLinePayload ? left : kLinePayload),
               sequence);
  }
}

/// Takes a record if all its lines carry `awaited`; what it found otherwise (newer wins over older).
inline Seen load_record(const Line* first, void* record, uint64_t bytes, uint64_t awaited) {
  auto* to = static_cast<std::byte*>(record);
  Seen all = Seen::same;
  for (uint64_t i = 0; i * kLinePayload < bytes; ++i) {
    const uint64_t left = bytes - i * kLinePayload;
    const Seen seen = load_line(first[i], to + i * kLinePayload,
                                static_cast<uint32_t>(left < kLinePayload ? left : kLinePayload), awaited);
    if (seen == Seen::newer) return seen;
    if (seen == Seen::older) all = seen;
  }
  return all;
}

}  // namespace moed
