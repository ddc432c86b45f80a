// The host's half of a lane: its memory, its armed call pass, and host calls, which ring the bell that stream calls
// ring.
#pragma once

#include <functional>
#include <mutex>
#include <set>

#include "daemon/abi/validate.h"
#include "kernels/cuda/armed.h"
#include "kernels/cuda/side.h"

namespace moed::cuda {

/// What lanes share.
struct Shop {
  const Driver& driver;
  Memory& memory;
  const DeviceWorld& world;
  const BackendOptions& options;
  Side& side;
  Health& health;
  std::function<void()> keep_serving;  ///< between the parts of a long copy
};

class Lane {
 public:
  Lane(const Shop& shop, uint32_t number) : shop_(shop), number_(number) {}

  /// The stream and what it runs.
  bool make(int priority);
  Armed& pass() { return pass_; }

  // From the control thread.
  Status open(ArenaKind kind, uint64_t bytes, LaneMemory& out, std::string& why);
  /// Ends what runs, then frees. False: the GPU did not let go in time, and the memory stays.
  bool close();
  void set_dry(bool on);
  Status add_record(uint32_t number, const Call& call, Nanos timeout, std::string& why);
  uint64_t arena_bytes() const { return arena_bytes_.load(std::memory_order_relaxed); }

  // From the service loop.
  Status begin(const Begin& begin, std::string& why);
  bool poll(CallRecord& out);
  bool busy() const { return running_.load(std::memory_order_relaxed); }
  /// Keeps passes queued, so that a bell finds one; from time to time.
  void tend();

 private:
  LaneState* state() const { return shop_.world.world().lane + number_; }
  DeviceCall* calls() const { return shop_.world.world().calls + uint64_t{number_} * kMostRecords; }
  HostLane& host() const { return shop_.world.board().lane[number_]; }
  bool give(Allocation& memory, Fd& out, std::string& why);
  bool allocate(ArenaKind kind, uint64_t bytes, LaneMemory& out, std::string& why);
  void copy_in(const Call& c);
  void zero_out(const Call& c);
  bool poll_stream(uint64_t done, CallRecord& out);
  bool take_record(uint64_t count, CallRecord& out) const;
  bool collect(uint64_t count, CallRecord& out);
  bool in_flight();
  void pump();

  const Shop& shop_;
  const uint32_t number_;
  Armed pass_;
  std::mutex mutex_;  // control opens and closes, service begins and polls
  bool open_ = false, dry_ = false;
  std::atomic<bool> running_{false};
  ArenaKind kind_ = ArenaKind::host;
  Allocation arena_, mailbox_;
  Mapping engine_;  ///< a host arena: what the engine writes and reads
  std::atomic<uint64_t> arena_bytes_{0};
  Begin begin_{};
  Refusal refusal_{};
  DeviceCall call_{};
  std::set<uint32_t> registered_;    ///< numbers of records, since the lane was opened
  uint64_t done_ = 0, noticed_ = 0;  ///< of the board: as it was polled last, and looked at last
  Nanos used_at_ = 0;                ///< when a stream call was seen to have ended
  uint64_t handed_ = 0;              ///< of the board: the last loop that left a call to the kernels behind it
  Nanos handed_at_ = 0;              ///< when that was seen
  uint64_t serial_ = 0;              ///< of calls begun on this lane, over all attaches
};

}  // namespace moed::cuda
