// Keys, proofs and signatures: the HMAC against another library, and every way in which a proof must not hold.
#include "control/auth.h"

#include <gtest/gtest.h>

#include <fstream>

#include "tests/support/temp_dir.h"

namespace moed::control {
namespace {

namespace fs = std::filesystem;

Key key_of(uint8_t byte) {
  Key key{};
  key.fill(byte);
  return key;
}

Hello hello_of(uint32_t rank, uint8_t nonce) {
  Hello h;
  h.rank = rank;
  h.nonce[0] = nonce;
  return h;
}

void write(const std::string& path, const std::string& text) { std::ofstream(path) << text; }

/// The data of RFC 4231's first case under a key of 32 bytes, as Python's hmac module has it.
TEST(Auth, HmacSha256) {
  const std::string text = "Hi There";
  const std::string head = text.substr(0, 3);
  const std::string tail = text.substr(3);
  const auto bytes = [](const std::string& s) {
    return std::span(reinterpret_cast<const uint8_t*>(s.data()), s.size());
  };
  const std::span<const uint8_t> whole[] = {bytes(text)};
  const std::span<const uint8_t> parts[] = {bytes(head), bytes(tail)};
  const Hmac want = {0x19, 0x8a, 0x60, 0x7e, 0xb4, 0x4b, 0xfb, 0xc6, 0x99, 0x03, 0xa0, 0xf1, 0xcf, 0x2b, 0xbd, 0xc5,
                     0xba, 0x0a, 0xa3, 0xf3, 0xd9, 0xae, 0x3c, 0x1c, 0x7a, 0x3b, 0x16, 0x96, 0xa0, 0xb6, 0x8c, 0xf7};
  EXPECT_EQ(hmac(key_of(0x0b), whole), want);
  EXPECT_EQ(hmac(key_of(0x0b), parts), want);
}

TEST(Auth, AProofHoldsForItsKeySideAndHellosOnly) {
  const Hello a = hello_of(0, 1);
  const Hello b = hello_of(1, 2);
  Proof proof;
  proof.greatest_session = 7;
  const Hmac good = prove(key_of(1), Side::dialler, a, b, proof);
  EXPECT_EQ(prove(key_of(1), Side::dialler, a, b, proof), good);
  EXPECT_NE(prove(key_of(2), Side::dialler, a, b, proof), good);
  EXPECT_NE(prove(key_of(1), Side::listener, a, b, proof), good);  // a reflected proof is none
  EXPECT_NE(prove(key_of(1), Side::dialler, b, a, proof), good);
  Proof other = proof;
  other.address[1023] = 1;
  EXPECT_NE(prove(key_of(1), Side::dialler, a, b, other), good);
  other = proof;
  other.hmac[0] = 9;  // the place of the proof itself is not under it
  EXPECT_EQ(prove(key_of(1), Side::dialler, a, b, other), good);
  for (size_t at = 0; at < sizeof(Hello); at += 7) {  // every part of a Hello counts
    Hello changed = b;
    reinterpret_cast<uint8_t*>(&changed)[at] ^= 0x40;
    EXPECT_NE(prove(key_of(1), Side::dialler, a, changed, proof), good) << at;
  }
}

TEST(Auth, SignaturesCoverHeaderAndBody) {
  const Key session = session_key(key_of(3), hello_of(0, 1), hello_of(1, 2));
  EXPECT_NE(session, session_key(key_of(3), hello_of(0, 1), hello_of(1, 3)));
  MessageHeader header;
  header.id = MessageId::ready;
  header.rank = 4;
  header.counter = 9;
  const std::array<uint8_t, 8> body = {1, 2, 3};
  const auto mac = sign(session, header, body);
  std::copy(mac.begin(), mac.end(), header.hmac);
  EXPECT_TRUE(verify(session, header, body));
  EXPECT_FALSE(verify(key_of(3), header, body));
  std::array<uint8_t, 8> changed = body;
  changed[7] = 1;
  EXPECT_FALSE(verify(session, header, changed));
  EXPECT_FALSE(verify(session, header, std::span(body).first(7)));
  MessageHeader wrong = header;
  wrong.counter += 1;
  EXPECT_FALSE(verify(session, wrong, body));
  for (uint8_t& byte : header.hmac) {
    byte ^= 1;
    EXPECT_FALSE(verify(session, header, body));
    byte ^= 1;
  }
}

TEST(Auth, NoncesDiffer) { EXPECT_NE(fresh_nonce(), fresh_nonce()); }

TEST(KeyRing, TheNewestProvesAndAnyVerifies) {
  const test::TempDir dir;
  write(dir.path() + "/b", std::string(32, 'b'));
  write(dir.path() + "/a", std::string(40, 'a'));
  write(dir.path() + "/.hidden", "short");
  fs::last_write_time(dir.path() + "/b", fs::file_time_type::clock::now() - std::chrono::hours(1));
  KeyRing ring(dir.path());
  EXPECT_EQ(ring.newest(), "a");
  ASSERT_NE(ring.find("b"), nullptr);
  EXPECT_NE(*ring.find("a"), *ring.find("b"));
  EXPECT_EQ(ring.find("c"), nullptr);
  EXPECT_EQ(ring.find(".hidden"), nullptr);
  write(dir.path() + "/c", std::string(32, 'c'));
  fs::last_write_time(dir.path() + "/c", fs::file_time_type::clock::now() + std::chrono::hours(1));
  EXPECT_FALSE(ring.refresh().fault.has_value());
  EXPECT_EQ(ring.newest(), "c");
  fs::remove(dir.path() + "/a");
  EXPECT_FALSE(ring.refresh().fault.has_value());
  EXPECT_EQ(ring.find("a"), nullptr);
}

TEST(KeyRing, WhatCannotBeAKeyIsNamedAndOldKeysStay) {
  const test::TempDir dir;
  EXPECT_THROW(KeyRing(dir.path()), std::runtime_error);
  EXPECT_THROW(KeyRing(dir.path() + "/none"), std::runtime_error);
  write(dir.path() + "/good", std::string(32, 'g'));
  KeyRing ring(dir.path());
  write(dir.path() + "/weak", std::string(31, 'w'));
  const auto why = ring.refresh().fault;
  ASSERT_TRUE(why.has_value());
  EXPECT_NE(why->find("weak"), std::string::npos) << *why;
  EXPECT_NE(why->find("31 bytes"), std::string::npos) << *why;
  EXPECT_NE(ring.find("good"), nullptr);
  fs::remove(dir.path() + "/weak");
  write(dir.path() + "/a-name-of-16-chr", std::string(32, 'n'));
  EXPECT_TRUE(ring.refresh().fault.has_value());
}

TEST(KeyRing, WithoutADirectoryThereIsOneKnownKey) {
  KeyRing ring("");
  EXPECT_EQ(ring.newest(), "none");
  EXPECT_NE(ring.find("none"), nullptr);
  EXPECT_FALSE(ring.refresh().fault.has_value());
}

}  // namespace
}  // namespace moed::control
