// Our own TCP between daemons: every rank dials every peer by name and listens; a mutual proof over fresh nonces; one
// connection per pair stays, and its end is the link's end. Nothing of a Hello but the key's id is looked at before the
// HMAC holds, and nothing is ever parsed: all structs are of fixed size.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "control/auth.h"
#include "control/messages.h"

namespace boost::asio {
class io_context;
}

namespace moed::control {

struct RendezvousOptions {
  Hello hello;                     ///< ours; key id and nonce are filled for each handshake
  std::vector<std::string> peers;  ///< "host:port" by rank
  std::string listen;              ///< "host:port"; host empty: all addresses
  std::vector<uint8_t> ucx_address;
  uint32_t handshake_ms = 5000;  ///< from accept or connect to the end of the handshake
  uint32_t backoff_least_ms = 50, backoff_most_ms = 1000;
  uint32_t connections = 256;  ///< handshakes of strangers at once; beyond, the oldest is closed
};

/// A peer that has proven who it is.
struct Proven {
  uint32_t rank = 0;
  Hello hello;
  Proof proof;
  uint32_t greatest_sent = 0;  ///< what we told the peer as our greatest session
  Key session{};               ///< signs the active messages of this link
};

/// All are called on the thread that runs `io`.
struct RendezvousHandlers {
  /// Whether a link with this rank may be made now; a sentence: no, and why.
  std::function<std::optional<std::string>(uint32_t rank)> refuse;
  std::function<uint32_t(uint32_t rank)> greatest_session;
  /// The connection stays from here until close() or ended().
  std::function<void(const Proven&)> proven;
  /// The peer has run its own proven(): from here it understands messages that are signed with the session key.
  std::function<void(uint32_t rank)> open;
  std::function<void(uint32_t rank)> ended;
  /// A handshake that failed, in one sentence; where both sides differ it names both values.
  std::function<void(const std::string& why)> refused;
};

class Rendezvous {
 public:
  /// Listens and begins to dial. Throws std::runtime_error naming address and reason when it cannot listen or a
  /// peer's address is none.
  Rendezvous(boost::asio::io_context& io, RendezvousOptions options, RendezvousHandlers handlers, KeyRing& keys);
  ~Rendezvous();
  Rendezvous(const Rendezvous&) = delete;
  Rendezvous& operator=(const Rendezvous&) = delete;

  uint16_t port() const;
  /// Closes the connection of a link; dialling begins again, after a pause that doubles until settled().
  void close(uint32_t rank);
  /// The link is of use: the next dial comes without a pause.
  void settled(uint32_t rank);
  /// No new links from here; those that are there stay.
  void leave();

 private:
  class Impl;
  std::shared_ptr<Impl> impl_;
};

}  // namespace moed::control
