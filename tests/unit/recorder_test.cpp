// The ring of records, from both ends: what a reader takes is whole or not taken, what is given away cannot be written,
// and every call that ends is in it. Each fault is made first and seen.
#include "daemon/recorder.h"

#include <gtest/gtest.h>
#include <sys/stat.h>

#include <array>
#include <atomic>
#include <functional>
#include <optional>
#include <thread>

#include "daemon/moectl/flight.h"
#include "daemon/service_loop.h"
#include "tests/support/cases.h"
#include "tests/support/world.h"

namespace moed {
namespace {

using ctl::Flight;
using ctl::read_flight;

constexpr Nanos kPatience = 20'000'000'000;

/// A record whose every word is n, so that a mixture of two shows.
template <class Record>
Record uniform(uint64_t n) {
  std::array<uint64_t, sizeof(Record) / 8> words;
  words.fill(n);
  Record record;
  std::memcpy(&record, words.data(), sizeof record);
  return record;
}

/// The word that a record consists of; nothing: it is a mixture.
template <class Record>
std::optional<uint64_t> word_of(const Record& record) {
  std::array<uint64_t, sizeof(Record) / 8> words;
  std::memcpy(words.data(), &record, sizeof record);
  for (const uint64_t word : words)
    if (word != words[0]) return {};
  return words[0];
}

/// A copy that does not look at the sequence.
template <class Record>
Record careless_copy(const RecordSlot<Record>& slot) {
  std::array<uint64_t, sizeof(Record) / 8> words;
  for (size_t i = 0; i < words.size(); ++i) words[i] = shared_word(slot.word[i]).load(std::memory_order_relaxed);
  Record record;
  std::memcpy(&record, words.data(), sizeof record);
  return record;
}

/// Does `turn` with 0, 1, 2, ... on a thread of its own until it goes.
class Background {
 public:
  explicit Background(std::function<void(uint64_t n)> turn)
      : thread_([this, turn = std::move(turn)] {
          for (uint64_t n = 0; !stop_.load(std::memory_order_relaxed); ++n) turn(n);
        }) {}
  ~Background() {
    stop_ = true;
    thread_.join();
  }
  Background(const Background&) = delete;
  Background& operator=(const Background&) = delete;

