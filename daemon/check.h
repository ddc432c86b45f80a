// What `moed check` prints: the effective configuration, the bytes it takes by part, and what this machine lacks.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "daemon/config.h"

namespace moed {

/// What a machine has, as far as a configuration can ask for it.
struct MachineFacts {
  uint64_t available_bytes = 0;  ///< memory that can be taken without swapping; the control group's limit counts
  uint64_t open_files = 0;       ///< soft limit of descriptors
  std::vector<int> cpus;         ///< that this process may run on
  std::string run_dir_fault;     ///< why RUN_DIR/GROUP cannot be made or written; empty: it can
  bool cuda_driver = false;      ///< libcuda.so.1 loads; for builds without the CUDA back end, where it is asked for
  bool futex_waitv = false;
  std::optional<std::vector<std::string>> gpu{};  ///< what the CUDA back end lacks; nothing: this build has none
};

/// Looks at this machine; changes nothing.
MachineFacts read_machine(const Config& config);

/// Bytes of all lanes' arenas.
uint64_t arena_bytes(const Config& config);

/// Descriptors that the daemon holds at most: an estimate from above.
uint64_t needed_files(const Config& config);

/// One sentence for each thing that the configuration needs and the machine lacks, with a remedy. planned: what the
/// back end will take (planned_memory); arenas are counted from the configuration.
std::vector<std::string> missing(const Config& config, const Backend::Memory& planned, const MachineFacts& facts);

/// The whole text of `moed check`.
std::string check_report(const Config& config, const Shape& shape, const Backend::Memory& planned,
                         const MachineFacts& facts);

}  // namespace moed
