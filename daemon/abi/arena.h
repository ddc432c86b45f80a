// The fixed slots of a lane's arena: one walk gives every offset and how many tokens fit.
#pragma once

#include <cstdint>

#include "daemon/abi/shape.h"

namespace moed {

/// Offsets of one slot's arrays from the arena's start, each a multiple of 256.
struct ArenaSlot {
  uint64_t x, scales, ids, weights, out, valid, end;
};

constexpr uint64_t round_up(uint64_t n, uint64_t to) { return (n + to - 1) / to * to; }

/// Slot `slot` of an arena whose slots hold `tokens` tokens: x and out BF16 [T, W], scales [T, W / 32] with W
/// the wider of hidden and latent (a small model may have latent > hidden), ids int64
/// [T, K] (int32 uses the first half), weights float32 [T, K], valid one int32.
constexpr ArenaSlot arena_slot(const Shape& s, uint32_t slot, uint64_t tokens) {
  const uint64_t width = s.hidden > s.latent ? s.hidden : s.latent;
  uint64_t at = 0;
  auto take = [&at](uint64_t bytes) {
    const uint64_t start = at;
    at += round_up(bytes, 256);
    return start;
  };
  ArenaSlot a{};
  a.x = take(tokens * width * 2);
  a.scales = take(tokens * ((width + kBlock - 1) / kBlock));
  a.ids = take(tokens * s.top_k * 8);
  a.weights = take(tokens * s.top_k * 4);
  a.out = take(tokens * width * 2);
  a.valid = take(4);
  const uint64_t base = slot * at;
  return {a.x + base, a.scales + base, a.ids + base, a.weights + base, a.out + base, a.valid + base, at + base};
}

/// The most tokens (up to max_call_tokens) with slots x slot bytes <= bytes; 0: not even one fits.
constexpr uint32_t slot_tokens(const Shape& s, uint32_t slots, uint64_t bytes, uint32_t max_call_tokens) {
  uint32_t low = 0;
  uint32_t high = max_call_tokens;
  while (low < high) {
    const uint32_t mid = low + (high - low + 1) / 2;
    if (slots * arena_slot(s, 0, mid).end <= bytes)
      low = mid;
    else
      high = mid - 1;
  }
  return low;
}

}  // namespace moed
