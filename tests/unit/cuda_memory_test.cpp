// GPU memory that several parties map, against a driver without GPUs whose memory is real: what one writes the others
// read, what is refused and with which words, and that whatever fails on the way leaves nothing behind.
#include "kernels/cuda/memory.h"

#include <fcntl.h>
#include <gtest/gtest.h>

#include <initializer_list>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

#include "tests/support/fake_driver.h"

namespace moed::cuda {
namespace {

testing::AssertionResult says(const std::string& text, std::initializer_list<const char*> parts) {
  for (const char* part : parts)
    if (text.find(part) == text.npos)
      return testing::AssertionFailure() << "no \"" << part << "\" in \"" << text << '"';
  return testing::AssertionSuccess();
}

constexpr uint32_t bit(HandleKind kind) { return 1U << static_cast<uint32_t>(kind); }

class CudaMemory : public testing::Test {
 protected:
  CudaMemory() {
    fake::reset(2);
    EXPECT_EQ(count_gpus(fake_, why_), 2);
  }
  ~CudaMemory() override {
    EXPECT_EQ(fake::state().held(), 0) << "something was not given back";
    EXPECT_EQ(fake::state().misuses, 0);
    EXPECT_EQ(fake::state().gpus[0].used + fake::state().gpus[1].used, 0U);
  }
  static void fail(const char* function, CUresult result, int after = 0) {
    fake::state().failures = {{function, {result, after}}};
  }

