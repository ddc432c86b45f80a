// NCCL loaded at run time, because nothing of ours links it, and how nccl_pairs fails.
#pragma once

#include <cuda_runtime.h>
#include <dlfcn.h>
#include <nccl.h>

#include <cstdio>
#include <cstdlib>
#include <string>

namespace moed::bench {

/// Ends the process at once: other threads may wait in a collective that cannot end any more.
[[noreturn]] inline void fail(int code, const std::string& sentence) {
  std::fflush(stdout);
  std::fprintf(stderr, "nccl_pairs: %s\n", sentence.c_str());
  std::_Exit(code);
}

inline void check(cudaError_t error, const char* what) {
  if (error != cudaSuccess) fail(1, std::string(what) + " failed: " + cudaGetErrorString(error));
}

#define NCCL_FUNCTIONS(X)     \
  X(ncclGetVersion)           \
  X(ncclGetErrorString)       \
  X(ncclGetLastError)         \
  X(ncclCommInitAll)          \
  X(ncclCommDestroy)          \
  X(ncclMemAlloc)             \
  X(ncclMemFree)              \
  X(ncclCommWindowRegister)   \
  X(ncclCommWindowDeregister) \
  X(ncclAllGather)            \
  X(ncclReduceScatter)        \
  X(ncclAlltoAll)

/// NCCL as `path` has it, kept until the process ends; without it the process exits 2.
struct Nccl {
// A declared name takes no parentheses. NOLINTNEXTLINE(bugprone-macro-parentheses)
#define NCCL_MEMBER(f) decltype(&::f) f = nullptr;
  NCCL_FUNCTIONS(NCCL_MEMBER)
#undef NCCL_MEMBER

  explicit Nccl(const std::string& path) {
    void* library = ::dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) {
      const char* why = ::dlerror();
      fail(2, "cannot load " + path + " (" + (why != nullptr ? why : "no reason given") +
                  "); install NCCL 2.28 or newer, or name the library with --nccl PATH");
    }
#define NCCL_LOAD(f)                                       \
  f = reinterpret_cast<decltype(f)>(::dlsym(library, #f)); \
  if ((f) == nullptr) fail(2, path + " has no " #f "; it takes NCCL 2.28 or newer: name one with --nccl PATH");
    NCCL_FUNCTIONS(NCCL_LOAD)
#undef NCCL_LOAD
  }

  void check(ncclResult_t result, const char* what) const {
    if (result == ncclSuccess) return;
    fail(1, std::string(what) + " failed: " + ncclGetErrorString(result) + "; " + ncclGetLastError(nullptr));
  }
};

}  // namespace moed::bench
