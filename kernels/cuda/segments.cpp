#include "kernels/cuda/segments.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <mutex>

#include "kernels/cuda/passes.h"

namespace moed::cuda {
namespace {

constexpr int kTestAttempts = 5;
constexpr uint32_t kTestRounds = 1000;  ///< of 64 lines: 64,000 reads beside as many writes, under 1 ms

/// Segments that ranks of one process pass to each other by number.
struct Shared {
  std::mutex mutex;
  uint64_t last = 0;
  std::map<uint64_t, std::weak_ptr<Segment>> segments;
};
Shared& shared() {
  static Shared all;
  return all;
}

uint64_t share(const std::shared_ptr<Segment>& segment) {
  const std::lock_guard lock(shared().mutex);
  if (segment->id == 0) segment->id = ++shared().last;
  shared().segments[segment->id] = segment;
  return segment->id;
}

std::shared_ptr<Segment> find_shared(uint64_t id) {
  const std::lock_guard lock(shared().mutex);
  const auto at = shared().segments.find(id);
  return at == shared().segments.end() ? nullptr : at->second.lock();
}

constexpr uint32_t bit(HandleKind kind) { return 1U << static_cast<uint32_t>(kind); }

}  // namespace

Segment::~Segment() {
  if (live) live->fetch_sub(memory.bytes());
  if (id == 0) return;
  const std::lock_guard lock(shared().mutex);
  shared().segments.erase(id);
}

bool Segments::choose(std::string& why) {
  kinds_ = probe_handle_kinds(memory_, why);
  kind_ = options_.handles.value_or((kinds_ & bit(HandleKind::fabric)) != 0 ? HandleKind::fabric : HandleKind::cuda_fd);
  if ((kinds_ & bit(kind_)) == 0) return false;
  if (options_.handles) kinds_ = bit(kind_);
  if (options_.in_process) kinds_ |= bit(HandleKind::address);
  return true;
}

SegmentHeader Segments::header(uint32_t owner, uint32_t writer) const {
  SegmentHeader header;
  header.owner = owner;
  header.writer = writer;
  header.bytes = layout_.bytes;
  header.digest = layout_digest(layout_);
  return header;
}

std::shared_ptr<Segment> Segments::make_plain(uint64_t bytes, std::string& why) {
  auto segment = std::make_shared<Segment>();
  segment->memory = memory_.make(bytes, kind_, why);
  if (!segment->memory) return nullptr;
  if (side_.zero(segment->memory.as<std::byte>(), bytes) && side_.settle()) return segment;
  why = health_.text();
  return nullptr;
}

std::shared_ptr<Segment> Segments::make(uint32_t writer, std::string& why) {
  std::shared_ptr<Segment> segment = make_plain(layout_.bytes, why);
  if (!segment) return nullptr;
  const SegmentHeader first = header(options_.rank, writer);
  segment->live = live_;
  live_->fetch_add(segment->memory.bytes());
  if (side_.to_gpu(segment->memory.as<std::byte>(), &first, sizeof first) && side_.settle()) return segment;
  why = health_.text();
  return nullptr;
}

bool Segments::give(const std::shared_ptr<Segment>& segment, Handle& out, std::string& why) {
  out.bytes = segment->memory.bytes();
  if (options_.in_process) {
    out.kind = HandleKind::address;
    const uint64_t id = share(segment);
    std::memcpy(out.token.data(), &id, sizeof id);
    return true;
  }
  out.kind = kind_;
  return kind_ == HandleKind::fabric ? memory_.export_fabric(segment->memory, out.token, why)
                                     : memory_.export_fd(segment->memory, out.fd, why);
}

Status Segments::import(const Handle& handle, uint64_t bytes, Allocation& out, std::string& why) {
  if (handle.bytes != bytes) {
    why = "a handle of " + std::to_string(handle.bytes) + " bytes, here " + std::to_string(bytes);
    return Status::internal;
  }
  if (handle.kind == HandleKind::address && options_.in_process) {
    uint64_t id = 0;
    std::memcpy(&id, handle.token.data(), sizeof id);
    const std::shared_ptr<Segment> segment = find_shared(id);
    why = "the memory behind a handle is gone";
    if (segment) out = memory_.import_local(segment->memory, why);
  } else if (handle.kind == HandleKind::cuda_fd) {
    out = memory_.import_fd(handle.fd, handle.bytes, why);
  } else if (handle.kind == HandleKind::fabric) {
    out = memory_.import_fabric(handle.token, handle.bytes, why);
  } else {
    why = "handle kind " + std::to_string(static_cast<uint32_t>(handle.kind)) + ", here cuda fd (2) and fabric (3)";
  }
  return out && reachable(out, why) ? Status::ok : Status::unsupported;
}

/// Memory of a GPU that this process sees has to be reachable over NVLink; of one that it does not see, the line test
/// alone decides.
bool Segments::reachable(const Allocation& memory, std::string& why) const {
  const int owner = memory_.owner(memory);
  return owner < 0 || can_reach(driver_, device_, owner, why);
}

Status Segments::take(uint32_t owner, const Handle& handle, std::shared_ptr<Segment>& out, std::string& why) {
  out = std::make_shared<Segment>();
  if (const Status s = import(handle, layout_.bytes, out->memory, why); s != Status::ok) return s;
  SegmentHeader found;
  const SegmentHeader wanted = header(owner, options_.rank);
  if (!side_.from_gpu(&found, out->memory.as<std::byte>(), sizeof found)) {
    why = health_.text();
    return Status::device_lost;
  }
  if (std::memcmp(&found, &wanted, sizeof found) != 0) {
    why = "segment of rank " + std::to_string(owner) + " has another header: layout digest " +
          std::to_string(found.digest) + ", here " + std::to_string(wanted.digest);
    return Status::internal;
  }
  return test_lines(*out, why) ? Status::ok : Status::unsupported;
}

Status Segments::take_plain(const Handle& handle, uint64_t bytes, std::shared_ptr<Segment>& out, std::string& why) {
  out = std::make_shared<Segment>();
  return import(handle, bytes, out->memory, why);
}

/// The lines lie among the rows of lane 0: their numbers belong to no session, so nobody ever takes them for a row. A
/// reader that saw no line change has tested nothing, and tries again.
bool Segments::test_lines(const Segment& segment, std::string& why) {
  const auto room = static_cast<uint32_t>(std::min<uint64_t>((layout_.bytes - layout_.rows) / kLineBytes, kTestLines));
  const Allocation counts = memory_.make(3 * sizeof(uint64_t), std::nullopt, why);
  if (!counts) return false;
  uint64_t found[3] = {};
  const uint64_t enough = options_.park ? room : 0;  // such tools may run one block after the other, too
  for (int attempt = 0; attempt < kTestAttempts && found[1] == 0 && found[2] <= enough; ++attempt) {
    auto* const to = counts.as<unsigned long long>();
    if (side_.zero(to, sizeof found)) {
      launch_line_test(segment.memory.as<std::byte>() + layout_.rows, room, kTestRounds, to, side_.stream());
      health_.good(cudaGetLastError(), "line test");
    }
    if (!side_.from_gpu(found, to, sizeof found)) {
      why = health_.text();
      return false;
    }
  }
  if (found[1] == 0 && found[2] > enough) return true;
  why = found[1] == 0 ? "no line changed while it was read: the test of its lines says nothing; is the GPU overloaded?"
                      : std::to_string(found[1]) + " of " + std::to_string(found[0] + found[1]) +
                            " lines of 128 bytes arrived in parts; moed needs NVLink between the GPUs of a world, "
                            "not PCIe";
  return false;
}

}  // namespace moed::cuda
