// Wire structs of the handshake (our own TCP) and of the active messages (UCX) between two daemons. Fixed sizes, fixed
// order, little-endian; nothing is looked at before its HMAC holds, except the key's id.
//
//   dialler                                   listener
//     Hello            ----------------->                 who I am, what I serve, a fresh nonce
//                      <-----------------       Hello
//     Proof            ----------------->                 HMAC over both Hellos and the rest of the Proof
//                      <-----------------       Proof
//     '+'              <---------------->       '+'        I know you: messages over UCX may come
//     (the connection stays: its end is the link's end)
#pragma once

#include <cstdint>
#include <cstring>
#include <span>
#include <type_traits>

#include "daemon/abi/shape.h"

namespace moed::control {

inline constexpr uint32_t kHelloMagic = 0x4f4c'4548u;  // "HELO"
inline constexpr uint32_t kMaxUcxAddress = 1024;

/// What a daemon says of itself. Every field but incarnation, build and nonce has to agree with the other side's.
struct Hello {
  uint32_t magic = kHelloMagic;
  uint32_t protocol = 0, numerics = 0;
  uint32_t rank = 0, ranks = 0;
  uint32_t lanes = 0, max_tokens = 0;
  uint32_t transport = 0;     ///< 0 heap, 1 nccl
  uint32_t handle_kinds = 0;  ///< bit k: HandleKind k can be created and imported
  uint32_t pad = 0;
  uint64_t incarnation = 0;  ///< this life of the daemon
  char group[32] = {};
  char key_id[16] = {};    ///< which shared key proves
  char revision[32] = {};  ///< the operator's name for the weights
  char build[32] = {};     ///< shown, not compared
  uint8_t model_digest[32] = {};
  uint8_t nonce[32] = {};
  Shape shape;
};
static_assert(sizeof(Hello) == 352 && std::is_trivially_copyable_v<Hello>);

/// Proves knowledge of the key named in the Hello and carries what only a proven peer is told.
struct Proof {
  uint8_t hmac[32] = {};          ///< over label, dialler's Hello, listener's Hello, the rest of this struct
  uint32_t greatest_session = 0;  ///< seen with this peer, 0: none
  uint16_t address_bytes = 0;
  uint16_t refused = 0;                  ///< 1: the sender makes no link; address is a sentence that says why
  uint8_t address[kMaxUcxAddress] = {};  ///< of the UCX worker
};
static_assert(sizeof(Proof) == 1064 && std::is_trivially_copyable_v<Proof>);

template <class T>
std::span<const uint8_t> bytes_of(const T& value) {
  static_assert(std::is_trivially_copyable_v<T>);
  return {reinterpret_cast<const uint8_t*>(&value), sizeof value};
}

/// Copies a struct out of bytes; false: they are not as many as it has.
template <class T>
bool take(std::span<const uint8_t> from, T& to) {
  if (from.size() != sizeof to) return false;
  std::memcpy(&to, from.data(), sizeof to);
  return true;
}

enum class MessageId : uint32_t { segment = 1, mapped = 2, ready = 3, heartbeat = 4, leaving = 5, nccl = 6, round = 7 };

/// In front of every active message. counter never repeats within a link; hmac covers header (hmac zero) and body.
struct MessageHeader {
  MessageId id{};
  uint32_t rank = 0;
  uint64_t incarnation = 0;
  uint64_t counter = 0;
  uint8_t hmac[16] = {};
};
static_assert(sizeof(MessageHeader) == 40);

/// How to map what the receiver may write at the sender. For descriptor kinds a handle is a one-time token.
struct SegmentBody {
  uint32_t kind = 0;
  uint32_t pad = 0;
  uint64_t bytes = 0;
  uint8_t segment[64] = {};
  uint8_t doorbell[64] = {};
};

/// The link's session as the sender reckons it.
struct ReadyBody {
  uint32_t session = 0;
  uint32_t pad = 0;
};

/// Why a sender is slow to get on; a busy peer is not a lost one.
enum class Busy : uint32_t { no = 0, loading = 1, mapping = 2, draining = 3 };
constexpr const char* name(Busy b) {
  constexpr const char* names[] = {"", "loading", "mapping", "draining"};
  return static_cast<uint32_t>(b) < 4 ? names[static_cast<uint32_t>(b)] : "unknown";
}

/// Sent up to the last rank's entry of wait_us.
struct HeartbeatBody {
  uint32_t service_age_us = 0;  ///< since the service loop's last turn
  uint32_t gpu_age_us = 0;      ///< since the GPU last made progress while calls waited
  Busy busy = Busy::no;
  uint32_t pad = 0;
  uint32_t wait_us[kMaxRanks] = {};  ///< this rank's row of the wait matrix: waited for rank r in the last interval
};

}  // namespace moed::control
