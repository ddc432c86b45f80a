// A round reads from begin_round() downwards.
#include "daemon/canary.h"

#include <openssl/sha.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <system_error>

#include "daemon/log.h"

namespace moed {
namespace {

constexpr Nanos kSoon = 200'000'000;            ///< until the next round while somebody has not answered
constexpr uint32_t kAskedAgain = 8;             ///< wrong answers of a rank, in one round
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
  const Status opened = backend.open_lane(0, ArenaKind::host, slot_.end, memory);
  if (opened == Status::device_lost) throw GpuError(backend.last_error());
  if (opened == Status::ok) {
    arena_ = Mapping(memory.arena, slot_.end);
    mailbox_ = Mapping(memory.host_mailbox, sizeof(HostMailbox));
  }
  Mapping theirs = mailbox_ ? Mapping(memory.host_mailbox, sizeof(HostMailbox)) : Mapping();
  if (!arena_ || !theirs)
    throw std::system_error(ENOMEM, std::generic_category(), "no lane for the canary: " + backend.last_error());
  service.attach(0, std::move(theirs));
}

Canary::~Canary() { backend_.close_lane(0); }

void Canary::start(std::function<std::vector<uint64_t>()> lives, std::function<void()> changed) {
  lives_ = std::move(lives);
  changed_ = std::move(changed);
  look();
}

void Canary::stop() {
  stopped_ = true;
  timer_.cancel();
}

void Canary::look() {
  if (stopped_ || !lives_) return;
  refresh_links();
  again_ = running_;
  if (running_) return;
  const bool unheard =
      std::any_of(peers_.begin(), peers_.end(), [](const Peer& p) { return p.life != 0 && p.answer == Answer::none; });
  if (unheard) begin_round(rounds_ == 0);
}

/// In a round that is not of all: who has not answered as it should.
bool Canary::asked(const Peer& peer) const {
  return peer.life != 0 && (all_ || peer.answer == Answer::none || peer.answer == Answer::late);
}

/// Who has not answered as it should is asked again before the period is over.
void Canary::wait_for_round() {
  all_ = false;
  const bool some = std::any_of(peers_.begin(), peers_.end(), [this](const Peer& p) { return asked(p); });
  const Nanos now = now_ns();
  const Nanos soon = some ? std::min(due_, now + kSoon) : due_;
  timer_.expires_after(std::chrono::nanoseconds(soon > now ? soon - now : 0));
  timer_.async_wait([this](boost::system::error_code error) {
    if (!error && !stopped_ && !running_) begin_round(now_ns() >= due_);
  });
}

void Canary::refresh_links() {
  const std::vector<uint64_t> now = lives_();
  for (uint32_t r = 0; r < peers_.size(); ++r) {
    Peer& peer = peers_[r];
    const uint64_t life = r == options_.rank ? 1 : now[r];
    if (peer.life == life) continue;
    peer.life = life;
    peer.answer = Answer::none;  // it has to answer again, and not what was on its way in its former life
    peer.spoiled = true;
  }
}

/// A round of all, or of those who have not answered as they should.
void Canary::begin_round(bool all) {
  refresh_links();
  running_ = true;
  all_ = all;
  if (all) ++rounds_;
  round_broken_.clear();
  for (Peer& peer : peers_) {
    peer.round = Answer::none;
    peer.spoiled = false;
  }
  const uint64_t layer = (rounds_ - 1) / batches_ % std::max(options_.shape.layers, 1U);
  add_wrong();  // probes_ is taken from its end
  if (options_.experts) add_probes(options_.shape.first_layer + static_cast<uint32_t>(layer));
  add_probes(kIdentityLayer);
  next();
}

/// One token for every rank that is asked, in calls of at most max_call_tokens.
void Canary::add_probes(uint32_t layer) {
  Probe probe;
  for (uint32_t r = 0; r < peers_.size(); ++r) {
    const Question q = question(layer, r);
    if (asked(peers_[r]) && q.first < q.end) probe.push_back({r, q});
    if (probe.size() < options_.max_call_tokens && r + 1 < peers_.size()) continue;
    if (!probe.empty()) probes_.push_back(std::exchange(probe, {}));
  }
}

/// What was wrong may have been put right, by a new life of the rank for example.
void Canary::add_wrong() {
  for (uint32_t r = 0; r < peers_.size(); ++r) {
    uint32_t left = kAskedAgain;
    for (const Question& q : peers_[r].wrong)
      if (asked(peers_[r]) && q.layer != kIdentityLayer && left-- > 0) probes_.push_back({{r, q}});
  }
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
  for (uint32_t t = 0; t < probe.size(); ++t) {
    const Question& q = probe[t].question;
    for (uint32_t c = 0; c < s.latent; ++c) x[t * s.latent + c] = exact_bf16(known_value(probe[t].rank, c));
    for (uint32_t k = 0; k < s.top_k; ++k) {
      ids[t * s.top_k + k] = q.first + k < q.end ? static_cast<int32_t>(q.first + k) : -1;
      weights[t * s.top_k + k] = kWeight;
    }
  }
}

void Canary::ring(const Probe& probe) {
  lay_out(probe);
  Call call{};
  call.layer = probe.front().question.layer;
  call.tokens = static_cast<uint32_t>(probe.size());
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
    if (overdue && !std::exchange(overdue_, true)) {
      log_error("canary: its call does not end", {{"layer", present_.front().question.layer}});
      changed_();
    }
    wait_for_answer();
  });
}

