// libmoed's C ABI and its host path: submit, poll and wait through the mailbox. Nothing here throws outwards, prints or
// waits without a limit.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <new>

#include "daemon/abi/arena.h"
#include "daemon/client/lane.h"

#define MOED_SAME(c, cpp, field) static_assert(offsetof(c, field) == offsetof(moed::cpp, field), #cpp "::" #field)

static_assert(sizeof(moed_call_t) == sizeof(moed::Call) && sizeof(moed_reply_t) == sizeof(moed::Reply));
static_assert(sizeof(moed_info) == sizeof(moed::Info) && MOED_ABI == moed::kAbi);
static_assert(MOED_LAYER_IDENTITY == moed::kIdentityLayer && MOED_INTERNAL == moed::kStatuses - 1);
MOED_SAME(moed_call_t, Call, tokens);
MOED_SAME(moed_call_t, Call, flags);
MOED_SAME(moed_call_t, Call, x);
MOED_SAME(moed_call_t, Call, scales);
MOED_SAME(moed_call_t, Call, ids);
MOED_SAME(moed_call_t, Call, weights);
MOED_SAME(moed_call_t, Call, out);
MOED_SAME(moed_call_t, Call, valid);
MOED_SAME(moed_call_t, Call, timeout_us);
MOED_SAME(moed_call_t, Call, reserved);
MOED_SAME(moed_reply_t, Reply, status);
MOED_SAME(moed_reply_t, Reply, ranks);
MOED_SAME(moed_reply_t, Reply, token);
MOED_SAME(moed_reply_t, Reply, dropped);
MOED_SAME(moed_reply_t, Reply, value);
MOED_SAME(moed_reply_t, Reply, limit);
MOED_SAME(moed_reply_t, Reply, total_ns);
MOED_SAME(moed_reply_t, Reply, reserved);
MOED_SAME(moed_info, Info, lane);
MOED_SAME(moed_info, Info, top_k);
MOED_SAME(moed_info, Info, max_call_tokens);
MOED_SAME(moed_info, Info, slot_tokens);
MOED_SAME(moed_info, Info, incarnation);
MOED_SAME(moed_info, Info, model_digest);
#undef MOED_SAME

