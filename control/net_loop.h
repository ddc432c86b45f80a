// The net thread: rendezvous, the UCX worker and the heartbeats of one daemon in one Asio context, so that a peer hears
// of us whatever our other threads are doing. It drives the World and tells its owner what to make and to map.
//
//   proven, both ends know it ---> open      the owner makes a segment     ---> offer()
//   segment message           ---> segment   the owner maps it             ---> mapped()
//   both ends have mapped     ---> usable    the owner's back end knows it ---> ready()
//   both ends are ready       ---> ready
//   error, silence, farewell  ---> leaving (what runs may end), lost (the owner retires the memory)
#pragma once

#include <array>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "control/auth.h"
#include "control/messages.h"
#include "control/peer_view.h"
#include "control/world.h"

namespace moed::control {

struct NetOptions {
  Hello hello;                     ///< ours; key id and nonce are filled for each handshake
  std::vector<std::string> peers;  ///< "host:port" by rank
  std::string listen;              ///< "host:port"; host empty: all addresses
  std::string ucx_ports;           ///< "low-high"
  std::string ucx_devices;         ///< interfaces for UCX; empty: UCX_NET_DEVICES, else all
  uint32_t interval_ms = 100, lost_after_ms = 1000;
};

/// One life of one link. Whoever answers names it: an answer for a life that is over is dropped.
struct LinkLife {
  uint32_t rank = 0;
  uint64_t number = 0;  ///< never used twice; 0: none
  bool operator==(const LinkLife&) const = default;
};

/// All are called on the net thread and must not block: they post.
struct NetHandlers {
  std::function<void(LinkLife, uint32_t session)> open;
  std::function<void(LinkLife, uint64_t incarnation, const SegmentBody&)> segment;
  std::function<void(LinkLife, uint32_t session)> usable;
  std::function<void(LinkLife, uint32_t session, Nanos took)> ready;
  std::function<void(LinkLife, uint32_t session)> leaving;
  /// was_up: it had been mapped or ready.
  std::function<void(LinkLife, Loss, const std::string& why, bool was_up)> lost;
  /// A handshake that failed, in one sentence.
  std::function<void(const std::string& why)> refused;
  /// A message that no link vouches for was dropped.
  std::function<void()> dropped;
  /// What to tell the peers; wait_us counts from the start of the process.
  std::function<HeartbeatBody()> beat;
  std::function<void(Nanos now)> tick;
  std::function<void()> stall;  ///< the thread was late for its own timer by more than 10 ms
};

class NetLoop {
 public:
  /// Starts the thread; it listens and dials from here. Throws std::runtime_error with a reason.
  NetLoop(NetOptions options, NetHandlers handlers, KeyRing keys);
  ~NetLoop();
  NetLoop(const NetLoop&) = delete;
  NetLoop& operator=(const NetLoop&) = delete;

  uint16_t port() const;
  std::vector<PeerView> peers() const;
  /// By rank; the own row is empty.
  std::vector<WaitRow> waits() const;

  // From any thread; carried out on the net thread.

  void offer(LinkLife life, const SegmentBody& body);
  void mapped(LinkLife life);
  void ready(LinkLife life);
  /// Ends a link; it is tried again.
  void lose(LinkLife life, const std::string& why);
  /// From now on these keys prove and verify. Links that are there keep theirs.
  void keys(KeyRing keys);
  /// Tells every peer that we go, and takes no new links.
  void leave();

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace moed::control
