// A round reads from begin_round() downwards.
#include "daemon/canary.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <stdexcept>

#include "daemon/log.h"

namespace moed {
namespace {

constexpr Nanos kSoon = 200'000'000;            ///< until the next round while somebody has not answered
constexpr std::chrono::milliseconds kFirst{1};  ///< looks at a call that runs
constexpr std::chrono::milliseconds kLater{20};
constexpr Nanos kOverdue = 1'000'000'000;  ///< after its deadline every call has ended

uint32_t local_experts(const Shape& s, uint32_t rank, uint32_t ranks) {
  return first_expert(s, rank + 1, ranks) - first_expert(s, rank, ranks);
}

uint16_t exact_bf16(float value) {  // of values that BF16 holds exactly
  uint32_t bits = 0;
  std::memcpy(&bits, &value, sizeof bits);
  return static_cast<uint16_t>(bits >> 16);
}

/// Element `column` of a rank's token: eighths between -1 and 1 without 0, which MXFP8 and BF16 hold exactly.
float known_value(uint32_t rank, uint32_t column) {
  const auto step = static_cast<int>((column * 7 + rank * 13) % 16);
  return static_cast<float>(step < 8 ? -step - 1 : step - 7) / 8;
}
constexpr float kWeight = 1.0F / 16;  ///< of every slot; times 32 slots and an eighth it is still exact in BF16

bool names(const Reply& reply, uint32_t rank) { return (reply.ranks[rank / 64] >> (rank % 64) & 1) != 0; }

}  // namespace

std::string Canary::Question::text() const {
  if (layer == kIdentityLayer) return "the identity layer";
  return "layer " + std::to_string(layer) + ", experts " + std::to_string(first) + " to " + std::to_string(end - 1);
}

Canary::Canary(boost::asio::io_context& io, CanaryOptions options, Backend& backend, ServiceLoop& service,
               Metrics& metrics)
    : options_(options),
      backend_(backend),
      metrics_(metrics),
      slot_(arena_slot(options.shape, 0, std::min(options.ranks, options.max_call_tokens))),
      timer_(io),
      peers_(options.ranks) {
  for (uint32_t r = 0; r < options.ranks; ++r)
    batches_ = std::max(
        batches_, (local_experts(options.shape, r, options.ranks) + options.shape.top_k - 1) / options.shape.top_k);
  LaneMemory memory;
  if (backend.open_lane(0, ArenaKind::host, slot_.end, memory) != Status::ok)
    throw std::runtime_error("no lane for the canary: " + backend.last_error());
  arena_ = Mapping(memory.arena, slot_.end);
  mailbox_ = Mapping(memory.host_mailbox, sizeof(HostMailbox));
  Mapping theirs(memory.host_mailbox, sizeof(HostMailbox));
  if (!arena_ || !mailbox_ || !theirs) throw std::runtime_error("no memory for the canary's lane");
  service.attach(0, std::move(theirs));
}

Canary::~Canary() { backend_.close_lane(0); }

void Canary::start(std::function<std::vector<bool>()> usable, std::function<void()> changed) {
  usable_ = std::move(usable);
  changed_ = std::move(changed);
  look();
}

void Canary::stop() {
  stopped_ = true;
  timer_.cancel();
}

void Canary::look() {
  if (stopped_ || !usable_) return;
  again_ = running_;
  if (running_) return;
  refresh_links();
  const bool unheard =
      std::any_of(peers_.begin(), peers_.end(), [](const Peer& p) { return p.usable && p.answer == Answer::none; });
  if (unheard) begin_round(rounds_ == 0);
}

/// Who has not answered as it should is asked again before the period is over.
void Canary::wait_for_round() {
  const bool unheard = std::any_of(peers_.begin(), peers_.end(), [](const Peer& p) {
    return p.usable && (p.answer == Answer::none || p.answer == Answer::late);
  });
  const Nanos now = now_ns();
  const Nanos soon = unheard ? std::min(due_, now + kSoon) : due_;
  timer_.expires_after(std::chrono::nanoseconds(soon > now ? soon - now : 0));
  timer_.async_wait([this](boost::system::error_code error) {
    if (!error && !stopped_ && !running_) begin_round(now_ns() >= due_);
  });
}

void Canary::refresh_links() {
  const std::vector<bool> now = usable_();
  for (uint32_t r = 0; r < peers_.size(); ++r) {
    Peer& peer = peers_[r];
    const bool usable = r == options_.rank || now[r];
    if (peer.usable && !usable) peer.answer = peer.round = Answer::none;  // it has to answer again when it is back
    peer.usable = usable;
  }
}

/// A round of all, or of those who have not answered as they should.
void Canary::begin_round(bool all) {
  refresh_links();
  running_ = true;
  all_ = all;
  if (all) ++rounds_;
  const uint64_t layer = (rounds_ - 1) / batches_ % std::max(options_.shape.layers, 1U);
  std::vector<uint32_t> layers;
  if (options_.experts) layers.push_back(options_.shape.first_layer + static_cast<uint32_t>(layer));
  layers.push_back(kIdentityLayer);  // probes_ is taken from its end
  for (const uint32_t l : layers) {
    Probe probe{l, {}};
    for (uint32_t r = 0; r < peers_.size(); ++r) {
      Peer& peer = peers_[r];
      peer.round = Answer::none;
      const bool asked = peer.usable && (all || peer.answer == Answer::none || peer.answer == Answer::late);
      if (asked && question(l, r).first < question(l, r).end) probe.ranks.push_back(r);
      if (probe.ranks.size() < options_.max_call_tokens && r + 1 < peers_.size()) continue;
      if (!probe.ranks.empty()) probes_.push_back(std::exchange(probe, {l, {}}));
    }
  }
  next();
}

/// The experts of `rank` that the present round asks for; of the identity layer the first ones.
Canary::Question Canary::question(uint32_t layer, uint32_t rank) const {
  const Shape& s = options_.shape;
  const uint32_t begin = first_expert(s, rank, options_.ranks);
  const uint32_t end = first_expert(s, rank + 1, options_.ranks);
  const uint64_t batch = layer == kIdentityLayer ? 0 : (rounds_ - 1) % batches_;
  const auto first = static_cast<uint32_t>(std::min<uint64_t>(begin + batch * s.top_k, end));
  return {layer, first, std::min(first + s.top_k, end)};
}

void Canary::next() {
  if (stopped_) return;
  if (probes_.empty()) return end_round();
  present_ = std::move(probes_.back());
  probes_.pop_back();
  ring(present_);
}

void Canary::lay_out(const Probe& probe) {
  const Shape& s = options_.shape;
  auto* const x = reinterpret_cast<uint16_t*>(arena_.data() + slot_.x);
  auto* const ids = reinterpret_cast<int32_t*>(arena_.data() + slot_.ids);
  auto* const weights = reinterpret_cast<float*>(arena_.data() + slot_.weights);
  for (uint32_t t = 0; t < probe.ranks.size(); ++t) {
    const Question q = question(probe.layer, probe.ranks[t]);
    for (uint32_t c = 0; c < s.latent; ++c) x[t * s.latent + c] = exact_bf16(known_value(probe.ranks[t], c));
    for (uint32_t k = 0; k < s.top_k; ++k) {
      ids[t * s.top_k + k] = q.first + k < q.end ? static_cast<int32_t>(q.first + k) : -1;
      weights[t * s.top_k + k] = kWeight;
    }
  }
}

void Canary::ring(const Probe& probe) {
  lay_out(probe);
  Call call{};
  call.layer = probe.layer;
  call.tokens = static_cast<uint32_t>(probe.ranks.size());
  call.flags = kFlagNoNorm;
  call.x = slot_.x;
  call.ids = slot_.ids;
  call.weights = slot_.weights;
  call.out = slot_.out;
  std::memcpy(&box().call, &call, sizeof call);
  rung_ = now_ns();
  box().bell.store(++number_);
  if (box().bell_asleep.load() != 0) futex_wake(futex_address(box().bell));
  wait_for_answer();
}

void Canary::wait_for_answer() {
  const Nanos waited = now_ns() - rung_;
  timer_.expires_after(waited < 50'000'000 ? kFirst : kLater);
  timer_.async_wait([this](boost::system::error_code error) {
    if (error || stopped_) return;
    if (box().done.load(std::memory_order_acquire) == number_) {
      overdue_ = false;
      Reply reply;
      std::memcpy(&reply, &box().reply, sizeof reply);
      return judge(reply);
    }
    const bool overdue = now_ns() > rung_ + Nanos{options_.longest_ms} * 1'000'000 + kOverdue;
    if (overdue && !std::exchange(overdue_, true)) changed_();
    wait_for_answer();
  });
}

void Canary::judge(const Reply& reply) {
  const auto status = static_cast<Status>(reply.status);
  const bool named = reply.ranks[0] != 0 || reply.ranks[1] != 0;
  if (status == Status::ok) {
    broken_.clear();
    for (uint32_t t = 0; t < present_.ranks.size(); ++t) compare(present_.ranks[t], t);
  } else if (status == Status::peer_timeout && named) {
    leave_out(reply, Answer::late);
  } else if (status == Status::internal && named) {
    leave_out(reply, Answer::wrong);
  } else if (named) {  // lost meanwhile, or not ready yet at its end: the link says so
    leave_out(reply, Answer::none);
  } else if (status == Status::draining) {
    return stop();
  } else {
    if (broken_.empty()) log_error("canary: its own call fails", {{"status", name(status)}, {"layer", present_.layer}});
    broken_ = name(status);
  }
  next();
}

/// The ranks that a failed call names are answered for; the others are asked again without them.
void Canary::leave_out(const Reply& reply, Answer answer) {
  Probe rest{present_.layer, {}};
  for (const uint32_t r : present_.ranks) {
    if (!names(reply, r)) {
      rest.ranks.push_back(r);
      continue;
    }
    peers_[r].round = std::max(peers_[r].round, answer);
    if (answer == Answer::wrong) note_wrong(r, question(present_.layer, r), "canary: a known call is refused");
    if (answer != Answer::late) continue;
    for (Probe& probe : probes_) std::erase(probe.ranks, r);  // once a round is enough to wait for it
  }
  std::erase_if(probes_, [](const Probe& probe) { return probe.ranks.empty(); });
  if (!rest.ranks.empty() && rest.ranks.size() < present_.ranks.size()) probes_.push_back(std::move(rest));
}

std::vector<uint16_t> Canary::identity_row(uint32_t rank, uint32_t slots) const {
  std::vector<uint16_t> row(options_.shape.latent);
  for (uint32_t c = 0; c < row.size(); ++c)
    row[c] = exact_bf16(known_value(rank, c) * kWeight * static_cast<float>(slots));
  return row;
}

void Canary::compare(uint32_t rank, uint32_t token) {
  const Question q = question(present_.layer, rank);
  const uint32_t width = options_.shape.latent;
  std::vector<uint16_t> row(width);
  std::memcpy(row.data(), arena_.data() + slot_.out + uint64_t{token} * width * 2, uint64_t{width} * 2);
  Peer& peer = peers_[rank];
  const bool right = q.layer == kIdentityLayer ? row == identity_row(rank, q.end - q.first)
                                               : right_.try_emplace({rank, q}, row).first->second == row;
  peer.round = std::max(peer.round, right ? Answer::ok : Answer::wrong);
  if (right && peer.wrong.erase(q) != 0) {
    log_info("canary: right again", {{"peer", rank}, {"at", q.text()}});
  } else if (!right) {
    note_wrong(rank, q, "canary: the bits of an answer are wrong");
  }
}

void Canary::note_wrong(uint32_t rank, const Question& q, const char* what) {
  if (peers_[rank].wrong.insert(q).second) log_error(what, {{"peer", rank}, {"at", q.text()}});
}

void Canary::end_round() {
  for (uint32_t r = 0; r < peers_.size(); ++r) settle(r);
  running_ = false;
  if (all_) due_ = now_ns() + Nanos{options_.period_ms} * 1'000'000;
  wait_for_round();
  changed_();
  if (std::exchange(again_, false)) look();
}

/// What the round has found about one rank.
void Canary::settle(uint32_t rank) {
  Peer& peer = peers_[rank];
  if (!peer.usable || peer.round == Answer::none) return;
  if (peer.round == Answer::late && peer.answer != Answer::late)
    log_warn("canary: no answer in time", {{"peer", rank}});
  if (peer.round == Answer::ok && peer.answer == Answer::late) log_info("canary: it answers again", {{"peer", rank}});
  peer.answer = peer.round;
  metrics_.canary(rank, peer.round == Answer::ok     ? CanaryResult::ok
                        : peer.round == Answer::late ? CanaryResult::late
                                                     : CanaryResult::wrong);
}

std::vector<std::string> Canary::missing() const {
  std::vector<std::string> all;
  if (!usable_) return all;  // not started: the links are not, either
  const std::vector<bool> now = usable_();
  if (overdue_) all.emplace_back("canary: its call does not end");
  if (!broken_.empty()) all.push_back("canary: its own call fails: " + broken_);
  for (uint32_t r = 0; r < peers_.size(); ++r) {
    const Peer& peer = peers_[r];
    if (r != options_.rank && !now[r]) continue;  // the link is missing already
    const std::string who = "canary " + std::to_string(r) + ": ";
    if (!peer.wrong.empty())
      all.push_back(who + "wrong at " + peer.wrong.begin()->text() +
                    (peer.wrong.size() > 1 ? " and " + std::to_string(peer.wrong.size() - 1) + " more" : ""));
    else if (!peer.usable || peer.answer == Answer::none)
      all.push_back(who + "no answer yet");
    else if (peer.answer == Answer::late)
      all.push_back(who + "late");
  }
  return all;
}

}  // namespace moed
