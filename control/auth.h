// Shared keys and proofs: HMAC-SHA256 over fresh nonces, session keys for active messages. Keys are files of a
// directory, named by their id; the newest proves, any present one verifies; the directory is read again when it
// changes.
#pragma once

#include <array>
#include <cstdint>
#include <filesystem>
#include <map>
#include <optional>
#include <span>
#include <string>

#include "control/messages.h"

namespace moed::control {

using Key = std::array<uint8_t, 32>;
using Hmac = std::array<uint8_t, 32>;

/// SHA-256 HMAC (RFC 2104) over the parts in order.
Hmac hmac(const Key& key, std::span<const std::span<const uint8_t>> parts);

/// Whether two byte strings of one length are equal, in a time that does not depend on where they differ.
bool equal_in_constant_time(std::span<const uint8_t> a, std::span<const uint8_t> b);

/// 32 bytes that nobody has seen. Throws std::runtime_error when the system has no randomness.
std::array<uint8_t, 32> fresh_nonce();

enum class Side : uint8_t { dialler = 1, listener = 2 };

/// The proof of one side. Both Hellos are under it, and so is the side: a reflected proof is none.
Hmac prove(const Key& key, Side side, const Hello& dialler, const Hello& listener, const Proof& proof);

/// What active messages of this link are signed with: both ends derive it from the key and both nonces.
Key session_key(const Key& key, const Hello& dialler, const Hello& listener);

/// MAC of an active message: 16 bytes over the header with its hmac zeroed and the body.
std::array<uint8_t, 16> sign(const Key& session, MessageHeader header, std::span<const uint8_t> body);
bool verify(const Key& session, const MessageHeader& header, std::span<const uint8_t> body);

/// The keys of one directory. Without a directory there is one key, known to everybody, with the id "none": for worlds
/// on loopback only.
class KeyRing {
 public:
  /// Reads the directory. Throws std::runtime_error naming path and reason when it cannot, when it holds no key, or
  /// when a key has fewer than 32 bytes or a name of more than 15.
  explicit KeyRing(std::string directory);

  struct Refreshed {
    bool changed = false;
    std::optional<std::string> fault;  ///< why the old keys stay
  };
  /// Reads the directory again if it changed; a directory that has become unreadable or empty keeps the old keys.
  Refreshed refresh();

  /// The id that proves: of the file changed last, the greater name among equals.
  const std::string& newest() const { return newest_; }
  const Key* find(const std::string& id) const;

 private:
  struct Loaded {
    std::map<std::string, Key> keys;
    std::string newest;
    std::string stamp;  ///< names, sizes and times: equal while nothing changed
  };
  static Loaded load(const std::string& directory);
  static std::string stamp_of(const std::string& directory);

  std::string directory_;
  std::map<std::string, Key> keys_;
  std::string newest_;
  std::string stamp_;
};

}  // namespace moed::control
