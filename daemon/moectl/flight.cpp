// Read from fetch_flight() upwards.
#include "daemon/moectl/flight.h"

#include <fcntl.h>
#include <sys/stat.h>

#include <algorithm>

#include "daemon/abi/attach.h"
#include "daemon/moectl/answer.h"

namespace moed::ctl {
namespace {

/// Whether every slot that the header speaks of lies within the file and looks as it does here.
bool understood(const RecorderHeader& h, uint64_t bytes) {
  const auto inside = [bytes](uint64_t at, uint64_t slot, uint64_t slots) {
    return at >= sizeof(RecorderHeader) && at % 64 == 0 && at <= bytes && slots > 0 && slots <= (bytes - at) / slot;
  };
  return h.magic == kRecorderMagic && h.version == kRecorderVersion && h.header_bytes == sizeof h &&
         h.call_bytes == sizeof(CallRecord) && h.pass_bytes == sizeof(ServeRecord) &&
         h.call_slot_bytes == sizeof(RecordSlot<CallRecord>) && h.pass_slot_bytes == sizeof(RecordSlot<ServeRecord>) &&
         inside(h.calls_at, h.call_slot_bytes, h.call_capacity) &&
         inside(h.passes_at, h.pass_slot_bytes, h.pass_capacity);
}

/// The last records of one ring; gives how many were lost to the writer.
template <class Record>
uint64_t copy_ring(const std::byte* slots, uint64_t capacity, uint64_t written, uint64_t last,
                   std::vector<Record>& to) {
  const auto* slot = reinterpret_cast<const RecordSlot<Record>*>(slots);
  const uint64_t kept = std::min({written, capacity, last == 0 ? capacity : last});
  uint64_t lost = 0;
  Record record;
  to.reserve(kept);
  for (uint64_t n = written - kept; n < written; ++n) {
    if (load_slot(slot[n % capacity], n, record))
      to.push_back(record);
    else
      ++lost;
  }
  return lost;
}

}  // namespace

Status read_flight(const Fd& file, uint64_t last, Flight& out, Sentence& why) {
  struct stat about = {};
  // Without the seal the file could shrink below what is mapped.
  const int seals = ::fcntl(file.get(), F_GET_SEALS);
  if (seals < 0 || (seals & F_SEAL_SHRINK) == 0 || ::fstat(file.get(), &about) != 0 ||
      about.st_size < static_cast<off_t>(sizeof(RecorderHeader))) {
    why.set("the daemon's descriptor is no recorder: daemon and moectl are of different versions");
    return Status::version;
  }
  const auto bytes = static_cast<uint64_t>(about.st_size);
  const Mapping memory(file, bytes, PROT_READ);
  if (!memory) {
    why.set("the recorder's %llu bytes cannot be mapped: %s", static_cast<unsigned long long>(bytes),
            ErrnoText(errno).get());
    return Status::no_memory;
  }
  const auto& header = *reinterpret_cast<const RecorderHeader*>(memory.data());
  if (!understood(header, bytes)) {
    why.set("the recorder has version %u, %u is known here: use moectl of the daemon's release", header.version,
            kRecorderVersion);
    return Status::version;
  }
  out = {};
  out.rank = header.rank;
  out.ranks = std::min(header.ranks, kMaxRanks);
  out.incarnation = header.incarnation;
  out.realtime_ahead_ns =
      std::atomic_ref(const_cast<int64_t&>(header.realtime_ahead_ns)).load(std::memory_order_relaxed);
  out.overwritten = copy_ring(memory.data() + header.calls_at, header.call_capacity,
                              shared_word(header.calls).load(std::memory_order_acquire), last, out.calls);
  out.overwritten += copy_ring(memory.data() + header.passes_at, header.pass_capacity,
                               shared_word(header.passes).load(std::memory_order_acquire), last, out.passes);
  return Status::ok;
}

Status fetch_flight(const std::string& socket, uint64_t last, Flight& out, Sentence& why) {
  const TraceQuery query;
  Answer answer;
  Heard heard{.answer = std::as_writable_bytes(std::span(&answer, 1))};
  const Status status = ask(socket, kAnswerLimit, std::as_bytes(std::span(&query, 1)), heard, why);
  if (status != Status::ok) return status;
  const bool whole =
      heard.got == sizeof answer && answer.header.magic == kAttachMagic && answer.header.type == MessageType::answer;
  if (whole && answer.status != 0) {
    why.set("%.*s", static_cast<int>(sizeof answer.text - 1), answer.text);
    return static_cast<Status>(answer.status);
  }
  if (!whole || heard.fds.size() != 1) {
    why.set(
        "the daemon's answer of %zu bytes and %zu descriptors is none to this question: daemon and moectl are of "
        "different versions",
        heard.got, heard.fds.size());
    return Status::version;
  }
  return read_flight(heard.fds[0], last, out, why);
}

}  // namespace moed::ctl
