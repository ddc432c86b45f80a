#include "control/auth.h"

#include <openssl/crypto.h>
#include <openssl/evp.h>
#include <openssl/rand.h>
#include <openssl/sha.h>

#include <algorithm>
#include <cstring>
#include <fstream>
#include <memory>
#include <sstream>
#include <stdexcept>
#include <vector>

namespace moed::control {
namespace {

namespace fs = std::filesystem;

constexpr size_t kMinKeyBytes = 32;
constexpr size_t kMaxKeyBytes = 64 * 1024;
constexpr const char* kNoKeyId = "none";

std::span<const uint8_t> bytes_of(const char* text) {
  return {reinterpret_cast<const uint8_t*>(text), std::strlen(text)};
}

EVP_MAC* hmac_algorithm() {
  static EVP_MAC* const algorithm = EVP_MAC_fetch(nullptr, "HMAC", nullptr);
  if (algorithm == nullptr) throw std::runtime_error("OpenSSL has no HMAC");
  return algorithm;
}

Key read_key(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  std::stringstream text;
  text << file.rdbuf();
  const std::string bytes = text.str();
  if (!file) throw std::runtime_error("cannot read the key " + path.string());
  if (bytes.size() < kMinKeyBytes || bytes.size() > kMaxKeyBytes)
    throw std::runtime_error("the key " + path.string() + " has " + std::to_string(bytes.size()) + " bytes, not " +
                             std::to_string(kMinKeyBytes) + " to " + std::to_string(kMaxKeyBytes));
  Key key{};
  SHA256(reinterpret_cast<const unsigned char*>(bytes.data()), bytes.size(), key.data());
  return key;
}

/// The files of a directory that are keys: not hidden ones, which a mounted secret uses for its own links.
std::vector<fs::path> key_files(const std::string& directory) {
  std::vector<fs::path> files;
  for (const fs::directory_entry& entry : fs::directory_iterator(directory))
    if (entry.path().filename().string().front() != '.' && fs::is_regular_file(entry.path()))
      files.push_back(entry.path());
  std::sort(files.begin(), files.end());
  return files;
}

}  // namespace

Hmac hmac(const Key& key, std::span<const std::span<const uint8_t>> parts) {
  const std::unique_ptr<EVP_MAC_CTX, decltype(&EVP_MAC_CTX_free)> context(EVP_MAC_CTX_new(hmac_algorithm()),
                                                                          EVP_MAC_CTX_free);
  char digest[] = "SHA256";
  const OSSL_PARAM parameters[] = {OSSL_PARAM_construct_utf8_string("digest", digest, 0), OSSL_PARAM_construct_end()};
  bool ok = context != nullptr && EVP_MAC_init(context.get(), key.data(), key.size(), parameters) == 1;
  for (const std::span<const uint8_t> part : parts)
    ok = ok && EVP_MAC_update(context.get(), part.data(), part.size()) == 1;
  Hmac out{};
  size_t length = 0;
  ok = ok && EVP_MAC_final(context.get(), out.data(), &length, out.size()) == 1 && length == out.size();
  if (!ok) throw std::runtime_error("OpenSSL could not compute an HMAC");
  return out;
}

bool equal_in_constant_time(std::span<const uint8_t> a, std::span<const uint8_t> b) {
  return a.size() == b.size() && CRYPTO_memcmp(a.data(), b.data(), a.size()) == 0;
}

std::array<uint8_t, 32> fresh_nonce() {
  std::array<uint8_t, 32> nonce{};
  if (RAND_bytes(nonce.data(), static_cast<int>(nonce.size())) != 1)
    throw std::runtime_error("OpenSSL has no randomness");
  return nonce;
}

Hmac prove(const Key& key, Side side, const Hello& dialler, const Hello& listener, const Proof& proof) {
  const std::span<const uint8_t> parts[] = {bytes_of("moed proof 1"), bytes_of(side), bytes_of(dialler),
                                            bytes_of(listener), bytes_of(proof).subspan(sizeof proof.hmac)};
  return hmac(key, parts);
}

Key session_key(const Key& key, const Hello& dialler, const Hello& listener) {
  const std::span<const uint8_t> parts[] = {bytes_of("moed session 1"), bytes_of(dialler), bytes_of(listener)};
  return hmac(key, parts);
}

std::array<uint8_t, 16> sign(const Key& session, MessageHeader header, std::span<const uint8_t> body) {
  std::memset(header.hmac, 0, sizeof header.hmac);
  const std::span<const uint8_t> parts[] = {bytes_of(header), body};
  const Hmac whole = hmac(session, parts);
  std::array<uint8_t, 16> half{};
  std::memcpy(half.data(), whole.data(), half.size());
  return half;
}

bool verify(const Key& session, const MessageHeader& header, std::span<const uint8_t> body) {
  return equal_in_constant_time(sign(session, header, body), header.hmac);
}

KeyRing::KeyRing(std::string directory) : directory_(std::move(directory)) {
  if (directory_.empty()) {
    keys_[kNoKeyId] = {};
    newest_ = kNoKeyId;
    return;
  }
  Loaded loaded = load(directory_);
  keys_ = std::move(loaded.keys);
  newest_ = std::move(loaded.newest);
  stamp_ = std::move(loaded.stamp);
}

KeyRing::Refreshed KeyRing::refresh() {
  if (directory_.empty()) return {};
  try {
    if (stamp_of(directory_) == stamp_) return {};
    Loaded loaded = load(directory_);
    keys_ = std::move(loaded.keys);
    newest_ = std::move(loaded.newest);
    stamp_ = std::move(loaded.stamp);
  } catch (const std::exception& e) {
    return {.changed = false, .fault = e.what()};
  }
  return {.changed = true, .fault = {}};
}

const Key* KeyRing::find(const std::string& id) const {
  const auto at = keys_.find(id);
  return at == keys_.end() ? nullptr : &at->second;
}

KeyRing::Loaded KeyRing::load(const std::string& directory) {
  Loaded loaded;
  loaded.stamp = stamp_of(directory);
  fs::file_time_type latest = fs::file_time_type::min();
  for (const fs::path& path : key_files(directory)) {
    const std::string id = path.filename().string();
    if (id.size() >= sizeof(Hello::key_id))
      throw std::runtime_error("the key " + path.string() + " has a name of " + std::to_string(id.size()) +
                               " bytes; at most " + std::to_string(sizeof(Hello::key_id) - 1));
    loaded.keys[id] = read_key(path);
    const fs::file_time_type changed = fs::last_write_time(path);
    if (changed >= latest) {  // files come in name order: the greater name wins among equals
      latest = changed;
      loaded.newest = id;
    }
  }
  if (loaded.keys.empty())
    throw std::runtime_error("the directory " + directory + " (control.secret_dir) holds no key");
  return loaded;
}

std::string KeyRing::stamp_of(const std::string& directory) {
  std::string stamp;
  for (const fs::path& path : key_files(directory))
    stamp += path.filename().string() + ' ' + std::to_string(fs::file_size(path)) + ' ' +
             std::to_string(fs::last_write_time(path).time_since_epoch().count()) + '\n';
  return stamp;
}

}  // namespace moed::control
