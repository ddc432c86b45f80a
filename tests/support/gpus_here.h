// What tests of real daemons may ask about CUDA, without CUDA: the daemon's own word and that of nvidia-smi.
#pragma once

#include <cstdio>
#include <memory>
#include <string>

#include "tests/support/binaries.h"

namespace moed::test {

/// What a command prints; empty when it cannot be run.
inline std::string output_of(const std::string& command) {
  const std::unique_ptr<FILE, int (*)(FILE*)> pipe(::popen((command + " 2>/dev/null").c_str(), "r"), ::pclose);
  std::string text;
  char buffer[4096];
  for (size_t got = 0; pipe && (got = std::fread(buffer, 1, sizeof buffer, pipe.get())) > 0;) text.append(buffer, got);
  return text;
}

inline bool built_with_cuda() {
  const std::string version = output_of("'" + moed_binary() + "' version");
  return version.find(", cuda ") != std::string::npos && version.find(", cuda none,") == std::string::npos;
}

/// GPUs that nvidia-smi lists, one a line; 0 where there is no nvidia-smi.
inline int gpus_here() {
  const std::string list = "\n" + output_of("nvidia-smi -L");
  int count = 0;
  for (size_t at = list.find("\nGPU "); at != std::string::npos; at = list.find("\nGPU ", at + 1)) ++count;
  return count;
}

}  // namespace moed::test
