// Segments and their handles: made, given away, taken, and compared by their first line.
#pragma once

#include <atomic>
#include <memory>
#include <string>

#include "kernels/cuda/side.h"

namespace moed::cuda {

/// Memory of one segment, ours or a peer's.
struct Segment {
  Allocation memory;
  uint64_t id = 0;  ///< among ranks of one process
  std::shared_ptr<std::atomic<uint64_t>> live{};
  Segment() = default;
  Segment(const Segment&) = delete;
  Segment& operator=(const Segment&) = delete;
  ~Segment();
};

class Segments {
 public:
  Segments(const Driver& driver, int device, Memory& memory, Side& side, Health& health, const BackendOptions& options,
           const SegmentLayout& layout)
      : driver_(driver),
        device_(device),
        memory_(memory),
        side_(side),
        health_(health),
        options_(options),
        layout_(layout) {}

  /// Finds the kind of handle to give: the one asked for, else the best that works. False: why it does not work.
  bool choose(std::string& why);
  uint32_t kinds() const { return kinds_; }
  /// Bytes of segments that were made here and are not freed yet, whoever still holds them.
  uint64_t live_bytes() const { return live_->load(); }

  /// What `writer` may write here: new, zeroed, with its header. nullptr: no memory.
  std::shared_ptr<Segment> make(uint32_t writer, std::string& why);
  /// Memory of `bytes` that can be given away; nullptr: no memory.
  std::shared_ptr<Segment> make_plain(uint64_t bytes, std::string& why);
  bool give(const std::shared_ptr<Segment>& segment, Handle& out, std::string& why);
  /// Imports and maps what `owner` made for us, reads its header and tests its lines. ok, unsupported or internal.
  Status take(uint32_t owner, const Handle& handle, std::shared_ptr<Segment>& out, std::string& why);
  /// The same without a header: a doorbell.
  Status take_plain(const Handle& handle, uint64_t bytes, std::shared_ptr<Segment>& out, std::string& why);
  /// Whether 128-byte stores to a segment stay whole; unused lines of it are written.
  bool test_lines(const Segment& segment, std::string& why);

 private:
  SegmentHeader header(uint32_t owner, uint32_t writer) const;
  Status import(const Handle& handle, uint64_t bytes, Allocation& out, std::string& why);

  bool reachable(const Allocation& memory, std::string& why) const;

  const Driver& driver_;
  const int device_;
  const std::shared_ptr<std::atomic<uint64_t>> live_ = std::make_shared<std::atomic<uint64_t>>(0);
  Memory& memory_;
  Side& side_;
  Health& health_;
  const BackendOptions& options_;
  const SegmentLayout layout_;
  uint32_t kinds_ = 0;
  HandleKind kind_ = HandleKind::cuda_fd;
};

}  // namespace moed::cuda
