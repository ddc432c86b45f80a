// GPU memory, step by step: an Allocation notes each step that worked, so that its destructor undoes exactly those.
#include "kernels/cuda/memory.h"

#include <fcntl.h>

#include <cerrno>
#include <cstring>
#include <utility>

#include "daemon/abi/text.h"

namespace moed::cuda {

class Context {
 public:
  Context(const Driver& functions, int device) : driver(functions) {
    char text[256] = {};
    result = driver.cuDeviceGet(&gpu, device);
    if (result == CUDA_SUCCESS) result = driver.cuDeviceGetName(text, sizeof(text), gpu);
    name = "GPU " + std::to_string(device) + (result == CUDA_SUCCESS ? " (" + printable(field_text(text)) + ")" : "");
    if (result == CUDA_SUCCESS) result = driver.cuDevicePrimaryCtxRetain(&handle, gpu);
  }
  Context(const Context&) = delete;
  Context& operator=(const Context&) = delete;
  ~Context() {
    if (result == CUDA_SUCCESS) driver.cuDevicePrimaryCtxRelease(gpu);
  }

  const Driver& driver;
  CUdevice gpu = 0;
  CUcontext handle = nullptr;
  std::string name;                ///< "GPU 0 (NVIDIA H200)"
  CUresult result = CUDA_SUCCESS;  ///< of entering the GPU
};

namespace {

constexpr CUmemAllocationHandleType kNoHandle = CU_MEM_HANDLE_TYPE_NONE;
constexpr CUmemAllocationHandleType kFdHandle = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
constexpr CUmemAllocationHandleType kFabricHandle = CU_MEM_HANDLE_TYPE_FABRIC;

/// Makes a context current for one function and puts back the caller's.
class Scope {
 public:
  explicit Scope(const Context& context) : driver_(context.driver) {
    if (context.result != CUDA_SUCCESS) {
      fault_ = context.name + " does not let this process in: " + driver_.text(context.result) +
               "; nvidia-smi shows who fills it or holds it exclusively (compute mode)";
      return;
    }
    CUresult result = driver_.cuCtxGetCurrent(&before_);
    if (result == CUDA_SUCCESS) result = driver_.cuCtxSetCurrent(context.handle);
    entered_ = result == CUDA_SUCCESS;
    if (!entered_)
      fault_ = context.name + ": the context of this process is lost: " + driver_.text(result) + "; start it again";
  }
  Scope(const Scope&) = delete;
  Scope& operator=(const Scope&) = delete;
  ~Scope() {
    if (entered_) driver_.cuCtxSetCurrent(before_);
  }
  bool enter(std::string& why) const {
    if (!entered_) why = fault_;
    return entered_;
  }

