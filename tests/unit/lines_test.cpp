// Lines and records: what is stored comes back, nothing beside it is touched, and a line that carries a sequence never
// shows payload from before it.
#include "kernels/lines.h"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <thread>
#include <vector>

namespace moed {
namespace {

using std::chrono::steady_clock;

constexpr uint64_t kSequence = 0x0000'1000'0000'0007ULL;  // session 1, count 7

uint8_t pattern(uint64_t i, uint64_t salt) { return static_cast<uint8_t>((i * 131 + salt * 29 + i / 251) & 0xFF); }

std::vector<Line> filled(uint64_t lines) {
  std::vector<Line> all(lines);
  std::memset(all.data(), 0xA5, lines * sizeof(Line));
  return all;
}

TEST(Lines, CountOfLines) {
  EXPECT_EQ(lines_of(0), 0U);
  EXPECT_EQ(lines_of(1), 1U);
  EXPECT_EQ(lines_of(120), 1U);
  EXPECT_EQ(lines_of(121), 2U);
  EXPECT_EQ(lines_of(3824), 32U);
  EXPECT_EQ(lines_of(7168), 60U);
}

TEST(Lines, RecordsOfEveryLengthComeBack) {
  for (uint64_t bytes = 1; bytes <= 5000; ++bytes) {
    std::vector<uint8_t> record(bytes);
    for (uint64_t i = 0; i < bytes; ++i) record[i] = pattern(i, bytes);
    const uint64_t lines = (bytes + 119) / 120;
    std::vector<Line> memory = filled(lines + 1);
    store_record(memory.data(), record.data(), bytes, kSequence);
    std::vector<uint8_t> back(bytes + 8, 0x5A);
    ASSERT_EQ(load_record(memory.data(), back.data(), bytes, kSequence), Seen::same) << bytes;
    ASSERT_EQ(std::memcmp(back.data(), record.data(), bytes), 0) << bytes;
    for (uint64_t i = bytes; i < back.size(); ++i) ASSERT_EQ(back[i], 0x5A) << bytes;
    for (const uint64_t word : memory[lines].word) ASSERT_EQ(word, 0xA5A5A5A5A5A5A5A5ULL) << bytes;
  }
}

TEST(Lines, LineIsPayloadThenZerosThenSequence) {
  std::vector<Line> memory = filled(1);
  const uint8_t payload[] = {1, 2, 3, 4, 5, 6, 7, 8, 9};
  store_line(memory[0], payload, sizeof payload, kSequence);
  const auto* bytes = reinterpret_cast<const uint8_t*>(memory.data());
  for (uint32_t i = 0; i < 120; ++i) ASSERT_EQ(bytes[i], i < 9 ? i + 1 : 0) << i;
  uint64_t last = 0;
  std::memcpy(&last, bytes + 120, 8);
  EXPECT_EQ(last, kSequence);
  EXPECT_EQ(load_sequence(memory[0]), kSequence);
}

TEST(Lines, ALineComparesWithTheSequenceAwaited) {
  Line line{};
  uint64_t payload = 0x1122334455667788ULL;
  store_line(line, &payload, 8, kSequence);
  uint64_t got = 1;
  EXPECT_EQ(load_line(line, &got, 8, kSequence + 1), Seen::older);
  EXPECT_EQ(load_line(line, &got, 8, kSequence - 1), Seen::newer);
  EXPECT_EQ(got, 1U) << "a line that is not taken must not be copied";
  EXPECT_EQ(load_line(line, &got, 8, kSequence), Seen::same);
  EXPECT_EQ(got, payload);
  // A link's next session is newer than any count of the one before.
  EXPECT_EQ(compare(sequence(2, 1), sequence(1, kCountMask)), Seen::newer);
  EXPECT_EQ(compare(0, sequence(1, 1)), Seen::older);
}

TEST(Lines, ARecordIsTakenOnlyWhole) {
  constexpr uint64_t bytes = 3824;
  const std::vector<uint8_t> record(bytes, 0x42);
  std::vector<uint8_t> back(bytes);
  std::vector<Line> memory(32);
  for (uint64_t odd = 0; odd < 32; ++odd) {
    store_record(memory.data(), record.data(), bytes, kSequence);
    store_line(memory[odd], record.data(), 8, kSequence - 1);
    EXPECT_EQ(load_record(memory.data(), back.data(), bytes, kSequence), Seen::older) << odd;
    store_line(memory[odd], record.data(), 8, kSequence + 1);
    EXPECT_EQ(load_record(memory.data(), back.data(), bytes, kSequence), Seen::newer) << odd;
  }
  store_record(memory.data(), record.data(), bytes, kSequence);
  store_line(memory[3], record.data(), 8, kSequence - 1);
  store_line(memory[20], record.data(), 8, kSequence + 1);
  EXPECT_EQ(load_record(memory.data(), back.data(), bytes, kSequence), Seen::newer) << "newer wins over older";
}

// Two threads. The writer overwrites one line without waiting, word i of sequence s being s * 16 + i, so every word
// says which sequence it belongs to.

void stamp(uint64_t (&words)[15], uint64_t seq) {
  for (uint64_t i = 0; i < 15; ++i) words[i] = seq * 16 + i;
}

/// Whether words taken under `seen` all belong to it or to a later one.
bool whole(const uint64_t (&words)[15], uint64_t seen) {
  for (uint64_t i = 0; i < 15; ++i)
    if (words[i] % 16 != i || words[i] / 16 < seen) return false;
  return true;
}

TEST(Lines, TheTornCheckCanFail) {
  Line line{};
  uint64_t words[15];
  stamp(words, 6);
  store_line(line, words, 120, 7);  // what a writer would leave that published its sequence before its payload
  uint64_t got[15];
  ASSERT_EQ(load_line(line, got, 120, 7), Seen::same);
  EXPECT_FALSE(whole(got, 7));
  stamp(words, 7);
  words[9] = 6 * 16 + 9;
  store_line(line, words, 120, 7);
  load_payload(line, got, 120);
  EXPECT_FALSE(whole(got, 7));
  stamp(words, 8);
  store_line(line, words, 120, 7);
  load_payload(line, got, 120);
  EXPECT_TRUE(whole(got, 7));
}

TEST(Lines, NoPayloadIsOlderThanItsSequence) {
  constexpr int wanted = 20'000;
  Line line{};
  std::atomic<bool> stop{false};
  std::thread writer([&] {
    uint64_t words[15];
    for (uint64_t seq = 1; !stop.load(std::memory_order_relaxed); ++seq) {
      stamp(words, seq);
      store_line(line, words, 120, seq);
      if (seq % 64 == 0) std::this_thread::yield();
    }
  });
  const auto deadline = steady_clock::now() + std::chrono::seconds(60);
  int observed = 0;
  int torn = 0;
  uint64_t last = 0;
  while (observed < wanted && steady_clock::now() < deadline) {
    const uint64_t seen = load_sequence(line);
    if (seen == last) {
      std::this_thread::yield();
      continue;
    }
    EXPECT_GT(seen, last);
    last = seen;
    uint64_t got[15];
    load_payload(line, got, 120);
    torn += whole(got, seen) ? 0 : 1;
    ++observed;
  }
  stop = true;
  writer.join();
  EXPECT_EQ(torn, 0);
  EXPECT_EQ(observed, wanted) << "the reader saw too few sequences within its deadline";
}

// As a call does it: the writer goes on to the next record only when this one was taken, so a record must be exact.
TEST(Lines, ARecordThatIsWaitedForIsExact) {
  constexpr uint64_t bytes = 3824;
  constexpr uint64_t rounds = 2000;
  std::vector<Line> memory(lines_of(bytes));
  std::atomic<uint64_t> taken{0};
  const auto deadline = steady_clock::now() + std::chrono::seconds(60);
  std::thread writer([&] {
    std::vector<uint8_t> record(bytes);
    for (uint64_t seq = 1; seq <= rounds; ++seq) {
      for (uint64_t i = 0; i < bytes; ++i) record[i] = pattern(i, seq);
      store_record(memory.data(), record.data(), bytes, seq);
      while (taken.load(std::memory_order_acquire) < seq && steady_clock::now() < deadline) std::this_thread::yield();
    }
  });
  std::vector<uint8_t> got(bytes);
  uint64_t seq = 1;
  uint64_t wrong = 0;
  while (seq <= rounds && steady_clock::now() < deadline) {
    const Seen seen = load_record(memory.data(), got.data(), bytes, seq);
    EXPECT_NE(seen, Seen::newer);
    if (seen != Seen::same) {
      std::this_thread::yield();
      continue;
    }
    for (uint64_t i = 0; i < bytes; ++i) wrong += got[i] != pattern(i, seq);
    taken.store(seq++, std::memory_order_release);
  }
  writer.join();
  EXPECT_EQ(wrong, 0U);
  EXPECT_EQ(seq, rounds + 1) << "a record did not come within the deadline";
}

}  // namespace
}  // namespace moed
