// One turn of the hot thread reads from work() downwards.
#include "daemon/service_loop.h"

#include <cstring>
#include <utility>

#include "daemon/abi/validate.h"
#include "daemon/log.h"
#include "kernels/lines.h"

namespace moed {
namespace {

constexpr Nanos kLongestSleep = 10'000'000;

/// What a call reads from and writes to its arena: x, ids, weights, out. Only for calls whose kind and tokens are
/// sound.
uint64_t call_bytes(const Call& c, const Shape& s) {
  const uint64_t width = c.kind == static_cast<uint32_t>(CallKind::layer) ? s.hidden : s.latent;
  const uint64_t x = (c.flags & kFlagWire) != 0 ? width + width / kBlock : width * 2;
  const uint64_t slot = ((c.flags & kFlagIds64) != 0 ? 8 : 4) + ((c.flags & kFlagWeights16) != 0 ? 2 : 4);
  return c.tokens * (x + width * 2 + s.top_k * slot);
}

/// SESSION.COUNT
std::string sequence_text(uint64_t sequence) {
  return std::to_string(sequence >> kSessionShift) + "." + std::to_string(sequence & kCountMask);
}

}  // namespace

ServiceLoop::ServiceLoop(Backend& backend, Metrics& metrics, ServiceOptions options)
    : backend_(backend), metrics_(metrics), options_(options) {
  for (uint32_t lane = 0; lane <= options.lanes; ++lane) lanes_.push_back(std::make_unique<Lane>());
  words_.reserve(options.lanes + 1);
  loop_ = std::make_unique<Loop>("moed-service", options.idle,
                                 Duty{.work = [this](Nanos now) { return work(now); },
                                      .sleep = [this](Nanos now) { sleep(now); },
                                      .stall = [this](Nanos) { metrics_.stall(LoopId::service); }});
}

ServiceLoop::~ServiceLoop() { stop(); }

void ServiceLoop::stop() {
  if (!loop_) return;
  loop_->request_stop();
  backend_.wake();
  loop_->stop();
}

void ServiceLoop::attach(uint32_t lane, Mapping mailbox) {
  Lane& l = *lanes_[lane];
  l.mailbox = std::move(mailbox);
  l.calls.store(0, std::memory_order_relaxed);
  l.bell = 0;
  l.running = l.warm = false;
  l.state.store(LaneState::attached, std::memory_order_release);
  backend_.wake();
}

void ServiceLoop::detach(uint32_t lane, std::function<void()> released) {
  Lane& l = *lanes_[lane];
  l.released = std::move(released);
  l.state.store(LaneState::leaving, std::memory_order_release);
  backend_.wake();
}

bool ServiceLoop::work(Nanos now) {
  metrics_.tick(LoopId::service, now);
  if (options_.loop_delay_us != 0 &&
      (options_.delay_for_ms == 0 || now < made_ + uint64_t{options_.delay_for_ms} * 1'000'000)) {
    const timespec t = to_timespec(uint64_t{options_.loop_delay_us} * 1000);
    ::nanosleep(&t, nullptr);
  }
  bool worked = false;
  for (uint32_t lane = 0; lane < lanes_.size(); ++lane) {
    const LaneState state = lanes_[lane]->state.load(std::memory_order_acquire);
    if (state == LaneState::attached) {
      worked |= step(lane, *lanes_[lane], now);
    } else if (state == LaneState::leaving) {
      let_go(lane, *lanes_[lane]);
      worked = true;
    }
  }
  if (backend_.serve(now, served_)) {
    metrics_.pass_ended(served_);
    if (options_.recorder != nullptr) options_.recorder->pass_ended(served_);
    worked = true;
  }
  for (WaitFault fault; backend_.fault(fault);) tell(fault);
  return worked;
}

/// A wait on the GPU that ended in vain: who, for what, and what was there.
void ServiceLoop::tell(const WaitFault& f) {
  constexpr const char* kNames[] = {"return line", "row", "partial"};
  log_warn("waited in vain", {{"for", kNames[static_cast<uint32_t>(f.what)]},
                              {"peer", f.rank},
                              {"lane", f.lane},
                              {"token", f.token},
                              {"awaited", sequence_text(f.awaited)},
                              {"seen", sequence_text(f.seen)},
                              {"waited_us", f.waited_ns / 1000}});
}

/// One lane: a bell that has rung begins a call, a running call is polled.
bool ServiceLoop::step(uint32_t number, Lane& lane, Nanos now) {
  const uint64_t bell = lane.box().bell.load(std::memory_order_acquire);
  const bool rung = !lane.running && bell != lane.bell;
  if (rung) take(number, lane, bell, now);
  if (!lane.running || !backend_.poll(static_cast<int>(number), now, record_)) return rung;
  finish(number, lane, record_);
  return true;
}

void ServiceLoop::take(uint32_t number, Lane& lane, uint64_t bell, Nanos now) {
  lane.bell = bell;
  Begin begin;
  begin.lane = static_cast<int>(number);
  begin.number = bell;
  std::memcpy(&begin.call, &lane.box().call, sizeof(Call));  // once: what the engine writes later is not looked at
  begin.seen = now;
  const uint64_t deadline_us = uint64_t{lane.warm ? options_.deadline_ms : options_.first_deadline_ms} * 1000;
  begin.deadline = now + (begin.call.timeout_us != 0 ? begin.call.timeout_us : deadline_us) * 1000;
  if (draining_.load(std::memory_order_acquire)) begin.refuse = Status::draining;
  lane.call = begin.call;
  lane.running = true;
  if (number != 0) in_flight_.fetch_add(1, std::memory_order_release);
  if (const Status status = backend_.begin(begin); status != Status::ok) {  // a lane that is not open: ours to answer
    CallRecord record{};
    record.number = bell;
    record.start = now;
    record.kind = begin.call.kind;
    record.layer = begin.call.layer;
    record.tokens = begin.call.tokens;
    record.status = static_cast<uint32_t>(Status::internal);
    record.lane = static_cast<uint16_t>(number);
    record.last = kNoRank;
    finish(number, lane, record);
  }
}

/// The engine hears first; what is counted and recorded of its call comes after.
void ServiceLoop::finish(uint32_t number, Lane& lane, const CallRecord& record) {
  reply(lane, record);
  ended(number, lane);
  lane.calls.fetch_add(1, std::memory_order_relaxed);
  const auto status = static_cast<Status>(record.status);
  lane.warm = lane.warm || status == Status::ok || status == Status::masked || status == Status::degraded;
  if (number != 0) metrics_.call_ended(record, status <= Status::masked ? call_bytes(lane.call, options_.shape) : 0);
  if (options_.recorder != nullptr) options_.recorder->call_ended(record);
}

void ServiceLoop::reply(Lane& lane, const CallRecord& record) {
  HostMailbox& box = lane.box();
  Reply reply{};
  reply.number = record.number;
  reply.status = record.status;
  reply.layer = record.layer;
  reply.ranks[0] = record.ranks[0];
  reply.ranks[1] = record.ranks[1];
  reply.token = record.token;
  reply.slot = record.slot;
  reply.field = record.field;
  reply.dropped = record.dropped;
  reply.value = record.value;
  reply.limit = record.limit;
  reply.total_ns = record.total_ns;
  std::memcpy(&box.reply, &reply, sizeof reply);
  box.done.store(record.number);
  if (box.done_asleep.load() != 0) futex_wake(futex_address(box.done));
}

/// The lane has no call in flight any more.
void ServiceLoop::ended(uint32_t number, Lane& lane) {
  if (std::exchange(lane.running, false) && number != 0) in_flight_.fetch_sub(1, std::memory_order_release);
}

/// The engine is gone: what its lane was doing is nobody's any more.
void ServiceLoop::let_go(uint32_t number, Lane& lane) {
  ended(number, lane);
  lane.mailbox = Mapping();
  const std::function<void()> released = std::move(lane.released);
  lane.state.store(LaneState::free, std::memory_order_release);
  released();
}

void ServiceLoop::sleep(Nanos now) {
  words_.clear();
  for (uint32_t lane = 0; lane < lanes_.size(); ++lane) {
    Lane& l = *lanes_[lane];
    if (l.state.load(std::memory_order_acquire) != LaneState::attached || l.running) continue;
    l.box().bell_asleep.store(1);
    if (l.box().bell.load() != l.bell) return wake_up();
    words_.push_back({futex_address(l.box().bell), static_cast<uint32_t>(l.bell)});
  }
  backend_.sleep(words_, now + kLongestSleep);
  wake_up();
}

void ServiceLoop::wake_up() {
  for (uint32_t lane = 0; lane < lanes_.size(); ++lane)
    if (lanes_[lane]->state.load(std::memory_order_acquire) == LaneState::attached)
      lanes_[lane]->box().bell_asleep.store(0, std::memory_order_relaxed);
}

}  // namespace moed
