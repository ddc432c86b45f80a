// The back end that a configuration asks for. backends.cpp alone knows which ones this build has.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "daemon/config.h"
#include "kernels/backend.h"

namespace moed {

/// Whether this build has the CUDA back end.
bool built_with_cuda();
/// Version of the toolkit that its kernels were built with, such as 13.0; "none" without it.
std::string built_cuda_version();

/// Sets what drivers read from the environment when they start; before any other thread runs.
void prepare_backends();

/// backend_options() with device and handles; weights, incarnation and in_process are the caller's.
BackendOptions whole_backend_options(const Config& config, const Shape& shape);

/// False: `backend: cuda` without a GPU, which make_backend() refuses whatever the weights are.
bool worth_loading(const Config& config);

/// Throws ConfigError for a back end that this build has not or a shape that it has no kernel for, GpuError for a GPU
/// that is missing or unusable, std::system_error when memory does not suffice.
std::unique_ptr<Backend> make_backend(const Config& config, BackendOptions options);

/// What it will take before it is ready, without making it; as on the CPU for one that this build has not.
Backend::Memory planned_bytes(const Config& config, const BackendOptions& options);

/// What the GPU of this machine lacks; nothing to lack for the cpu back end or in a build without the other.
std::vector<std::string> gpu_lacks(const Config& config, const BackendOptions& options);

/// Kinds of handles that the configuration allows, bit 1 << HandleKind: what a rank says before its back end is made.
/// The back end uses the best of them that this machine can really export and import.
uint32_t allowed_handle_kinds(const Config& config);

}  // namespace moed
