// Worlds on GPUs: what a test says where there are none, and how ranks are spread over those that there are.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <utility>

#include "kernels/backend.h"
#include "tests/support/jobs.h"
#include "tests/support/world.h"

namespace moed::test {

/// Why worlds cannot run on the first `wanted` GPUs here; empty: they can.
inline std::string why_no_gpus(int wanted) {
  const int have = gpu_count();
  std::string why;
  for (int gpu = 0; gpu < std::clamp(have, 1, wanted); ++gpu) {
    BackendOptions options;
    options.shape = small_shape();
    options.in_process = true;
    options.device = std::to_string(gpu);
    for (const std::string& sentence : gpu_missing(options)) why += (why.empty() ? "" : " ") + sentence;
  }
  if (why.empty() && have < wanted)
    why = "needs " + std::to_string(wanted) + " GPUs, this process can use " + std::to_string(have);
  return why;
}

/// Skips the running test, with the reason, where `wanted` GPUs are not to be had. For SetUp().
inline void skip_without_gpus(int wanted) {
  if (const std::string why = why_no_gpus(wanted); !why.empty()) GTEST_SKIP() << why;
}

/// GPUs to spread ranks over: two where there are two, else one.
inline int gpus_to_use() { return std::min(gpu_count(), 2); }

/// Rank r of the world on GPU r modulo `gpus`.
inline WorldOptions on_gpus(WorldOptions options, int gpus) {
  options.make = make_cuda_backend;
  options.devices.clear();
  for (int gpu = 0; gpu < gpus; ++gpu) options.devices.push_back(std::to_string(gpu));
  return options;
}

/// A test that needs one GPU.
class GpuTest : public testing::Test {
 protected:
  void SetUp() override { skip_without_gpus(1); }
};

/// A test that runs with the ranks on one GPU and again spread over two; the second is skipped where there is one.
class GpusTest : public testing::TestWithParam<int> {
 protected:
  void SetUp() override { skip_without_gpus(GetParam()); }
  WorldOptions spread(WorldOptions options) const { return on_gpus(std::move(options), GetParam()); }
};

inline std::string gpus_name(const testing::TestParamInfo<int>& info) {
  return std::to_string(info.param) + (info.param == 1 ? "Gpu" : "Gpus");
}

}  // namespace moed::test
