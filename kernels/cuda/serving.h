// The stream of serve passes: kept filled while somebody calls, parked behind the doorbell when nobody does.
#pragma once

#include <utility>

#include "kernels/cuda/armed.h"
#include "kernels/cuda/device_world.h"
#include "kernels/cuda/side.h"

namespace moed::cuda {

/// The service thread's, once it is made.
class Serving {
 public:
  Serving(Health& health, const BackendOptions& options, const DeviceWorld& world)
      : health_(health), options_(options), world_(world) {}

  bool make(int priority) { return health_.good(stream_.make(priority), "serve stream"); }
  /// What the stream runs, when the world is made.
  bool prepare(const Driver& driver);
  bool fill();
  Armed& stream() { return stream_; }

  /// Passes are queued while somebody calls; else one waits for the doorbell without keeping the GPU busy. What rings
  /// between its last look and the wait is not lost: the wait is for more than that look had read.
  void keep();
  /// Somebody has been served.
  void note_traffic(Nanos now) { served_at_ = now; }
  /// Whether passes are used up faster than loops end.
  bool is_busy(Nanos now) const;
  /// Passes are queued all the time and none takes long: when none begins or ends, the GPU stands still.
  void look_whether_stuck(Nanos now);
  /// Waits until all that is queued has ended. False: it does not in time.
  bool settle(Nanos longest);

 private:
  /// How many loops the next pass has: few while what they leave to the kernels behind them waits for it.
  uint32_t loops();

  Health& health_;
  const BackendOptions& options_;
  const DeviceWorld& world_;
  const Driver* driver_ = nullptr;
  Armed stream_;
  Nanos served_at_ = now_ns();
  uint64_t handed_ = 0;  ///< of the board: the last loop that left something to the kernels behind it
  Nanos handed_at_ = 0;  ///< when that was seen
  uint64_t parked_ = 0;  ///< loops that had begun when the stream was made to wait for the doorbell; 0: it is not
  uint64_t moved_ = 0;   ///< loops begun and completed, when they last moved
  Nanos moved_at_ = 0;
};

}  // namespace moed::cuda
