// What the driver says about the machine: its functions, its GPUs, and what speaks against using one.
#include "kernels/cuda/driver.h"

#include <dlfcn.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <cstdlib>
#include <span>
#include <string_view>

#include "daemon/abi/text.h"
#include "kernels/backend.h"

#define MOED_QUOTE(name) #name
#define MOED_TEXT(name) MOED_QUOTE(name)  // after cuda.h has renamed it

namespace moed::cuda {
namespace {

/// Compute capabilities that the kernels are compiled for. Their machine code runs on these exactly: code for sm_90a,
/// sm_100a and sm_103a is not carried on to later GPUs, and the binary holds no PTX.
constexpr std::array<std::array<int, 2>, 3> kBuiltFor = {{{9, 0}, {10, 0}, {10, 3}}};

/// The oldest CUDA that a driver may support: runtimes of one major version run on every driver of that version.
constexpr int kOldestCuda = CUDA_VERSION / 1000 * 1000;

constexpr unsigned kNvlinkEnabled = 1, kMostNvlinks = 18, kFabricComplete = 3;

std::string version_text(int cuda) { return std::to_string(cuda / 1000) + "." + std::to_string(cuda % 1000 / 10); }

std::string gib(uint64_t bytes) {
  const uint64_t hundredths = bytes / ((uint64_t{1} << 30) / 100);
  const std::string rest = std::to_string(hundredths % 100);
  return std::to_string(hundredths / 100) + "." + (rest.size() < 2 ? "0" : "") + rest + " GiB";
}

/// One library; closed again unless kept, so that a refused one leaves nothing behind.
class Library {
 public:
  explicit Library(const char* path) : path_(path), at_(::dlopen(path, RTLD_NOW | RTLD_LOCAL)) {
    if (at_ == nullptr) {
      const char* said = ::dlerror();
      fault_ = std::string(path) + " cannot be loaded (" + (said != nullptr ? said : "no reason given") + ")";
    }
  }
  Library(const Library&) = delete;
  Library& operator=(const Library&) = delete;
  ~Library() {
    if (at_ != nullptr && !kept_) ::dlclose(at_);
  }

  /// Sets `function` to what the library has under `name`; the first one that is missing becomes the fault.
  template <class Function>
  void take(const char* name, Function& function) {
    if (!fault_.empty()) return;
    function = reinterpret_cast<Function>(::dlsym(at_, name));
    if (function == nullptr) fault_ = std::string(path_) + " has no function " + name;
  }
  const std::string& fault() const { return fault_; }
  bool loaded() const { return at_ != nullptr; }
  void keep() { kept_ = true; }

