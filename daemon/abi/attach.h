// Messages of the Unix socket RUN_DIR/GROUP/RANK.sock (SOCK_SEQPACKET): one message each way, then the next.
//
//   Attach -> Attached + descriptors     the socket stays open: it is the lease, a hang-up frees the lane
//   Dry    -> Answer                     on an attached socket
//   Record -> Answer                     on an attached socket (stream calls)
//   StatusQuery -> JSON text             on any socket, at most 64 KiB
//   Fetch -> Answer + one descriptor     on any socket: a peer daemon of this host and user
//   TraceQuery -> Answer + one descriptor   on any socket of the same user: the recorder's file (record.h), read-only
//
// Every message starts with {magic, type}; an unknown type or a wrong length closes the socket.
#pragma once

#include <cstdint>

#include "daemon/abi/call.h"

namespace moed {

inline constexpr uint32_t kAbi = 1;
inline constexpr uint32_t kProtocol = 1;                ///< heap, lines, control messages
inline constexpr uint32_t kNumerics = 1;                ///< anything that changes bits
inline constexpr uint32_t kAttachMagic = 0x4445'4f4du;  // "MOED"
inline constexpr uint32_t kMaxStatusBytes = 64 * 1024;

enum class MessageType : uint32_t {
  attach = 1,
  attached = 2,
  dry = 3,
  record = 4,
  answer = 5,
  status = 6,
  fetch = 7,
  trace = 8
};

struct MessageHeader {
  uint32_t magic = kAttachMagic;
  MessageType type{};
};

struct Attach {
  MessageHeader header{kAttachMagic, MessageType::attach};
  uint32_t abi = kAbi;
  uint32_t arena_kind = 0;   ///< 0 host memory, 1 GPU memory
  uint64_t arena_bytes = 0;  ///< 0: limits.arena_mb
  uint32_t dry = 0;
  uint32_t has_digest = 0;  ///< 1: model_digest must match
  uint8_t gpu_uuid[16] = {};
  uint8_t model_digest[32] = {};
  char name[32] = {};  ///< shown in status; zero-padded, not necessarily terminated
  uint64_t reserved[4] = {};
};
static_assert(sizeof(Attach) == 144);

/// What an engine may know of its lane; moed_info of the C ABI, field by field.
struct Info {
  uint32_t size = 0, abi = 0, protocol = 0, numerics = 0, rank = 0, ranks = 0, lane = 0, hidden = 0, latent = 0,
           intermediate = 0, experts = 0, top_k = 0, first_layer = 0, layers = 0, max_tokens = 0, max_call_tokens = 0,
           backend = 0, sharing = 0, slots = 0, slot_tokens = 0;
  uint64_t incarnation = 0, arena_bytes = 0;
  uint8_t model_digest[32] = {};
};
static_assert(sizeof(Info) == 128);

struct Attached {
  MessageHeader header{kAttachMagic, MessageType::attached};
  uint32_t status = 0;  ///< Status; with ok, descriptors follow: host mailbox, device mailbox (CUDA), arena
  uint32_t descriptors = 0;
  uint32_t deadline_ms = 0, first_deadline_ms = 0;  ///< what a timeout of 0 means
  Info info;
  char text[128] = {};  ///< one sentence when status is not ok
};

struct Dry {
  MessageHeader header{kAttachMagic, MessageType::dry};
  uint32_t on = 0;
  uint32_t pad = 0;
};

struct Record {
  MessageHeader header{kAttachMagic, MessageType::record};
  uint32_t number = 0;  ///< 1..4096, chosen by libmoed
  uint32_t pad = 0;
  alignas(128) Call call{};
};

struct Answer {
  MessageHeader header{kAttachMagic, MessageType::answer};
  uint32_t status = 0;
  uint32_t pad = 0;
  char text[128] = {};
};

/// A peer's token for one descriptor, good once. The token came over its link.
struct Fetch {
  MessageHeader header{kAttachMagic, MessageType::fetch};
  uint32_t protocol = kProtocol;
  uint32_t rank = 0;         ///< who asks
  uint64_t incarnation = 0;  ///< of who is asked
  uint8_t token[64] = {};
};
static_assert(sizeof(Fetch) == 88);

struct StatusQuery {
  MessageHeader header{kAttachMagic, MessageType::status};
};

struct TraceQuery {
  MessageHeader header{kAttachMagic, MessageType::trace};
};

}  // namespace moed
