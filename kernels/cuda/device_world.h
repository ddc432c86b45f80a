// Everything that a back end keeps on its GPU, taken once before it is ready: weights, scratch, the state of the
// passes, and the board in host memory.
#pragma once

#include <cuda_runtime.h>

#include <string>

#include "kernels/cuda/memory.h"
#include "kernels/cuda/state.h"

namespace moed::cuda {

class Side;

/// Bytes that a back end of these options takes on its GPU. heap: all segments; weights; scratch: the rest.
Backend::Memory planned(const BackendOptions& options);

/// Owns what World points to. Freed when nothing runs any more.
class DeviceWorld {
 public:
  DeviceWorld() = default;
  DeviceWorld(const DeviceWorld&) = delete;
  DeviceWorld& operator=(const DeviceWorld&) = delete;
  ~DeviceWorld();

  /// Takes and fills everything; weights are copied. ok, no_memory or device_lost.
  Status make(Memory& memory, const BackendOptions& options, const GpuFacts& gpu, Side& side, std::string& why);

  /// The drill of broken memory: a power of the first scale of an expert's W2, once. From one thread.
  void flip_when_due(const BackendOptions& options, Side& side, Nanos now);

  /// The word that sources add to when they have sent calls here; before passes are captured.
  void set_doorbell(const uint32_t* word) { world_.doorbell = word; }
  const World& world() const { return world_; }
  Board& board() const { return *board_; }
  uint64_t weight_bytes() const { return weights_.mapped_bytes(); }
  uint64_t scratch_bytes() const { return scratch_.mapped_bytes(); }

 private:
  void share_multiprocessors(uint32_t count, const BackendOptions::Tuning& tuning);
  Status upload(Memory& memory, const BackendOptions& options, Side& side, std::string& why);

  World world_{};
  Board* board_ = nullptr;
  const Nanos made_ = now_ns();
  bool flipped_ = false;
  Allocation scratch_, weights_;
};

/// "cudaGraphLaunch: out of memory (cudaErrorMemoryAllocation)".
std::string cuda_text(const char* what, cudaError_t error);

}  // namespace moed::cuda
