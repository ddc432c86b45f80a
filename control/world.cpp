#include "control/world.h"

#include <algorithm>
#include <cstring>
#include <sstream>

#include "daemon/abi/text.h"

namespace moed::control {
namespace {

constexpr uint32_t kMaxSession = (1U << 20) - 1;  // the sequence's share of bits

/// "top_k 8, here 16": the first field in which two shapes differ.
std::string difference(const Shape& there, const Shape& here) {
  const auto number = [](auto value) { return static_cast<double>(value); };
  const struct {
    const char* field;
    double there, here;
  } fields[] = {{"hidden", number(there.hidden), number(here.hidden)},
                {"latent", number(there.latent), number(here.latent)},
                {"intermediate", number(there.intermediate), number(here.intermediate)},
                {"shared_intermediate", number(there.shared_intermediate), number(here.shared_intermediate)},
                {"experts", number(there.experts), number(here.experts)},
                {"top_k", number(there.top_k), number(here.top_k)},
                {"first_layer", number(there.first_layer), number(here.first_layer)},
                {"layers", number(there.layers), number(here.layers)},
                {"wire", number(there.wire), number(here.wire)},
                {"weights", number(there.weights), number(here.weights)},
                {"activation", number(there.activation), number(here.activation)},
                {"reduce", number(there.reduce), number(here.reduce)},
                {"router", number(there.router), number(here.router)},
                {"renormalise", number(there.renormalise), number(here.renormalise)},
                {"norm_eps", number(there.norm_eps), number(here.norm_eps)},
                {"act_beta", number(there.act_beta), number(here.act_beta)},
                {"act_linear_beta", number(there.act_linear_beta), number(here.act_linear_beta)},
                {"routed_scale", number(there.routed_scale), number(here.routed_scale)}};
  std::ostringstream text;
  for (const auto& f : fields) {
    if (f.there == f.here) continue;
    text << f.field << ' ' << f.there << ", here " << f.here;
    return text.str();
  }
  return "reserved bytes";
}

}  // namespace

std::optional<std::string> disagreement(const Hello& ours, const Hello& theirs) {
  const std::string who = "peer " + std::to_string(theirs.rank) + ": ";
  const auto differs = [&who](const char* field, const std::string& there, const std::string& here) {
    return who + field + " " + there + ", here " + here;
  };
  const struct {
    const char* field;
    uint64_t there, here;
  } numbers[] = {{"protocol", theirs.protocol, ours.protocol},
                 {"numerics", theirs.numerics, ours.numerics},
                 {"ranks", theirs.ranks, ours.ranks},
                 {"lanes", theirs.lanes, ours.lanes},
                 {"max_tokens", theirs.max_tokens, ours.max_tokens},
                 {"transport", theirs.transport, ours.transport}};
  const std::string group = field_text(theirs.group);
  const std::string our_group = field_text(ours.group);
  if (group != our_group) return differs("group", printable(group), our_group);
  for (const auto& n : numbers)
    if (n.there != n.here) return differs(n.field, std::to_string(n.there), std::to_string(n.here));
  if (theirs.rank >= ours.ranks)
    return differs("rank", std::to_string(theirs.rank), "0.." + std::to_string(ours.ranks - 1));
  if (theirs.rank == ours.rank) return differs("rank", std::to_string(theirs.rank), "the same: two daemons hold it");
  if (!(theirs.shape == ours.shape)) return who + "shape: " + difference(theirs.shape, ours.shape);
  if (std::memcmp(theirs.model_digest, ours.model_digest, sizeof ours.model_digest) != 0)
    return differs("model digest", hex(std::span(theirs.model_digest).first(8)) + "..",
                   hex(std::span(ours.model_digest).first(8)) + "..");
  const std::string revision = field_text(theirs.revision);
  const std::string our_revision = field_text(ours.revision);
  if (revision != our_revision)
    return differs("weights revision", "'" + printable(revision) + "'", "'" + our_revision + "'");
  if ((theirs.handle_kinds & ours.handle_kinds) == 0)
    return differs("handle kinds", std::to_string(theirs.handle_kinds),
                   std::to_string(ours.handle_kinds) + ": none in common");
  return {};
}

std::string why_not_ready(State state, bool leaving, Busy busy) {
  if (state == State::ready) return "";
  if (leaving) return "leaving";
  return state != State::lost && busy != Busy::no ? name(busy) : name(state);
}

World::World(uint32_t rank, uint32_t ranks, Nanos lost_after) : rank_(rank), lost_after_(lost_after), peers_(ranks) {
  Peer& own = peers_[rank];
  own.state = State::ready;
  own.session = own.greatest_session = 1;
  own.we_mapped = own.they_mapped = own.we_ready = own.they_ready = true;
}

std::optional<std::string> World::proven(uint32_t rank, uint64_t incarnation, uint32_t their_greatest_session,
                                         Nanos now) {
  Peer& p = peers_[rank];
  if (rank == rank_) return "rank " + std::to_string(rank) + " is this daemon";
  if (alive(rank)) return "rank " + std::to_string(rank) + " is linked already (" + name(p.state) + ")";
  const uint32_t greatest = std::max(p.greatest_session, their_greatest_session);
  if (greatest >= kMaxSession)
    return "rank " + std::to_string(rank) + " has used up its sessions: " + std::to_string(greatest);
  Peer next;
  next.incarnation = incarnation;
  next.session = next.greatest_session = greatest + 1;
  next.heard = now;
  std::copy(std::begin(p.losses), std::end(p.losses), std::begin(next.losses));
  p = next;
  return {};
}

bool World::heard(uint32_t rank, uint64_t incarnation, uint64_t counter, Nanos now) {
  if (rank >= peers_.size() || rank == rank_ || !alive(rank)) return false;
  Peer& p = peers_[rank];
  if (p.incarnation != incarnation || counter <= p.last_counter) return false;
  p.last_counter = counter;
  p.heard = now;
  return true;
}

/// Whether the flags just set carry the link a state further.
bool World::advance(Peer& p) {
  if (p.state == State::connecting && p.we_mapped && p.they_mapped) {
    p.state = State::mapped;
    return true;
  }
  if (p.state == State::mapped && p.we_ready && p.they_ready && !p.leaving) {
    p.state = State::ready;
    return true;
  }
  return false;
}

bool World::we_mapped(uint32_t rank) {
  if (!alive(rank)) return false;
  peers_[rank].we_mapped = true;
  return advance(peers_[rank]);
}

bool World::they_mapped(uint32_t rank) {
  if (!alive(rank)) return false;
  peers_[rank].they_mapped = true;
  return advance(peers_[rank]);
}

bool World::we_are_ready(uint32_t rank) {
  if (!alive(rank)) return false;
  peers_[rank].we_ready = true;
  return advance(peers_[rank]);
}

bool World::they_are_ready(uint32_t rank, uint32_t session) {
  if (!alive(rank) || peers_[rank].session != session) return false;
  peers_[rank].they_ready = true;
  return advance(peers_[rank]);
}

void World::beat(uint32_t rank, const HeartbeatBody& beat) {
  if (alive(rank)) peers_[rank].beat = beat;
}

bool World::lose(uint32_t rank, Loss why) {
  if (rank == rank_ || !alive(rank)) return false;
  Peer& p = peers_[rank];
  // A link that was never up goes back to where it was: nobody has lost anything.
  const bool was_up = p.state == State::mapped || p.state == State::ready;
  p.state = was_up || p.losses[0] + p.losses[1] + p.losses[2] > 0 ? State::lost : State::connecting;
  p.incarnation = 0;
  p.we_mapped = p.they_mapped = p.we_ready = p.they_ready = false;
  if (was_up) ++p.losses[static_cast<uint32_t>(p.leaving ? Loss::leaving : why)];
  p.leaving = false;
  p.beat = {};
  return true;
}

bool World::they_leave(uint32_t rank) {
  if (rank == rank_ || !alive(rank)) return false;
  Peer& p = peers_[rank];
  p.leaving = true;
  if (p.state != State::ready) return false;
  p.state = State::mapped;
  p.we_ready = p.they_ready = false;
  return true;
}

void World::was_away(Nanos now) {
  for (Peer& p : peers_)
    if (p.incarnation != 0) p.heard = std::max(p.heard, now);
}

std::vector<uint32_t> World::silent(Nanos now) const {
  std::vector<uint32_t> ranks;
  for (uint32_t r = 0; r < peers_.size(); ++r)
    if (r != rank_ && alive(r) && now > peers_[r].heard + lost_after_) ranks.push_back(r);
  return ranks;
}

std::vector<std::string> World::missing() const {
  std::vector<std::string> all;
  for (uint32_t r = 0; r < peers_.size(); ++r) {
    const Peer& p = peers_[r];
    if (p.state != State::ready)
      all.push_back("link " + std::to_string(r) + ": " + why_not_ready(p.state, p.leaving, p.beat.busy));
  }
  return all;
}

bool World::ready() const {
  return std::all_of(peers_.begin(), peers_.end(), [](const Peer& p) { return p.state == State::ready; });
}

}  // namespace moed::control