namespace {

using namespace moed;

constexpr std::size_t kFirstInfoSize = 128;
constexpr Nanos kLeasePeriod = 100'000'000U;  // how long a daemon's death may go unnoticed
constexpr Nanos kReplySlack = 100'000'000U;   // beyond the deadline, for the reply to arrive

thread_local Sentence attach_error;

moed_status number(Status status) { return static_cast<moed_status>(status); }

moed_status lost(moed_lane& lane) {
  lane.lost = true;
  lane.error.set("the daemon at %s is gone: moed_reattach when it is back", lane.path);
  return MOED_DAEMON_LOST;
}

/// Runs what allocates; no exception leaves.
template <class F>
moed_status guarded(Sentence& why, F&& body) {
  try {
    return number(body());
  } catch (const std::bad_alloc&) {
    why.set("this process has no memory left");
    return MOED_NO_MEMORY;
  } catch (...) {
    why.set("an exception in libmoed, which is a bug");
    return MOED_INTERNAL;
  }
}

void describe(moed_lane& lane, const Reply& r) {
  const auto status = static_cast<Status>(r.status);
  if (status == Status::bad_call) {
    lane.error.set("call %llu: %s is %lld, its limit is %llu", static_cast<unsigned long long>(r.number),
                   name(static_cast<CallField>(r.field)), static_cast<long long>(r.value),
                   static_cast<unsigned long long>(r.limit));
  } else if (status == Status::bad_route || status == Status::masked) {
    lane.error.set("call %llu: token %u slot %u has expert id %lld, allowed are -1 to %u",
                   static_cast<unsigned long long>(r.number), r.token, r.slot, static_cast<long long>(r.value),
                   lane.info.experts - 1);
  } else {
    lane.error.set("call %llu of layer %u ended as %s, rank mask %llx:%016llx",
                   static_cast<unsigned long long>(r.number), r.layer, name(status),
                   static_cast<unsigned long long>(r.ranks[1]), static_cast<unsigned long long>(r.ranks[0]));
  }
}

moed_status collect(moed_lane& lane, moed_reply_t* out) {
  const Reply& reply = lane.mailbox->reply;
  const uint32_t status = reply.status;
  if (out != nullptr) std::memcpy(out, &reply, sizeof *out);
  if (status == MOED_OK)
    lane.had_good = true;
  else
    describe(lane, reply);
  return status;
}

bool ended(const moed_lane& lane) { return lane.mailbox->done.load(std::memory_order_acquire) == lane.number; }

/// Looks at the lease once a period; true when the daemon is gone and has not ended the call before.
bool gone(moed_lane& lane, Nanos now) {
  if (now - lane.lease_checked < kLeasePeriod) return false;
  lane.lease_checked = now;
  return !lease_held(lane) && !ended(lane);
}

/// Waits for the call in flight until `until`: spins, then sleeps in slices short enough to notice a dead daemon.
moed_status wait_until(moed_lane& lane, moed_reply_t* out, Nanos start, Nanos until) {
  const Nanos spin_end = std::min(start + lane.spin, until);
  std::atomic<uint64_t>& done = lane.mailbox->done;
  const uint64_t awaited = lane.number;
  Nanos now = start;
  do {
    for (int i = 0; i < 64; ++i) {
      if (done.load(std::memory_order_acquire) == awaited) return collect(lane, out);
      cpu_relax();
    }
    now = now_ns();
    if (gone(lane, now)) return lost(lane);
  } while (now < spin_end);
  std::atomic<uint32_t>& asleep = lane.mailbox->done_asleep;
  while (now < until) {
    asleep.store(1, std::memory_order_seq_cst);
    const uint64_t seen = done.load(std::memory_order_seq_cst);
    if (seen != awaited)
      futex_wait(futex_address(done), static_cast<uint32_t>(seen), std::min(until, lane.lease_checked + kLeasePeriod));
    asleep.store(0, std::memory_order_relaxed);
    if (ended(lane)) return collect(lane, out);
    now = now_ns();
    if (gone(lane, now)) return lost(lane);
  }
  if (ended(lane)) return collect(lane, out);
  return MOED_PENDING;
}

/// Why a lane cannot be asked for its call; ok: it can.
moed_status check_asked(moed_lane& lane) {
  if (lane.lost) return MOED_DAEMON_LOST;
  if (lane.number != 0) return MOED_OK;
  lane.error.set("no call was submitted on this lane since it was attached");
  return MOED_BAD_CALL;
}

moed_status no_stream(moed_lane* lane) {
  if (lane != nullptr) lane->error.set("stream calls need a CUDA daemon");
  return MOED_UNSUPPORTED;
}

}  // namespace

uint32_t moed_abi(void) { return MOED_ABI; }

moed_status moed_attach(const char* socket, const moed_options* options, moed_lane** out) {
  if (out == nullptr) {
    attach_error.set("moed_attach: out is NULL");
    return MOED_BAD_CALL;
  }
  *out = nullptr;
  moed_lane* lane = nullptr;
  const moed_status status = guarded(attach_error, [&] {
    lane = new moed_lane;
    return attach(*lane, socket, options, attach_error);
  });
  if (status == MOED_OK)
    *out = lane;
  else
    delete lane;
  return status;
}

moed_status moed_get_info(const moed_lane* lane, moed_info* out) {
  if (lane == nullptr || out == nullptr) return MOED_BAD_CALL;
  const std::size_t asked = out->size != 0 ? out->size : kFirstInfoSize;
  if (asked < kFirstInfoSize) {
    lane->error.set("moed_info.size is %zu, at least %zu: set it to sizeof(moed_info)", asked, kFirstInfoSize);
    return MOED_BAD_CALL;
  }
  const std::size_t filled = std::min(asked, sizeof lane->info);
  std::memcpy(out, &lane->info, filled);
  out->size = static_cast<uint32_t>(filled);
  return MOED_OK;
}

void* moed_arena(const moed_lane* lane) { return lane != nullptr ? lane->arena.data() : nullptr; }

