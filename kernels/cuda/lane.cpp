// A host call reads from begin() downwards.
#include "kernels/cuda/lane.h"

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <thread>
#include <utility>

#include "kernels/cuda/passes.h"

namespace moed::cuda {
namespace {

constexpr uint64_t kLow = 0xFFFFFFFF;
constexpr Nanos kUsed = 2'000'000;  ///< after a stream call more are expected for so long
constexpr Nanos kLongestLoop = 1'000'000;
constexpr uint64_t kParked = 32;          ///< loops of a lane whose calls the host does not see come
constexpr uint64_t kAhead = 12;           ///< loops queued while a call runs: each waits less than 1 ms
constexpr uint32_t kLoops = 32;           ///< of a pass; of a lane that the host rings for:
constexpr uint32_t kHostLoops = 4;        ///< the GPU is left alone the sooner
constexpr Nanos kUnusual = 50'000'000;    ///< a pass has one loop for so long after one has left a call behind
constexpr Nanos kLetGo = 10'000'000'000;  ///< how long the GPU may take to end what is queued
constexpr uint32_t kNudge = 0x20000000U;  ///< a bell that is no call: lets a parked pass through
constexpr uint64_t kCopyPart = 1 << 20;   ///< a copy from or to the engine's memory keeps the thread busy
constexpr uint64_t kMailboxBytes = sizeof(DeviceMailbox);

/// Whether out shares bytes with what the call reads. A call loop writes out while it may still have to read.
bool is_in_place(const Call& c, const Shape& s) {
  const uint64_t slots = uint64_t{c.tokens} * s.top_k;
  const auto meets = [&](uint64_t offset, uint64_t bytes) {
    return offset < c.out + out_bytes(c, s) && c.out < offset + bytes;
  };
  const bool wire = (c.flags & kFlagWire) != 0;
  return meets(c.x, uint64_t{c.tokens} * s.latent * (wire ? 1 : 2)) ||
         (wire && meets(c.scales, uint64_t{c.tokens} * (s.latent / kBlock))) || meets(c.ids, slots * 8) ||
         meets(c.weights, slots * 4) || (c.valid != 0 && meets(c.valid, sizeof(int32_t)));
}

/// Whether a call may end within a call loop: one piece, small, and nothing known against it.
bool is_plain(const Shop& shop, const DeviceCall& call) {
  const BackendOptions& o = shop.options;
  const uint32_t tokens = call.call.tokens;
  return call.forced == Status::ok && call.dry == 0 && shop.world.world().long_way == 0 &&
         !is_in_place(call.call, o.shape) && tokens <= std::min(kLoopTokens, o.max_tokens) &&
         tokens * o.shape.top_k <= kLoopSlots;
}

}  // namespace

bool Lane::make(int priority) {
  if (!shop_.health.good(pass_.make(priority), "stream of a lane")) return false;
  const World& w = shop_.world.world();
  pass_.set_pass(
      [this, &w](uint64_t loop, uint32_t loops) { return launch_call_pass(w, number_, loop, loops, pass_.stream()); },
      host().begun, host().completed);
  return shop_.health.good(prepare_call_pass(w), "kernels of the call pass");
}

bool Lane::give(Allocation& memory, Fd& out, std::string& why) { return shop_.memory.export_fd(memory, out, why); }

/// Memory of one attach. A host arena has a copy on the GPU; a GPU arena is the engine's, too.
bool Lane::allocate(ArenaKind kind, uint64_t bytes, LaneMemory& out, std::string& why) {
  const auto exportable = kind == ArenaKind::gpu ? std::optional(HandleKind::cuda_fd) : std::nullopt;
  out.host_mailbox = make_sealed_memory("moed-mailbox", sizeof(HostMailbox));
  arena_ = shop_.memory.make(bytes, exportable, why);
  mailbox_ = arena_ ? shop_.memory.make(kMailboxBytes, exportable, why) : Allocation();
  if (!mailbox_) return false;
  if (kind == ArenaKind::gpu) {
    if (!give(mailbox_, out.device_mailbox, why) || !give(arena_, out.arena, why)) return false;
  } else {
    out.arena = make_sealed_memory("moed-arena", bytes);
    engine_ = out.arena ? Mapping(out.arena, bytes) : Mapping();
  }
  if (out.host_mailbox && (kind == ArenaKind::gpu || engine_)) return true;
  why = "no memory for an arena of " + std::to_string(bytes) + " bytes: " + std::strerror(errno);
  return false;
}

Status Lane::open(ArenaKind kind, uint64_t bytes, LaneMemory& out, std::string& why) {
  const std::lock_guard lock(mutex_);
  if (!allocate(kind, bytes, out, why)) {
    arena_.reset(), mailbox_.reset();
    engine_ = Mapping();
    return Status::no_memory;
  }
  LaneState* s = state();
  DeviceMailbox* const box = mailbox_.as<DeviceMailbox>();
  std::byte* const arena = arena_.as<std::byte>();
  constexpr uint32_t none = 0;
  const bool good =
      shop_.side.zero(arena, bytes) && shop_.side.zero(box, kMailboxBytes) &&
      shop_.side.zero(calls(), kMostRecords * sizeof(DeviceCall)) &&
      shop_.side.to_gpu(&s->mailbox, &box, sizeof(void*)) && shop_.side.to_gpu(&s->arena, &arena, sizeof(void*)) &&
      shop_.side.to_gpu(&s->arena_bytes, &bytes, sizeof bytes) && shop_.side.to_gpu(&s->running, &none, sizeof none) &&
      shop_.side.to_gpu(&s->disarm, &none, sizeof none) && shop_.side.settle();
  if (!good) {
    why = shop_.health.text();
    return Status::device_lost;
  }
  kind_ = kind;
  registered_.clear();
  done_ = noticed_ = host_load(host().done);
  dry_ = running_ = false;
  arena_bytes_.store(bytes, std::memory_order_relaxed);
  out.arena_bytes = bytes;
  open_ = true;
  pump();
  return Status::ok;
}

bool Lane::close() {
  const std::lock_guard lock(mutex_);
  if (!open_) return true;
  open_ = running_ = false;
  constexpr uint32_t on = 1;
  bool gone = shop_.side.to_gpu(&state()->disarm, &on, sizeof on) &&
              shop_.side.word(&mailbox_.as<DeviceMailbox>()->bell, kNudge) && shop_.side.settle();
  gone = gone && shop_.health.good(pass_.mark(), "marker of a lane");
  for (const Nanos until = now_ns() + kLetGo; gone && !pass_.settled();) {
    gone = now_ns() < until;
    std::this_thread::yield();
  }
  arena_bytes_.store(0, std::memory_order_relaxed);
  engine_ = Mapping();
  if (!gone) return shop_.health.good(cudaErrorLaunchTimeout, "a lane that the GPU does not let go");
  arena_.reset();
  mailbox_.reset();
  return true;
}

void Lane::set_dry(bool on) {
  const std::lock_guard lock(mutex_);
  dry_ = on;
}

/// What a call reads goes from the engine's host arena to its copy on the GPU; nothing else is ever read there.
void Lane::copy_in(const Call& c) {
  if (kind_ != ArenaKind::host) return;
  const Shape& s = shop_.options.shape;
  const auto copy = [&](uint64_t offset, uint64_t bytes) {
    for (uint64_t end = offset + bytes; offset < end; offset += kCopyPart) {
      shop_.side.to_gpu(arena_.as<std::byte>() + offset, engine_.data() + offset, std::min(kCopyPart, end - offset));
      if (end - offset > kCopyPart) shop_.keep_serving();
    }
  };
  const uint64_t t = c.tokens;
  const bool wire = (c.flags & kFlagWire) != 0;
  copy(c.x, t * s.latent * (wire ? 1 : 2));
  if (wire) copy(c.scales, t * (s.latent / kBlock));
  copy(c.ids, t * s.top_k * ((c.flags & kFlagIds64) != 0 ? 8 : 4));
  copy(c.weights, t * s.top_k * ((c.flags & kFlagWeights16) != 0 ? 2 : 4));
  if (c.valid != 0) copy(c.valid, sizeof(int32_t));
}

/// A call that is refused before it reaches the GPU: zeros as far as it says where out lies.
void Lane::zero_out(const Call& c) {
  const Shape& s = shop_.options.shape;
  if (c.kind > 1 || c.tokens > shop_.options.max_call_tokens || !fits(c.out, out_bytes(c, s), arena_bytes())) return;
  if (kind_ == ArenaKind::host)
    std::memset(engine_.data() + c.out, 0, out_bytes(c, s));
  else
    shop_.side.zero(arena_.as<std::byte>() + c.out, out_bytes(c, s));
}

Status Lane::add_record(uint32_t number, const Call& call, Nanos timeout, std::string& why) {
  const std::lock_guard lock(mutex_);
  if (!open_ || kind_ != ArenaKind::gpu || number == 0 || number > kMostRecords) {
    why = "lane " + std::to_string(number_) + " takes records 1.." + std::to_string(kMostRecords) +
          " while it is open with a GPU arena, not " + std::to_string(number);
    return Status::internal;
  }
  const BackendOptions& o = shop_.options;
  const Refusal refusal = validate(call, {o.shape, o.max_call_tokens, arena_bytes(), false});
  if (refusal.status != Status::ok) {
    why = std::string(name(refusal.field)) + " = " + std::to_string(refusal.value) + " is refused";
    return refusal.status;
  }
  DeviceCall record{};
  record.call = call;
  record.number = number;
  record.timeout_ns = timeout;
  record.may_zero = 1;
  record.plain = is_plain(shop_, record) ? 1 : 0;
  // Without a number while it is half there, because a loop that runs may read it ahead.
  DeviceCall* const place = calls() + number - 1;
  const uint64_t none = 0;
  const uint64_t named = std::exchange(record.number, none);
  if (!shop_.side.to_gpu(&place->number, &none, sizeof none) || !shop_.side.settle() ||
      !shop_.side.to_gpu(place, &record, sizeof record) || !shop_.side.settle() ||
      !shop_.side.to_gpu(&place->number, &named, sizeof named) || !shop_.side.settle()) {
    why = shop_.health.text();
    return Status::device_lost;
  }
  // A loop that runs may have read ahead what was there before.
  if (!registered_.insert(number).second) std::this_thread::sleep_for(std::chrono::nanoseconds(kLongestLoop));
  return Status::ok;
}

Status Lane::begin(const Begin& begin, std::string& why) {
  const std::lock_guard lock(mutex_);
  if (!open_ || running_) {
    why = "lane " + std::to_string(number_) + (open_ ? " has a call in flight" : " is not open");
    return open_ ? Status::busy : Status::internal;
  }
  begin_ = begin;
  const BackendOptions& o = shop_.options;
  refusal_ = validate(begin.call, {o.shape, o.max_call_tokens, arena_bytes(), false});
  call_ = {};
  call_.call = begin.call;
  call_.number = ++serial_;
  call_.timeout_ns = begin.deadline > begin.seen ? begin.deadline - begin.seen : 0;
  call_.forced = refusal_.status != Status::ok ? refusal_.status : begin.refuse;
  call_.dry = dry_ ? 1 : 0;
  call_.may_zero = call_.forced == Status::ok ? 1 : 0;
  call_.plain = is_plain(shop_, call_) ? 1 : 0;
  if (call_.forced == Status::ok)
    copy_in(begin.call);
  else
    zero_out(begin.call);
  shop_.side.to_gpu(&state()->host_call, &call_, sizeof call_);
  shop_.side.word(&state()->host_number, static_cast<uint32_t>(serial_));
  shop_.side.word(&mailbox_.as<DeviceMailbox>()->bell, kHostBell);
  running_ = true;
  pump();
  return Status::ok;
}

bool Lane::poll(CallRecord& out) {
  const std::lock_guard lock(mutex_);
  if (!open_) return false;
  pump();
  const uint64_t done = host_load(host().done);
  if (done == done_) return false;
  if (!running_) return open_ && kind_ == ArenaKind::gpu && poll_stream(done, out);
  if ((done & kLow) != (serial_ & kLow) || !collect(done >> 32, out)) return false;
  done_ = done;
  out.total_ns = now_ns() - begin_.seen;
  running_ = false;
  return true;
}

void Lane::tend() {
  const std::unique_lock lock(mutex_, std::try_to_lock);  // whoever holds it does the same
  if (lock && open_) pump();
}

/// The last stream call that has ended; those before it since the last poll are not told.
bool Lane::poll_stream(uint64_t done, CallRecord& out) {
  if (!take_record(done >> 32, out)) return false;
  done_ = done;
  out.start = now_ns() - out.total_ns;
  out.lane = static_cast<uint16_t>(number_);
  out.path = static_cast<uint16_t>(CallPath::stream);
  return true;
}

bool Lane::take_record(uint64_t count, CallRecord& out) const {
  out = {};
  return take_tagged(host().record, count, offsetof(CallRecord, peer) + shop_.options.ranks * sizeof(CallRecord::Peer),
                     out);
}

/// The record, and for a host arena the answer. False: the record is not whole yet.
bool Lane::collect(uint64_t count, CallRecord& out) {
  if (!take_record(count, out)) return false;
  out.number = begin_.number;
  out.start = begin_.seen;
  out.lane = static_cast<uint16_t>(number_);
  out.path = static_cast<uint16_t>(CallPath::host);
  if (refusal_.status != Status::ok) {
    out.field = static_cast<uint32_t>(refusal_.field);
    out.value = refusal_.value;
    out.limit = refusal_.limit;
  }
  const Call& c = begin_.call;
  if (call_.may_zero == 0 || kind_ != ArenaKind::host) return true;
  const uint64_t bytes = out_bytes(c, shop_.options.shape);
  for (uint64_t at = 0; at < bytes; at += kCopyPart) {
    shop_.side.from_gpu(engine_.data() + c.out + at, arena_.as<std::byte>() + c.out + at,
                        std::min(kCopyPart, bytes - at));
    if (bytes - at > kCopyPart) shop_.keep_serving();
  }
  return true;
}

/// A stream call that its passes have not ended yet: nobody rings for it again. Only while no pass is queued.
bool Lane::in_flight() {
  uint32_t running = 0;
  return shop_.side.from_gpu(&running, &state()->running, sizeof running) && running != 0;
}

/// Keeps passes queued while calls come; an idle lane's pass waits for the bell by a stream memory operation.
void Lane::pump() {
  if (shop_.health.lost()) return;
  if (const uint64_t done = host_load(host().done); done != noticed_) {
    noticed_ = done;
    used_at_ = now_ns();
  }
  if (const uint64_t handed = host_load(host().handed); handed != handed_) {
    handed_ = handed;
    handed_at_ = used_at_ = now_ns();
  }
  const bool unusual = handed_at_ != 0 && now_ns() < handed_at_ + kUnusual;
  const uint32_t loops = unusual ? 1 : kind_ == ArenaKind::gpu ? kLoops : kHostLoops;
  if (running_ || now_ns() < used_at_ + kUsed) {
    shop_.health.good(pass_.fill(kAhead, loops), "launch of the call pass");
  } else if (shop_.options.park) {
    if (!pass_.settled()) {
      shop_.health.good(pass_.mark(), "marker of a lane");
      return;
    }
    if (kind_ == ArenaKind::gpu && in_flight()) {
      shop_.health.good(pass_.fill(kAhead, loops), "launch of the call pass");
      return;
    }
    cudaError_t launched = cudaSuccess;
    const CUresult waits = pass_.park(shop_.driver, reinterpret_cast<CUdeviceptr>(&mailbox_.as<DeviceMailbox>()->bell),
                                      1, kind_ == ArenaKind::gpu ? kParked : kHostLoops, loops, launched);
    shop_.health.good(waits, shop_.driver, "wait for a bell");
    shop_.health.good(launched, "launch of the call pass");
  }
}

}  // namespace moed::cuda
