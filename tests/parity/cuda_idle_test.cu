// The GPU of an idle daemon is idle. A probe has one block a multiprocessor, each with all the shared memory that there
// is, and finds whether all of them are resident at the same time: then no other block is.
#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "kernels/cuda/memory.h"
#include "kernels/cuda/ptx.cuh"
#include "tests/support/gpu.h"
#include "tests/support/played_peer.h"

namespace moed {
namespace {

using test::Engine;
using test::status_of;
using test::World;
using test::WorldOptions;

constexpr uint32_t kRanks = 2, kTokens = 5;
constexpr Nanos kRest = 300'000'000;  ///< far more than a daemon waits before it leaves the GPU alone
constexpr Nanos kLongest = 2'000'000'000;
/// What all blocks of a grid need to begin, many times over, and well below the 0.7 ms of a loop.
constexpr Nanos kAtOnce = 200'000;
constexpr int kTries = 20, kMost = 17;  ///< an idle GPU does better than kMost, a busy one does not

/// How many blocks have begun, and how many of them saw all.
struct Counts {
  uint32_t begun, saw_all;
};

/// No block leaves before it has seen all or its time is over: when all have seen all, they were there together.
__global__ void __launch_bounds__(1024) count_in(Counts* counts, uint64_t longest) {
  if (threadIdx.x == 0) {
    const uint64_t until = cuda::global_time() + longest;
    atomicAdd(&counts->begun, 1U);
    bool all = false;
    do {
      all = cuda::load_u32(&counts->begun) == gridDim.x;
    } while (!all && cuda::global_time() < until);
    if (all) atomicAdd(&counts->saw_all, 1U);
  }
  __syncthreads();
}

/// The probe of one GPU.
class Probe {
 public:
  explicit Probe(int gpu) : gpu_(gpu), memory_(test::loaded_driver(), gpu), copies_(gpu) {
    std::string why;
    counts_ = memory_.make(sizeof(Counts), std::nullopt, why);
    if (!counts_) throw std::runtime_error(why);
    need(cudaDeviceGetAttribute(&blocks_, cudaDevAttrMultiProcessorCount, gpu), "multiprocessors");
    need(cudaDeviceGetAttribute(&bytes_, cudaDevAttrMaxSharedMemoryPerBlockOptin, gpu), "shared memory");
    need(cudaFuncSetAttribute(count_in, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes_), "shared memory");
  }

  int blocks() const { return blocks_; }

  /// Blocks that were resident together with all others, none of which waited longer than `longest`.
  int together(Nanos longest) {
    constexpr Counts none = {};
    Counts counts = {};
    copies_.to_gpu(counts_.as<void>(), &none, sizeof none);  // makes the GPU this thread's, too
    count_in<<<blocks_, 1024, static_cast<size_t>(bytes_), copies_.stream()>>>(counts_.as<Counts>(), longest);
    need(cudaGetLastError(), "launch");
    copies_.from_gpu(&counts, counts_.as<void>(), sizeof counts);
    if (static_cast<int>(counts.begun) != blocks_)
      throw std::runtime_error("only " + std::to_string(counts.begun) + " blocks of the probe have run");
    return static_cast<int>(counts.saw_all);
  }
  bool at_once() { return together(kAtOnce) == blocks_; }

 private:
  static void need(cudaError_t e, const char* what) {
    if (e != cudaSuccess) throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(e));
  }

  const int gpu_;
  cuda::Memory memory_;
  test::Copies copies_;
  cuda::Allocation counts_;
  int blocks_ = 0, bytes_ = 0;
};

class CudaIdle : public test::GpusTest {
 protected:
  void SetUp() override {
    test::GpusTest::SetUp();
    if (IsSkipped()) return;
    if (std::getenv("MOED_NO_PARK") != nullptr) GTEST_SKIP() << "MOED_NO_PARK keeps the GPU busy";
    WorldOptions o;
    o.shape = shape();
    o.ranks = kRanks;
    o.lanes = 1;
    o.max_tokens = 16;
    world_ = std::make_unique<World>(spread(o));
    for (uint32_t r = 0; r < kRanks; ++r) engines_.push_back(world_->engine(r));
    for (int gpu = 0; gpu < GetParam(); ++gpu) probes_.push_back(std::make_unique<Probe>(gpu));
  }

  static Shape shape() { return make_shape(7168, 3584, 3072, 896, 16); }

  /// A call of a rank, which both ranks serve; every answer is another one. Whether the probe, if there is one, has
  /// found the GPU idle right behind it.
  bool call(uint32_t rank, Probe* probe = nullptr) {
    const oracle::Rows rows = make_rows(Routing::random, shape(), kRanks, kTokens, ++seed_);
    Reply reply{};
    const std::vector<uint16_t> got = engines_[rank]->run(test::job_of(rows, kIdentityLayer, kFlagNoNorm), reply);
    const bool idle = probe != nullptr && probe->at_once();
    EXPECT_EQ(status_of(reply), Status::ok) << name(status_of(reply));
    const std::vector<uint16_t> want = oracle::routed(oracle_layer(shape()), rows, kRanks).latent;
    EXPECT_EQ(test::first_difference(got, want, shape().latent, 0), "") << "call " << seed_ << ", rank " << rank;
    return idle;
  }

  std::unique_ptr<World> world_;
  std::vector<std::unique_ptr<Engine>> engines_;
  std::vector<std::unique_ptr<Probe>> probes_;
  uint64_t seed_ = 0;
};

TEST_P(CudaIdle, NothingOfADaemonThatNobodyCallsIsOnItsGpu) {
  for (uint32_t i = 0; i < 10; ++i) call(i % kRanks);
  for (uint32_t gpu = 0; gpu < probes_.size(); ++gpu) {  // loops wait for the next call, so the probe can fail
    int idle = 0;
    for (int i = 0; i < kTries; ++i) idle += call(gpu, probes_[gpu].get()) ? 1 : 0;
    std::printf("GPU %u: idle for %d of %d probes right behind a call\n", gpu, idle, kTries);
    EXPECT_LE(idle, kMost) << "GPU " << gpu;
  }
  std::this_thread::sleep_for(std::chrono::nanoseconds(kRest));  // the service loops go on
  for (uint32_t gpu = 0; gpu < probes_.size(); ++gpu) {
    EXPECT_EQ(probes_[gpu]->together(kLongest), probes_[gpu]->blocks()) << "GPU " << gpu;
    // A loop ends after a millisecond, and a probe that waits longer finds room then. What is idle has it at once.
    int idle = 0;
    for (int i = 0; i < kTries; ++i) idle += probes_[gpu]->at_once() ? 1 : 0;
    std::printf("GPU %u: idle for %d of %d probes after a rest\n", gpu, idle, kTries);
    EXPECT_GT(idle, kMost) << "GPU " << gpu;
  }
  for (uint32_t i = 0; i < 10; ++i) call(i % kRanks);
}

INSTANTIATE_TEST_SUITE_P(On, CudaIdle, testing::Values(1, 2), test::gpus_name);

}  // namespace
}  // namespace moed
