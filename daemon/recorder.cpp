// The writer of the ring in daemon/abi/record.h.
#include "daemon/recorder.h"

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstddef>
#include <string>
#include <system_error>
#include <vector>

#include "daemon/abi/futex.h"

namespace moed {
namespace {

constexpr uint64_t kLooked = 1024;  ///< records behind a quantile: enough for a p99, and few enough to ask every second

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

/// Nearest rank, as the calls' own quantiles are.
uint64_t quantile(std::vector<uint64_t>& ns, double q) {
  const auto at = static_cast<std::ptrdiff_t>(std::ceil(q * static_cast<double>(ns.size()))) - 1;
  std::ranges::nth_element(ns, ns.begin() + at);
  return ns[static_cast<std::size_t>(at)];
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

template <class Record, class Use>
void Recorder::last(uint64_t at, const uint64_t& count, std::size_t bytes, Use use) const {
  const uint64_t written = shared_word(count).load(std::memory_order_acquire);
  const uint64_t looked = std::min({written, capacity_, kLooked});
  const auto* slots = reinterpret_cast<const RecordSlot<Record>*>(memory_.data() + at);
  Record record{};
  for (uint64_t n = written - looked; n < written; ++n)
    if (load_slot(slots[n % capacity_], n, record, bytes)) use(record);
}

std::array<PhaseTimes, kPhaseNames.size()> Recorder::phases() const {
  std::array<std::vector<uint64_t>, kPhaseNames.size()> ns;
  const auto add = [&ns](std::size_t phase, uint64_t took) {
    if (took > 0) ns[phase].push_back(took);
  };
  const RecorderHeader& h = header();
  last<CallRecord>(h.calls_at, h.calls, offsetof(CallRecord, peer), [&add](const CallRecord& r) {
    for (std::size_t p = 0; p < 3 && r.lane != 0; ++p) add(p, r.phase_ns[p]);  // not the canary's
  });
  last<ServeRecord>(h.passes_at, h.passes, sizeof(ServeRecord), [&add](const ServeRecord& r) {
    add(3, r.gather_ns);
    add(4, r.experts_ns);
    add(5, r.send_ns);
  });
  std::array<PhaseTimes, kPhaseNames.size()> all;
  for (std::size_t p = 0; p < all.size(); ++p)
    if (!ns[p].empty()) all[p] = {ns[p].size(), quantile(ns[p], 0.5), quantile(ns[p], 0.99)};
  return all;
}

}  // namespace moed
