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

bool prove_streams(const Shop& shop, cudaStream_t first, const std::vector<cudaStream_t>& lanes, std::string& why) {
  Side& side = shop.side;
  Health& health = shop.health;
  const Allocation words = shop.memory.make((lanes.size() + 1) * sizeof(uint32_t), std::nullopt, why);
  if (!words) return false;
  auto* const gate = words.as<uint32_t>();  // one a lane
  uint32_t* const noted = gate + lanes.size();
  bool good = side.zero(gate, words.bytes()) && side.settle();
  launch_note(noted, first);  // loaded before anything waits
  good = good && runs(first, health);
  for (size_t i = 0; i < lanes.size(); ++i) {
    for (int pass = 0; pass < 2; ++pass) {  // an armed pass and one behind it
      health.good(shop.driver.cuStreamWaitValue32(lanes[i], reinterpret_cast<CUdeviceptr>(gate + i), 1,
                                                  CU_STREAM_WAIT_VALUE_GEQ),
                  shop.driver, "start-up test of streams");
      launch_note(noted, lanes[i]);
    }
  }
  launch_note(noted, first);
  launch_note(noted, side.stream());
  good = good && runs(first, health) && runs(side.stream(), health);
  for (size_t i = lanes.size(); i-- > 0;) {  // the last lane first: the others still wait
    side.word(gate + i, 1);
    good = runs(lanes[i], health) && good;
  }
  for (const cudaStream_t lane : lanes) runs(lane, health);  // nothing uses the words any more
  if (good && !health.lost()) return true;
  why = health.lost() ? health.text()
                      : "a lane that waits stops other streams of this process; set CUDA_DEVICE_MAX_CONNECTIONS=32 "
                        "before it starts, or lower limits.lanes";
  return false;
}

}  // namespace moed::cuda
