// The serve pass: look, choose, gather, plan, experts, send, in this order from top to bottom. Nothing after gather
// reads what peers can write.
#include <sched.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <optional>
#include <tuple>

#include "kernels/cpu/passes.h"

namespace moed::cpu {
namespace {

constexpr uint32_t kMayRetry = 3;  // passes in which a source's rows may be incomplete
constexpr uint32_t kMayMiss = 2;   // passes that a source may miss before nobody lingers for it

uint32_t saturated(uint64_t ns) { return static_cast<uint32_t>(std::min<uint64_t>(ns, UINT32_MAX)); }

bool has_row(const CallLine& call, uint32_t token) { return (call.bitmap[token / 8] >> (token % 8) & 1) != 0; }

uint32_t row_count(const CallLine& call) {
  uint32_t rows = 0;
  for (const uint8_t byte : call.bitmap) rows += static_cast<uint32_t>(std::popcount(byte));
  return rows;
}

/// Whether the copied call line is one that a sound peer may send.
Status check_call(const CallLine& call, const Shape& s, uint32_t max_tokens) {
  if (call.tokens > max_tokens) return Status::bad_call;
  for (uint32_t t = call.tokens; t < kMaxTokens; ++t)
    if (has_row(call, t)) return Status::bad_call;
  if (call.layer != kIdentityLayer && (call.layer < s.first_layer || call.layer - s.first_layer >= s.layers))
    return Status::bad_call;
  return Status::ok;
}

bool is_local(int32_t id, uint32_t first, uint32_t end) {
  return id >= 0 && static_cast<uint32_t>(id) >= first && static_cast<uint32_t>(id) < end;
}

}  // namespace

void gather(const GatherArgs& a) {
  const Shape& s = *a.shape;
  const RowLayout at = row_layout(s);
  alignas(16) std::array<std::byte, kMaxRowBytes> row;
  Rows& rows = *a.rows;
  rows.count = 0;
  rows.place.clear();
  for (uint32_t i = 0; i < a.sources.size(); ++i) {
    Source& source = a.sources[i];
    source.first_row = rows.count;
    for (uint32_t t = 0; t < source.call.tokens && source.status == Status::ok; ++t) {
      if (!has_row(source.call, t)) continue;
      const auto* lines = reinterpret_cast<const Line*>(source.rows_segment + a.layout->row(source.lane, t));
      source.seen = load_record(lines, row.data(), at.bytes, source.sequence);
      if (source.seen != Seen::same) break;
      const uint64_t r = rows.count++;
      rows.place.push_back({i, t});
      rows.ids.resize(rows.count * uint64_t{s.top_k});
      rows.weights.resize(rows.count * uint64_t{s.top_k});
      rows.scales.resize(rows.count * uint64_t{s.latent / kBlock});
      rows.codes.resize(rows.count * uint64_t{s.latent});
      std::memcpy(&rows.ids[r * s.top_k], row.data(), s.top_k * 4);
      std::memcpy(&rows.weights[r * s.top_k], row.data() + at.weights, s.top_k * 4);
      std::memcpy(&rows.scales[r * (s.latent / kBlock)], row.data() + at.scales, s.latent / kBlock);
      std::memcpy(&rows.codes[r * s.latent], row.data() + at.codes, s.latent);
      for (uint32_t k = 0; k < s.top_k; ++k) {
        const int32_t id = rows.ids[r * s.top_k + k];
        if (id < -1 || id >= static_cast<int32_t>(s.experts)) source.status = Status::bad_route;
      }
    }
    if (source.seen != Seen::same || source.status != Status::ok) {  // none of its rows stays in the pass
      rows.count = source.first_row;
      rows.place.resize(rows.count);
    }
    source.rows = rows.count - source.first_row;
  }
}

void plan(const PlanArgs& a) {
  const Shape& s = *a.shape;
  const uint32_t first = first_expert(s, a.rank, a.ranks);
  const uint32_t end = first_expert(s, a.rank + 1, a.ranks);
  Plan& plan = *a.plan;
  plan.pairs.clear();
  plan.pair_of.assign(uint64_t{a.rows->count} * s.top_k, kNoPair);
  for (uint32_t r = 0; r < a.rows->count; ++r) {
    const uint32_t layer = a.sources[a.rows->place[r].source].call.layer;
    if (layer_weights(*a.model, s, layer) == nullptr) continue;  // identity: nothing to multiply
    for (uint32_t k = 0; k < s.top_k; ++k) {
      const int32_t id = a.rows->ids[uint64_t{r} * s.top_k + k];
      if (is_local(id, first, end)) plan.pairs.push_back({layer, static_cast<uint32_t>(id) - first, r, k});
    }
  }
  std::sort(plan.pairs.begin(), plan.pairs.end(), [](const Pair& x, const Pair& y) {
    return std::tie(x.layer, x.local, x.row, x.slot) < std::tie(y.layer, y.local, y.row, y.slot);
  });
  plan.experts = 0;
  for (uint32_t i = 0; i < plan.pairs.size(); ++i) {
    const Pair& p = plan.pairs[i];
    plan.pair_of[uint64_t{p.row} * s.top_k + p.slot] = i;
    if (i == 0 || p.layer != plan.pairs[i - 1].layer || p.local != plan.pairs[i - 1].local) ++plan.experts;
  }
}

void send(const SendArgs& a) {
  const Shape& s = *a.shape;
  const uint32_t first = first_expert(s, a.rank, a.ranks);
  const uint32_t end = first_expert(s, a.rank + 1, a.ranks);
  std::array<float, kMaxWidth> sum;
  std::array<uint16_t, kMaxWidth> partial;
  for (uint32_t r = 0; r < a.rows->count; ++r) {
    const Source& source = a.sources[a.rows->place[r].source];
    const uint64_t slots = uint64_t{r} * s.top_k;
    if (layer_weights(*a.model, s, source.call.layer) == nullptr) {
      float weight = 0.0F;
      for (uint32_t k = 0; k < s.top_k; ++k)
        if (is_local(a.rows->ids[slots + k], first, end)) weight += a.rows->weights[slots + k];
      for (uint32_t c = 0; c < s.latent; ++c) {
        const float x = e4m3_to_float(a.rows->codes[uint64_t{r} * s.latent + c]) *
                        e8m0_to_float(a.rows->scales[uint64_t{r} * (s.latent / kBlock) + c / kBlock]);
        sum[c] = x * weight;
      }
    } else {
      std::fill_n(sum.begin(), s.latent, 0.0F);
      for (uint32_t k = 0; k < s.top_k; ++k) {
        const uint32_t pair = a.plan->pair_of[slots + k];
        if (pair == kNoPair) continue;
        const float weight = a.rows->weights[slots + k];
        const float* y = a.pairs + uint64_t{pair} * s.latent;
        for (uint32_t c = 0; c < s.latent; ++c) sum[c] += weight * y[c];
      }
    }
    for (uint32_t c = 0; c < s.latent; ++c) partial[c] = float_to_bf16(sum[c]);
    auto* lines =
        reinterpret_cast<Line*>(source.answer_segment + a.layout->partial(source.lane, a.rows->place[r].token));
    store_record(lines, partial.data(), uint64_t{s.latent} * 2, source.sequence);
  }
}

ServePass::ServePass(const Common& common) : common_(common) {
  const BackendOptions& o = common.options;
  const uint64_t pairs = pass_pairs(o);
  const uint64_t rows = pairs / o.shape.top_k;
  watch_.resize(uint64_t{o.ranks} * common.layout.lanes_all);
  sources_.reserve(watch_.size());
  // Taken once, so that no pass allocates; not touched before a pass needs it: the pages are the system's until then.
  rows_.place.reserve(rows);
  rows_.ids.reserve(rows * o.shape.top_k);
  rows_.weights.reserve(rows * o.shape.top_k);
  rows_.scales.reserve(rows * (o.shape.latent / kBlock));
  rows_.codes.reserve(rows * o.shape.latent);
  plan_.pairs.reserve(pairs);
  plan_.pair_of.reserve(pairs);
  pairs_ = std::make_unique_for_overwrite<float[]>(pairs * o.shape.latent);
  scratch_ = std::make_unique_for_overwrite<float[]>(experts_scratch(o.shape));
  thread_ = std::thread([this] { run(); });
}

ServePass::~ServePass() {
  for (uint32_t seen = state_.load(); seen != static_cast<uint32_t>(State::stop);) {
    if (seen == static_cast<uint32_t>(State::running)) {
      futex_wait(futex_address(state_), seen, now_ns() + 10'000'000);
      seen = state_.load();
    } else if (state_.compare_exchange_strong(seen, static_cast<uint32_t>(State::stop))) {
      break;
    }
  }
  futex_wake(futex_address(state_));
  thread_.join();
}

bool ServePass::step(Nanos now, const std::shared_ptr<const Links>& links, ServeRecord& out) {
  const State state = static_cast<State>(state_.load(std::memory_order_acquire));
  look(now, *links);
  if (state == State::running) {
    ::sched_yield();  // the pass may be waiting for this very core
    return false;
  }
  bool ended = false;
  if (state == State::ended) {
    settle(out);
    ended = true;
    state_.store(static_cast<uint32_t>(State::idle), std::memory_order_relaxed);
  }
  if (worth_starting(now)) {
    choose(now, links);
    if (!sources_.empty()) {
      state_.store(static_cast<uint32_t>(State::running), std::memory_order_release);
      futex_wake(futex_address(state_));
    }
  }
  return ended;
}

/// Notes every call line that is new and when it was seen.
void ServePass::look(Nanos now, const Links& links) {
  const uint32_t lanes = common_.layout.lanes_all;
  for (uint32_t r = 0; r < links.size(); ++r) {
    if (links[r].state != LinkState::ready) continue;
    for (uint32_t lane = 0; lane < lanes; ++lane) {
      Watch& watch = watch_[uint64_t{r} * lanes + lane];
      const auto& line = *reinterpret_cast<const Line*>(links[r].mine->data() + common_.layout.call(lane));
      const uint64_t seen = load_sequence(line);
      if (seen >> kSessionShift != links[r].session || seen == watch.pending || seen <= watch.served) continue;
      watch.pending = seen;
      watch.since = last_look_ == 0 ? now : last_look_;
      if (first_pending_ == 0) first_pending_ = now;
    }
  }
  last_look_ = now;
}

/// Whether to start now, or to linger for lanes that took part in the last passes.
bool ServePass::worth_starting(Nanos now) const {
  if (first_pending_ == 0) return false;
  if (now >= first_pending_ + uint64_t{common_.options.linger_us} * 1000) return true;
  return std::none_of(watch_.begin(), watch_.end(), [](const Watch& w) { return w.recent > 0 && w.pending == 0; });
}

/// Takes whole sources, from the one after the one served last, while they fit.
void ServePass::choose(Nanos now, const std::shared_ptr<const Links>& links) {
  const BackendOptions& o = common_.options;
  const uint64_t limit = pass_pairs(o);
  const uint32_t lanes = common_.layout.lanes_all;
  uint64_t pairs = 0;
  std::optional<uint32_t> first_left;  // the next pass starts with the first source that did not fit into this one
  const uint32_t start = next_;
  links_ = links;
  sources_.clear();
  for (uint32_t i = 0; i < watch_.size(); ++i) {
    const auto at = static_cast<uint32_t>((uint64_t{start} + i) % watch_.size());
    Watch& watch = watch_[at];
    if (watch.pending == 0) {
      if (watch.recent > 0) --watch.recent;
      continue;
    }
    const Link& link = (*links)[at / lanes];
    const uint64_t noted = watch.pending;
    watch.pending = 0;
    if (link.state != LinkState::ready || noted >> kSessionShift != link.session) continue;
    Source source;
    source.rank = at / lanes;
    source.lane = at % lanes;
    source.rows_segment = link.mine->data();
    source.answer_segment = link.theirs->data();
    const auto& line = *reinterpret_cast<const Line*>(source.rows_segment + common_.layout.call(source.lane));
    source.sequence = load_sequence(line);  // it may have gone on since it was noted
    if (source.sequence >> kSessionShift != link.session) continue;
    load_payload(line, &source.call, sizeof(CallLine));
    source.status = check_call(source.call, o.shape, o.max_tokens);
    const uint64_t more = uint64_t{row_count(source.call)} * o.shape.top_k;
    if (source.status == Status::ok && pairs + more > limit && !sources_.empty()) {
      if (!first_left) first_left = at;
      watch.pending = source.sequence;
      continue;
    }
    pairs += source.status == Status::ok ? more : 0;
    source.queue_ns = now > watch.since ? now - watch.since : 0;
    watch.served = source.sequence;
    watch.recent = kMayMiss;
    next_ = (at + 1) % static_cast<uint32_t>(watch_.size());
    sources_.push_back(source);
  }
  if (first_left) next_ = *first_left;
  if (sources_.empty()) links_.reset();
  record_ = {};
  record_.start = now;
  record_.wait_ns = now > first_pending_ ? now - first_pending_ : 0;
  first_pending_ = first_left ? now : 0;
}

/// After a pass: a source whose rows were not complete is looked at again, but not for ever: whoever announces rows and
/// never sends them is dropped.
void ServePass::settle(ServeRecord& out) {
  for (const Source& source : sources_) {
    Watch& watch = watch_[uint64_t{source.rank} * common_.layout.lanes_all + source.lane];
    if (source.seen != Seen::older) watch.retries = 0;
    if (source.seen != Seen::older || watch.retries++ >= kMayRetry) continue;
    if (watch.served != source.sequence || watch.pending != 0) continue;
    watch.pending = source.sequence;
    watch.since = record_.start;
    if (first_pending_ == 0) first_pending_ = record_.start;
  }
  out = record_;
  links_.reset();
}

/// The drill of broken memory: a power of the first scale of W2, once.
void ServePass::flip(Nanos now) {
  const BackendOptions& o = common_.options;
  if (flipped_ || o.drills.flip_after_ms == 0) return;
  if (now < common_.made + uint64_t{o.drills.flip_after_ms} * 1'000'000) return;
  flipped_ = true;
  const LayerWeights* layer = layer_weights(o.weights, o.shape, o.drills.flip_layer);
  const uint32_t local = o.drills.flip_expert - first_expert(o.shape, o.rank, o.ranks);
  if (layer != nullptr && local < layer->experts.size())
    *const_cast<uint8_t*>(layer->experts[local].w2_scale) ^= 4;  // whoever asks for the drill owns writable memory
}

/// The pass itself, on the thread of the back end.
void ServePass::work() {
  const BackendOptions& o = common_.options;
  const Nanos started = now_ns();
  gather({.shape = &o.shape, .layout = &common_.layout, .sources = sources_, .rows = &rows_});
  plan({.shape = &o.shape,
        .model = &o.weights,
        .rank = o.rank,
        .ranks = o.ranks,
        .sources = sources_,
        .rows = &rows_,
        .plan = &plan_});
  const Nanos gathered = now_ns();
  flip(gathered);
  const bool drill = drilling(common_, gathered);
  if (drill) delay(o.drills.experts_delay_us);
  experts({.shape = &o.shape,
           .model = &o.weights,
           .rows = &rows_,
           .plan = &plan_,
           .out = pairs_.get(),
           .scratch = scratch_.get()});
  const Nanos computed = now_ns();
  if (drill) delay(o.drills.send_delay_us);
  send({.shape = &o.shape,
        .layout = &common_.layout,
        .rank = o.rank,
        .ranks = o.ranks,
        .sources = sources_,
        .model = &o.weights,
        .rows = &rows_,
        .plan = &plan_,
        .pairs = pairs_.get()});
  record_.rows = rows_.count;
  record_.pairs = static_cast<uint32_t>(plan_.pairs.size());
  record_.weight_bytes = plan_.experts * expert_bytes(o.shape);
  record_.gather_ns = gathered - started;
  record_.experts_ns = computed - gathered;
  for (const Source& source : sources_) {
    record_.refused += source.status == Status::ok && source.seen != Seen::older ? 0 : 1;
    record_.sources += source.seen == Seen::same ? 1 : 0;
  }
  for (const Source& source : sources_) {
    if (source.seen != Seen::same) continue;
    const ReturnLine line{
        .status = static_cast<uint32_t>(source.status),
        .rows = source.rows,
        .pass_rows = rows_.count,
        .pass_sources = record_.sources,
        .queue_ns = saturated(source.queue_ns + (started > record_.start ? started - record_.start : 0)),
        .experts_ns = saturated(computed - gathered),
        .send_ns = saturated(now_ns() - computed)};
    store_line(*reinterpret_cast<Line*>(source.answer_segment + common_.layout.return_line(source.lane)), &line,
               sizeof line, source.sequence);
    if (source.rank != o.rank) ring(*(*links_)[source.rank].doorbell);
  }
  record_.send_ns = now_ns() - computed;
}

void ServePass::run() {
  for (;;) {
    const uint32_t seen = state_.load(std::memory_order_acquire);
    if (seen == static_cast<uint32_t>(State::stop)) return;
    if (seen != static_cast<uint32_t>(State::running)) {
      futex_wait(futex_address(state_), seen, now_ns() + 1'000'000'000);
      continue;
    }
    work();
    state_.store(static_cast<uint32_t>(State::ended), std::memory_order_release);
    futex_wake(futex_address(state_));
    ring(*common_.doorbell);
  }
}

}  // namespace moed::cpu