moed_status moed_slot(const moed_lane* lane, uint32_t slot, moed_call_t* out) {
  if (lane == nullptr || out == nullptr) return MOED_BAD_CALL;
  if (slot >= lane->info.slots) {
    lane->error.set("slot is %u, the arena has %u", slot, lane->info.slots);
    return MOED_BAD_CALL;
  }
  const ArenaSlot at = arena_slot(slot_shape(lane->info), slot, lane->info.slot_tokens);
  *out = {};
  out->x = at.x;
  out->scales = at.scales;
  out->ids = at.ids;
  out->weights = at.weights;
  out->out = at.out;
  out->valid = at.valid;
  return MOED_OK;
}

moed_status moed_submit(moed_lane* lane, const moed_call_t* call) {
  if (lane == nullptr || call == nullptr) return MOED_BAD_CALL;
  if (lane->lost) return MOED_DAEMON_LOST;
  if (!ended(*lane)) {
    lane->error.set("call %llu is in flight: collect it with moed_poll or moed_wait",
                    static_cast<unsigned long long>(lane->number));
    return MOED_BUSY;
  }
  HostMailbox& mailbox = *lane->mailbox;
  std::memcpy(&mailbox.call, call, sizeof mailbox.call);
  mailbox.bell.store(++lane->number, std::memory_order_seq_cst);
  if (mailbox.bell_asleep.load(std::memory_order_seq_cst) != 0) futex_wake(futex_address(mailbox.bell));
  return MOED_OK;
}

moed_status moed_poll(moed_lane* lane, moed_reply_t* out) {
  if (lane == nullptr) return MOED_BAD_CALL;
  if (const moed_status status = check_asked(*lane); status != MOED_OK) return status;
  if (ended(*lane)) return collect(*lane, out);
  if (gone(*lane, now_ns())) return lost(*lane);
  return MOED_PENDING;
}

moed_status moed_wait(moed_lane* lane, moed_reply_t* out, uint32_t timeout_us) {
  if (lane == nullptr) return MOED_BAD_CALL;
  if (const moed_status status = check_asked(*lane); status != MOED_OK) return status;
  const Nanos start = now_ns();
  return wait_until(*lane, out, start, start + timeout_us * Nanos{1000});
}

moed_status moed_call(moed_lane* lane, const moed_call_t* call, moed_reply_t* out) {
  const moed_status status = moed_submit(lane, call);
  if (status != MOED_OK) return status;
  Nanos limit = lane->had_good ? lane->deadline : lane->first_deadline;
  if (call->timeout_us != 0) limit = std::min(call->timeout_us, kMaxTimeoutUs) * Nanos{1000};
  const Nanos start = now_ns();
  return wait_until(*lane, out, start, start + limit + kReplySlack);
}

moed_status moed_begin(moed_lane* lane, void*, const moed_call_t*) { return no_stream(lane); }
moed_status moed_end(moed_lane* lane, void*) { return no_stream(lane); }
moed_status moed_enqueue(moed_lane* lane, void*, const moed_call_t*) { return no_stream(lane); }
moed_status moed_step(moed_lane* lane, void*) { return no_stream(lane); }
moed_status moed_stream_status(moed_lane* lane, moed_reply_t*) { return no_stream(lane); }

moed_status moed_dry(moed_lane* lane, int on) {
  if (lane == nullptr) return MOED_BAD_CALL;
  if (lane->lost) return MOED_DAEMON_LOST;
  const moed_status status = guarded(lane->error, [&] { return set_dry(*lane, on != 0, lane->error); });
  if (status == MOED_DAEMON_LOST) lane->lost = true;
  return status;
}

moed_status moed_reattach(moed_lane* lane) {
  if (lane == nullptr) return MOED_BAD_CALL;
  return guarded(lane->error, [&] { return reattach(*lane, lane->error); });
}

const char* moed_status_name(moed_status status) { return name(static_cast<Status>(status)); }

const char* moed_last_error(const moed_lane* lane) { return lane != nullptr ? lane->error.text : attach_error.text; }

void moed_detach(moed_lane* lane) { delete lane; }
