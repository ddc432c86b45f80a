// What moed asks of the CUDA driver before it uses a GPU, against a driver without GPUs: what is found, what is refused
// and with which words.
#include <gtest/gtest.h>

#include <cstdlib>
#include <cstring>
#include <initializer_list>

#include "kernels/cuda/driver.h"
#include "tests/support/fake_driver.h"

namespace moed::cuda {
namespace {

/// Whether `text` holds each of `parts`.
testing::AssertionResult says(const std::string& text, std::initializer_list<const char*> parts) {
  for (const char* part : parts)
    if (text.find(part) == text.npos)
      return testing::AssertionFailure() << "no \"" << part << "\" in \"" << text << '"';
  return testing::AssertionSuccess();
}

class CudaDriver : public testing::Test {
 protected:
  explicit CudaDriver(std::size_t gpus = 2) {
    fake::reset(gpus);
    ::unsetenv("CUDA_VISIBLE_DEVICES");
  }
  ~CudaDriver() override { EXPECT_EQ(fake::state().misuses, 0); }

  bool find(const std::string& device) { return find_gpu(fake_, nullptr, device, gpu_, why_); }

  const Driver fake_ = fake::driver();
  GpuFacts gpu_;
  std::string why_;
};

TEST(Library, AMachineWithoutADriverSaysWhichLibraryIsMissingAndWhatToDo) {
  Driver out;
  std::string why;
  EXPECT_FALSE(load_driver("/nowhere/libcuda.so.1", out, why));
  EXPECT_TRUE(says(
      why, {"/nowhere/libcuda.so.1 cannot be loaded", "No such file", "install the NVIDIA driver", "backend: cpu"}));
  Nvml nvml_out;
  EXPECT_FALSE(load_nvml("/nowhere/libnvidia-ml.so.1", nvml_out, why));
  EXPECT_TRUE(says(why, {"/nowhere/libnvidia-ml.so.1 cannot be loaded"}));
}

TEST(Library, OneThatLacksAFunctionIsRefusedByTheFunctionsName) {
  Driver out;
  std::string why;
  EXPECT_FALSE(load_driver("libz.so.1", out, why));
  EXPECT_TRUE(says(why, {"libz.so.1 has no function cuInit", "install a driver that supports CUDA 13.0"}));
  EXPECT_EQ(out.cuInit, nullptr);
  Nvml nvml_out;
  EXPECT_FALSE(load_nvml("libz.so.1", nvml_out, why));
  EXPECT_TRUE(says(why, {"libz.so.1 has no function nvmlInit_v2"}));
}

TEST(Library, TheProcessesOwnIsThereOrSaysWhyEveryTime) {
  for (int i = 0; i < 2; ++i) {
    std::string why;
    const Driver* own = driver(why);
    if (own != nullptr)
      EXPECT_NE(own->cuMemGetInfo, nullptr);
    else
      EXPECT_TRUE(says(why, {"libcuda.so.1", "backend: cpu"}));
  }
}

class CudaDriverWithoutGpus : public CudaDriver {
 protected:
  CudaDriverWithoutGpus() : CudaDriver(0) {}
};

TEST_F(CudaDriverWithoutGpus, SaysThatThereIsNoGpuAndWhatHidesThem) {
  EXPECT_FALSE(find("0"));
  EXPECT_TRUE(says(why_, {"there is no GPU for this process;", "backend: cpu"}));
  ::setenv("CUDA_VISIBLE_DEVICES", "", 1);
  EXPECT_FALSE(find("0"));
  EXPECT_TRUE(says(why_, {"CUDA_VISIBLE_DEVICES is \"\""}));
}

TEST_F(CudaDriver, ADriverThatDoesNotStartSaysItsError) {
  fake::state().failures["cuInit"] = {CUDA_ERROR_SYSTEM_DRIVER_MISMATCH, 0};
  EXPECT_EQ(count_gpus(fake_, why_), 0);
  EXPECT_TRUE(says(why_, {"does not start", "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH (system has unsupported"}));
}

TEST_F(CudaDriver, AnErrorWithoutANameIsANumber) { EXPECT_EQ(fake_.text(CUDA_ERROR_LAUNCH_FAILED), "CUDA error 719"); }

TEST_F(CudaDriver, AnOrdinalBeyondTheLastListsTheGpusThatThereAre) {
  for (const char* device : {"2", "3", "99999999999999999999", "-1", "", "gpu0"}) {
    EXPECT_FALSE(find(device)) << device;
    EXPECT_TRUE(says(why_, {"names no GPU", "sees 2 GPUs", "GPU 0 (NVIDIA H200, GPU-10111213-", "GPU 1 ("}));
  }
}

TEST_F(CudaDriver, AGpuIsFoundByItsOrdinalItsUuidOrTheBeginningOfThat) {
  for (const char* device : {"1", "GPU-20212223-2425-2627-2829-2a2b2c2d2e2f", "GPU-20", "MIG-2021"}) {
    ASSERT_TRUE(find(device)) << device << why_;
    EXPECT_EQ(gpu_.ordinal, 1);
  }
  EXPECT_EQ(gpu_.uuid, "GPU-20212223-2425-2627-2829-2a2b2c2d2e2f");
}

TEST_F(CudaDriver, AnUnknownUuidAndOneThatFitsTwoGpusAreRefused) {
  EXPECT_FALSE(find("GPU-77"));
  EXPECT_TRUE(says(why_, {"\"GPU-77\" names no GPU"}));
  fake::state().gpus[1].first_byte = fake::state().gpus[0].first_byte;
  EXPECT_FALSE(find("GPU-10"));
  EXPECT_TRUE(says(why_, {"more than one GPU"}));
}

TEST_F(CudaDriver, FactsAreReadAndTheContextIsKept) {
  fake::state().gpus[0].used = 1 << 20;
  ASSERT_TRUE(find("0")) << why_;
  EXPECT_EQ(gpu_.name, "NVIDIA H200");
  EXPECT_EQ(gpu_.cuda, 13000);
  EXPECT_EQ(gpu_.major, 9);
  EXPECT_EQ(gpu_.minor, 0);
  EXPECT_EQ(gpu_.multiprocessors, 132);
  EXPECT_EQ(gpu_.total_bytes, uint64_t{64} << 20);
  EXPECT_EQ(gpu_.free_bytes, uint64_t{63} << 20);
  EXPECT_TRUE(gpu_.vmm && gpu_.fd_handles && gpu_.fabric_handles && gpu_.wait_64);
  EXPECT_EQ(gpu_.driver_version, "");
  EXPECT_EQ(gpu_.nvlinks, 0U);
  EXPECT_EQ(fake::state().gpus[0].contexts, 1) << "ending a context waits for the lanes of other GPUs";
  EXPECT_EQ(fake::state().held(), 1);
  EXPECT_EQ(fake::current, nullptr);
}

TEST_F(CudaDriver, NvmlAddsTheDriversVersionLinksAndFabric) {
  Nvml nvml;
  nvml.nvmlSystemGetDriverVersion = [](char* out, unsigned) {
    std::strcpy(out, "580.159.04");
    return 0;
  };
  nvml.nvmlDeviceGetHandleByUUID = [](const char* uuid, NvmlDevice*) {
    return std::string(uuid) == "GPU-10111213-1415-1617-1819-1a1b1c1d1e1f" ? 0 : 2;
  };
  nvml.nvmlDeviceGetNvLinkState = [](NvmlDevice, unsigned link, unsigned* state) {
    *state = link == 4 ? 0 : 1;  // one is down, beyond the sixth there is none
    return link < 6 ? 0 : 2;
  };
  nvml.nvmlDeviceGetGpuFabricInfoV = [](NvmlDevice, NvmlFabric* out) {
    if (out->version != 0x2000024) return 25;  // the argument's version does not match
    out->cluster[15] = 0xab;
    out->clique = 7;
    out->state = 3;
    return 0;
  };
  ASSERT_TRUE(find_gpu(fake_, &nvml, "0", gpu_, why_)) << why_;
  EXPECT_EQ(gpu_.driver_version, "580.159.04");
  EXPECT_EQ(gpu_.nvlinks, 5U);
  EXPECT_EQ(gpu_.fabric, "000000000000000000000000000000ab.7");
  ASSERT_TRUE(find_gpu(fake_, &nvml, "1", gpu_, why_)) << "a GPU that NVML does not know: " << why_;
  EXPECT_EQ(gpu_.nvlinks, 0U);
}

TEST_F(CudaDriver, AGpuThatAnotherProcessHoldsExclusivelySaysSo) {
  fake::state().failures["cuDevicePrimaryCtxRetain"] = {CUDA_ERROR_DEVICE_UNAVAILABLE, 0};
  EXPECT_FALSE(find("0"));
  EXPECT_TRUE(says(why_, {"GPU 0 (NVIDIA H200", "does not let this process in", "busy or unavailable", "nvidia-smi"}));
}

TEST_F(CudaDriver, EveryCallThatFailsWhileAGpuIsReadIsReportedAndLeavesNoContext) {
  for (const char* function :
       {"cuInit", "cuDeviceGetCount", "cuDeviceGet", "cuDeviceGetName", "cuDeviceGetUuid", "cuDriverGetVersion",
        "cuDeviceTotalMem", "cuDevicePrimaryCtxRetain", "cuCtxGetCurrent", "cuCtxSetCurrent", "cuMemGetInfo"}) {
    fake::state().failures = {{function, {CUDA_ERROR_OUT_OF_MEMORY, 0}}};
    why_.clear();
    EXPECT_FALSE(find("0")) << function;
    EXPECT_TRUE(says(why_, {"CUDA_ERROR_OUT_OF_MEMORY"})) << function;
    EXPECT_EQ(fake::state().held(), 0) << function;
  }
}

TEST_F(CudaDriver, ASoundGpuHasNoFaults) {
  for (const auto& [major, minor] : {std::pair{9, 0}, {10, 0}, {10, 3}}) {
    fake::state().gpus[0].attributes[CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR] = major;
    fake::state().gpus[0].attributes[CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR] = minor;
    ASSERT_TRUE(find("0")) << why_;
    EXPECT_TRUE(gpu_faults(gpu_, gpu_.free_bytes).empty()) << gpu_faults(gpu_, gpu_.free_bytes).front();
  }
}

TEST_F(CudaDriver, ArchitecturesWithoutKernelsAreRefused) {
  for (const auto& [major, minor] : {std::pair{8, 0}, {8, 9}, {10, 1}, {11, 0}, {12, 0}}) {
    fake::state().gpus[0].attributes[CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR] = major;
    fake::state().gpus[0].attributes[CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR] = minor;
    ASSERT_TRUE(find("0")) << why_;
    const auto faults = gpu_faults(gpu_, 0);
    ASSERT_EQ(faults.size(), 1U);
    const std::string capability = std::to_string(major) + "." + std::to_string(minor);
    EXPECT_TRUE(says(faults[0], {"GPU 0 (", capability.c_str(), "9.0, 10.0 and 10.3", "backend: cpu"}));
  }
}

TEST_F(CudaDriver, ADriverTooOldOrWithoutWhatIsNeededIsRefusedWithEachReason) {
  fake::state().cuda = 12040;
  fake::state().gpus[0].attributes[CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED] = 0;
  fake::state().gpus[0].attributes[CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS] = 0;
  ASSERT_TRUE(find("0")) << why_;
  const auto faults = gpu_faults(gpu_, 0);
  ASSERT_EQ(faults.size(), 3U);
  EXPECT_TRUE(says(faults[0], {"supports CUDA 12.4", "needs 13.0", "install a later driver"}));
  EXPECT_TRUE(says(faults[1], {"no virtual memory management", "install a later driver"}));
  EXPECT_TRUE(says(faults[2], {"no 64-bit waits", "install a later driver"}));
}

TEST_F(CudaDriver, TooLittleFreeMemoryNamesNeededFreeAndTotal) {
  fake::state().gpus[0].total = uint64_t{140} << 30;
  fake::state().gpus[0].used = uint64_t{100} << 30;
  ASSERT_TRUE(find("0")) << why_;
  EXPECT_TRUE(gpu_faults(gpu_, uint64_t{40} << 30).empty());
  const auto faults = gpu_faults(gpu_, (uint64_t{81} << 29) + 1);
  ASSERT_EQ(faults.size(), 1U);
  EXPECT_TRUE(says(faults[0], {"GPU 0 (", "40.00 GiB of 140.00 GiB free", "40.50 GiB are needed", "limits.lanes"}));
}

TEST_F(CudaDriver, AGpuReachesItselfAndPeersOverNvlinkAlone) {
  ASSERT_EQ(count_gpus(fake_, why_), 2);
  EXPECT_TRUE(can_reach(fake_, 0, 1, why_)) << why_;
  fake::state().nvlink = false;
  EXPECT_FALSE(can_reach(fake_, 0, 1, why_));
  EXPECT_TRUE(says(why_, {"GPU 0 and GPU 1", "PCIe alone", "nvidia-smi topo -m"}));
  fake::state().apart = {{0, 1}};
  EXPECT_FALSE(can_reach(fake_, 1, 0, why_));
  EXPECT_TRUE(says(why_, {"GPU 1 and GPU 0 cannot map each other's memory", "NVLink"}));
  EXPECT_TRUE(can_reach(fake_, 0, 0, why_));
  fake::state().failures["cuDeviceCanAccessPeer"] = {CUDA_ERROR_INVALID_VALUE, 0};
  EXPECT_FALSE(can_reach(fake_, 0, 1, why_));
  EXPECT_TRUE(says(why_, {"cannot be told: CUDA_ERROR_INVALID_VALUE"}));
}

}  // namespace
}  // namespace moed::cuda
