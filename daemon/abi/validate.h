// The check of a call's fields: one function for the daemon and for whoever wants to refuse early.
#pragma once

#include <cstdint>

#include "daemon/abi/call.h"
#include "daemon/abi/shape.h"

namespace moed {

/// What a lane's calls are checked against.
struct CallLimits {
  Shape shape;
  uint32_t max_call_tokens = 0;
  uint64_t arena_bytes = 0;
  bool layer_calls = false;  ///< whether this daemon serves kind 1
};

/// Why a call is refused. status ok: it is not.
struct Refusal {
  Status status = Status::ok;
  CallField field = CallField::kind;
  int64_t value = 0;
  uint64_t limit = 0;
};

/// Whether [offset, offset + bytes) lies in the arena at a multiple of 16. Cannot overflow.
constexpr bool fits(uint64_t offset, uint64_t bytes, uint64_t arena_bytes) {
  return offset % 16 == 0 && bytes <= arena_bytes && offset <= arena_bytes - bytes;
}

/// Bytes of the out array of a call whose kind and tokens are within limits: BF16 [T, L or H].
constexpr uint64_t out_bytes(const Call& c, const Shape& s) {
  return uint64_t{c.tokens} * (c.kind == static_cast<uint32_t>(CallKind::layer) ? s.hidden : s.latent) * 2;
}

/// Checks every field in order and names the first that is beyond its limit. An offset's limit is the largest that
/// fits.
constexpr Refusal validate(const Call& c, const CallLimits& m) {
  const Shape& s = m.shape;
  auto bad = [](CallField f, uint64_t value, uint64_t limit) {
    return Refusal{Status::bad_call, f, static_cast<int64_t>(value), limit};
  };
  if (c.kind > 1) return bad(CallField::kind, c.kind, 1);
  if (c.kind == 1 && !m.layer_calls) return {Status::unsupported, CallField::kind, 1, 0};
  if (c.layer != kIdentityLayer && (c.layer < s.first_layer || c.layer - s.first_layer >= s.layers))
    return bad(CallField::layer, c.layer, s.first_layer + s.layers - 1);
  if (c.tokens > m.max_call_tokens) return bad(CallField::tokens, c.tokens, m.max_call_tokens);
  if ((c.flags & ~kFlagsAll) != 0) return bad(CallField::flags, c.flags, kFlagsAll);
  const uint64_t t = c.tokens;
  const uint64_t width = c.kind == 1 ? s.hidden : s.latent;
  const bool wire = (c.flags & kFlagWire) != 0;
  const struct {
    CallField field;
    uint64_t offset, bytes;
  } arrays[] = {
      {CallField::x, c.x, t * width * (wire ? 1 : 2)},
      {CallField::scales, wire ? c.scales : 0, wire ? t * width / kBlock : 0},
      {CallField::ids, c.ids, t * s.top_k * ((c.flags & kFlagIds64) != 0 ? 8 : 4)},
      {CallField::weights, c.weights, t * s.top_k * ((c.flags & kFlagWeights16) != 0 ? 2 : 4)},
      {CallField::out, c.out, t * width * 2},
      {CallField::valid, c.valid, c.valid != 0 ? uint64_t{4} : 0},
  };
  for (const auto& a : arrays) {
    const uint64_t limit = a.bytes <= m.arena_bytes ? (m.arena_bytes - a.bytes) / 16 * 16 : 0;
    if (!fits(a.offset, a.bytes, m.arena_bytes)) return bad(a.field, a.offset, limit);
  }
  if (c.timeout_us > kMaxTimeoutUs) return bad(CallField::timeout_us, c.timeout_us, kMaxTimeoutUs);
  for (const uint32_t r : c.reserved)
    if (r != 0) return bad(CallField::reserved, r, 0);
  return {};
}

}  // namespace moed
