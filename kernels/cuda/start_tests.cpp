#include "kernels/cuda/start_tests.h"

#include <thread>

#include "kernels/cuda/passes.h"

namespace moed::cuda {
namespace {

constexpr Nanos kLimit = 1'000'000'000;

/// Whether everything queued on `stream` has run in time. Looks; never blocks in the driver.
bool runs(cudaStream_t stream, Health& health) {
  for (const Nanos until = now_ns() + kLimit;;) {
    const cudaError_t e = cudaStreamQuery(stream);
    if (e == cudaSuccess) return true;
    if (e != cudaErrorNotReady) return health.good(e, "start-up test of streams");
    if (now_ns() > until) return false;
    std::this_thread::yield();
  }
}

}  // namespace

bool prove_streams(const Driver& driver, Memory& memory, Side& side, Health& health, cudaStream_t first,
                   const std::vector<cudaStream_t>& others, std::string& why) {
  const Allocation words = memory.make(2 * sizeof(uint32_t), std::nullopt, why);
  if (!words) return false;
  auto* const gate = words.as<uint32_t>();
  if (!side.zero(gate, 2 * sizeof(uint32_t)) || !side.settle()) return false;
  launch_note(gate + 1, first);  // loaded before anything waits
  bool free = runs(first, health);
  for (const cudaStream_t stream : others) {
    for (int pass = 0; pass < 2; ++pass) {  // an armed pass and one behind it
      health.good(driver.cuStreamWaitValue32(stream, words.address(), 1, CU_STREAM_WAIT_VALUE_GEQ), driver,
                  "start-up test of streams");
      launch_note(gate + 1, stream);
    }
  }
  launch_note(gate + 1, first);
  launch_note(gate + 1, side.stream());
  free = free && runs(first, health) && runs(side.stream(), health);
  side.word(gate, 1);  // whatever came of it, the lanes are let through
  bool all = runs(side.stream(), health);
  for (const cudaStream_t stream : others) all = runs(stream, health) && all;
  if (free && all && !health.lost()) return true;
  why = health.lost() ? health.text()
                      : "lanes that wait stop other streams of this process; set CUDA_DEVICE_MAX_CONNECTIONS=32 before "
                        "it starts, or lower limits.lanes";
  return false;
}

}  // namespace moed::cuda
