// The host mailbox: how an engine hands a call over and hears of its end. One memfd per attach, sealed, new every time.
//
//   byte    0  header     magic .. incarnation          daemon, once
//         128  call       the Call asked for            engine
//         256  bell       number of that call           engine, after call
//         384  bell_asleep  1: the daemon may sleep     daemon
//         512  reply      the Reply to it               daemon
//         640  done       number of the ended call      daemon, after reply
//         768  done_asleep  1: the engine may sleep     engine
//         896  (end)
//
// A side that rings stores its word, then reads the other's asleep word; a side that goes to sleep stores asleep, then
// reads the word again: all four sequentially consistent, so one of the two always sees the other. The sleep itself is
// a shared futex on the low 32 bits of the word.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "daemon/abi/call.h"

namespace moed {

inline constexpr uint64_t kMailboxMagic = 0x31584f4244454f4dULL;  // "MOEDBOX1"

struct MailboxHeader {
  uint64_t magic;
  uint32_t abi;
  uint32_t bytes;       ///< of the whole mailbox
  uint32_t arena_kind;  ///< 0 host memory, 1 GPU memory
  uint32_t pad;
  uint64_t arena_bytes;
  std::atomic<uint64_t> incarnation;  ///< of the daemon; stored last (release), 0 before
};

struct HostMailbox {
  alignas(128) MailboxHeader header;
  alignas(128) Call call;
  alignas(128) std::atomic<uint64_t> bell;
  alignas(128) std::atomic<uint32_t> bell_asleep;
  alignas(128) Reply reply;
  alignas(128) std::atomic<uint64_t> done;
  alignas(128) std::atomic<uint32_t> done_asleep;
};
static_assert(sizeof(HostMailbox) == 896);
static_assert(offsetof(HostMailbox, bell) == 256 && offsetof(HostMailbox, done) == 640);
static_assert(std::atomic<uint64_t>::is_always_lock_free && std::atomic<uint32_t>::is_always_lock_free);

/// The device mailbox of stream calls, in GPU memory that is new for every attach. begin: {done = 0, barrier, bell =
/// record number}; end: wait until done or dead is not 0. The values in a captured graph are constants, so both are
/// flags.
struct DeviceMailbox {
  alignas(128) uint32_t bell;  ///< record number, 0: none
  alignas(128) uint32_t done;  ///< low half of the word that end waits on
  uint32_t dead;               ///< high half, raised by libmoed when the daemon is gone
};
static_assert(offsetof(DeviceMailbox, dead) == offsetof(DeviceMailbox, done) + 4);
inline constexpr uint32_t kStepBell = 0x80000000u;

}  // namespace moed
