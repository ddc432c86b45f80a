// What an engine asks for and what it is told: two records of 128 bytes, the same in shared memory and in the C ABI.
#pragma once

#include <cstdint>

#include "daemon/abi/status.h"

namespace moed {

enum class CallKind : uint32_t {
  routed = 0,  ///< x is the latent [T, L]; out is the routed latent
  layer = 1,   ///< x is the hidden state [T, H]; out is the layer's output
};

/// Bits of Call::flags.
inline constexpr uint32_t kFlagNoNorm = 1;     ///< out is the sum, not normalised
inline constexpr uint32_t kFlagIds64 = 2;      ///< ids are int64 (else int32)
inline constexpr uint32_t kFlagWeights16 = 4;  ///< weights are BF16 (else float32)
inline constexpr uint32_t kFlagWire = 8;       ///< x is in wire format: E4M3 codes, and scales holds the E8M0 bytes
inline constexpr uint32_t kFlagMask = 16;      ///< a bad id counts as -1 instead of ending the call
inline constexpr uint32_t kFlagsAll = 31;

inline constexpr uint32_t kMaxTimeoutUs = 60'000'000;

/// One layer for T tokens. Offsets are bytes from the start of the lane's arena, multiples of 16.
struct alignas(128) Call {
  uint32_t kind;     ///< CallKind
  uint32_t layer;    ///< the model's own number; kIdentityLayer: identity experts, in every world
  uint32_t tokens;   ///< T, 0..max_call_tokens; more than max_tokens are served in pieces
  uint32_t flags;    ///< kFlag bits
  uint64_t x;        ///< BF16 [T, L or H], or E4M3 [T, L] (kFlagWire)
  uint64_t scales;   ///< u8 [T, L / 32], read only with kFlagWire
  uint64_t ids;      ///< int32 or int64 [T, K]; -1: no expert
  uint64_t weights;  ///< float32 or BF16 [T, K]
  uint64_t out;      ///< BF16, shaped as x
  uint64_t
      valid;  ///< 0, or where an int32 lies that is read when the call starts, clamped to [0, T]: the rest is padding
  uint32_t timeout_us;  ///< 0: calls.deadline_ms; at most 60 s, counted from when the daemon sees the bell
  uint32_t reserved[15];
};
static_assert(sizeof(Call) == 128);

/// Index of a field of Call, as Reply::field names it.
enum class CallField : uint32_t {
  kind,
  layer,
  tokens,
  flags,
  x,
  scales,
  ids,
  weights,
  out,
  valid,
  timeout_us,
  reserved
};

constexpr const char* name(CallField field) {
  constexpr const char* names[] = {"kind", "layer",   "tokens", "flags", "x",          "scales",
                                   "ids",  "weights", "out",    "valid", "timeout_us", "reserved"};
  return static_cast<uint32_t>(field) < 12 ? names[static_cast<uint32_t>(field)] : "unknown";
}

/// How a call ended. Fields that a status does not name are 0.
struct alignas(128) Reply {
  uint64_t number;  ///< of this attach's calls, from 1
  uint32_t status;  ///< Status
  uint32_t layer;
  uint64_t ranks[2];  ///< bit r set: late (peer_timeout), lost (peer_lost, degraded), missing (not_ready)
  uint32_t token;     ///< bad_route, masked: where
  uint32_t slot;
  uint32_t field;     ///< bad_call: CallField
  uint32_t dropped;   ///< degraded: (token, rank) contributions left out
  int64_t value;      ///< the offending value
  uint64_t limit;     ///< and what it had to stay below or at
  uint64_t total_ns;  ///< from the bell's sight to done
  uint32_t reserved[14];
};
static_assert(sizeof(Reply) == 128);

}  // namespace moed
