// The writer of the ring in daemon/abi/record.h.
#include "daemon/recorder.h"

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <string>
#include <system_error>

#include "daemon/abi/futex.h"

namespace moed {
namespace {

[[noreturn]] void no_file(int error, uint64_t bytes, const char* remedy = "free memory, or lower recorder.calls") {
  throw std::system_error(
      error, std::generic_category(),
      "the recorder's memory file of " + std::to_string(bytes) + " bytes cannot be made (" + remedy + ")");
}

int64_t realtime_ns() {
  timespec t{};
  ::clock_gettime(CLOCK_REALTIME, &t);
  return int64_t{t.tv_sec} * 1'000'000'000 + t.tv_nsec;
}

/// CLOCK_REALTIME minus CLOCK_MONOTONIC: of several looks the one that took least, so that being scheduled away between
/// the two clocks does not count.
int64_t realtime_ahead() {
  Nanos shortest = ~Nanos{0};
  int64_t ahead = 0;
  for (int look = 0; look < 5; ++look) {
    const Nanos before = now_ns();
    const int64_t real = realtime_ns();
    const Nanos after = now_ns();
    if (after - before >= shortest) continue;
    shortest = after - before;
    ahead = real - static_cast<int64_t>(before + shortest / 2);
  }
  return ahead;
}

/// A file that only the mapping made here can write.
Fd make_file(uint64_t bytes, Mapping& memory) {
  Fd fd(::memfd_create("moed-recorder", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!fd) no_file(errno, bytes);
  if (const int failed = ::posix_fallocate(fd.get(), 0, static_cast<off_t>(bytes)); failed != 0) no_file(failed, bytes);
  memory = Mapping(fd, bytes);
  if (!memory) no_file(errno, bytes);
  if (::fcntl(fd.get(), F_ADD_SEALS, F_SEAL_GROW | F_SEAL_SHRINK | F_SEAL_FUTURE_WRITE | F_SEAL_SEAL) != 0)
    no_file(errno, bytes, "its seal needs Linux 5.1 or newer");
  std::memset(memory.data(), 0, bytes);  // the service thread shall meet no page fault
  return fd;
}

}  // namespace

Recorder::Recorder(const RecorderOptions& options)
    : fd_(make_file(recorder_bytes(options.calls), memory_)), capacity_(options.calls) {
  call_bytes_ = offsetof(CallRecord, peer) + std::min(options.ranks, kMaxRanks) * sizeof(CallRecord::Peer);
  RecorderHeader& h = header();
  h.version = kRecorderVersion;
  h.header_bytes = sizeof h;
  h.incarnation = options.incarnation;
  h.rank = options.rank;
  h.ranks = options.ranks;
  h.call_bytes = sizeof(CallRecord);
  h.pass_bytes = sizeof(ServeRecord);
  h.call_slot_bytes = sizeof(RecordSlot<CallRecord>);
  h.pass_slot_bytes = sizeof(RecordSlot<ServeRecord>);
  h.call_capacity = h.pass_capacity = options.calls;
  h.calls_at = sizeof h;
  h.passes_at = h.calls_at + capacity_ * h.call_slot_bytes;
  shared_word(h.magic).store(kRecorderMagic, std::memory_order_release);
}

void Recorder::call_ended(const CallRecord& record) noexcept {
  store_slot(slot<CallRecord>(header().calls_at, calls_), calls_, record, call_bytes_);
  shared_word(header().calls).store(++calls_, std::memory_order_release);
}

void Recorder::pass_ended(const ServeRecord& record) noexcept {
  store_slot(slot<ServeRecord>(header().passes_at, passes_), passes_, record);
  shared_word(header().passes).store(++passes_, std::memory_order_release);
}

int Recorder::descriptor() {
  std::atomic_ref(header().realtime_ahead_ns).store(realtime_ahead(), std::memory_order_relaxed);
  return fd_.get();
}

}  // namespace moed
