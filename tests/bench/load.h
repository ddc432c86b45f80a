// A kernel that streams memory on all multiprocessors of a GPU: what others are measured beside.
#pragma once

#include <cuda_runtime.h>

#include <chrono>
#include <cstdint>

namespace moed::bench {

/// What one of its blocks takes of a multiprocessor. threads: 32 to 512.
struct LoadBlock {
  uint32_t threads = 512, shared_bytes = 32 << 10;
};

/// Reads 4 GiB again and again, with as many blocks as the GPU has multiprocessors. Used by one thread, but for end().
/// Makes `device` the current one of the thread that uses it. Throws std::runtime_error.
class Load {
 public:
  explicit Load(int device, const LoadBlock& block = {});
  Load(const Load&) = delete;
  Load& operator=(const Load&) = delete;
  /// Frees memory, which waits for every kernel on the GPU: whatever waits there has to be gone.
  ~Load();

  /// Returns when all blocks have begun; throws when they have not within 5 s.
  void start();
  /// Tells the blocks to end. From any thread, also while the driver keeps another one.
  void end() noexcept;
  /// Tells them, and waits until they have.
  void stop();
  /// Bytes a second that it read between its last start and stop.
  double rate() const { return rate_; }

 private:
  uint32_t begun() const;
  void free() noexcept;

  const int device_;
  const LoadBlock block_;
  uint32_t blocks_ = 0;
  cudaStream_t stream_ = nullptr;
  void* memory_ = nullptr;
  uint32_t* words_ = nullptr;  ///< on the host, mapped: whether to end; then by block: begun; turns read
  uint32_t* ended_ = nullptr;  ///< on the device: the same, for all blocks
  bool running_ = false;
  std::chrono::steady_clock::time_point began_;
  double rate_ = 0;
};

}  // namespace moed::bench
