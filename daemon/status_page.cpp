// The page's Content-Security-Policy. Hashes rather than 'unsafe-inline': text of an engine that ever got into the page
// as markup would still not run.
#include "daemon/status_page.h"

#include <openssl/evp.h>

#include <array>
#include <stdexcept>
#include <string>

namespace moed {
namespace {

/// What stands between <tag> and </tag>, as the hash of a policy counts it.
std::string_view inside(const std::string& tag) {
  const std::size_t begin = kStatusPage.find("<" + tag + ">") + tag.size() + 2;
  return kStatusPage.substr(begin, kStatusPage.find("</" + tag + ">") - begin);
}

/// 'sha256-...' in base64.
std::string hash_source(std::string_view text) {
  std::array<unsigned char, EVP_MAX_MD_SIZE> digest{};
  unsigned bytes = 0;
  if (EVP_Digest(text.data(), text.size(), digest.data(), &bytes, EVP_sha256(), nullptr) != 1)
    throw std::runtime_error("OpenSSL has no SHA-256");
  std::array<unsigned char, 2 * EVP_MAX_MD_SIZE> base64{};
  const int length = EVP_EncodeBlock(base64.data(), digest.data(), static_cast<int>(bytes));
  return "'sha256-" + std::string(base64.begin(), base64.begin() + length) + "'";
}

}  // namespace

HttpAnswer status_page() {
  static const std::string policy =
      "default-src 'none'; script-src " + hash_source(inside("script")) + "; style-src " +
      hash_source(inside("style")) +
      "; connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'";
  return {200, std::string(kStatusPage), kTypeHtml, policy};
}

}  // namespace moed
