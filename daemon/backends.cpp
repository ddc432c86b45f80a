#include "daemon/backends.h"

#include <algorithm>
#include <utility>

namespace moed {
namespace {

#ifdef MOED_HAS_CUDA
constexpr bool kHasCuda = true;
#else
constexpr bool kHasCuda = false;
#endif

constexpr uint32_t bit(HandleKind kind) { return 1U << static_cast<uint32_t>(kind); }

bool on_one_host(const Config& config) {
  const auto& peers = config.control.peers;
  return std::all_of(peers.begin(), peers.end(), [&](const std::string& peer) {
    const std::string host = parse_endpoint(peer)->host;
    return host == parse_endpoint(peers[config.rank])->host || is_loopback(host);
  });
}

/// After how long a GPU without progress stands still: a drill's delays are no fault.
uint32_t longest_pass_ms(const Config& config) {
  const DebugConfig& d = config.debug;
  return config.gpu.stuck_after_ms + (d.experts_delay_us + d.send_delay_us) / 1000;
}

std::optional<HandleKind> wanted_handles(const Config& config) {
  if (config.gpu.handles == HandleChoice::automatic)  // descriptors work for all of one host, whatever each GPU can
    return on_one_host(config) ? std::optional(HandleKind::cuda_fd) : std::nullopt;
  return config.gpu.handles == HandleChoice::fd ? HandleKind::cuda_fd : HandleKind::fabric;
}

}  // namespace

bool built_with_cuda() { return kHasCuda; }

std::string built_cuda_version() {
#ifdef MOED_HAS_CUDA
  return cuda_version();
#else
  return "none";
#endif
}

void prepare_backends() {
#ifdef MOED_HAS_CUDA
  prepare_cuda();
#endif
}

BackendOptions whole_backend_options(const Config& config, const Shape& shape) {
  BackendOptions o = backend_options(config, shape);
  o.device = config.device;
  o.handles = wanted_handles(config);
  o.stuck_after_ms = longest_pass_ms(config);
  o.arena_bytes = uint64_t{config.limits.arena_mb} << 20;
  return o;
}

bool worth_loading([[maybe_unused]] const Config& config) {
#ifdef MOED_HAS_CUDA
  return config.backend == BackendKind::cpu || gpu_count() > 0;
#else
  return true;
#endif
}

std::unique_ptr<Backend> make_backend(const Config& config, BackendOptions options) {
  if (config.backend == BackendKind::cpu) return make_cpu_backend(std::move(options));
#ifdef MOED_HAS_CUDA
  try {
    return make_cuda_backend(std::move(options));
  } catch (const std::invalid_argument& e) {
    throw ConfigError(std::string("backend = cuda cannot serve this: ") + e.what());
  }
#else
  throw ConfigError("backend = cuda, but this build has the cpu back end only; build where nvcc is found");
#endif
}

Backend::Memory planned_bytes([[maybe_unused]] const Config& config, const BackendOptions& options) {
#ifdef MOED_HAS_CUDA
  if (config.backend == BackendKind::cuda) return planned_cuda_memory(options);
#endif
  return planned_memory(options);
}

std::vector<std::string> gpu_lacks([[maybe_unused]] const Config& config,
                                   [[maybe_unused]] const BackendOptions& options) {
#ifdef MOED_HAS_CUDA
  if (config.backend == BackendKind::cuda) return gpu_missing(options);
#endif
  return {};
}

uint32_t allowed_handle_kinds(const Config& config) {
  if (config.backend == BackendKind::cpu) return bit(HandleKind::memfd);
  const std::optional<HandleKind> wanted = wanted_handles(config);
  return wanted ? bit(*wanted) : bit(HandleKind::cuda_fd) | bit(HandleKind::fabric);
}

}  // namespace moed
