// A CUDA driver without GPUs: plain functions over one state. Its memory is real, in memory files, mapped by the same
// steps as a GPU's, so that a step left out is a fault and a step not undone is counted.
#pragma once

#include <sys/mman.h>
#include <sys/stat.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "daemon/abi/fd.h"
#include "kernels/cuda/driver.h"

namespace moed::fake {

inline constexpr std::size_t kGranule = 65536;

/// An H200 unless a test changes it.
struct Gpu {
  std::string name = "NVIDIA H200";
  unsigned char first_byte = 0x10;  ///< of its UUID, whose others count up from it
  std::map<int, int> attributes = {{CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, 9},
                                   {CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, 0},
                                   {CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, 132},
                                   {CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED, 1},
                                   {CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED, 1},
                                   {CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_FABRIC_SUPPORTED, 1},
                                   {CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS, 1}};
  uint64_t total = uint64_t{64} << 20, used = 0;
  int contexts = 0;  ///< retained and not released
};

/// What a GPU's memory lies in; gone with the last handle and mapping.
struct Physical {
  Fd file;
  uint64_t bytes = 0;
  int gpu = 0, type = 0;
  uint64_t* used = nullptr;  ///< the GPU's count, by whoever created it
  ~Physical() {
    if (used != nullptr) *used -= bytes;
  }
};

/// The one state behind all functions. Tests begin with reset().
struct State {
  struct Range {
    uint64_t bytes = 0;
    std::shared_ptr<Physical> mapped;
  };
  struct Failure {
    CUresult result = CUDA_SUCCESS;
    int after = 0;  ///< calls that still work
  };
  std::recursive_mutex mutex;
  std::vector<Gpu> gpus;
  std::map<std::string, Failure> failures;  ///< by function; from the named call on
  std::set<std::pair<int, int>> apart;      ///< pairs that cannot map each other's memory
  bool nvlink = true;                       ///< false: PCIe
  int cuda = 13000;
  bool started = false;
  int misuses = 0;  ///< undone twice, in the wrong order, or made without a context: more than the real one asks
  uint64_t last_handle = 0;
  std::map<uint64_t, std::shared_ptr<Physical>> handles;
  std::map<CUdeviceptr, Range> ranges;
  std::map<uint64_t, int> gpu_of_file;                     ///< by inode
  std::map<uint64_t, std::shared_ptr<Physical>> by_token;  ///< fabric: by the first 8 bytes

