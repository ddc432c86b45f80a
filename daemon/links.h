// The control thread's half of the links: makes what a peer may write here, passes it on, maps what the peer gives, and
// retires both when the link is lost. The net thread (control/net_loop.h) talks to the peers meanwhile.
#pragma once

#include <array>
#include <atomic>
#include <boost/asio/io_context.hpp>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "control/net_loop.h"
#include "daemon/config.h"
#include "daemon/fetch.h"
#include "daemon/metrics.h"
#include "daemon/model.h"
#include "kernels/backend.h"

namespace moed {

class Links {
 public:
  /// Starts the net thread: peers find us from here, and hear that we are loading until start(). A world of one has no
  /// net thread and no port. Throws std::runtime_error with a reason.
  Links(boost::asio::io_context& io, const Config& config, const Model& model, uint64_t incarnation, Metrics& metrics);
  ~Links();
  Links(const Links&) = delete;
  Links& operator=(const Links&) = delete;

  // All on the thread that runs `io`, except where it says otherwise.

  /// From here links can become ready. changed: a link has become ready or has ceased to be.
  void start(Backend& backend, std::function<void()> changed);
  /// What a peer's token stands for, once; nothing and a sentence: there is no such token.
  Fd take(const Fetch& fetch, std::string& why);
  /// Tells the peers that we are about to go: their calls that run here may end, new ones do not come.
  void drain() {
    draining_ = true;
    show_busy();
  }
  void leave() {
    if (net_) net_->leave();
  }
  /// Reads the directory of keys again.
  void refresh_keys();

  /// "off" in a world of one.
  std::string port() const { return net_ ? std::to_string(net_->port()) : "off"; }
  /// By rank, the own one included.
  std::vector<control::PeerView> peers() const;
  /// By rank: 0 where the link is not ready, else a number that is another one in every life of the link.
  std::vector<uint64_t> lives() const;
  /// The peers' rows of the wait matrix, by rank; the own one is empty.
  std::vector<control::WaitRow> waits() const;
  /// "link 3: connecting", for every link that is not ready.
  std::vector<std::string> missing() const;

 private:
  using Token = std::array<uint8_t, 64>;
  struct Link {
    control::LinkLife life;
    std::unique_ptr<Fetcher> fetcher;  ///< while the peer's descriptors are on their way
    bool asked = false;
  };
  struct Offered {
    control::LinkLife life;
    Fd fd;
  };

  control::NetOptions net_options(const Model& model) const;
  control::NetHandlers net_handlers();
  control::HeartbeatBody beat() const;
  void refused(const std::string& why);
  bool lives(control::LinkLife life) const { return links_[life.rank].life == life; }
  void open(control::LinkLife life);
  Token token_of(control::LinkLife life, Handle& handle);
  Token offer(control::LinkLife life, Fd fd);
  void segment(control::LinkLife life, uint64_t incarnation, const control::SegmentBody& body);
  void fetch(control::LinkLife life, uint64_t incarnation, const control::SegmentBody& body);
  void map(control::LinkLife life, const control::SegmentBody& body, std::vector<Fd> fds);
  void usable(control::LinkLife life, uint32_t session);
  void ready(control::LinkLife life, uint32_t session, Nanos took);
  void leaving(control::LinkLife life, uint32_t session);
  void show_busy();
  void lost(control::LinkLife life, control::Loss why, const std::string& text, bool was_up);

  boost::asio::io_context& io_;
  const Config& config_;
  const uint64_t incarnation_;
  Metrics& metrics_;
  Backend* backend_ = nullptr;
  std::function<void()> changed_;
  std::vector<Link> links_;
  std::map<Token, Offered> offered_;
  bool draining_ = false;
  std::atomic<control::Busy> busy_{control::Busy::loading};  ///< read by the net thread
  control::KeyRing keys_;
  std::map<std::string, Nanos> refused_;   ///< sentences and when each was said last: the net thread's alone
  std::unique_ptr<control::NetLoop> net_;  // last: its thread uses what is above; empty in a world of one
};

/// Where the rendezvous listens: control.listen, or the own entry's port on all addresses, on loopback only if every
/// peer is there.
std::string listen_address(const Config& config);

}  // namespace moed
