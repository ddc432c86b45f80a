// Owners of a file descriptor, of a mapping and of a sealed memory file. POSIX only.
#pragma once

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <utility>

namespace moed {

/// Owns a descriptor; closes it once.
class Fd {
 public:
  Fd() = default;
  explicit Fd(int fd) : fd_(fd) {}
  Fd(Fd&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Fd& operator=(Fd&& other) noexcept {
    if (this != &other) {
      reset();
      fd_ = std::exchange(other.fd_, -1);
    }
    return *this;
  }
  Fd(const Fd&) = delete;
  Fd& operator=(const Fd&) = delete;
  ~Fd() { reset(); }

  int get() const { return fd_; }
  explicit operator bool() const { return fd_ >= 0; }
  int release() { return std::exchange(fd_, -1); }
  void reset() {
    if (fd_ >= 0) ::close(std::exchange(fd_, -1));
  }
  /// A second descriptor of the same file; empty when the process has no more.
  Fd duplicate() const { return Fd(::fcntl(fd_, F_DUPFD_CLOEXEC, 0)); }

 private:
  int fd_ = -1;
};

/// Owns a shared mapping of a whole descriptor.
class Mapping {
 public:
  Mapping() = default;
  /// Maps `bytes` of `fd`; an empty mapping (data() == nullptr) and errno on failure.
  Mapping(const Fd& fd, std::size_t bytes, int protection = PROT_READ | PROT_WRITE) {
    void* at = ::mmap(nullptr, bytes, protection, MAP_SHARED, fd.get(), 0);
    if (at != MAP_FAILED) {
      data_ = static_cast<std::byte*>(at);
      bytes_ = bytes;
    }
  }
  Mapping(Mapping&& other) noexcept
      : data_(std::exchange(other.data_, nullptr)), bytes_(std::exchange(other.bytes_, 0)) {}
  Mapping& operator=(Mapping&& other) noexcept {
    if (this != &other) {
      reset();
      data_ = std::exchange(other.data_, nullptr);
      bytes_ = std::exchange(other.bytes_, 0);
    }
    return *this;
  }
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;
  ~Mapping() { reset(); }

  std::byte* data() const { return data_; }
  std::size_t bytes() const { return bytes_; }
  explicit operator bool() const { return data_ != nullptr; }

 private:
  void reset() {
    if (data_ != nullptr) ::munmap(std::exchange(data_, nullptr), std::exchange(bytes_, 0));
  }
  std::byte* data_ = nullptr;
  std::size_t bytes_ = 0;
};

/// An anonymous, zeroed memory file of `bytes`, its space reserved and sealed against growing and shrinking, so that
/// whoever maps it cannot be made to read beyond its end. Empty with errno set when there is not that much.
inline Fd make_sealed_memory(const char* name, std::size_t bytes) {
  Fd fd(::memfd_create(name, MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!fd) return {};
  const int failed = ::posix_fallocate(fd.get(), 0, static_cast<off_t>(bytes));
  if (failed != 0) {
    errno = failed;
    return {};
  }
  if (::fcntl(fd.get(), F_ADD_SEALS, F_SEAL_GROW | F_SEAL_SHRINK | F_SEAL_SEAL) != 0) return {};
  return fd;
}

}  // namespace moed
