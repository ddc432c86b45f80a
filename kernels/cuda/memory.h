// GPU memory as physical allocations that are mapped, given away and taken back by handle. All of moed's GPU memory is
// made here: cudaFree and its like wait for every kernel that waits, and unmapping does not.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "daemon/abi/fd.h"
#include "kernels/backend.h"
#include "kernels/cuda/driver.h"

namespace moed::cuda {

/// The primary context of one GPU, held as long as memory of it is.
class Context;

/// Physical memory of a GPU with a mapping in this process, readable and writable for kernels of the GPU that mapped
/// it. Unmapped and released with it: no kernel may use it then. It may outlive the Memory that made it. Move only.
class Allocation {
 public:
  Allocation() = default;
  Allocation(Allocation&& other) noexcept;
  Allocation& operator=(Allocation&& other) noexcept;
  Allocation(const Allocation&) = delete;
  Allocation& operator=(const Allocation&) = delete;
  ~Allocation() { reset(); }

  explicit operator bool() const { return address_ != 0; }
  CUdeviceptr address() const { return address_; }
  /// The address in the GPU's memory, which the host cannot follow.
  template <class T>
  T* as() const {
    return reinterpret_cast<T*>(address_);
  }
  uint64_t bytes() const { return bytes_; }            ///< as asked for
  uint64_t mapped_bytes() const { return reserved_; }  ///< the same in whole granules
  CUmemGenericAllocationHandle handle() const { return handle_; }
  void reset();

 private:
  friend class Memory;
  std::shared_ptr<const Context> context_;
  CUmemGenericAllocationHandle handle_ = 0;
  CUdeviceptr address_ = 0;
  uint64_t bytes_ = 0, reserved_ = 0;
  bool held_ = false, mapped_ = false;  ///< handle_; the range at address_
};

using FabricToken = std::array<std::byte, sizeof(CUmemFabricHandle)>;

/// Memory of one GPU. What fails leaves nothing behind and says in `why` what was asked of which GPU and what to do.
/// From any thread; the thread's current context is the same afterwards. `driver` has to outlive what is made here.
class Memory {
 public:
  /// Of GPU `device` (ordinal; find_gpu has started the driver). Should it not let us in, every call below says so.
  Memory(const Driver& driver, int device);

  /// New memory, its contents undefined. exportable: cuda_fd or fabric, to be given away as that.
  Allocation make(uint64_t bytes, std::optional<HandleKind> exportable, std::string& why);

  /// A descriptor of memory made as cuda_fd; it keeps the memory alive on its own.
  bool export_fd(const Allocation& memory, Fd& out, std::string& why);
  /// 64 bytes that stand for memory made as fabric, in every process of the same NVLink domain and IMEX channel.
  bool export_fabric(const Allocation& memory, FabricToken& token, std::string& why);

  /// Maps what another process, GPU or back end made. bytes: as it was made with; more than that is refused.
  Allocation import_fd(const Fd& fd, uint64_t bytes, std::string& why);
  Allocation import_fabric(const FabricToken& token, uint64_t bytes, std::string& why);
  /// Of any GPU in this process: a mapping of its own, whose memory lives as long as either.
  Allocation import_local(const Allocation& memory, std::string& why);

  /// Ordinal of the GPU that memory lies on; -1: none that this process sees.
  int owner(const Allocation& memory) const;

  /// What allocations are rounded up to, in bytes; 0 when the GPU does not let us in.
  uint64_t granularity();

 private:
  bool round_up(uint64_t bytes, CUmemAllocationHandleType type, uint64_t& rounded, std::string& why) const;
  bool map(Allocation& memory, uint64_t rounded, bool own, std::string& why) const;
  bool give(const Allocation& memory, CUmemAllocationHandleType type, void* out, std::string& why) const;
  Allocation take(void* handle, CUmemAllocationHandleType type, uint64_t bytes, std::string& why) const;

  std::shared_ptr<const Context> context_;
};

/// Kinds of handles that this GPU really makes, gives and takes again, as bits 1 << HandleKind: the attributes promise
/// fabric handles on machines that refuse them. why: what does not work and what it takes; empty when both kinds do.
uint32_t probe_handle_kinds(Memory& memory, std::string& why);

}  // namespace moed::cuda
