// libcuda and NVML, loaded at run time: a binary starts on a machine without them and says what is missing. Nothing
// here throws; what fails leaves one sentence with its remedy.
#pragma once

#include <cuda.h>

#include <cstdint>
#include <string>
#include <type_traits>
#include <vector>

namespace moed::cuda {

/// The functions of libcuda.so.1 that moed uses. cuda.h renames some to their version (cuMemGetInfo_v2), here as at
/// every use.
#define MOED_DRIVER_FUNCTIONS(F)            \
  F(cuInit)                                 \
  F(cuDriverGetVersion)                     \
  F(cuGetErrorName)                         \
  F(cuGetErrorString)                       \
  F(cuDeviceGetCount)                       \
  F(cuDeviceGet)                            \
  F(cuDeviceGetName)                        \
  F(cuDeviceGetUuid)                        \
  F(cuDeviceGetAttribute)                   \
  F(cuDeviceTotalMem)                       \
  F(cuDeviceCanAccessPeer)                  \
  F(cuDeviceGetP2PAttribute)                \
  F(cuDevicePrimaryCtxRetain)               \
  F(cuDevicePrimaryCtxRelease)              \
  F(cuCtxGetCurrent)                        \
  F(cuCtxSetCurrent)                        \
  F(cuMemGetInfo)                           \
  F(cuMemGetAllocationGranularity)          \
  F(cuMemCreate)                            \
  F(cuMemRelease)                           \
  F(cuMemAddressReserve)                    \
  F(cuMemAddressFree)                       \
  F(cuMemMap)                               \
  F(cuMemUnmap)                             \
  F(cuMemSetAccess)                         \
  F(cuMemExportToShareableHandle)           \
  F(cuMemImportFromShareableHandle)         \
  F(cuMemRetainAllocationHandle)            \
  F(cuMemGetAllocationPropertiesFromHandle) \
  F(cuMemsetD8)                             \
  F(cuMemcpyHtoD)                           \
  F(cuMemcpyDtoH)                           \
  F(cuStreamWaitValue32)                    \
  F(cuStreamWaitValue64)                    \
  F(cuStreamWriteValue32)                   \
  F(cuStreamBatchMemOp)

/// libcuda as pointers. Tests fill it with functions of their own.
struct Driver {
#define MOED_MEMBER(name) decltype(&::name) name = nullptr;  // NOLINT(bugprone-macro-parentheses): declares it
  MOED_DRIVER_FUNCTIONS(MOED_MEMBER)
#undef MOED_MEMBER

  /// "CUDA_ERROR_NO_DEVICE (no CUDA-capable device is detected)".
  std::string text(CUresult result) const;
};

/// NVML's declarations that are used here, as its public header nvml.h has them: the toolkit may come without it.
using NvmlDevice = struct nvmlDevice_st*;
struct NvmlFabric {  ///< nvmlGpuFabricInfo_v2_t
  unsigned version = 0;
  unsigned char cluster[16] = {};
  int status = 0;
  unsigned clique = 0;
  unsigned char state = 0;
  unsigned health = 0;
};
static_assert(sizeof(NvmlFabric) == 36);

#define MOED_NVML_FUNCTIONS(F)                                          \
  F(nvmlInit_v2, int (*)())                                             \
  F(nvmlSystemGetDriverVersion, int (*)(char*, unsigned))               \
  F(nvmlDeviceGetHandleByUUID, int (*)(const char*, NvmlDevice*))       \
  F(nvmlDeviceGetNvLinkState, int (*)(NvmlDevice, unsigned, unsigned*)) \
  F(nvmlDeviceGetGpuFabricInfoV, int (*)(NvmlDevice, NvmlFabric*))

/// libnvidia-ml as pointers; each returns 0 when it worked. moed runs without it and knows a little less.
struct Nvml {
#define MOED_MEMBER(name, type) std::type_identity_t<type> name = nullptr;
  MOED_NVML_FUNCTIONS(MOED_MEMBER)
#undef MOED_MEMBER
};

/// Fills `out` from the library at `path` (libcuda.so.1). false: no library, or one without a function that moed needs;
/// `out` is unchanged.
bool load_driver(const char* path, Driver& out, std::string& why);
/// The same for libnvidia-ml.so.1, and starts it.
bool load_nvml(const char* path, Nvml& out, std::string& why);

/// The process's own, loaded once; nullptr: see `why`. The driver reads its environment (CUDA_VISIBLE_DEVICES,
/// CUDA_DEVICE_MAX_CONNECTIONS, CUDA_MODULE_LOADING) when count_gpus or find_gpu first starts it: set it before.
const Driver* driver(std::string& why);
/// The process's own; nullptr where there is none, which is no fault.
const Nvml* nvml();

/// One GPU as the driver describes it.
struct GpuFacts {
  int ordinal = 0;
  std::string name;            ///< "NVIDIA H200"
  std::string uuid;            ///< "GPU-0a1b2c3d-..."
  std::string driver_version;  ///< "580.159.04"; empty without NVML
  int cuda = 0;                ///< newest CUDA that the driver supports: 13000 is 13.0
  int major = 0, minor = 0;    ///< compute capability
  int multiprocessors = 0;
  uint64_t total_bytes = 0;
  uint64_t free_bytes = 0;      ///< beside this process's own context
  bool vmm = false;             ///< virtual memory management
  bool fd_handles = false;      ///< as the attributes say; probe_handle_kinds() tries
  bool fabric_handles = false;  ///< the same
  bool wait_64 = false;         ///< 64-bit waits as stream memory operations
  uint32_t nvlinks = 0;         ///< active links; 0 without NVML
  std::string fabric;           ///< "CLUSTER.CLIQUE" of the NVLink domain; empty outside one and without NVML
};

/// "GPU 0 (NVIDIA H200, GPU-0a1b2c3d-...)".
std::string describe(const GpuFacts& gpu);

/// GPUs that this process may use; 0 with `why` when the driver finds none or does not start.
int count_gpus(const Driver& driver, std::string& why);

/// Finds `device`, an ordinal ("0") or a UUID or its beginning ("GPU-0a1b"), and reads its facts. `nvml` may be null.
/// false: no such GPU (why lists those that there are), or it does not let us in.
bool find_gpu(const Driver& driver, const Nvml* nvml, const std::string& device, GpuFacts& out, std::string& why);

/// What speaks against running there with `needed_bytes` of GPU memory, each a sentence with its remedy; empty:
/// nothing.
std::vector<std::string> gpu_faults(const GpuFacts& gpu, uint64_t needed_bytes);

/// Whether GPU `device` can use the memory of GPU `peer` (ordinals) over NVLink. Not over PCIe: it cuts lines of 128
/// bytes, which have to arrive whole.
bool can_reach(const Driver& driver, int device, int peer, std::string& why);

}  // namespace moed::cuda