  /// Handles, ranges and contexts that somebody still holds.
  int held() const {
    int contexts = 0;
    for (const Gpu& gpu : gpus) contexts += gpu.contexts;
    return static_cast<int>(handles.size() + ranges.size()) + contexts;
  }
};

inline State& state() {
  static State instance;
  return instance;
}
inline thread_local CUcontext current = nullptr;

inline void reset(std::size_t gpus) {
  State& s = state();
  s.by_token.clear();
  s.handles.clear();
  s.ranges.clear();
  s.gpus.assign(gpus, Gpu{});
  for (std::size_t i = 0; i < gpus; ++i) s.gpus[i].first_byte = static_cast<unsigned char>(0x10 * (i + 1));
  s.failures.clear();
  s.apart.clear();
  s.gpu_of_file.clear();
  s.nvlink = true;
  s.cuda = 13000;
  s.started = false;
  s.misuses = 0;
  current = nullptr;
}

inline bool known(int gpu) { return gpu >= 0 && static_cast<std::size_t>(gpu) < state().gpus.size(); }
inline Gpu& gpu_at(int gpu) { return state().gpus.at(static_cast<std::size_t>(gpu)); }
inline CUcontext context_of(int gpu) { return reinterpret_cast<CUcontext>(&gpu_at(gpu)); }
inline int gpu_of(CUcontext context) {
  for (std::size_t i = 0; i < state().gpus.size(); ++i)
    if (context == context_of(static_cast<int>(i))) return static_cast<int>(i);
  return -1;
}

template <class T, class Value>
CUresult put(T* out, Value value) {
  *out = static_cast<T>(value);
  return CUDA_SUCCESS;
}

inline CUresult misuse() {
  ++state().misuses;
  return CUDA_ERROR_INVALID_VALUE;
}

/// What the call of `name` has to answer before it does anything.
inline CUresult enter(const char* name, bool needs_context) {
  State& s = state();
  if (!s.started) {
    ++s.misuses;
    return CUDA_ERROR_NOT_INITIALIZED;
  }
  if (needs_context && (gpu_of(current) < 0 || gpu_at(gpu_of(current)).contexts == 0)) {
    ++s.misuses;
    return CUDA_ERROR_INVALID_CONTEXT;
  }
  const auto at = s.failures.find(name);
  if (at == s.failures.end() || at->second.after-- > 0) return CUDA_SUCCESS;
  at->second.after = 0;
  return at->second.result;
}

#define MOED_ENTER(name, needs_context)                        \
  const std::lock_guard lock(moed::fake::state().mutex);       \
  [[maybe_unused]] moed::fake::State& s = moed::fake::state(); \
  if (const CUresult refused = moed::fake::enter(name, needs_context); refused != CUDA_SUCCESS) return refused

inline uint64_t add_handle(std::shared_ptr<Physical> physical) {
  state().handles[++state().last_handle] = std::move(physical);
  return state().last_handle;
}

inline CUresult create(CUmemGenericAllocationHandle* out, size_t bytes, const CUmemAllocationProp* prop,
                       unsigned long long) {
  MOED_ENTER("cuMemCreate", true);
  if (!known(prop->location.id) || bytes == 0 || bytes % kGranule != 0) return misuse();
  Gpu& gpu = gpu_at(prop->location.id);
  if (bytes > gpu.total - gpu.used) return CUDA_ERROR_OUT_OF_MEMORY;
  auto made = std::make_shared<Physical>();
  made->file = make_sealed_memory("fake-gpu", bytes);
  if (!made->file) return CUDA_ERROR_OUT_OF_MEMORY;
  made->bytes = bytes;
  made->gpu = prop->location.id;
  made->type = static_cast<int>(prop->requestedHandleTypes);
  made->used = &gpu.used;
  gpu.used += bytes;
  struct stat file {};
  ::fstat(made->file.get(), &file);
  s.gpu_of_file[file.st_ino] = made->gpu;
  return put(out, add_handle(std::move(made)));
}

inline CUresult release(CUmemGenericAllocationHandle handle) {
  MOED_ENTER("cuMemRelease", false);
  return s.handles.erase(handle) == 1 ? CUDA_SUCCESS : misuse();
}

inline CUresult reserve(CUdeviceptr* out, size_t bytes, size_t, CUdeviceptr, unsigned long long) {
  MOED_ENTER("cuMemAddressReserve", true);
  if (bytes == 0 || bytes % kGranule != 0) return misuse();
  void* at = ::mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (at == MAP_FAILED) return CUDA_ERROR_OUT_OF_MEMORY;
  *out = reinterpret_cast<CUdeviceptr>(at);
  s.ranges[*out].bytes = bytes;
  return CUDA_SUCCESS;
}

inline CUresult free_range(CUdeviceptr at, size_t bytes) {
  MOED_ENTER("cuMemAddressFree", false);
  const auto range = s.ranges.find(at);
  if (range == s.ranges.end() || range->second.bytes != bytes || range->second.mapped) return misuse();
  ::munmap(reinterpret_cast<void*>(at), bytes);
  s.ranges.erase(range);
  return CUDA_SUCCESS;
}

inline CUresult map(CUdeviceptr at, size_t bytes, size_t offset, CUmemGenericAllocationHandle handle,
                    unsigned long long) {
  MOED_ENTER("cuMemMap", true);
  const auto range = s.ranges.find(at);
  if (range == s.ranges.end() || range->second.mapped || !s.handles.contains(handle) || offset != 0) return misuse();
  const std::shared_ptr<Physical>& physical = s.handles[handle];
  if (bytes > physical->bytes || bytes > range->second.bytes) return CUDA_ERROR_INVALID_VALUE;
  void* got = ::mmap(reinterpret_cast<void*>(at), bytes, PROT_NONE, MAP_SHARED | MAP_FIXED, physical->file.get(), 0);
  if (got == MAP_FAILED) return CUDA_ERROR_OUT_OF_MEMORY;
  range->second.mapped = physical;
  return CUDA_SUCCESS;
}

inline CUresult unmap(CUdeviceptr at, size_t bytes) {
  MOED_ENTER("cuMemUnmap", false);
  const auto range = s.ranges.find(at);
  if (range == s.ranges.end() || range->second.bytes != bytes || !range->second.mapped) return misuse();
  range->second.mapped.reset();
  void* left = ::mmap(reinterpret_cast<void*>(at), bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
  return left == MAP_FAILED ? CUDA_ERROR_OUT_OF_MEMORY : CUDA_SUCCESS;
}

inline CUresult set_access(CUdeviceptr at, size_t bytes, const CUmemAccessDesc* access, size_t accesses) {
  MOED_ENTER("cuMemSetAccess", true);
  const auto range = s.ranges.find(at);
  if (range == s.ranges.end() || !range->second.mapped || accesses != 1 || !known(access->location.id)) return misuse();
  if (s.apart.contains(std::minmax(access->location.id, range->second.mapped->gpu)))
    return CUDA_ERROR_PEER_ACCESS_UNSUPPORTED;
  const int protection = access->flags == CU_MEM_ACCESS_FLAGS_PROT_READWRITE ? PROT_READ | PROT_WRITE : PROT_READ;
  return ::mprotect(reinterpret_cast<void*>(at), bytes, protection) == 0 ? CUDA_SUCCESS : CUDA_ERROR_UNKNOWN;
}

inline CUresult give(void* out, CUmemGenericAllocationHandle handle, CUmemAllocationHandleType type,
                     unsigned long long) {
  MOED_ENTER("cuMemExportToShareableHandle", true);
  if (!s.handles.contains(handle)) return misuse();
  const std::shared_ptr<Physical>& physical = s.handles[handle];
  if ((physical->type & static_cast<int>(type)) == 0) return CUDA_ERROR_INVALID_VALUE;
  if (type == CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) {
    const int fd = ::dup(physical->file.get());  // inherited by children, as the worst driver might have it
    std::memcpy(out, &fd, sizeof(fd));
  } else {
    const uint64_t token = handle;
    s.by_token[token] = physical;
    std::memset(out, 0, sizeof(CUmemFabricHandle));
    std::memcpy(out, &token, sizeof(token));
  }
  return CUDA_SUCCESS;
}

inline CUresult take(CUmemGenericAllocationHandle* out, void* from, CUmemAllocationHandleType type) {
  MOED_ENTER("cuMemImportFromShareableHandle", true);
  if (type == CU_MEM_HANDLE_TYPE_FABRIC) {
    uint64_t token = 0;
    std::memcpy(&token, from, sizeof(token));
    const auto known_token = s.by_token.find(token);
    if (known_token == s.by_token.end()) return CUDA_ERROR_INVALID_VALUE;
    return put(out, add_handle(known_token->second));
  }
  const int fd = static_cast<int>(reinterpret_cast<std::intptr_t>(from));
  struct stat file {};
  if (::fstat(fd, &file) != 0 || !s.gpu_of_file.contains(file.st_ino)) return CUDA_ERROR_INVALID_VALUE;
  auto taken = std::make_shared<Physical>();
  taken->file = Fd(::fcntl(fd, F_DUPFD_CLOEXEC, 0));
  taken->bytes = static_cast<uint64_t>(file.st_size);
  taken->gpu = s.gpu_of_file[file.st_ino];
  return put(out, add_handle(std::move(taken)));
}

inline CUresult retain_handle(CUmemGenericAllocationHandle* out, void* at) {
  MOED_ENTER("cuMemRetainAllocationHandle", true);
  const auto range = s.ranges.find(reinterpret_cast<CUdeviceptr>(at));
  if (range == s.ranges.end() || !range->second.mapped) return CUDA_ERROR_INVALID_VALUE;
  return put(out, add_handle(range->second.mapped));
}

/// The names and sentences of the real driver, as far as tests need them.
inline const std::map<CUresult, std::pair<const char*, const char*>>& errors() {
  static const std::map<CUresult, std::pair<const char*, const char*>> all = {
      {CUDA_ERROR_INVALID_VALUE, {"CUDA_ERROR_INVALID_VALUE", "invalid argument"}},
      {CUDA_ERROR_OUT_OF_MEMORY, {"CUDA_ERROR_OUT_OF_MEMORY", "out of memory"}},
      {CUDA_ERROR_DEVICE_UNAVAILABLE,
       {"CUDA_ERROR_DEVICE_UNAVAILABLE", "CUDA-capable device(s) is/are busy or unavailable"}},
      {CUDA_ERROR_PEER_ACCESS_UNSUPPORTED,
       {"CUDA_ERROR_PEER_ACCESS_UNSUPPORTED", "peer access is not supported between these two devices"}},
      {CUDA_ERROR_SYSTEM_DRIVER_MISMATCH,
       {"CUDA_ERROR_SYSTEM_DRIVER_MISMATCH", "system has unsupported display driver / cuda driver combination"}},
      {CUDA_ERROR_NOT_PERMITTED, {"CUDA_ERROR_NOT_PERMITTED", "operation not permitted"}}};
  return all;
}

inline void describe_machine(cuda::Driver& d) {
  d.cuInit = [](unsigned) -> CUresult {
    state().started = true;
    MOED_ENTER("cuInit", false);
    return s.gpus.empty() ? CUDA_ERROR_NO_DEVICE : CUDA_SUCCESS;
  };
  d.cuDriverGetVersion = [](int* out) -> CUresult {
    MOED_ENTER("cuDriverGetVersion", false);
    return put(out, s.cuda);
  };
  d.cuGetErrorName = [](CUresult result, const char** out) -> CUresult {
    return errors().contains(result) ? put(out, errors().at(result).first) : CUDA_ERROR_INVALID_VALUE;
  };
  d.cuGetErrorString = [](CUresult result, const char** out) -> CUresult {
    return errors().contains(result) ? put(out, errors().at(result).second) : CUDA_ERROR_INVALID_VALUE;
  };
  d.cuDeviceGetCount = [](int* out) -> CUresult {
    MOED_ENTER("cuDeviceGetCount", false);
    return put(out, static_cast<int>(s.gpus.size()));
  };
}

inline void describe_gpus(cuda::Driver& d) {
  d.cuDeviceGet = [](CUdevice* out, int ordinal) -> CUresult {
    MOED_ENTER("cuDeviceGet", false);
    *out = ordinal;
    return known(ordinal) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE;
  };
  d.cuDeviceGetName = [](char* out, int bytes, CUdevice gpu) -> CUresult {
    MOED_ENTER("cuDeviceGetName", false);
    std::strncpy(out, gpu_at(gpu).name.c_str(), static_cast<std::size_t>(bytes) - 1);
    return CUDA_SUCCESS;
  };
  d.cuDeviceGetUuid = [](CUuuid* out, CUdevice gpu) -> CUresult {
    MOED_ENTER("cuDeviceGetUuid", false);
    for (int i = 0; i < 16; ++i) out->bytes[i] = static_cast<char>(gpu_at(gpu).first_byte + i);
    return CUDA_SUCCESS;
  };
  d.cuDeviceGetAttribute = [](int* out, CUdevice_attribute which, CUdevice gpu) -> CUresult {
    MOED_ENTER("cuDeviceGetAttribute", false);
    return put(out, gpu_at(gpu).attributes[which]);
  };
  d.cuDeviceTotalMem = [](size_t* out, CUdevice gpu) -> CUresult {
    MOED_ENTER("cuDeviceTotalMem", false);
    return put(out, gpu_at(gpu).total);
  };
  d.cuDeviceCanAccessPeer = [](int* out, CUdevice gpu, CUdevice peer) -> CUresult {
    MOED_ENTER("cuDeviceCanAccessPeer", false);
    return put(out, s.apart.contains(std::minmax(gpu, peer)) ? 0 : 1);
  };
  d.cuDeviceGetP2PAttribute = [](int* out, CUdevice_P2PAttribute which, CUdevice, CUdevice) -> CUresult {
    MOED_ENTER("cuDeviceGetP2PAttribute", false);
    return put(out, which == CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED && s.nvlink ? 1 : 0);
  };
}

inline void describe_contexts(cuda::Driver& d) {
  d.cuDevicePrimaryCtxRetain = [](CUcontext* out, CUdevice gpu) -> CUresult {
    MOED_ENTER("cuDevicePrimaryCtxRetain", false);
    if (!known(gpu)) return CUDA_ERROR_INVALID_DEVICE;
    ++gpu_at(gpu).contexts;
    return put(out, context_of(gpu));
  };
  d.cuDevicePrimaryCtxRelease = [](CUdevice gpu) -> CUresult {
    MOED_ENTER("cuDevicePrimaryCtxRelease", false);
    return known(gpu) && gpu_at(gpu).contexts-- > 0 ? CUDA_SUCCESS : misuse();
  };
  d.cuCtxGetCurrent = [](CUcontext* out) -> CUresult {
    MOED_ENTER("cuCtxGetCurrent", false);
    return put(out, current);
  };
  d.cuCtxSetCurrent = [](CUcontext context) -> CUresult {
    MOED_ENTER("cuCtxSetCurrent", false);
    current = context;
    return CUDA_SUCCESS;
  };
}

/// All functions that moed calls to know a machine and to make memory; those for streams and copies stay null.
inline cuda::Driver driver() {
  cuda::Driver d;
  describe_machine(d);
  describe_gpus(d);
  describe_contexts(d);
  d.cuMemGetInfo = [](size_t* free_bytes, size_t* total_bytes) -> CUresult {
    MOED_ENTER("cuMemGetInfo", true);
    const Gpu& gpu = gpu_at(gpu_of(current));
    *total_bytes = gpu.total;
    *free_bytes = gpu.total - gpu.used;
    return CUDA_SUCCESS;
  };
  d.cuMemGetAllocationGranularity = [](size_t* out, const CUmemAllocationProp*,
                                       CUmemAllocationGranularity_flags) -> CUresult {
    MOED_ENTER("cuMemGetAllocationGranularity", true);
    return put(out, kGranule);
  };
  d.cuMemCreate = create;
  d.cuMemRelease = release;
  d.cuMemAddressReserve = reserve;
  d.cuMemAddressFree = free_range;
  d.cuMemMap = map;
  d.cuMemUnmap = unmap;
  d.cuMemSetAccess = set_access;
  d.cuMemExportToShareableHandle = give;
  d.cuMemImportFromShareableHandle = take;
  d.cuMemRetainAllocationHandle = retain_handle;
  return d;
}

#undef MOED_ENTER

}  // namespace moed::fake
