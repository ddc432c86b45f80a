// The call pass: check, dispatch, wait, reduce, in this order from top to bottom.
#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>

#include "daemon/abi/validate.h"
#include "kernels/cpu/passes.h"

namespace moed::cpu {
namespace {

uint32_t saturated(uint64_t ns) { return static_cast<uint32_t>(std::min<uint64_t>(ns, UINT32_MAX)); }

void add_saturating(uint32_t& total, uint64_t ns) { total = saturated(uint64_t{total} + ns); }

/// Quantises L BF16 values: scales and codes of a row record.
void quantise(const uint16_t* x, uint32_t n, uint8_t* scales, uint8_t* codes) {
  for (uint32_t block = 0; block < n / kBlock; ++block) {
    const uint16_t* from = x + block * kBlock;
    uint16_t amax = 0;
    for (uint32_t j = 0; j < kBlock; ++j) {
      const auto magnitude = static_cast<uint16_t>(from[j] & 0x7FFF);
      if (magnitude <= 0x7F80 && magnitude > amax) amax = magnitude;
    }
    scales[block] = mxfp8_scale_bf16(amax);
    const float multiplier = mxfp8_multiplier(scales[block]);
    for (uint32_t j = 0; j < kBlock; ++j) codes[block * kBlock + j] = mxfp8_code(bf16_to_float(from[j]), multiplier);
  }
}

/// The row record of one token.
void make_row(const DispatchArgs& a, uint32_t token, std::byte* row) {
  const Shape& s = *a.shape;
  const RowLayout at = row_layout(s);
  std::memcpy(row, a.ids + uint64_t{token} * s.top_k, s.top_k * 4);
  std::memcpy(row + at.weights, a.weights + uint64_t{token} * s.top_k, s.top_k * 4);
  auto* scales = reinterpret_cast<uint8_t*>(row + at.scales);
  auto* codes = reinterpret_cast<uint8_t*>(row + at.codes);
  if (a.wire) {
    std::memcpy(scales, a.scales + uint64_t{token} * (s.latent / kBlock), s.latent / kBlock);
    std::memcpy(codes, a.x + uint64_t{token} * s.latent, s.latent);
  } else {
    quantise(reinterpret_cast<const uint16_t*>(a.x) + uint64_t{token} * s.latent, s.latent, scales, codes);
  }
}

}  // namespace

void dispatch(const DispatchArgs& a) {
  std::array<CallLine, kMaxRanks> line{};
  RankSet sent;
  alignas(16) std::array<std::byte, kMaxRowBytes> row;
  const uint32_t row_bytes = row_layout(*a.shape).bytes;
  for (uint32_t t = 0; t < a.tokens; ++t) {
    const RankSet set = token_ranks({a.ids + uint64_t{t} * a.shape->top_k, a.shape->top_k}, *a.shape, a.ranks);
    if (set.empty()) continue;
    make_row(a, t, row.data());
    for (uint32_t r = 0; r < a.ranks; ++r) {
      if (!set.has(r) || a.to[r].segment == nullptr) continue;
      auto* lines = reinterpret_cast<Line*>(a.to[r].segment + a.layout->row(a.lane, t));
      store_record(lines, row.data(), row_bytes, a.to[r].sequence);
      line[r].bitmap[t / 8] = static_cast<uint8_t>(line[r].bitmap[t / 8] | 1U << (t % 8));
      sent.add(r);
    }
  }
  for (uint32_t i = 0; i < a.ranks; ++i) {
    const uint32_t r = (a.first + i) % a.ranks;
    if (!sent.has(r)) continue;
    line[r].layer = a.layer;
    line[r].tokens = static_cast<uint16_t>(a.tokens);
    store_line(*reinterpret_cast<Line*>(a.to[r].segment + a.layout->call(a.lane)), &line[r], sizeof(CallLine),
               a.to[r].sequence);
  }
}

bool reduce(const ReduceArgs& a, uint32_t& culprit) {
  const uint32_t n = a.shape->latent;
  std::array<float, kMaxWidth> sum;
  std::array<uint16_t, kMaxWidth> partial;
  for (uint32_t t = 0; t < a.tokens; ++t) {
    const RankSet set = token_ranks({a.ids + uint64_t{t} * a.shape->top_k, a.shape->top_k}, *a.shape, a.ranks);
    std::fill_n(sum.data(), n, 0.0F);
    for (uint32_t r = 0; r < a.ranks; ++r) {
      if (!set.has(r) || a.from[r].segment == nullptr) continue;
      const auto* lines = reinterpret_cast<const Line*>(a.from[r].segment + a.layout->partial(a.lane, t));
      culprit = r;
      if (load_record(lines, partial.data(), uint64_t{n} * 2, a.from[r].sequence) != Seen::same) return false;
      for (uint32_t k = 0; k < n; ++k) sum[k] += bf16_to_float(partial[k]);
    }
    uint16_t* out = a.out + uint64_t{t} * n;
    double squares = 0.0;  // in FP32 the squares of very small and very large rows would be lost
    for (uint32_t k = 0; k < n; ++k) {
      out[k] = float_to_bf16(sum[k]);
      const double v = bf16_to_float(out[k]);
      squares += v * v;
    }
    if (!a.norm || squares == 0.0) continue;  // a row of zeros stays +0 whatever gamma's sign
    const double rstd = 1.0 / std::sqrt(squares / n + static_cast<double>(a.shape->norm_eps));
    for (uint32_t k = 0; k < n; ++k) {
      const double gamma = a.gamma == nullptr ? 1.0 : static_cast<double>(bf16_to_float(a.gamma[k]));
      out[k] = float_to_bf16(static_cast<float>(static_cast<double>(bf16_to_float(out[k])) * rstd * gamma));
    }
  }
  return true;
}

void CallPass::reserve() {
  const BackendOptions& o = common_.options;
  ids_.reserve(uint64_t{o.max_call_tokens} * o.shape.top_k);
  weights_.reserve(uint64_t{o.max_call_tokens} * o.shape.top_k);
  to_.reserve(o.ranks);
}

void CallPass::begin(const Begin& begin, std::shared_ptr<const Links> links, std::byte* arena, uint64_t arena_bytes,
                     bool dry) {
  begin_ = begin;
  links_ = std::move(links);
  arena_ = arena;
  arena_bytes_ = arena_bytes;
  record_ = {};
  record_.number = begin.number;
  record_.start = begin.seen;
  record_.kind = begin.call.kind;
  record_.layer = begin.call.layer;
  record_.tokens = begin.call.tokens;
  record_.lane = static_cast<uint16_t>(lane_);
  record_.last = kNoRank;
  done_ = 0;
  good_ = Status::ok;
  const BackendOptions& o = common_.options;
  const Refusal refusal = validate(begin.call, {o.shape, o.max_call_tokens, arena_bytes, false});
  if (refusal.status != Status::ok) {
    record_.field = static_cast<uint32_t>(refusal.field);
    record_.value = refusal.value;
    record_.limit = refusal.limit;
    return end(refusal.status, begin.seen);
  }
  if (begin.refuse != Status::ok) return end(begin.refuse, begin.seen);
  if (drilling(common_, begin.seen)) delay(o.drills.call_delay_us);
  if (const Status routing = read_routing(); routing != Status::ok) return end(routing, now_ns());
  if (dry) return end(Status::dry, now_ns());
  RankSet needed;
  for (uint64_t t = 0; t < valid_; ++t)
    needed.add(token_ranks({ids_.data() + t * o.shape.top_k, o.shape.top_k}, o.shape, o.ranks));
  if (!usable(needed)) return;
  start_piece(begin.seen);
}

/// Copies ids, weights and valid once into private memory and checks them there: all, before anything is sent.
Status CallPass::read_routing() {
  const Call& c = begin_.call;
  const Shape& s = common_.options.shape;
  valid_ = c.tokens;
  if (c.valid != 0) {
    int32_t v = 0;
    std::memcpy(&v, arena_ + c.valid, sizeof v);
    valid_ = static_cast<uint32_t>(std::clamp<int64_t>(v, 0, c.tokens));
  }
  const uint64_t slots = uint64_t{valid_} * s.top_k;
  ids_.resize(slots);
  weights_.resize(slots);
  for (uint64_t i = 0; i < slots; ++i) {
    int64_t id = 0;
    if ((c.flags & kFlagIds64) != 0) {
      std::memcpy(&id, arena_ + c.ids + i * 8, 8);
    } else {
      int32_t narrow = 0;
      std::memcpy(&narrow, arena_ + c.ids + i * 4, 4);
      id = narrow;
    }
    if (id < -1 || id >= static_cast<int64_t>(s.experts)) {
      if (good_ == Status::ok) {
        record_.token = static_cast<uint32_t>(i / s.top_k);
        record_.slot = static_cast<uint32_t>(i % s.top_k);
        record_.value = id;
        record_.limit = s.experts - 1;
      }
      if ((c.flags & kFlagMask) == 0) return Status::bad_route;
      good_ = Status::masked;
      id = -1;
    }
    ids_[i] = static_cast<int32_t>(id);
    if ((c.flags & kFlagWeights16) != 0) {
      uint16_t bits = 0;
      std::memcpy(&bits, arena_ + c.weights + i * 2, 2);
      weights_[i] = bf16_to_float(bits);
    } else {
      std::memcpy(&weights_[i], arena_ + c.weights + i * 4, 4);
    }
  }
  return Status::ok;
}

/// Whether all needed ranks are there (or may be dropped); ends the call otherwise, before anything is sent.
bool CallPass::usable(const RankSet& needed) {
  RankSet missing;
  RankSet lost;
  for (uint32_t r = 0; r < common_.options.ranks; ++r) {
    const Link& link = (*links_)[r];
    if (!needed.has(r) || link.state == LinkState::ready) continue;
    (link.seen ? lost : missing).add(r);
  }
  const bool fail = common_.options.on_lost_rank == OnLostRank::fail;
  if (missing.empty() && (lost.empty() || !fail)) return true;
  const RankSet& named = missing.empty() ? lost : missing;
  std::copy_n(named.word, 2, record_.ranks);
  end(missing.empty() ? Status::peer_lost : Status::not_ready, now_ns());
  return false;
}

uint32_t CallPass::piece_tokens() const { return std::min(valid_ - done_, common_.options.max_tokens); }

void CallPass::start_piece(Nanos started) {
  const BackendOptions& o = common_.options;
  const Call& c = begin_.call;
  ++count_;
  waiting_ = in_ = out_ = {};
  to_.assign(o.ranks, {});
  const uint32_t tokens = piece_tokens();
  for (uint64_t t = 0; t < tokens; ++t)
    waiting_.add(token_ranks({piece_ids() + t * o.shape.top_k, o.shape.top_k}, o.shape, o.ranks));
  for (uint32_t r = 0; r < o.ranks; ++r) {
    if (!waiting_.has(r)) continue;
    const Link& link = (*links_)[r];
    if (link.state == LinkState::ready) {
      to_[r] = {link.theirs->data(), sequence(link.session, count_)};
    } else {
      waiting_.remove(r);
      out_.add(r);
    }
  }
  // Every call begins with another rank: whoever hears last would often be last, too.
  const auto first = static_cast<uint32_t>(count_ % o.ranks);
  const bool wire = (c.flags & kFlagWire) != 0;
  const uint64_t x_row = uint64_t{o.shape.latent} * (wire ? 1 : 2);
  const std::byte* scales = wire ? arena_ + c.scales + uint64_t{done_} * (o.shape.latent / kBlock) : nullptr;
  dispatch({.shape = &o.shape,
            .layout = &common_.layout,
            .ranks = o.ranks,
            .lane = lane_,
            .layer = c.layer,
            .tokens = tokens,
            .wire = wire,
            .x = arena_ + c.x + done_ * x_row,
            .scales = scales,
            .ids = piece_ids(),
            .weights = weights_.data() + uint64_t{done_} * o.shape.top_k,
            .to = to_,
            .first = first});
  for (uint32_t i = 0; i < o.ranks; ++i) {
    const uint32_t r = (first + i) % o.ranks;
    if (waiting_.has(r) && r != o.rank && (*links_)[r].doorbell) ring(*(*links_)[r].doorbell);
  }
  waited_from_ = now_ns();
  record_.phase_ns[0] += waited_from_ - started;
  state_ = State::waiting;
}

bool CallPass::poll(Nanos now, const Links& present, CallRecord& out) {
  if (state_ == State::waiting) {
    collect(now, present);
    if (state_ == State::waiting && waiting_.empty()) finish_piece(now);
  }
  if (state_ != State::ended) return false;
  out = record_;
  state_ = State::idle;
  links_.reset();
  return true;
}

namespace {

/// Whether what was sent over `then` can still be answered. A link that is mapped and no longer ready takes nothing
/// new, but answers what it has.
bool still_there(const Link& then, const Link& now) {
  return now.session == then.session && (now.state == LinkState::ready || now.state == LinkState::mapped);
}

}  // namespace

/// Takes the return lines that have come; decides about lost ranks and the deadline.
void CallPass::collect(Nanos now, const Links& present) {
  uint64_t slowest = 0;
  for (uint32_t r = 0; r < common_.options.ranks; ++r) {
    if (!waiting_.has(r)) continue;
    const Link& link = (*links_)[r];
    ReturnLine line;
    const auto& place = *reinterpret_cast<const Line*>(link.mine->data() + common_.layout.return_line(lane_));
    if (load_line(place, &line, sizeof line, to_[r].sequence) == Seen::same) {
      waiting_.remove(r);
      in_.add(r);
      CallRecord::Peer& peer = record_.peer[r];
      add_saturating(peer.wait, now > waited_from_ ? now - waited_from_ : 0);
      add_saturating(peer.queue, line.queue_ns);
      add_saturating(peer.experts, line.experts_ns);
      add_saturating(peer.send, line.send_ns);
      // Of several that a look finds at once, the one that says it was slowest counts as the last.
      const uint64_t took = uint64_t{line.queue_ns} + line.experts_ns + line.send_ns;
      if (took >= slowest) record_.last = r;
      slowest = std::max(slowest, took);
      if (line.status != 0) {
        RankSet named;
        named.add(r);
        std::copy_n(named.word, 2, record_.ranks);
        record_.value = line.status;  // a peer's word is reported, never taken for our own status
        return end(Status::internal, now);
      }
    } else if (!still_there(link, present[r])) {
      waited_in_vain(r, now);
      waiting_.remove(r);
      out_.add(r);
    }
  }
  if (!out_.empty() && common_.options.on_lost_rank == OnLostRank::fail) {
    std::copy_n(out_.word, 2, record_.ranks);
    return end(Status::peer_lost, now);
  }
  if (!waiting_.empty() && now >= begin_.deadline) {
    std::copy_n(waiting_.word, 2, record_.ranks);
    for (uint32_t r = 0; r < common_.options.ranks; ++r)
      if (waiting_.has(r)) waited_in_vain(r, now);
    end(Status::peer_timeout, now);
  }
}

/// A rank that did not answer was last, too; nothing is known of its own times.
void CallPass::waited_in_vain(uint32_t rank, Nanos now) {
  add_saturating(record_.peer[rank].wait, now > waited_from_ ? now - waited_from_ : 0);
  record_.last = rank;
}

/// The set of ranks that are in is decided: sum, write, and go on with the next piece or end.
void CallPass::finish_piece(Nanos now) {
  const BackendOptions& o = common_.options;
  const Call& c = begin_.call;
  record_.phase_ns[1] += now > waited_from_ ? now - waited_from_ : 0;
  std::vector<Destination>& from = to_;
  const uint32_t tokens = piece_tokens();
  for (uint32_t r = 0; r < o.ranks; ++r) from[r].segment = in_.has(r) ? (*links_)[r].mine->data() : nullptr;
  if (!out_.empty()) {
    good_ = Status::degraded;
    for (uint64_t t = 0; t < tokens; ++t) {
      const RankSet set = token_ranks({piece_ids() + t * o.shape.top_k, o.shape.top_k}, o.shape, o.ranks);
      for (uint32_t r = 0; r < o.ranks; ++r) record_.dropped += set.has(r) && out_.has(r) ? 1 : 0;
    }
    record_.ranks[0] |= out_.word[0];
    record_.ranks[1] |= out_.word[1];
  }
  const LayerWeights* weights = layer_weights(o.weights, o.shape, c.layer);
  uint32_t culprit = 0;
  const bool whole = reduce({.shape = &o.shape,
                             .layout = &common_.layout,
                             .ranks = o.ranks,
                             .lane = lane_,
                             .tokens = tokens,
                             .norm = o.shape.reduce == Reduce::sum_rmsnorm && (c.flags & kFlagNoNorm) == 0,
                             .ids = piece_ids(),
                             .gamma = weights == nullptr || weights->norm.empty() ? nullptr : weights->norm.data(),
                             .from = from,
                             .out = reinterpret_cast<uint16_t*>(arena_ + c.out) + uint64_t{done_} * o.shape.latent},
                            culprit);
  const Nanos reduced = now_ns();
  record_.phase_ns[2] += reduced - now;
  if (!whole) {
    RankSet named;
    named.add(culprit);
    std::copy_n(named.word, 2, record_.ranks);
    return end(Status::internal, reduced);
  }
  done_ += tokens;
  if (done_ < valid_) return start_piece(reduced);
  end(good_, reduced);
}

/// The one place where a call ends. out becomes zeros where it has to, as far as the call says where it lies.
void CallPass::end(Status status, Nanos now) {
  const Call& c = begin_.call;
  const Shape& s = common_.options.shape;
  const bool known =
      c.kind <= 1 && c.tokens <= common_.options.max_call_tokens && fits(c.out, out_bytes(c, s), arena_bytes_);
  const bool worked = status == Status::ok || status == Status::masked || status == Status::degraded;
  if (known) {
    const uint64_t keep = worked ? uint64_t{done_} * s.latent * 2 : 0;
    std::memset(arena_ + c.out + keep, 0, out_bytes(c, s) - keep);
  }
  if (state_ != State::waiting) ++count_;  // refused: consumes its count all the same
  const bool names_field = status == Status::bad_call || status == Status::unsupported;
  const bool names_route = status == Status::bad_route || status == Status::masked;
  if (!names_field) record_.field = 0;
  if (!names_route) record_.token = record_.slot = 0;
  if (!names_field && !names_route) record_.limit = 0;
  if (!names_field && !names_route && status != Status::internal) record_.value = 0;
  if (status != Status::degraded) record_.dropped = 0;
  record_.count = count_;
  record_.status = static_cast<uint32_t>(status);
  record_.total_ns = now > begin_.seen ? now - begin_.seen : 0;
  state_ = State::ended;
}

}  // namespace moed::cpu
