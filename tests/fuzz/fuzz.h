// What the fuzz targets share: a check that ends the run, a reader of the fuzzer's bytes, files in memory.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "daemon/abi/fd.h"

namespace moed::fuzz {

/// Ends the run where something that always holds does not; the fuzzer then keeps the input.
inline void require(bool holds, std::string_view what, std::string_view found = "") {
  if (holds) return;
  std::fprintf(stderr, "this must hold: %.*s; found: %.*s\n", static_cast<int>(what.size()), what.data(),
               static_cast<int>(found.size()), found.data());
  std::abort();
}

/// A message for an operator: not empty, one line.
inline void require_sentence(std::string_view text) {
  require(!text.empty() && text.find('\n') == text.npos, "an error is one line of text", text);
}

/// Reads values off the front of the fuzzer's bytes; after their end everything is 0.
class Input {
 public:
  Input(const uint8_t* data, size_t size) : left_(data, size) {}

  bool empty() const { return left_.empty(); }
  std::span<const uint8_t> rest() const { return left_; }

  template <class T>
  T take() {
    T value{};
    fill(&value, sizeof value);
    return value;
  }
  /// At most `most` bytes, fewer where fewer are left.
  std::span<const uint8_t> bytes(size_t most) {
    const auto out = left_.first(std::min(most, left_.size()));
    left_ = left_.subspan(out.size());
    return out;
  }
  void fill(void* to, size_t size) {
    const auto from = bytes(size);
    if (!from.empty()) std::memcpy(to, from.data(), from.size());
  }
  /// Overwrites parts of a record of `size` bytes: pairs of an offset (u16, modulo the size) and a length (u8, at most
  /// 8) with the bytes that follow, `patches` of them. So a record stays sound but for what the fuzzer chose.
  void patch(void* record, size_t size, uint32_t patches) {
    for (uint32_t i = 0; i < patches && !empty(); ++i) {
      const size_t at = take<uint16_t>() % size;
      const size_t length = std::min<size_t>({take<uint8_t>() % 8U + 1U, size - at, left_.size()});
      fill(static_cast<uint8_t*>(record) + at, length);
    }
  }

 private:
  std::span<const uint8_t> left_;
};

/// The parts of a text between lines that are "%%".
inline std::vector<std::string> parts_of(std::string_view text) {
  constexpr std::string_view kSeparator = "\n%%\n";
  std::vector<std::string> parts;
  for (size_t at = 0;;) {
    const size_t end = text.find(kSeparator, at);
    parts.emplace_back(text.substr(at, end == text.npos ? end : end - at));
    if (end == text.npos) return parts;
    at = end + kSeparator.size();
  }
}

/// A file without a place on a disk, opened by others under path().
class MemoryFile {
 public:
  MemoryFile() : fd_(::memfd_create("fuzz", MFD_CLOEXEC)) {
    if (!fd_) throw std::runtime_error("no memory file");
  }
  std::string path() const { return "/proc/self/fd/" + std::to_string(fd_.get()); }
  /// From here the file has exactly these bytes, and zeros up to `size` where that is more.
  void set(std::string_view bytes, size_t size = 0) {
    const auto length = static_cast<ssize_t>(bytes.size());
    const bool done = ::ftruncate(fd_.get(), 0) == 0 && ::pwrite(fd_.get(), bytes.data(), bytes.size(), 0) == length &&
                      ::ftruncate(fd_.get(), static_cast<off_t>(std::max(size, bytes.size()))) == 0;
    if (!done) throw std::runtime_error("a memory file cannot be written");
  }

 private:
  Fd fd_;
};

}  // namespace moed::fuzz