 private:
  const Driver& driver_;
  CUcontext before_ = nullptr;
  bool entered_ = false;
  std::string fault_;
};

CUmemAllocationProp properties(const Context& context, CUmemAllocationHandleType type) {
  CUmemAllocationProp prop{};
  prop.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  prop.requestedHandleTypes = type;
  prop.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  prop.location.id = context.gpu;
  return prop;
}

/// What a granule is for memory of that kind; the recommended one, as other users of fabric handles have it.
CUresult granule(const Context& context, CUmemAllocationHandleType type, std::size_t& bytes) {
  const CUmemAllocationProp prop = properties(context, type);
  return context.driver.cuMemGetAllocationGranularity(&bytes, &prop, CU_MEM_ALLOC_GRANULARITY_RECOMMENDED);
}

std::string count(uint64_t bytes) { return std::to_string(bytes) + " bytes"; }

/// The sentence for memory that cuMemCreate did not give.
std::string refused(const Context& context, uint64_t bytes, CUmemAllocationHandleType type, CUresult result) {
  const std::string error = context.driver.text(result);
  if (type == kFabricHandle && result != CUDA_ERROR_OUT_OF_MEMORY)
    return context.name + " gives no memory with a fabric handle: " + error +
           "; this process needs an IMEX channel (/dev/nvidia-caps-imex-channels/channel0, in Kubernetes by a "
           "ComputeDomain claim) and a running nvidia-imex (nvidia-imex-ctl -N)";
  std::size_t free_bytes = 0, total_bytes = 0;
  std::string left;
  if (context.driver.cuMemGetInfo(&free_bytes, &total_bytes) == CUDA_SUCCESS)
    left = ", of " + count(total_bytes) + " " + count(free_bytes) + " are free";
  return context.name + " gives no " + count(bytes) + left + ": " + error +
         "; end what fills it (nvidia-smi lists it), or lower limits.lanes, limits.max_tokens or limits.arena_mb";
}

}  // namespace

Allocation::Allocation(Allocation&& other) noexcept { *this = std::move(other); }

Allocation& Allocation::operator=(Allocation&& other) noexcept {
  if (this == &other) return *this;
  reset();
  context_ = std::move(other.context_);
  handle_ = std::exchange(other.handle_, 0);
  address_ = std::exchange(other.address_, 0);
  bytes_ = std::exchange(other.bytes_, 0);
  reserved_ = std::exchange(other.reserved_, 0);
  held_ = std::exchange(other.held_, false);
  mapped_ = std::exchange(other.mapped_, false);
  return *this;
}

void Allocation::reset() {
  if (context_ == nullptr) return;
  {
    // A lost context is no reason to keep the rest: each call is tried, and what it answers changes nothing here.
    const Scope scope(*context_);
    const Driver& driver = context_->driver;
    if (mapped_) driver.cuMemUnmap(address_, reserved_);
    if (address_ != 0) driver.cuMemAddressFree(address_, reserved_);
    if (held_) driver.cuMemRelease(handle_);
  }
  handle_ = address_ = bytes_ = reserved_ = 0;
  held_ = mapped_ = false;
  context_.reset();
}

Memory::Memory(const Driver& driver, int device) : context_(std::make_shared<const Context>(driver, device)) {}

bool Memory::round_up(uint64_t bytes, CUmemAllocationHandleType type, uint64_t& rounded, std::string& why) const {
  std::size_t unit = 0;
  const CUresult result = granule(*context_, type, unit);
  if (result != CUDA_SUCCESS && type == kFabricHandle) {
    why = refused(*context_, bytes, type, result);
    return false;
  }
  if (result != CUDA_SUCCESS || unit == 0) {
    why = context_->name + " does not tell its granularity for handles of type " + std::to_string(type) + ": " +
          context_->driver.text(result) + "; install a later driver";
    return false;
  }
  if (bytes == 0 || bytes > UINT64_MAX - unit) {
    why = context_->name + ": " + count(bytes) + " of memory were asked for; from 1 up to what it has is possible";
    return false;
  }
  rounded = (bytes + unit - 1) / unit * unit;
  return true;
}

/// Gives `memory`, which holds its handle, an address. own: made here, so a refusal is not about reaching a peer.
bool Memory::map(Allocation& memory, uint64_t rounded, bool own, std::string& why) const {
  const Driver& driver = context_->driver;
  CUdeviceptr at = 0;
  CUresult result = driver.cuMemAddressReserve(&at, rounded, 0, 0, 0);
  if (result != CUDA_SUCCESS) {
    why = context_->name + ": no range of addresses for " + count(rounded) + ": " + driver.text(result) +
          "; lift the limit on virtual memory (ulimit -v)";
    return false;
  }
  memory.address_ = at;
  memory.reserved_ = rounded;
  result = driver.cuMemMap(at, rounded, 0, memory.handle_, 0);
  if (result != CUDA_SUCCESS) {
    why = context_->name + " does not map " + count(rounded) + ": " + driver.text(result) +
          (own || result == CUDA_ERROR_OUT_OF_MEMORY
               ? "; nvidia-smi shows whether it is full or unhealthy"
               : "; what was given is smaller than it says, or not GPU memory: look at the peer that gave it");
    return false;
  }
  memory.mapped_ = true;
  CUmemAccessDesc access{};
  access.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  access.location.id = context_->gpu;
  access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
  result = driver.cuMemSetAccess(at, rounded, &access, 1);
  if (result == CUDA_SUCCESS) return true;
  if (own || result == CUDA_ERROR_OUT_OF_MEMORY)
    why = context_->name + " gives no access to " + count(rounded) + " that it mapped: " + driver.text(result) +
          "; nvidia-smi shows whether it is full or unhealthy";
  else
    why = context_->name + " cannot reach the memory of the other GPU: " + driver.text(result) +
          "; run both ranks on GPUs of one NVLink domain (nvidia-smi topo -m shows them as NV)";
  return false;
}

Allocation Memory::make(uint64_t bytes, std::optional<HandleKind> exportable, std::string& why) {
  CUmemAllocationHandleType type = kNoHandle;
  if (exportable == HandleKind::cuda_fd) type = kFdHandle;
  if (exportable == HandleKind::fabric) type = kFabricHandle;
  if (exportable && type == kNoHandle) {
    why = "GPU memory is given away as cuda_fd (2) or fabric (3), not as handle kind " +
          std::to_string(static_cast<uint32_t>(*exportable)) + "; ask for one of these";
    return {};
  }
  const Scope scope(*context_);
  uint64_t rounded = 0;
  if (!scope.enter(why) || !round_up(bytes, type, rounded, why)) return {};
  Allocation made;
  made.context_ = context_;
  const CUmemAllocationProp prop = properties(*context_, type);
  const CUresult result = context_->driver.cuMemCreate(&made.handle_, rounded, &prop, 0);
  if (result != CUDA_SUCCESS) {
    why = refused(*context_, rounded, type, result);
    return {};
  }
  made.held_ = true;
  if (!map(made, rounded, true, why)) return {};
  made.bytes_ = bytes;
  return made;
}

bool Memory::give(const Allocation& memory, CUmemAllocationHandleType type, void* out, std::string& why) const {
  const Scope scope(*context_);
  if (!scope.enter(why)) return false;
  const CUresult result = context_->driver.cuMemExportToShareableHandle(out, memory.handle_, type, 0);
  if (result == CUDA_SUCCESS) return true;
  why = context_->name + " gives no " + (type == kFdHandle ? "descriptor" : "fabric handle") + " of " +
        count(memory.bytes_) + " of its memory: " + context_->driver.text(result) + "; " +
        (type == kFdHandle ? "the process may be out of descriptors (ulimit -n), or the memory was made without one"
                           : "the IMEX channel may have gone (nvidia-imex-ctl -N), or the memory was made without one");
  return false;
}

bool Memory::export_fd(const Allocation& memory, Fd& out, std::string& why) {
  int fd = -1;
  if (!give(memory, kFdHandle, &fd, why)) return false;
  out = Fd(fd);
  if (::fcntl(fd, F_SETFD, FD_CLOEXEC) == 0) return true;
  why = context_->name + " gave " + std::to_string(fd) + ", which is no descriptor: " + std::strerror(errno) +
        "; install a later driver";
  return false;
}

bool Memory::export_fabric(const Allocation& memory, FabricToken& token, std::string& why) {
  CUmemFabricHandle handle{};
  if (!give(memory, kFabricHandle, &handle, why)) return false;
  std::memcpy(token.data(), &handle, token.size());
  return true;
}

Allocation Memory::take(void* handle, CUmemAllocationHandleType type, uint64_t bytes, std::string& why) const {
  const Scope scope(*context_);
  uint64_t rounded = 0;
  if (!scope.enter(why) || !round_up(bytes, type, rounded, why)) return {};
  Allocation taken;
  taken.context_ = context_;
  const CUresult result = context_->driver.cuMemImportFromShareableHandle(&taken.handle_, handle, type);
  if (result != CUDA_SUCCESS) {
    why = context_->name + " does not take " + count(bytes) + " of another's memory by its " +
          (type == kFdHandle ? "descriptor: " : "fabric handle: ") + context_->driver.text(result) + "; " +
          (type == kFdHandle ? "both ends have to run on this host, on GPUs that this process sees"
                             : "both ends need the same IMEX channel and user; nvidia-imex-ctl -N shows the domain");
    return {};
  }
  taken.held_ = true;
  if (!map(taken, rounded, false, why)) return {};
  taken.bytes_ = bytes;
  return taken;
}

Allocation Memory::import_fd(const Fd& fd, uint64_t bytes, std::string& why) {
  if (!fd) {
    why = context_->name + ": a handle of kind cuda_fd came without its descriptor; the peer has to send it along";
    return {};
  }
  return take(reinterpret_cast<void*>(static_cast<std::intptr_t>(fd.get())), kFdHandle, bytes, why);
}

Allocation Memory::import_fabric(const FabricToken& token, uint64_t bytes, std::string& why) {
  CUmemFabricHandle handle{};
  std::memcpy(&handle, token.data(), token.size());
  return take(&handle, kFabricHandle, bytes, why);
}

Allocation Memory::import_local(const Allocation& memory, std::string& why) {
  const Scope scope(*context_);
  if (!scope.enter(why)) return {};
  Allocation taken;
  taken.context_ = context_;
  const CUresult result = context_->driver.cuMemRetainAllocationHandle(&taken.handle_, memory.as<void>());
  if (result != CUDA_SUCCESS) {
    why = context_->name +
          ": memory of this process was asked for that is not there: " + context_->driver.text(result) +
          "; whoever made it has to keep it until it is mapped here";
    return {};
  }
  taken.held_ = true;
  if (!map(taken, memory.reserved_, false, why)) return {};
  taken.bytes_ = memory.bytes_;
  return taken;
}

int Memory::owner(const Allocation& memory) const {
  CUmemAllocationProp prop{};
  if (context_->driver.cuMemGetAllocationPropertiesFromHandle(&prop, memory.handle_) != CUDA_SUCCESS) return -1;
  return prop.location.type == CU_MEM_LOCATION_TYPE_DEVICE ? prop.location.id : -1;
}

uint64_t Memory::granularity() {
  const Scope scope(*context_);
  std::string why;
  std::size_t unit = 0;
  return scope.enter(why) && granule(*context_, kNoHandle, unit) == CUDA_SUCCESS ? unit : 0;
}

uint32_t probe_handle_kinds(Memory& memory, std::string& why) {
  uint32_t kinds = 0;
  std::string fd_fault, fabric_fault;
  if (const Allocation made = memory.make(1, HandleKind::cuda_fd, fd_fault)) {
    Fd fd;
    if (memory.export_fd(made, fd, fd_fault) && memory.import_fd(fd, 1, fd_fault))
      kinds |= 1U << static_cast<uint32_t>(HandleKind::cuda_fd);
  }
  if (const Allocation made = memory.make(1, HandleKind::fabric, fabric_fault)) {
    FabricToken token{};
    if (memory.export_fabric(made, token, fabric_fault) && memory.import_fabric(token, 1, fabric_fault))
      kinds |= 1U << static_cast<uint32_t>(HandleKind::fabric);
  }
  why = fd_fault;
  if (!fd_fault.empty() && !fabric_fault.empty()) why += "; ";
  why += fabric_fault;
  return kinds;
}

}  // namespace moed::cuda