 private:
  std::atomic<bool> stop_{false};
  std::thread thread_;
};

Fd copy_of(Recorder& recorder) { return Fd(::fcntl(recorder.descriptor(), F_DUPFD_CLOEXEC, 0)); }

Flight flight_of(Recorder& recorder, uint64_t last = 0) {
  Flight flight;
  Sentence why;
  EXPECT_EQ(read_flight(copy_of(recorder), last, flight, why), Status::ok) << why.text;
  return flight;
}

TEST(RecordSlot, AHalfWrittenRecordIsNotTaken) {
  RecordSlot<CallRecord> slot{};
  CallRecord got;
  EXPECT_FALSE(load_slot(slot, 0, got)) << "nothing was written yet";
  store_slot(slot, 0, uniform<CallRecord>(7));
  ASSERT_TRUE(load_slot(slot, 0, got));
  EXPECT_EQ(word_of(got), 7U);
  EXPECT_FALSE(load_slot(slot, 4, got)) << "record 4 of a ring of 4 is not written yet";
  // The writer stands still in the middle of record 4.
  shared_word(slot.sequence).store(2 * 4 + 1);
  for (size_t i = 0; i < std::size(slot.word) / 2; ++i) shared_word(slot.word[i]).store(8);
  EXPECT_FALSE(word_of(careless_copy(slot))) << "a careless copy is a mixture";
  EXPECT_FALSE(load_slot(slot, 0, got));
  EXPECT_FALSE(load_slot(slot, 4, got));
  store_slot(slot, 4, uniform<CallRecord>(8));
  EXPECT_FALSE(load_slot(slot, 0, got)) << "record 0 is gone";
  ASSERT_TRUE(load_slot(slot, 4, got));
  EXPECT_EQ(word_of(got), 8U);
}

TEST(RecordSlot, ACopyDuringWhichTheWriterCameByIsNotTaken) {
  RecordSlot<CallRecord> slot{};
  std::atomic<uint64_t> written{0};
  const Background writer([&](uint64_t n) {
    store_slot(slot, n, uniform<CallRecord>(n));
    written.store(n + 1, std::memory_order_release);
    if (n % 64 == 0) std::this_thread::yield();
  });
  uint64_t mixed = 0, taken = 0, refused = 0;
  for (const Nanos until = now_ns() + kPatience; (mixed == 0 || taken == 0 || refused == 0) && now_ns() < until;) {
    mixed += word_of(careless_copy(slot)) ? 0 : 1;
    const uint64_t n = written.load(std::memory_order_acquire);
    CallRecord got;
    if (n != 0 && load_slot(slot, n - 1, got)) {
      ASSERT_EQ(word_of(got), n - 1);
      ++taken;
    } else {
      ++refused;
    }
  }
  EXPECT_GT(mixed, 0U) << "the fault was never there";
  EXPECT_GT(taken, 0U);
  EXPECT_GT(refused, 0U);
}

TEST(Recorder, KeepsTheLastAndSaysWhoseTheyAre) {
  Recorder recorder({.calls = 4, .rank = 3, .ranks = 128, .incarnation = 77});
  EXPECT_TRUE(flight_of(recorder).calls.empty());
  for (uint64_t n = 1; n <= 11; ++n) {
    recorder.call_ended(uniform<CallRecord>(n));
    if (n <= 3) recorder.pass_ended(uniform<ServeRecord>(n * 100));
  }
  const Flight all = flight_of(recorder);
  EXPECT_EQ(all.rank, 3U);
  EXPECT_EQ(all.ranks, 128U);
  EXPECT_EQ(all.incarnation, 77U);
  EXPECT_EQ(all.overwritten, 0U);
  ASSERT_EQ(all.calls.size(), 4U);
  for (uint64_t i = 0; i < 4; ++i) EXPECT_EQ(word_of(all.calls[i]), 8 + i);
  ASSERT_EQ(all.passes.size(), 3U);
  for (uint64_t i = 0; i < 3; ++i) EXPECT_EQ(word_of(all.passes[i]), (i + 1) * 100);
  const Flight two = flight_of(recorder, 2);
  ASSERT_EQ(two.calls.size(), 2U);
  EXPECT_EQ(word_of(two.calls[0]), 10U);
  ASSERT_EQ(two.passes.size(), 2U);
  EXPECT_EQ(word_of(two.passes[0]), 200U);
}

TEST(Recorder, PhasesAreThoseOfTheLastRecords) {
  Recorder recorder({.calls = 2000, .ranks = 128});
  for (const PhaseTimes& p : recorder.phases()) EXPECT_EQ(p.seen, 0U);
  for (uint64_t n = 1; n <= 3000; ++n) {  // dispatch took n ns, wait 7 ns in every tenth call, reduce no time
    CallRecord record{};
    record.phase_ns[0] = n;
    record.phase_ns[1] = n % 10 == 0 ? 7 : 0;
    record.lane = 1;
    recorder.call_ended(record);
  }
  CallRecord canary{};  // of lane 0: in no phase, though among the last
  canary.phase_ns[2] = 1;
  recorder.call_ended(canary);
  for (const uint64_t n : {30, 10, 20}) {
    ServeRecord record{};
    record.gather_ns = n;
    record.experts_ns = 2 * n;
    record.send_ns = 3 * n;
    recorder.pass_ended(record);
  }
  const uint64_t expected[][3] = {// of 1978..3000: the 512th and the 1013th
                                  {1023, 2489, 2990}, {103, 7, 7}, {0, 0, 0}, {3, 20, 30}, {3, 40, 60}, {3, 60, 90}};
  const auto phases = recorder.phases();
  for (size_t p = 0; p < phases.size(); ++p) {
    EXPECT_EQ(phases[p].seen, expected[p][0]) << kPhaseNames[p];
    EXPECT_EQ(phases[p].p50, expected[p][1]) << kPhaseNames[p];
    EXPECT_EQ(phases[p].p99, expected[p][2]) << kPhaseNames[p];
  }
}

TEST(Recorder, ItsClockIsTheOneOnTheWall) {
  Recorder recorder({.calls = 1});
  const Flight flight = flight_of(recorder);
  const auto monotonic = static_cast<int64_t>(now_ns());
  timespec t{};
  ::clock_gettime(CLOCK_REALTIME, &t);
  const int64_t wall = int64_t{t.tv_sec} * 1'000'000'000 + t.tv_nsec;
  EXPECT_LT(std::abs(monotonic + flight.realtime_ahead_ns - wall), 50'000'000) << "50 ms: this thread may be set aside";
}

TEST(Recorder, WritesThePeersOfItsWorldAlone) {
  Recorder recorder({.calls = 1, .rank = 0, .ranks = 3});
  recorder.call_ended(uniform<CallRecord>(5));
  const CallRecord got = flight_of(recorder).calls.at(0);
  EXPECT_EQ(got.total_ns, 5U);
  EXPECT_EQ(got.peer[2].experts, 5U) << "the lower half of a 64-bit 5";
  EXPECT_EQ(got.peer[3].experts, 0U);
}

TEST(Recorder, AReaderThatIsOvertakenLosesRecordsAndTakesNoMixture) {
  Recorder recorder({.calls = 64, .rank = 0, .ranks = 128});
  const Fd file = copy_of(recorder);
  const Background writer([&](uint64_t n) {
    recorder.call_ended(uniform<CallRecord>(n));
    recorder.pass_ended(uniform<ServeRecord>(n));
  });
  uint64_t overwritten = 0, taken = 0;
  for (const Nanos until = now_ns() + kPatience; (overwritten == 0 || taken == 0) && now_ns() < until;) {
    Flight flight;
    Sentence why;
    ASSERT_EQ(read_flight(file, 0, flight, why), Status::ok) << why.text;
    overwritten += flight.overwritten;
    ASSERT_LE(recorder.phases()[0].seen, 64U);  // read while it is written: for the race detector
    taken += flight.calls.size();
    for (size_t i = 0; i < flight.calls.size(); ++i) {
      const auto word = word_of(flight.calls[i]);
      ASSERT_TRUE(word);
      if (i != 0) {
        ASSERT_LT(word_of(flight.calls[i - 1]), word);
      }
    }
    for (const ServeRecord& r : flight.passes) ASSERT_TRUE(word_of(r));
  }
  EXPECT_GT(overwritten, 0U) << "the fault was never there";
  EXPECT_GT(taken, 0U);
}

/// Every way to change a file of whose descriptor one has a copy; those that succeeded.
std::vector<std::string> ways_in(const Fd& fd) {
  std::vector<std::string> open;
  const uint64_t bytes = sizeof(RecorderHeader);
  const char byte = 'x';
  const auto reports = [&open](const char* way, bool worked) {
    if (worked) open.emplace_back(way);
  };
  reports("write", ::pwrite(fd.get(), &byte, 1, 0) == 1);
  reports("shared mapping", static_cast<bool>(Mapping(fd, bytes)));
  const Mapping read_only(fd, bytes, PROT_READ);
  EXPECT_TRUE(read_only);
  reports("mprotect", ::mprotect(read_only.data(), read_only.bytes(), PROT_READ | PROT_WRITE) == 0);
  const Fd again(::open(("/proc/self/fd/" + std::to_string(fd.get())).c_str(), O_RDWR | O_CLOEXEC));
  reports("write after reopening", again && ::pwrite(again.get(), &byte, 1, 0) == 1);
  reports("mapping after reopening", again && Mapping(again, bytes));
  reports("punched hole", ::fallocate(fd.get(), FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0, 4096) == 0);
  reports("other seals", ::fcntl(fd.get(), F_ADD_SEALS, F_SEAL_WRITE) == 0);
  reports("growing", ::ftruncate(fd.get(), 1 << 24) == 0);
  reports("shrinking", ::ftruncate(fd.get(), 0) == 0);
  return open;
}

TEST(Recorder, WhatIsGivenAwayCannotBeWritten) {
  const Fd plain(::memfd_create("plain", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  ASSERT_EQ(::ftruncate(plain.get(), 1 << 16), 0);
  EXPECT_GE(ways_in(plain).size(), 6U) << "these ways lead into a file without seals";
  Recorder recorder({.calls = 4});
  recorder.call_ended(uniform<CallRecord>(1));
  EXPECT_EQ(ways_in(copy_of(recorder)), std::vector<std::string>());
  recorder.call_ended(uniform<CallRecord>(2));
  EXPECT_EQ(flight_of(recorder).calls.size(), 2U) << "the recorder itself still writes";
}

/// What read_flight says to a file with this header; `seals`: whether it cannot shrink.
std::string refusal(const std::function<void(RecorderHeader&)>& change, int seals = F_SEAL_SHRINK,
                    uint64_t bytes = recorder_bytes(4)) {
  Recorder recorder({.calls = 4});
  RecorderHeader header;
  EXPECT_EQ(::pread(recorder.descriptor(), &header, sizeof header, 0), static_cast<ssize_t>(sizeof header));
  change(header);
  const Fd file(::memfd_create("made-up", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  EXPECT_EQ(::ftruncate(file.get(), static_cast<off_t>(bytes)), 0);
  const uint64_t part = std::min<uint64_t>(bytes, sizeof header);
  EXPECT_EQ(::pwrite(file.get(), &header, part, 0), static_cast<ssize_t>(part));
  EXPECT_EQ(::fcntl(file.get(), F_ADD_SEALS, seals), 0);
  Flight flight;
  Sentence why;
  return read_flight(file, 0, flight, why) == Status::ok ? "" : why.text;
}

TEST(ReadFlight, RefusesWhatItDoesNotKnow) {
  EXPECT_EQ(refusal([](RecorderHeader&) {}), "");
  EXPECT_NE(refusal([](RecorderHeader& h) { h.version = 9; }).find("has version 9, 1 is known here"),
            std::string::npos);
  const std::vector<std::function<void(RecorderHeader&)>> changes = {
      [](RecorderHeader& h) { h.magic ^= 1; },
      [](RecorderHeader& h) { h.call_bytes += 8; },
      [](RecorderHeader& h) { h.pass_slot_bytes *= 2; },
      [](RecorderHeader& h) { h.call_capacity = 0; },
      [](RecorderHeader& h) { h.call_capacity = 1000; },
      [](RecorderHeader& h) { h.pass_capacity = 5; },
      [](RecorderHeader& h) { h.calls_at = 8; },
      [](RecorderHeader& h) { h.calls_at += 8; },
      [](RecorderHeader& h) { h.passes_at = ~uint64_t{63}; }};
  for (size_t i = 0; i < changes.size(); ++i) EXPECT_NE(refusal(changes[i]), "") << "change " << i;
  EXPECT_NE(refusal([](RecorderHeader&) {}, F_SEAL_GROW), "") << "a file that may shrink under the reader";
  EXPECT_NE(refusal([](RecorderHeader&) {}, F_SEAL_SHRINK, 100), "");
}

/// One rank by itself with a recorder, as a daemon has it.
class Rank : public testing::Test {
 protected:
  static constexpr uint32_t kTokens = 3;

  static BackendOptions backend_options() {
    BackendOptions o;
    o.shape = make_shape(128, 64, 32, 12, 3);
    o.max_call_tokens = 64;
    o.in_process = true;
    return o;
  }
  ServiceOptions service_options() {
    ServiceOptions o;
    o.shape = backend_options().shape;
    o.idle.spin_us = 0;
    o.recorder = &recorder_;
    return o;
  }

  std::unique_ptr<test::Engine> engine(uint32_t lane) {
    return std::make_unique<test::Engine>(*backend_, service_, backend_options().shape, lane, 1 << 20);
  }

  static test::Job job() {
    const oracle::Rows rows = make_rows(Routing::random, backend_options().shape, 1, kTokens, 1);
    test::Job j;
    j.x = rows.x;
    j.ids = rows.ids;
    j.weights = rows.weights;
    return j;
  }

  /// The reply goes out before the record: waits until there are so many.
  Flight flight(size_t calls) {
    Flight got = flight_of(recorder_);
    for (const Nanos until = now_ns() + kPatience; got.calls.size() < calls && now_ns() < until;)
      got = flight_of(recorder_);
    EXPECT_EQ(got.calls.size(), calls);
    return got;
  }

  uint64_t counted() const {
    uint64_t all = 0;
    for (uint32_t s = 0; s < kStatuses; ++s) all += metrics_.calls(static_cast<Status>(s));
    return all;
  }

  std::unique_ptr<Backend> backend_ = make_cpu_backend(backend_options());
  Metrics metrics_{MetricsInfo{}};
  Recorder recorder_{{.calls = 64}};
  ServiceLoop service_{*backend_, metrics_, service_options()};
};

TEST_F(Rank, EveryCallThatEndsIsRecordedWhateverItsStatus) {
  const auto lane = engine(2);
  Reply reply{};
  test::Job bad = job();
  lane->run(job(), reply);
  EXPECT_EQ(reply.status, static_cast<uint32_t>(Status::ok));
  bad.ids[4] = 12;
  lane->run(bad, reply);
  bad.flags = kFlagMask;
  lane->run(bad, reply);
  Call call = lane->lay_out(job());
  call.layer = 5;
  EXPECT_EQ(lane->call(call).status, static_cast<uint32_t>(Status::bad_call));
  service_.drain();
  lane->run(job(), reply);
  const Flight got = flight(5);
  constexpr Status kExpected[] = {Status::ok, Status::bad_route, Status::masked, Status::bad_call, Status::draining};
  for (uint32_t i = 0; i < 5; ++i) {
    const CallRecord& r = got.calls[i];
    EXPECT_EQ(r.status, static_cast<uint32_t>(kExpected[i])) << i;
    EXPECT_EQ(r.number, i + 1);
    EXPECT_EQ(r.lane, 2U);
    EXPECT_EQ(r.tokens, kTokens);
    EXPECT_LE(r.phase_ns[0] + r.phase_ns[1] + r.phase_ns[2], r.total_ns);
  }
  EXPECT_NE(got.calls[0].total_ns, 0U);
  EXPECT_EQ(got.passes.size(), 2U) << "of the calls that were ok and masked";
  EXPECT_EQ(counted(), 5U);
}

TEST_F(Rank, ACallThatTheBackEndDoesNotTakeIsRecorded) {
  LaneMemory memory;
  ASSERT_EQ(backend_->open_lane(1, ArenaKind::host, 1 << 16, memory), Status::ok);
  Mapping box(memory.host_mailbox, sizeof(HostMailbox));
  backend_->close_lane(1);  // the lane is not open and yet served: a bug, and it is told
  service_.attach(1, Mapping(memory.host_mailbox, sizeof(HostMailbox)));
  auto& mailbox = *reinterpret_cast<HostMailbox*>(box.data());
  mailbox.call = {};
  mailbox.call.layer = kIdentityLayer;
  mailbox.call.tokens = 9;
  mailbox.bell.store(1);
  const CallRecord r = flight(1).calls.at(0);
  EXPECT_EQ(r.status, static_cast<uint32_t>(Status::internal));
  EXPECT_EQ(r.lane, 1U);
  EXPECT_EQ(r.tokens, 9U);
  EXPECT_NE(r.start, 0U);
}

TEST_F(Rank, LaneZeroIsServedAndRecordedAndNotCounted) {
  const auto own = engine(0);
  const auto lane = engine(1);
  Reply reply{};
  const std::vector<uint16_t> expected = lane->run(job(), reply);
  for (int i = 0; i < 3; ++i) {
    EXPECT_EQ(own->run(job(), reply), expected);
    EXPECT_EQ(reply.status, static_cast<uint32_t>(Status::ok));
  }
  const Flight got = flight(4);
  EXPECT_EQ(std::count_if(got.calls.begin(), got.calls.end(), [](const CallRecord& r) { return r.lane == 0; }), 3);
  EXPECT_EQ(counted(), 1U);
  EXPECT_EQ(service_.calls(0), 3U);
}

}  // namespace
}  // namespace moed
