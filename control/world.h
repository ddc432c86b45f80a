// The links of one rank as a state machine: who is where, what is missing, who is late. Pure: no I/O, no clock of its
// own, no memory; whoever drives it gives the time and carries out what it says.
//
//   connecting --proven--> connecting --both mapped--> mapped --both ready--> ready
//        ^                                                                      |
//        +---------------- a new handshake, session and segments ------------ lost <--- error, heartbeat, leaving
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "control/messages.h"
#include "daemon/abi/futex.h"

namespace moed::control {

enum class State : uint32_t { connecting = 0, mapped = 1, ready = 2, lost = 3 };
enum class Loss : uint32_t { error = 0, heartbeat = 1, leaving = 2 };

constexpr const char* name(State s) {
  constexpr const char* names[] = {"connecting", "mapped", "ready", "lost"};
  return static_cast<uint32_t>(s) < 4 ? names[static_cast<uint32_t>(s)] : "unknown";
}
constexpr const char* name(Loss l) {
  constexpr const char* names[] = {"error", "heartbeat", "leaving"};
  return static_cast<uint32_t>(l) < 3 ? names[static_cast<uint32_t>(l)] : "unknown";
}

/// What a link knows of its peer. Times are CLOCK_MONOTONIC nanoseconds of this host; a peer's clock is never read.
struct Peer {
  State state = State::connecting;
  uint64_t incarnation = 0;       ///< of the peer's present life, 0: not proven
  uint32_t session = 0;           ///< of this link's present life
  uint32_t greatest_session = 0;  ///< ever seen with this peer
  bool we_mapped = false, they_mapped = false, we_ready = false, they_ready = false;
  bool leaving = false;       ///< it has said so: its losses are no errors
  uint64_t last_counter = 0;  ///< of its messages
  Nanos heard = 0;            ///< last message
  HeartbeatBody beat{};
  uint64_t losses[3] = {};
};

/// Why a peer's Hello does not fit ours: one sentence with both values. Nothing: it does.
std::optional<std::string> disagreement(const Hello& ours, const Hello& theirs);

/// "connecting", "lost", and where the peer has said more, "leaving", "loading", "mapping"; empty: it is ready.
std::string why_not_ready(State state, bool leaving, Busy busy);

class World {
 public:
  World(uint32_t rank, uint32_t ranks, Nanos lost_after);

  /// A handshake with `rank` held. Refused (a sentence) while its link lives: connecting with a proof, mapped or ready.
  std::optional<std::string> proven(uint32_t rank, uint64_t incarnation, uint32_t their_greatest_session, Nanos now);
  /// A message with a good MAC. False: of another life, or a counter that is not greater; it is dropped.
  bool heard(uint32_t rank, uint64_t incarnation, uint64_t counter, Nanos now);
  /// Each returns true when the link became mapped, or ready.
  bool we_mapped(uint32_t rank);
  bool they_mapped(uint32_t rank);
  bool we_are_ready(uint32_t rank);
  bool they_are_ready(uint32_t rank, uint32_t session);
  void beat(uint32_t rank, const HeartbeatBody& beat);
  /// The peer says that it will go. True: it was ready, and is mapped now: what runs may end, nothing new begins.
  bool they_leave(uint32_t rank);
  /// False: it was not alive. An error of a peer that was leaving counts as leaving.
  bool lose(uint32_t rank, Loss why);
  /// This process did not run for a while: what peers said meanwhile is still to be read, so nobody is silent.
  void was_away(Nanos now);

  /// Ranks whose last message is older than lost_after.
  std::vector<uint32_t> silent(Nanos now) const;
  /// "link 3: connecting", for every link that is not ready; "link 3: leaving" and "link 3: loading" where the peer
  /// said so.
  std::vector<std::string> missing() const;
  bool ready() const;
  const Peer& peer(uint32_t rank) const { return peers_[rank]; }
  /// Whether a handshake with this rank is under way or done.
  bool alive(uint32_t rank) const { return peers_[rank].incarnation != 0 && peers_[rank].state != State::lost; }

 private:
  bool advance(Peer& peer);

  const uint32_t rank_;
  const Nanos lost_after_;
  std::vector<Peer> peers_;
};

}  // namespace moed::control
