// Shared futexes: sleeping on a word that another process changes.
#pragma once

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <climits>
#include <cstdint>
#include <ctime>
#include <span>

namespace moed {

using Nanos = uint64_t;  ///< CLOCK_MONOTONIC

inline Nanos now_ns() {
  timespec t{};
  ::clock_gettime(CLOCK_MONOTONIC, &t);
  return static_cast<Nanos>(t.tv_sec) * 1'000'000'000U + static_cast<Nanos>(t.tv_nsec);
}

/// Tells the core that this is a spin; nothing where no compiler built-in says so.
inline void cpu_relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

inline timespec to_timespec(Nanos ns) {
  return {static_cast<time_t>(ns / 1'000'000'000U), static_cast<long>(ns % 1'000'000'000U)};
}

/// The 32 bits of a word that the kernel compares: all of it, or the low half of a 64-bit one (little-endian).
inline uint32_t* futex_address(std::atomic<uint32_t>& word) { return reinterpret_cast<uint32_t*>(&word); }
inline uint32_t* futex_address(std::atomic<uint64_t>& word) { return reinterpret_cast<uint32_t*>(&word); }

inline void futex_wake(uint32_t* word) { ::syscall(SYS_futex, word, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0); }

/// Sleeps until woken, until *word != seen, or until the absolute time `until`; spurious returns happen.
inline void futex_wait(uint32_t* word, uint32_t seen, Nanos until) {
  const timespec t = to_timespec(until);
  ::syscall(SYS_futex, word, FUTEX_WAIT_BITSET, seen, &t, nullptr, FUTEX_BITSET_MATCH_ANY);
}

/// A word to sleep on and the value it had when there was nothing to do.
struct FutexWord {
  uint32_t* word;
  uint32_t seen;
};

/// Sleeps until any of `words` (at most 128) is woken or differs, at the latest until the absolute time `until`. On
/// kernels without futex_waitv (before 5.16) it sleeps on the first word for at most 1 ms.
inline void futex_wait_any(std::span<const FutexWord> words, Nanos until) {
  futex_waitv waits[FUTEX_WAITV_MAX] = {};
  unsigned count = 0;
  for (const FutexWord& w : words) {
    if (count == FUTEX_WAITV_MAX) break;
    waits[count].val = w.seen;
    waits[count].uaddr = reinterpret_cast<uintptr_t>(w.word);
    waits[count].flags = FUTEX_32;
    ++count;
  }
  if (count == 0) return;
  const timespec t = to_timespec(until);
  if (::syscall(SYS_futex_waitv, waits, count, 0, &t, CLOCK_MONOTONIC) < 0 &&
      (errno == ENOSYS || errno == EPERM)) {  // too old a kernel, or a filter of system calls
    const Nanos limit = now_ns() + 1'000'000;
    futex_wait(words[0].word, words[0].seen, until < limit ? until : limit);
  }
}

}  // namespace moed
