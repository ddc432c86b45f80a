// What speaks against `backend: cuda` is one sentence with a remedy and an exit code of its own, at start, before any
// weight is read. Without a GPU all but the last tests run: a driver that cannot be loaded is made where there is one.
#include <gtest/gtest.h>

#include <cstdlib>
#include <fstream>
#include <string>
#include <vector>

#include "tests/support/binaries.h"
#include "tests/support/daemons.h"
#include "tests/support/gpus_here.h"
#include "tests/support/process.h"

namespace moed {
namespace {

using Words = std::vector<std::string>;

struct Outcome {
  int exit = -1;     ///< -1: it did not end within 30 s
  std::string text;  ///< stdout and stderr
};

/// Runs the daemon's binary with an environment of its own to the end.
Outcome run_moed(const Words& environment, const Words& arguments) {
  const test::TempDir dir;
  Words all{"/usr/bin/env"};
  all.insert(all.end(), environment.begin(), environment.end());
  all.push_back(test::moed_binary());
  all.insert(all.end(), arguments.begin(), arguments.end());
  if (arguments[0] == "serve") all.insert(all.end(), {"--set", "run_dir=" + dir.path(), "--set", "http.listen="});
  const std::string log = dir.path() + "/log";
  const pid_t pid = test::spawn(all, log);
  const int status = test::wait_for(pid, 30'000);
  if (status == -1) {
    ::kill(pid, SIGKILL);
    ::waitpid(pid, nullptr, 0);
  }
  return {status != -1 && WIFEXITED(status) ? WEXITSTATUS(status) : -1, test::read_file(log)};
}

/// A machine whose driver cannot be loaded: what the loader finds first under that name is no library.
class BrokenDriver {
 public:
  BrokenDriver() { std::ofstream(dir_.path() + "/libcuda.so.1") << "no library\n"; }
  Words environment() const {
    const char* others = std::getenv("LD_LIBRARY_PATH");  // the program's own libraries may lie there
    return {"LD_LIBRARY_PATH=" + dir_.path() + (others == nullptr ? "" : std::string(":") + others)};
  }

 private:
  test::TempDir dir_;
};

/// Exactly one error, and it is that of the exit.
void expect_refused(const Outcome& o, int exit, const Words& parts) {
  EXPECT_EQ(o.exit, exit) << o.text;
  EXPECT_NE(o.text.find(" error ending reason=\""), std::string::npos) << o.text;
  EXPECT_NE(o.text.find("\" exit=" + std::to_string(exit) + "\n"), std::string::npos) << o.text;
  EXPECT_EQ(o.text.find(" error "), o.text.rfind(" error ")) << o.text;
  for (const std::string& part : parts) EXPECT_NE(o.text.find(part), std::string::npos) << part << " in\n" << o.text;
}

TEST(CudaRefused, InABuildWithoutIt) {
  if (test::built_with_cuda()) GTEST_SKIP() << "this build has the CUDA back end";
  expect_refused(run_moed({}, {"serve", "--set", "backend=cuda"}), 65,
                 {"backend = cuda, but this build has the cpu back end only"});
  EXPECT_NE(
      run_moed({}, {"check", "--set", "backend=cuda"}).text.find("\n  cuda: this build has the cpu back end only"),
      std::string::npos);
}

class CudaRefusal : public testing::Test {
 protected:
  void SetUp() override {
    if (!test::built_with_cuda()) GTEST_SKIP() << "this build has no CUDA back end";
  }
};

TEST_F(CudaRefusal, WithoutADriver) {
  const BrokenDriver broken;
  expect_refused(run_moed(broken.environment(), {"serve", "--set", "backend=cuda"}), 71,
                 {"libcuda.so.1", "install the NVIDIA driver"});
}

TEST_F(CudaRefusal, WithoutADriverBeforeTheWeightsAreMade) {
  const BrokenDriver broken;
  const Words large{
      "serve",
      "--set",
      "backend=cuda",
      "--set",
      "model.source=synthetic",
      "--set",
      "model.shape={hidden: 7168, latent: 3584, intermediate: 3072, experts: 896, top_k: 16, layers: 92}"};
  expect_refused(run_moed(broken.environment(), large), 71, {"libcuda.so.1"});
}

TEST_F(CudaRefusal, CheckSaysTheSameAndPrintsTheBytes) {
  const BrokenDriver broken;
  const Outcome o = run_moed(broken.environment(), {"check", "--set", "backend=cuda"});
  EXPECT_EQ(o.exit, 0) << o.text;
  const auto lacks = o.text.find("\nthis machine lacks\n");
  ASSERT_NE(lacks, std::string::npos) << o.text;
  const auto gpu = o.text.find("\n  gpu: ", lacks);
  ASSERT_NE(gpu, std::string::npos) << o.text;
  EXPECT_NE(o.text.substr(gpu + 1, o.text.find('\n', gpu + 1) - gpu).find("libcuda.so.1"), std::string::npos) << o.text;
  EXPECT_EQ(o.text.find("\nheap                  0"), std::string::npos) << o.text;
}

TEST_F(CudaRefusal, TheCpuBackEndNeedsNoDriver) {
  const BrokenDriver broken;
  const Outcome o = run_moed(broken.environment(), {"check"});
  EXPECT_EQ(o.exit, 0) << o.text;
  EXPECT_EQ(o.text.find("libcuda"), std::string::npos) << o.text;
}

TEST_F(CudaRefusal, AShapeWithoutAKernel) {
  const BrokenDriver broken;  // a configuration's fault comes first, with a GPU or without
  expect_refused(
      run_moed(broken.environment(), {"serve", "--set", "backend=cuda", "--set", "model.shape={latent: 16384}"}), 65,
      {"backend = cuda cannot serve this: latent = 16384 is not at most 8192"});
}

TEST_F(CudaRefusal, ADeviceThatIsNotThere) {
  if (test::gpus_here() == 0) GTEST_SKIP() << "nvidia-smi -L lists no GPU";
  expect_refused(run_moed({}, {"serve", "--set", "backend=cuda", "--set", "device=99"}), 71, {"99"});
  expect_refused(run_moed({"CUDA_VISIBLE_DEVICES="}, {"serve", "--set", "backend=cuda"}), 71, {"CUDA_VISIBLE_DEVICES"});
}

TEST_F(CudaRefusal, TooLittleMemory) {
  if (test::gpus_here() == 0) GTEST_SKIP() << "nvidia-smi -L lists no GPU";
  // 128 segments of 29 lanes with 832 wide rows each: 85 GB; and 29 arenas of 16 GB.
  expect_refused(
      run_moed({}, {"serve", "--set", "backend=cuda", "--set", "limits={lanes: 29, max_tokens: 832, arena_mb: 16384}",
                    "--set", test::peers_of(test::free_ports(128)), "--set",
                    "model.shape={latent: 8192, intermediate: 32, experts: 128, layers: 1}"}),
      73, {"are needed"});
}

}  // namespace
}  // namespace moed
