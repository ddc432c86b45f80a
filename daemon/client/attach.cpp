// Taking a lane: options, the messages of the socket, and every check on what the daemon sends before it is used.
#include <sys/stat.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <utility>
#include <vector>

#include "daemon/abi/arena.h"
#include "daemon/client/lane.h"

namespace moed {
namespace {

constexpr std::size_t kFirstOptionsSize = 48;
static_assert(sizeof(moed_options) == kFirstOptionsSize);
constexpr std::size_t kMostOptionsSize = 4096;

/// What an attach brings.
struct Attachment {
  Fd lease;
  Attached answer;
  Mapping mailbox;
  Fd arena;
};

/// Refuses memory that is smaller than said or that could shrink under the mapping.
Status check_memory(const Fd& fd, uint64_t bytes, const char* what, Sentence& why) {
  struct stat info {};
  if (::fstat(fd.get(), &info) != 0 || static_cast<uint64_t>(info.st_size) < bytes) {
    why.set("the daemon's %s has %lld bytes, %llu were announced: daemon and libmoed are of different versions", what,
            static_cast<long long>(info.st_size), static_cast<unsigned long long>(bytes));
    return Status::version;
  }
  const int seals = ::fcntl(fd.get(), F_GET_SEALS);
  if (seals >= 0 && (seals & F_SEAL_SHRINK) != 0) return Status::ok;
  why.set("the daemon's %s is not sealed against shrinking: reading it could end this process", what);
  return Status::internal;
}

Status check_answer(const Attached& answer, std::size_t bytes, std::size_t descriptors, Sentence& why) {
  if (bytes != sizeof answer || answer.header.magic != kAttachMagic || answer.header.type != MessageType::attached) {
    why.set(
        "the answer to attach has %zu bytes and type %u, %zu and %u expected: daemon and libmoed are of different "
        "versions",
        bytes, bytes < sizeof(MessageHeader) ? 0U : static_cast<unsigned>(answer.header.type), sizeof answer,
        static_cast<unsigned>(MessageType::attached));
    return Status::version;
  }
  if (answer.status != static_cast<uint32_t>(Status::ok)) {
    const auto status = static_cast<Status>(answer.status);
    if (answer.text[0] != '\0')
      why.set("%.*s", static_cast<int>(sizeof answer.text), answer.text);
    else
      why.set("the daemon refused: %s", name(status));
    return status;
  }
  if (answer.info.abi != kAbi || answer.info.size < sizeof(Info)) {
    why.set("the daemon serves abi %u, this libmoed speaks abi %u: install the libmoed of the daemon's version",
            answer.info.abi, kAbi);
    return Status::version;
  }
  constexpr std::size_t expected = 2;  // mailbox and arena in host memory; a GPU arena brings a device mailbox, too
  if (descriptors == expected && answer.descriptors == expected) return Status::ok;
  why.set(
      "attach brought %zu descriptors, %u were announced and %zu expected: has this process reached its limit (ulimit "
      "-n)?",
      descriptors, answer.descriptors, expected);
  return descriptors < answer.descriptors ? Status::no_memory : Status::version;
}

Status check_mailbox(const HostMailbox& mailbox, const Info& info, Sentence& why) {
  const MailboxHeader& h = mailbox.header;
  const uint64_t incarnation = h.incarnation.load(std::memory_order_acquire);  // stored last: the rest is there
  if (incarnation == 0 || incarnation != info.incarnation) {
    why.set("the mailbox is of incarnation %llx, the daemon of %llx: attach again",
            static_cast<unsigned long long>(incarnation), static_cast<unsigned long long>(info.incarnation));
    return Status::internal;
  }
  if (h.magic != kMailboxMagic || h.abi != kAbi || h.bytes < sizeof(HostMailbox) || h.arena_kind != 0 ||
      h.arena_bytes != info.arena_bytes) {
    why.set("the mailbox says abi %u, %u bytes, arena kind %u of %llu bytes; expected %u, %zu, 0, %llu", h.abi, h.bytes,
            h.arena_kind, static_cast<unsigned long long>(h.arena_bytes), kAbi, sizeof(HostMailbox),
            static_cast<unsigned long long>(info.arena_bytes));
    return Status::version;
  }
  return Status::ok;
}

/// Connects, attaches, checks everything and maps the mailbox. The arena is left to the caller, who knows where to.
Status attach_to(const SocketPath& path, const Attach& request, Attachment& out, Sentence& why) {
  const Nanos until = now_ns() + kAnswerLimit;
  Status status = connect_socket(path, until, out.lease, why);
  if (status == Status::ok) status = send_within(out.lease, &request, sizeof request, until, why);
  std::vector<Fd> fds;
  std::size_t got = 0;
  const std::span<std::byte> buffer(reinterpret_cast<std::byte*>(&out.answer), sizeof out.answer);
  if (status == Status::ok) status = receive_within(out.lease, buffer, fds, until, got, why);
  if (status == Status::peer_timeout) status = Status::daemon_lost;
  if (status == Status::ok) status = check_answer(out.answer, got, fds.size(), why);
  if (status == Status::ok) status = check_memory(fds.front(), sizeof(HostMailbox), "mailbox", why);
  if (status == Status::ok) status = check_memory(fds.back(), out.answer.info.arena_bytes, "arena", why);
  if (status != Status::ok) return status;
  out.mailbox = Mapping(fds.front(), sizeof(HostMailbox));
  if (!out.mailbox) {
    why.set("the mailbox of %zu bytes cannot be mapped: %s", sizeof(HostMailbox), ErrnoText(errno).get());
    return Status::no_memory;
  }
  out.arena = std::move(fds.back());
  return check_mailbox(*reinterpret_cast<const HostMailbox*>(out.mailbox.data()), out.answer.info, why);
}

/// Makes the lane the attachment's; its arena is mapped already.
void adopt(moed_lane& lane, Attachment&& from) {
  lane.lease = std::move(from.lease);
  lane.mailbox_memory = std::move(from.mailbox);
  lane.mailbox = reinterpret_cast<HostMailbox*>(lane.mailbox_memory.data());
  lane.info = from.answer.info;
  lane.info.size = sizeof(Info);
  lane.deadline = from.answer.deadline_ms * Nanos{1'000'000};
  lane.first_deadline = from.answer.first_deadline_ms * Nanos{1'000'000};
  lane.number = 0;
  lane.had_good = lane.lost = false;
  lane.answers_owed = 0;
  lane.lease_checked = now_ns();
  const int32_t all = INT32_MAX;
  for (uint32_t slot = 0; slot < lane.info.slots; ++slot) {
    const ArenaSlot at = arena_slot(slot_shape(lane.info), slot, lane.info.slot_tokens);
    if (at.end <= lane.arena.bytes()) std::memcpy(lane.arena.data() + at.valid, &all, sizeof all);
  }
}

Status read_options(const moed_options* given, moed_lane& lane, Sentence& why) {
  moed_options options{};
  if (given != nullptr) {
    if (given->size < kFirstOptionsSize || given->size > kMostOptionsSize) {
      why.set("moed_options.size is %u, allowed are %zu to %zu: set it to sizeof(moed_options)", given->size,
              kFirstOptionsSize, kMostOptionsSize);
      return Status::bad_call;
    }
    const auto* bytes = reinterpret_cast<const unsigned char*>(given);
    if (std::any_of(bytes + sizeof options, bytes + given->size, [](unsigned char b) { return b != 0; })) {
      why.set("moed_options sets fields beyond the %zu bytes that this libmoed knows: install a newer one",
              sizeof options);
      return Status::unsupported;
    }
    options = *given;
  }
  if (options.arena != 0) {
    why.set("moed_options.arena is %u, only 0 (host memory) is served without a CUDA daemon", options.arena);
    return Status::unsupported;
  }
  if (options.spin_us > 1'000'000) {
    why.set("moed_options.spin_us is %u, at most 1000000", options.spin_us);
    return Status::bad_call;
  }
  lane.spin = (options.spin_us != 0 ? options.spin_us : 50) * Nanos{1000};
  lane.request.arena_bytes = options.arena_bytes;
  lane.request.dry = options.dry != 0 ? 1 : 0;
  lane.request.has_digest = options.model_digest != nullptr ? 1 : 0;
  if (options.model_digest != nullptr)
    std::memcpy(lane.request.model_digest, options.model_digest, sizeof lane.request.model_digest);
  if (options.name != nullptr)
    std::memcpy(lane.request.name, options.name, ::strnlen(options.name, sizeof lane.request.name));
  return Status::ok;
}

/// Whether offsets into the arena mean the same at the new daemon.
Status check_same(const moed_lane& lane, const Info& now, Sentence& why) {
  const Info& was = lane.info;
  const struct {
    const char* name;
    uint64_t was, now;
  } fields[] = {{"arena_bytes", lane.arena.bytes(), now.arena_bytes},
                {"hidden", was.hidden, now.hidden},
                {"latent", was.latent, now.latent},
                {"experts", was.experts, now.experts},
                {"top_k", was.top_k, now.top_k},
                {"first_layer", was.first_layer, now.first_layer},
                {"layers", was.layers, now.layers},
                {"slots", was.slots, now.slots},
                {"slot_tokens", was.slot_tokens, now.slot_tokens}};
  for (const auto& f : fields) {
    if (f.was == f.now) continue;
    why.set("the new daemon's %s is %llu, it was %llu: detach and attach", f.name,
            static_cast<unsigned long long>(f.now), static_cast<unsigned long long>(f.was));
    return Status::unsupported;
  }
  if (std::memcmp(was.model_digest, now.model_digest, sizeof was.model_digest) == 0) return Status::ok;
  why.set(
      "the new daemon serves another model (digest %02x%02x%02x%02x..., it was %02x%02x%02x%02x...): detach and attach",
      now.model_digest[0], now.model_digest[1], now.model_digest[2], now.model_digest[3], was.model_digest[0],
      was.model_digest[1], was.model_digest[2], was.model_digest[3]);
  return Status::unsupported;
}

}  // namespace

bool lease_held(const moed_lane& lane) {
  pollfd p{lane.lease.get(), POLLRDHUP, 0};
  return ::poll(&p, 1, 0) <= 0 || (p.revents & (POLLHUP | POLLRDHUP | POLLERR | POLLNVAL)) == 0;
}

Status attach(moed_lane& lane, const char* socket, const moed_options* options, Sentence& why) {
  Status status = read_options(options, lane, why);
  if (status == Status::ok) status = find_socket(socket, lane.path, why);
  Attachment attachment;
  if (status == Status::ok) status = attach_to(lane.path, lane.request, attachment, why);
  if (status != Status::ok) return status;
  const uint64_t bytes = attachment.answer.info.arena_bytes;
  lane.arena = Mapping(attachment.arena, bytes);
  if (!lane.arena) {
    why.set("the arena of %llu bytes cannot be mapped: %s", static_cast<unsigned long long>(bytes),
            ErrnoText(errno).get());
    return Status::no_memory;
  }
  adopt(lane, std::move(attachment));
  return Status::ok;
}

Status reattach(moed_lane& lane, Sentence& why) {
  if (!lane.lost && lease_held(lane)) {
    why.set("the daemon at %s still holds this lane: moed_reattach is for a lane that is lost", lane.path);
    return Status::busy;
  }
  lane.lost = true;
  Attach request = lane.request;
  request.arena_bytes = lane.arena.bytes();
  Attachment attachment;
  Status status = attach_to(lane.path, request, attachment, why);
  if (status == Status::ok) status = check_same(lane, attachment.answer.info, why);
  if (status != Status::ok) return status;
  void* at = lane.arena.data();
  if (::mmap(at, lane.arena.bytes(), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, attachment.arena.get(), 0) != at) {
    why.set("the arena of %zu bytes cannot be mapped at %p again: %s", lane.arena.bytes(), at, ErrnoText(errno).get());
    lane.arena = {};  // what is mapped there now is unknown
    return Status::no_memory;
  }
  adopt(lane, std::move(attachment));
  return Status::ok;
}

/// Sends Dry and returns the daemon's answer to it, past the answers to requests given up before.
Status set_dry(moed_lane& lane, bool on, Sentence& why) {
  const Nanos until = now_ns() + kAnswerLimit;
  Dry request;
  request.on = on ? 1 : 0;
  Status status = send_within(lane.lease, &request, sizeof request, until, why);
  if (status != Status::ok) return status;
  Answer answer;
  for (++lane.answers_owed; lane.answers_owed > 0; --lane.answers_owed) {
    std::vector<Fd> fds;
    std::size_t got = 0;
    const std::span<std::byte> buffer(reinterpret_cast<std::byte*>(&answer), sizeof answer);
    status = receive_within(lane.lease, buffer, fds, until, got, why);
    if (status != Status::ok) return status;
    if (got == sizeof answer && answer.header.magic == kAttachMagic && answer.header.type == MessageType::answer)
      continue;
    why.set("the answer to dry has %zu bytes, %zu expected: daemon and libmoed are of different versions", got,
            sizeof answer);
    return Status::version;
  }
  if (answer.status != 0) why.set("%.*s", static_cast<int>(sizeof answer.text), answer.text);
  return static_cast<Status>(answer.status);
}

}  // namespace moed