 private:
  const char* path_;
  void* at_;
  bool kept_ = false;
  std::string fault_;
};

/// What may hide GPUs from this process, as the end of a sentence.
std::string visibility() {
  const char* visible = std::getenv("CUDA_VISIBLE_DEVICES");
  return visible == nullptr ? "" : "; CUDA_VISIBLE_DEVICES is \"" + printable(visible) + "\" here";
}

int attribute(const Driver& driver, CUdevice device, CUdevice_attribute which) {
  int value = 0;
  return driver.cuDeviceGetAttribute(&value, which, device) == CUDA_SUCCESS ? value : 0;
}

std::string uuid_text(const CUuuid& uuid) {
  const std::string digits = hex({reinterpret_cast<const uint8_t*>(uuid.bytes), sizeof(uuid.bytes)});
  return "GPU-" + digits.substr(0, 8) + "-" + digits.substr(8, 4) + "-" + digits.substr(12, 4) + "-" +
         digits.substr(16, 4) + "-" + digits.substr(20);
}

/// Name and UUID of one ordinal; `why` names the call that failed.
bool identify(const Driver& driver, int ordinal, GpuFacts& out, CUdevice& device, std::string& why) {
  char name[256] = {};
  CUuuid uuid{};
  CUresult result = driver.cuDeviceGet(&device, ordinal);
  if (result == CUDA_SUCCESS) result = driver.cuDeviceGetName(name, sizeof(name), device);
  if (result == CUDA_SUCCESS) result = driver.cuDeviceGetUuid(&uuid, device);
  if (result != CUDA_SUCCESS) {
    why = "GPU " + std::to_string(ordinal) + " does not say what it is: " + driver.text(result) +
          "; nvidia-smi shows whether it is healthy";
    return false;
  }
  out.ordinal = ordinal;
  out.name = printable(field_text(name));
  out.uuid = uuid_text(uuid);
  return true;
}

bool names(const std::string& device, const GpuFacts& gpu) {
  if (!device.starts_with("GPU-") && !device.starts_with("MIG-")) return device == std::to_string(gpu.ordinal);
  return std::string_view(gpu.uuid).substr(4).starts_with(std::string_view(device).substr(4));
}

/// Free and total bytes, which the driver tells only inside a context: the process's own, made here if need be, and
/// kept: whoever asks will use it, and ending one waits for the lanes of all other GPUs of the process, without end.
bool read_memory(const Driver& driver, CUdevice device, GpuFacts& out, std::string& why) {
  CUcontext context = nullptr, before = nullptr;
  CUresult result = driver.cuDevicePrimaryCtxRetain(&context, device);
  if (result != CUDA_SUCCESS) {
    why = describe(out) + " does not let this process in: " + driver.text(result) +
          "; nvidia-smi shows who fills it or holds it exclusively (compute mode)";
    return false;
  }
  std::size_t free_bytes = 0, total_bytes = 0;
  result = driver.cuCtxGetCurrent(&before);
  if (result == CUDA_SUCCESS) result = driver.cuCtxSetCurrent(context);
  if (result == CUDA_SUCCESS) {
    result = driver.cuMemGetInfo(&free_bytes, &total_bytes);
    driver.cuCtxSetCurrent(before);
  }
  if (result != CUDA_SUCCESS) {
    driver.cuDevicePrimaryCtxRelease(device);
    why = describe(out) + " does not tell its free memory: " + driver.text(result) +
          "; nvidia-smi shows whether it is healthy";
    return false;
  }
  out.free_bytes = free_bytes;
  return true;
}

/// What NVML adds; what it does not know stays empty.
void read_nvml(const Nvml& nvml, GpuFacts& out) {
  char version[80] = {};
  if (nvml.nvmlSystemGetDriverVersion(version, sizeof(version)) == 0)
    out.driver_version = printable(field_text(version));
  NvmlDevice device = nullptr;
  if (nvml.nvmlDeviceGetHandleByUUID(out.uuid.c_str(), &device) != 0) return;
  for (unsigned link = 0; link < kMostNvlinks; ++link) {
    unsigned state = 0;
    if (nvml.nvmlDeviceGetNvLinkState(device, link, &state) == 0 && state == kNvlinkEnabled) ++out.nvlinks;
  }
  NvmlFabric fabric;
  fabric.version = sizeof(fabric) | 2U << 24;  // NVML_STRUCT_VERSION(GpuFabricInfo, 2)
  if (nvml.nvmlDeviceGetGpuFabricInfoV(device, &fabric) != 0) return;
  if (fabric.state == kFabricComplete && fabric.status == 0)
    out.fabric = hex(fabric.cluster) + "." + std::to_string(fabric.clique);
}

bool read_facts(const Driver& driver, CUdevice device, GpuFacts& out, std::string& why) {
  std::size_t total = 0;
  CUresult result = driver.cuDriverGetVersion(&out.cuda);
  if (result == CUDA_SUCCESS) result = driver.cuDeviceTotalMem(&total, device);
  if (result != CUDA_SUCCESS) {
    why = describe(out) + " does not answer: " + driver.text(result) + "; nvidia-smi shows whether it is healthy";
    return false;
  }
  out.total_bytes = total;
  out.major = attribute(driver, device, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR);
  out.minor = attribute(driver, device, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR);
  out.multiprocessors = attribute(driver, device, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT);
  out.vmm = attribute(driver, device, CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED) != 0;
  out.fd_handles = attribute(driver, device, CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED) != 0;
  out.fabric_handles = attribute(driver, device, CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_FABRIC_SUPPORTED) != 0;
  out.wait_64 = attribute(driver, device, CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS) != 0;
  return read_memory(driver, device, out, why);
}

/// "this process sees 2 GPUs: GPU 0 (...), GPU 1 (...)".
std::string listing(std::span<const GpuFacts> gpus) {
  std::string text = "this process sees " + std::to_string(gpus.size()) + (gpus.size() == 1 ? " GPU: " : " GPUs: ");
  for (std::size_t i = 0; i < gpus.size(); ++i) text += (i == 0 ? "" : ", ") + describe(gpus[i]);
  return text + visibility();
}

}  // namespace

std::string Driver::text(CUresult result) const {
  const char *symbol = nullptr, *sentence = nullptr;
  if (cuGetErrorName(result, &symbol) != CUDA_SUCCESS || symbol == nullptr)
    return "CUDA error " + std::to_string(static_cast<int>(result));
  if (cuGetErrorString(result, &sentence) != CUDA_SUCCESS || sentence == nullptr) return symbol;
  return std::string(symbol) + " (" + sentence + ")";
}

bool load_driver(const char* path, Driver& out, std::string& why) {
  Driver loaded;
  Library library(path);
#define MOED_TAKE(name) library.take(MOED_TEXT(name), loaded.name);
  MOED_DRIVER_FUNCTIONS(MOED_TAKE)
#undef MOED_TAKE
  if (!library.fault().empty()) {
    why = "the CUDA driver: " + library.fault();
    why += library.loaded() ? "; install a driver that supports CUDA " + version_text(kOldestCuda) + " or later"
                            : "; install the NVIDIA driver; in a container, start it with the NVIDIA runtime";
    why += "; or run with backend: cpu";
    return false;
  }
  library.keep();
  out = loaded;
  return true;
}

bool load_nvml(const char* path, Nvml& out, std::string& why) {
  Nvml loaded;
  Library library(path);
#define MOED_TAKE(name, type) library.take(#name, loaded.name);
  MOED_NVML_FUNCTIONS(MOED_TAKE)
#undef MOED_TAKE
  if (!library.fault().empty()) {
    why = "NVML: " + library.fault() + "; it comes with the NVIDIA driver";
    return false;
  }
  if (const int result = loaded.nvmlInit_v2(); result != 0) {
    why = std::string("NVML: ") + path + " does not start (nvmlReturn_t " + std::to_string(result) +
          "); nvidia-smi fails likewise and says more";
    return false;
  }
  library.keep();
  out = loaded;
  return true;
}

const Driver* driver(std::string& why) {
  struct Once {
    Driver functions;
    std::string why;
    bool loaded = load_driver("libcuda.so.1", functions, why);
  };
  static const Once once;
  if (once.loaded) return &once.functions;
  why = once.why;
  return nullptr;
}

const Nvml* nvml() {
  struct Once {
    Nvml functions;
    std::string why;
    bool loaded = load_nvml("libnvidia-ml.so.1", functions, why);
  };
  static const Once once;
  return once.loaded ? &once.functions : nullptr;
}

std::string describe(const GpuFacts& gpu) {
  return "GPU " + std::to_string(gpu.ordinal) + " (" + gpu.name + ", " + gpu.uuid + ")";
}

int count_gpus(const Driver& driver, std::string& why) {
  int count = 0;
  CUresult result = driver.cuInit(0);
  if (result == CUDA_SUCCESS) result = driver.cuDeviceGetCount(&count);
  if (result == CUDA_SUCCESS && count > 0) return count;
  if (result == CUDA_SUCCESS || result == CUDA_ERROR_NO_DEVICE)
    why = "there is no GPU for this process" + visibility() +
          "; nvidia-smi shows those of the machine, a container gets them by --gpus or a resource claim; or run with "
          "backend: cpu";
  else
    why = "the CUDA driver does not start: " + driver.text(result) + visibility() +
          "; nvidia-smi shows whether driver and GPUs are healthy; or run with backend: cpu";
  return 0;
}

bool find_gpu(const Driver& driver, const Nvml* nvml, const std::string& device, GpuFacts& out, std::string& why) {
  const int count = count_gpus(driver, why);
  if (count == 0) return false;
  std::vector<GpuFacts> gpus, named;
  CUdevice handle = 0;
  for (int ordinal = 0; ordinal < count; ++ordinal) {
    GpuFacts gpu;
    CUdevice at = 0;
    if (!identify(driver, ordinal, gpu, at, why)) return false;
    gpus.push_back(gpu);
    if (!names(device, gpu)) continue;
    named.push_back(gpu);
    handle = at;
  }
  if (named.size() != 1) {
    why = "device: \"" + printable(device) + "\" names " + (named.empty() ? "no GPU" : "more than one GPU") + "; " +
          listing(gpus) + "; set device to an ordinal or a UUID of these";
    return false;
  }
  GpuFacts found = named.front();
  if (!read_facts(driver, handle, found, why)) return false;
  if (nvml != nullptr) read_nvml(*nvml, found);
  out = found;
  return true;
}

std::vector<std::string> gpu_faults(const GpuFacts& gpu, uint64_t needed_bytes) {
  std::vector<std::string> faults;
  const std::string who = describe(gpu);
  const std::string running = gpu.driver_version.empty() ? "" : " " + gpu.driver_version;
  if (std::ranges::find(kBuiltFor, std::array{gpu.major, gpu.minor}) == kBuiltFor.end())
    faults.push_back(who + " has compute capability " + std::to_string(gpu.major) + "." + std::to_string(gpu.minor) +
                     ", and this binary has kernels for 9.0, 10.0 and 10.3 alone; choose another GPU with device, or "
                     "run with backend: cpu");
  if (gpu.cuda < kOldestCuda)
    faults.push_back("driver" + running + " supports CUDA " + version_text(gpu.cuda) + ", and this binary needs " +
                     version_text(kOldestCuda) + "; install a later driver");
  if (!gpu.vmm)
    faults.push_back(who + ": driver" + running +
                     " offers no virtual memory management, in which all memory that peers and engines map is made; "
                     "install a later driver, or run outside a virtual machine that hides it");
  if (!gpu.wait_64)
    faults.push_back(who + ": driver" + running +
                     " offers no 64-bit waits in streams, by which idle lanes and engines wait; install a later "
                     "driver, or run outside a virtual machine that hides them");
  if (needed_bytes > gpu.free_bytes)
    faults.push_back(who + " has " + gib(gpu.free_bytes) + " of " + gib(gpu.total_bytes) + " free, and " +
                     gib(needed_bytes) +
                     " are needed; end what fills it (nvidia-smi lists it), lower limits.lanes, "
                     "limits.max_tokens or limits.arena_mb, or spread the experts over more ranks");
  return faults;
}

bool can_reach(const Driver& driver, int device, int peer, std::string& why) {
  if (device == peer) return true;
  const std::string pair = "GPU " + std::to_string(device) + " and GPU " + std::to_string(peer);
  int reaches = 0, whole = 0;
  CUdevice from = 0, to = 0;
  CUresult result = driver.cuDeviceGet(&from, device);
  if (result == CUDA_SUCCESS) result = driver.cuDeviceGet(&to, peer);
  if (result == CUDA_SUCCESS) result = driver.cuDeviceCanAccessPeer(&reaches, from, to);
  if (result == CUDA_SUCCESS && reaches != 0)
    result = driver.cuDeviceGetP2PAttribute(&whole, CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED, from, to);
  if (result != CUDA_SUCCESS)
    why = "whether " + pair + " reach each other cannot be told: " + driver.text(result);
  else if (reaches == 0)
    why = pair + " cannot map each other's memory";
  else if (whole == 0)
    why = pair + " reach each other over PCIe alone, which cuts lines of 128 bytes";
  else
    return true;
  why += "; use GPUs that NVLink connects (nvidia-smi topo -m shows them as NV)";
  return false;
}

}  // namespace moed::cuda

namespace moed {

/// More streams than queues would stop each other, and a kernel that is loaded when it is first launched waits for
/// every gate (design.md section 8).
void prepare_cuda() {
  const auto want = [](const char* name, const char* value, bool has) {
    if (!has) ::setenv(name, value, 1);
  };
  const char* loading = std::getenv("CUDA_MODULE_LOADING");
  const char* queues = std::getenv("CUDA_DEVICE_MAX_CONNECTIONS");
  if (std::getenv("CUDA_LAUNCH_BLOCKING") != nullptr)
    ::unsetenv("CUDA_LAUNCH_BLOCKING");  // a gate would block its bell
  want("CUDA_MODULE_LOADING", "EAGER", loading != nullptr && std::string_view(loading) == "EAGER");
  want("CUDA_DEVICE_MAX_CONNECTIONS", "32", queues != nullptr && std::atoi(queues) >= 32);
}

}  // namespace moed