  const Driver fake_ = fake::driver();
  std::string why_;
};

TEST_F(CudaMemory, NewMemoryIsWritableInWholeGranulesAndGoneAfterwards) {
  Memory memory(fake_, 0);
  EXPECT_EQ(memory.granularity(), fake::kGranule);
  {
    const Allocation made = memory.make(fake::kGranule + 1, std::nullopt, why_);
    ASSERT_TRUE(made) << why_;
    EXPECT_EQ(made.bytes(), fake::kGranule + 1);
    EXPECT_EQ(made.mapped_bytes(), 2 * fake::kGranule);
    made.as<uint8_t>()[2 * fake::kGranule - 1] = 7;
    EXPECT_EQ(fake::state().gpus[0].used, 2 * fake::kGranule);
  }
  EXPECT_EQ(fake::state().gpus[0].used, 0U);
  EXPECT_TRUE(memory.make(fake::kGranule, std::nullopt, why_)) << why_;
}

TEST_F(CudaMemory, WhatOneWritesEveryHolderOfADescriptorReadsAlsoAfterTheMakerIsGone) {
  Memory maker(fake_, 0), peer(fake_, 1);
  Allocation made = maker.make(1000, HandleKind::cuda_fd, why_);
  Fd fd;
  ASSERT_TRUE(made && maker.export_fd(made, fd, why_)) << why_;
  EXPECT_EQ(::fcntl(fd.get(), F_GETFD) & FD_CLOEXEC, FD_CLOEXEC) << "children must not inherit GPU memory";
  const Allocation taken = peer.import_fd(fd, 1000, why_);
  ASSERT_TRUE(taken) << why_;
  EXPECT_EQ(taken.bytes(), 1000U);
  EXPECT_NE(taken.address(), made.address());
  made.as<uint64_t>()[124] = 0x1234;
  taken.as<uint64_t>()[0] = 0x5678;
  EXPECT_EQ(taken.as<uint64_t>()[124], 0x1234U);
  EXPECT_EQ(made.as<uint64_t>()[0], 0x5678U);
  made.reset();
  EXPECT_FALSE(made);
  EXPECT_EQ(taken.as<uint64_t>()[124], 0x1234U);
  ASSERT_TRUE(peer.import_fd(fd, 1000, why_)) << "a restarted daemon takes it again: " << why_;
}

TEST_F(CudaMemory, TheSameByAFabricHandleAndWithinAProcess) {
  Memory maker(fake_, 0), peer(fake_, 1);
  const Allocation made = maker.make(1000, HandleKind::fabric, why_);
  FabricToken token{};
  ASSERT_TRUE(made && maker.export_fabric(made, token, why_)) << why_;
  const Allocation far = peer.import_fabric(token, 1000, why_);
  ASSERT_TRUE(far) << why_;
  Allocation near = peer.import_local(made, why_);
  ASSERT_TRUE(near) << why_;
  EXPECT_EQ(near.bytes(), 1000U);
  made.as<int>()[5] = 55;
  EXPECT_EQ(far.as<int>()[5], 55);
  EXPECT_EQ(near.as<int>()[5], 55);
  fake::state().by_token.clear();
}

TEST_F(CudaMemory, MappingsOfAProcessOutliveWhoeverMadeTheMemory) {
  Allocation near;
  {
    Memory maker(fake_, 0), peer(fake_, 1);
    const Allocation made = maker.make(1000, std::nullopt, why_);
    made.as<int>()[5] = 55;
    near = peer.import_local(made, why_);
    ASSERT_TRUE(near) << why_;
  }
  EXPECT_EQ(near.as<int>()[5], 55);
  EXPECT_EQ(fake::state().gpus[1].contexts, 1) << "the context lives as long as a mapping of it";
}

TEST_F(CudaMemory, MovedMemoryIsReleasedOnceAndWhatItReplacesAtOnce) {
  Memory memory(fake_, 0);
  Allocation first = memory.make(1, std::nullopt, why_);
  const CUdeviceptr at = first.address();
  Allocation second = memory.make(1, std::nullopt, why_);
  second = std::move(first);
  EXPECT_EQ(fake::state().gpus[0].used, fake::kGranule);
  EXPECT_EQ(second.address(), at);
  EXPECT_EQ(first.address(), 0U);  // NOLINT(bugprone-use-after-move): empty is what a moved one is
}

TEST_F(CudaMemory, TheCallersContextIsPutBack) {
  Memory memory(fake_, 0), other(fake_, 1);
  fake::current = fake::context_of(1);
  {
    const Allocation made = memory.make(1, std::nullopt, why_);
    EXPECT_EQ(fake::current, fake::context_of(1));
    fail("cuMemMap", CUDA_ERROR_OUT_OF_MEMORY);
    EXPECT_FALSE(memory.make(1, std::nullopt, why_));
    EXPECT_EQ(fake::current, fake::context_of(1));
  }
  EXPECT_EQ(fake::current, fake::context_of(1));
}

TEST_F(CudaMemory, MoreThanThereIsIsRefusedWithWhatWasAskedAndWhatIsFree) {
  Memory memory(fake_, 0);
  const Allocation most = memory.make(uint64_t{63} << 20, std::nullopt, why_);
  ASSERT_TRUE(most) << why_;
  EXPECT_FALSE(memory.make(uint64_t{2} << 20, std::nullopt, why_));
  EXPECT_TRUE(says(why_, {"GPU 0 (NVIDIA H200) gives no 2097152 bytes", "of 67108864 bytes 1048576 bytes are free",
                          "CUDA_ERROR_OUT_OF_MEMORY", "limits.arena_mb"}));
}

TEST_F(CudaMemory, NothingAndMoreThanANumberHoldsAreRefused) {
  Memory memory(fake_, 0);
  for (const uint64_t bytes : {uint64_t{0}, UINT64_MAX, UINT64_MAX - fake::kGranule + 1}) {
    why_.clear();
    EXPECT_FALSE(memory.make(bytes, std::nullopt, why_));
    EXPECT_TRUE(says(why_, {"bytes of memory were asked for", std::to_string(bytes).c_str()}));
  }
}

TEST_F(CudaMemory, HandleKindsThatAreNotTheGpusAreRefused) {
  Memory memory(fake_, 0);
  for (const HandleKind kind : {HandleKind::memfd, HandleKind::address}) {
    EXPECT_FALSE(memory.make(1, kind, why_));
    EXPECT_TRUE(says(why_, {"cuda_fd (2) or fabric (3)"}));
  }
}

TEST_F(CudaMemory, MemoryThatWasNotMadeToBeGivenAwayIsNot) {
  Memory memory(fake_, 0);
  const Allocation made = memory.make(1, std::nullopt, why_);
  Fd fd;
  EXPECT_FALSE(memory.export_fd(made, fd, why_));
  EXPECT_FALSE(fd);
  EXPECT_TRUE(says(why_, {"GPU 0", "gives no descriptor of 1 bytes", "CUDA_ERROR_INVALID_VALUE"}));
  FabricToken token{};
  EXPECT_FALSE(memory.export_fabric(made, token, why_));
  EXPECT_TRUE(says(why_, {"gives no fabric handle", "IMEX"}));
}

TEST_F(CudaMemory, AHandleForLessThanItSaysOrForNoMemoryIsRefused) {
  Memory maker(fake_, 0), peer(fake_, 1);
  const Allocation made = maker.make(1000, HandleKind::cuda_fd, why_);
  Fd fd;
  ASSERT_TRUE(maker.export_fd(made, fd, why_)) << why_;
  EXPECT_FALSE(peer.import_fd(fd, fake::kGranule + 1, why_));
  EXPECT_TRUE(says(why_, {"GPU 1", "does not map 131072 bytes", "smaller than it says"}));
  const Fd file = make_sealed_memory("no-gpu-memory", 1000);
  EXPECT_FALSE(peer.import_fd(file, 1000, why_));
  EXPECT_TRUE(says(why_, {"GPU 1", "does not take 1000 bytes", "descriptor", "this host"}));
  EXPECT_FALSE(peer.import_fd(Fd(), 1000, why_));
  EXPECT_TRUE(says(why_, {"without its descriptor"}));
  EXPECT_FALSE(peer.import_fabric(FabricToken{}, 1000, why_));
  EXPECT_TRUE(says(why_, {"fabric handle", "IMEX channel"}));
  EXPECT_FALSE(peer.import_local(Allocation(), why_));
  EXPECT_TRUE(says(why_, {"that is not there"}));
}

TEST_F(CudaMemory, APeerOutOfReachIsRefusedWithWhatItTakes) {
  Memory maker(fake_, 0), peer(fake_, 1);
  const Allocation made = maker.make(1000, HandleKind::cuda_fd, why_);
  Fd fd;
  ASSERT_TRUE(maker.export_fd(made, fd, why_)) << why_;
  fake::state().apart = {{0, 1}};
  EXPECT_FALSE(peer.import_fd(fd, 1000, why_));
  EXPECT_TRUE(says(why_, {"GPU 1 (NVIDIA H200) cannot reach", "CUDA_ERROR_PEER_ACCESS_UNSUPPORTED", "NVLink domain"}));
  EXPECT_FALSE(peer.import_local(made, why_));
  EXPECT_TRUE(maker.import_fd(fd, 1000, why_)) << "its own it reaches: " << why_;
}

TEST_F(CudaMemory, AGpuThatDoesNotLetUsInSaysSoAtEveryUse) {
  fail("cuDevicePrimaryCtxRetain", CUDA_ERROR_DEVICE_UNAVAILABLE);
  Memory memory(fake_, 1);
  fake::state().failures.clear();
  EXPECT_EQ(memory.granularity(), 0U);
  EXPECT_FALSE(memory.make(1, std::nullopt, why_));
  EXPECT_TRUE(says(why_, {"GPU 1 (NVIDIA H200) does not let this process in", "busy or unavailable"}));
  why_.clear();
  EXPECT_EQ(probe_handle_kinds(memory, why_), 0U);
  EXPECT_TRUE(says(why_, {"does not let this process in"}));
  Memory none(fake_, 9);
  EXPECT_FALSE(none.make(1, std::nullopt, why_));
  EXPECT_TRUE(says(why_, {"GPU 9 does not let this process in"}));
}

TEST_F(CudaMemory, TheProbeBelievesWhatWorksNotTheAttributes) {
  Memory memory(fake_, 0);
  EXPECT_EQ(probe_handle_kinds(memory, why_), bit(HandleKind::cuda_fd) | bit(HandleKind::fabric)) << why_;
  EXPECT_EQ(why_, "");
  fake::state().by_token.clear();
  fail("cuMemCreate", CUDA_ERROR_NOT_PERMITTED, 1);  // the second is the fabric one
  EXPECT_EQ(probe_handle_kinds(memory, why_), bit(HandleKind::cuda_fd));
  EXPECT_TRUE(says(why_, {"CUDA_ERROR_NOT_PERMITTED", "IMEX channel", "nvidia-imex-ctl -N"}));
  fail("cuMemImportFromShareableHandle", CUDA_ERROR_NOT_PERMITTED, 1);
  EXPECT_EQ(probe_handle_kinds(memory, why_), bit(HandleKind::cuda_fd));
  EXPECT_TRUE(says(why_, {"fabric handle: CUDA_ERROR_NOT_PERMITTED"}));
  fake::state().by_token.clear();
  fail("cuMemExportToShareableHandle", CUDA_ERROR_NOT_PERMITTED);
  EXPECT_EQ(probe_handle_kinds(memory, why_), 0U);
  EXPECT_TRUE(says(why_, {"gives no descriptor", "gives no fabric handle"}));
}

/// Everything that a rank does with memory, the fabric apart; false with `why` at the first that fails.
bool use_all(const Driver& driver, std::string& why) {
  Memory memory(driver, 0), peer(driver, 1);
  const Allocation made = memory.make(1000, HandleKind::cuda_fd, why);
  Fd fd;
  if (!made || !memory.export_fd(made, fd, why)) return false;
  const Allocation taken = peer.import_fd(fd, 1000, why);
  if (!taken) return false;
  return static_cast<bool>(peer.import_local(made, why));
}

TEST_F(CudaMemory, WhicheverCallFailsEverythingBeforeItIsUndone) {
  for (const char* function :
       {"cuDeviceGet", "cuDeviceGetName", "cuDevicePrimaryCtxRetain", "cuCtxGetCurrent", "cuCtxSetCurrent",
        "cuMemGetAllocationGranularity", "cuMemCreate", "cuMemAddressReserve", "cuMemMap", "cuMemSetAccess",
        "cuMemExportToShareableHandle", "cuMemImportFromShareableHandle", "cuMemRetainAllocationHandle"}) {
    int failed = 0;
    for (bool worked = false; !worked; ++failed) {
      ASSERT_LT(failed, 100) << function;
      fake::state().failures = {{function, {CUDA_ERROR_INVALID_VALUE, failed}}};
      why_.clear();
      worked = use_all(fake_, why_);
      EXPECT_TRUE(worked || says(why_, {"GPU ", "CUDA_ERROR_INVALID_VALUE"})) << function << " call " << failed;
      EXPECT_EQ(fake::state().held(), 0) << function << " call " << failed;
    }
    EXPECT_GT(failed, 1) << function << " is never called";
  }
}

TEST_F(CudaMemory, ThreadsMakeGiveTakeAndReleaseAtOnce) {
  std::vector<std::thread> threads;
  std::vector<std::string> faults(4);
  for (std::string& fault : faults)
    threads.emplace_back([&] {
      for (int i = 0; i < 50 && fault.empty(); ++i)
        if (!use_all(fake_, fault) && fault.empty()) fault = "failed without a reason";
    });
  for (std::thread& thread : threads) thread.join();
  for (const std::string& fault : faults) EXPECT_EQ(fault, "");
}

}  // namespace
}  // namespace moed::cuda
