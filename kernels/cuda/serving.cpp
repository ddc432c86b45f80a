#include "kernels/cuda/serving.h"

#include <string>
#include <thread>

#include "kernels/cuda/passes.h"

namespace moed::cuda {
namespace {

constexpr uint64_t kAhead = 16;    ///< loops queued at least: 11 ms
constexpr uint32_t kLoops = 32;    ///< of a pass, in a world without experts; of one whose sources go behind them:
constexpr uint32_t kFewLoops = 4;  ///< the first of them waits for the rest of its pass,
constexpr uint32_t kOneLoop = 1;   ///< and those that follow it for nobody
constexpr Nanos kUnusual = 50'000'000;
constexpr Nanos kIdle = 50'000'000;  ///< nobody having called for so long, the GPU is left alone
constexpr Nanos kTraffic = 20'000'000;

}  // namespace

bool Serving::prepare(const Driver& driver) {
  driver_ = &driver;
  const World& w = world_.world();
  stream_.set_pass(
      [this, &w](uint64_t loop, uint32_t loops) { return launch_serve_pass(w, loop, loops, stream_.stream()); },
      w.board->begun, w.board->completed);
  return health_.good(prepare_serve_pass(w), "kernels of the serve pass");
}

uint32_t Serving::loops() {
  if (const uint64_t handed = host_load(world_.board().handed); handed != handed_) {
    handed_ = handed;
    handed_at_ = now_ns();
  }
  if (handed_ != 0 && now_ns() < handed_at_ + kUnusual) return kOneLoop;
  return world_.world().model_layers != 0 ? kFewLoops : kLoops;
}

bool Serving::fill() { return health_.good(stream_.fill(kAhead, loops()), "launch of the serve pass"); }

bool Serving::is_busy(Nanos now) const { return now < served_at_ + kTraffic; }

void Serving::keep() {
  if (health_.lost()) return;
  const Nanos now = now_ns();
  if (parked_ != 0 && stream_.begun() == parked_) return;
  if (std::exchange(parked_, 0) != 0) served_at_ = now;
  if (!options_.park || now < served_at_ + kIdle) {
    fill();
    return;
  }
  if (!stream_.settled()) {
    health_.good(stream_.mark(), "marker of the serve stream");
    return;
  }
  parked_ = stream_.begun();
  cudaError_t launched = cudaSuccess;
  const auto rung = static_cast<uint32_t>(host_load(world_.board().rung));
  health_.good(stream_.park(*driver_, reinterpret_cast<CUdeviceptr>(world_.world().doorbell), rung + 1, kAhead, loops(),
                            launched),
               *driver_, "wait for the doorbell");
  health_.good(launched, "launch of the serve pass");
}

void Serving::look_whether_stuck(Nanos now) {
  const uint64_t moved = stream_.begun() + stream_.completed();
  if (moved != moved_ || stream_.ahead() == 0 || parked_ != 0 || moved_at_ == 0) {
    moved_ = moved;
    moved_at_ = now;
  } else if (options_.stuck_after_ms != 0 && now > moved_at_ + uint64_t{options_.stuck_after_ms} * 1'000'000) {
    health_.stand_still("no serve pass has begun or ended for " + std::to_string((now - moved_at_) / 1'000'000) +
                        " ms; the GPU stands still (gpu.stuck_after_ms)");
  }
}

bool Serving::settle(Nanos longest) {
  if (!health_.good(stream_.mark(), "marker of the serve stream")) return false;
  for (const Nanos until = now_ns() + longest; !stream_.settled();) {
    if (now_ns() > until) return false;
    std::this_thread::yield();
  }
  return true;
}

}  // namespace moed::cuda