void Canary::judge(const Reply& reply) {
  const auto status = static_cast<Status>(reply.status);
  const bool named = reply.ranks[0] != 0 || reply.ranks[1] != 0;
  if (status == Status::ok) {
    for (uint32_t t = 0; t < present_.size(); ++t) compare(present_[t], t);
  } else if (status == Status::internal && named && reply.value != 0) {
    leave_out(reply, Answer::wrong);  // its own status, for a call that is known to be good
  } else if ((status == Status::peer_timeout || status == Status::internal) && named) {
    leave_out(reply, Answer::late);
  } else if (named) {  // lost meanwhile, or not ready yet at its end: the link says so
    leave_out(reply, Answer::none);
  } else if (status == Status::draining) {
    return stop();
  } else {
    round_broken_ = name(status);
  }
  next();
}

/// The ranks that a failed call names are answered for; the others are asked again without them.
void Canary::leave_out(const Reply& reply, Answer answer) {
  Probe rest;
  for (const Token& token : present_) {
    Peer& peer = peers_[token.rank];
    if (!names(reply, token.rank)) {
      rest.push_back(token);
      continue;
    }
    peer.round = std::max(peer.round, answer);
    peer.spoiled = peer.spoiled || answer == Answer::none;
    if (answer == Answer::wrong) note_wrong(token, "canary: a known call is refused");
    if (answer == Answer::wrong) continue;
    for (Probe& probe : probes_)  // once a round is enough to wait for it
      std::erase_if(probe, [&token](const Token& other) { return other.rank == token.rank; });
  }
  std::erase_if(probes_, [](const Probe& probe) { return probe.empty(); });
  if (!rest.empty() && rest.size() < present_.size()) probes_.push_back(std::move(rest));
}

std::vector<uint16_t> Canary::identity_row(const Token& token) const {
  std::vector<uint16_t> row(options_.shape.latent);
  const auto slots = static_cast<float>(token.question.end - token.question.first);
  for (uint32_t c = 0; c < row.size(); ++c) row[c] = exact_bf16(known_value(token.rank, c) * kWeight * slots);
  return row;
}

void Canary::compare(const Token& token, uint32_t row) {
  const uint64_t bytes = uint64_t{options_.shape.latent} * 2;
  const std::byte* const out = arena_.data() + slot_.out + row * bytes;
  Peer& peer = peers_[token.rank];
  if (peer.spoiled) return;  // an answer of its former life is nobody's
  bool right = false;
  if (token.question.layer == kIdentityLayer) {
    right = std::memcmp(identity_row(token).data(), out, bytes) == 0;
  } else {
    Digest digest;
    SHA256(reinterpret_cast<const unsigned char*>(out), bytes, digest.data());
    right = right_.try_emplace({token.rank, token.question}, digest).first->second == digest;
  }
  peer.round = std::max(peer.round, right ? Answer::ok : Answer::wrong);
  if (right && peer.wrong.erase(token.question) != 0) {
    log_info("canary: right again", {{"peer", token.rank}, {"at", token.question.text()}});
  } else if (!right) {
    note_wrong(token, "canary: the bits of an answer are wrong");
  }
}

void Canary::note_wrong(const Token& token, const char* what) {
  if (peers_[token.rank].wrong.insert(token.question).second)
    log_error(what, {{"peer", token.rank}, {"at", token.question.text()}});
}

void Canary::end_round() {
  for (uint32_t r = 0; r < peers_.size(); ++r) settle(r);
  running_ = false;
  if (!round_broken_.empty() && broken_.empty()) log_error("canary: its own call fails", {{"status", round_broken_}});
  broken_ = round_broken_;
  if (all_) due_ = now_ns() + Nanos{options_.period_ms} * 1'000'000;
  wait_for_round();
  changed_();
  if (std::exchange(again_, false)) look();
}

/// What the round has found about one rank.
void Canary::settle(uint32_t rank) {
  Peer& peer = peers_[rank];
  if (peer.life == 0 || peer.spoiled || peer.round == Answer::none) return;
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
  if (!lives_) return all;  // not started: the links are not, either
  const std::vector<uint64_t> now = lives_();
  if (overdue_) all.emplace_back("canary: its call does not end");
  if (!broken_.empty()) all.push_back("canary: its own call fails: " + broken_);
  for (uint32_t r = 0; r < peers_.size(); ++r) {
    const Peer& peer = peers_[r];
    if (r != options_.rank && now[r] == 0) continue;  // the link is missing already
    const std::string who = "canary " + std::to_string(r) + ": ";
    if (!peer.wrong.empty())
      all.push_back(who + "wrong at " + peer.wrong.begin()->text() +
                    (peer.wrong.size() > 1 ? " and " + std::to_string(peer.wrong.size() - 1) + " more" : ""));
    else if (peer.answer == Answer::none || (r != options_.rank && peer.life != now[r]))
      all.push_back(who + "no answer yet");
    else if (peer.answer == Answer::late)
      all.push_back(who + "late");
  }
  return all;
}

}  // namespace moed
