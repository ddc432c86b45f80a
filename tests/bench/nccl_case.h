// What nccl_pairs measures: systems, formats, the values that travel.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace moed::bench {

inline constexpr size_t kLatent = 3584;  ///< Kimi K3
inline constexpr size_t kTopK = 16;
inline constexpr size_t kIdsAndWeights = kTopK * (sizeof(int32_t) + sizeof(float));

/// How a token's row travels to the experts, always with its ids and weights. bytes: of one row.
struct Format {
  const char* name;
  size_t bytes;
};
inline constexpr Format kFormats[] = {
    {"BF16", kLatent * sizeof(uint16_t) + kIdsAndWeights},
    {"MXFP8", kLatent + kLatent / 32 + kIdsAndWeights},
};

struct System {
  const char* name;
  bool all_to_all;  ///< else all-gather and reduce-scatter
  bool windows;     ///< symmetric memory, registered
};
inline constexpr System kSystems[] = {
    {"all-to-all x2, plain buffers", true, false},
    {"all-gather + reduce-scatter, plain buffers", false, false},
    {"all-gather + reduce-scatter, symmetric windows", false, true},
};

/// What rank `source` sends to rank `target`, element i of the chunk.
inline uint8_t dispatch_value(size_t source, size_t target, size_t i) {
  return static_cast<uint8_t>((i * 31 + source * 17 + target * 5) % 251);
}
/// Small whole numbers: BF16 holds them and the sum of eight of them exactly.
inline uint32_t combine_value(size_t source, size_t target, size_t i) {
  return 1 + static_cast<uint32_t>((i * 7 + source * 13 + target * 3) % 16);
}
inline uint16_t bf16(uint32_t value) {
  return static_cast<uint16_t>(std::bit_cast<uint32_t>(static_cast<float>(value)) >> 16);
}

struct Buffers {
  void *dispatch_send = nullptr, *dispatch_recv = nullptr, *combine_send = nullptr, *combine_recv = nullptr;
  auto all() { return std::vector<void**>{&dispatch_send, &dispatch_recv, &combine_send, &combine_recv}; }
};

/// One measurement: a system, a format, T. chunk_*: what one rank sends another, in bytes and in BF16 elements.
struct Case {
  System system;
  Format format;
  size_t tokens;
  size_t ranks;
  size_t chunk_bytes() const { return tokens * format.bytes; }
  size_t chunk_elements() const { return tokens * kLatent; }
};

}  // namespace moed::bench
