// Stream calls as the GPU sees them: records registered once, and a bell in GPU memory that names one. Here the host
// writes the bell. Every answer against the float64 oracle, bit for bit.
#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include "daemon/abi/arena.h"
#include "daemon/abi/mailbox.h"
#include "tests/support/cases.h"
#include "tests/support/gpu.h"
#include "tests/support/oracle.h"
#include "tests/support/played_peer.h"

namespace moed {
namespace {

using test::Copies;
using test::World;
using test::WorldOptions;

constexpr int kLane = 2;
constexpr uint32_t kMaxTokens = 128, kSlots = 8;
constexpr Nanos kLongest = 5'000'000'000;

/// A lane with a GPU arena at one rank, and what was registered there: record n is laid out in slot n of the arena.
class StreamLane {
 public:
  StreamLane(World& world, uint32_t rank, int gpu, const Shape& shape)
      : backend_(world.backend(rank)),
        shape_(shape),
        slot_(arena_slot(shape, 0, kMaxTokens)),
        memory_(test::loaded_driver(), gpu),
        copies_(gpu),
        rows_(kSlots),
        valid_(kSlots) {
    LaneMemory memory;
    need(backend_.open_lane(kLane, ArenaKind::gpu, slot_.end * kSlots, memory) == Status::ok);
    std::string why;
    mailbox_ = memory_.import_fd(memory.device_mailbox, sizeof(DeviceMailbox), why);
    arena_ = memory_.import_fd(memory.arena, slot_.end * kSlots, why);
    if (!mailbox_ || !arena_) throw std::runtime_error(why);
  }
  StreamLane(const StreamLane&) = delete;
  StreamLane& operator=(const StreamLane&) = delete;
  ~StreamLane() { backend_.close_lane(kLane); }

  /// valid: nothing for no padding, else what the word says.
  Call lay_out(uint32_t number, uint32_t tokens, uint64_t seed, std::optional<int32_t> valid = {}) {
    const uint64_t at = number * slot_.end;
    rows_[number] = make_rows(Routing::random, shape_, 2, tokens, seed);
    const oracle::Rows& rows = rows_[number];
    put(at + slot_.x, rows.x.data(), rows.x.size() * 2);
    put(at + slot_.ids, rows.ids.data(), rows.ids.size() * 4);
    put(at + slot_.weights, rows.weights.data(), rows.weights.size() * 4);
    if (valid) put(at + slot_.valid, &*valid, sizeof *valid);
    valid_[number] = valid ? std::clamp(*valid, 0, static_cast<int32_t>(tokens)) : static_cast<int32_t>(tokens);
    Call call{};
    call.layer = kIdentityLayer;
    call.tokens = tokens;
    call.flags = kFlagNoNorm;
    call.x = at + slot_.x;
    call.ids = at + slot_.ids;
    call.weights = at + slot_.weights;
    call.out = at + slot_.out;
    call.valid = valid ? at + slot_.valid : 0;
    return call;
  }

  Status add(uint32_t number, const Call& call) { return backend_.add_record(kLane, number, call, kLongest); }

  /// Rings and waits for done. Empty; or that it did not come.
  std::string ring(uint32_t bell) {
    constexpr uint32_t none = 0;
    auto* const box = mailbox_.as<DeviceMailbox>();
    copies_.to_gpu(&box->done, &none, sizeof none);
    copies_.to_gpu(&box->bell, &bell, sizeof bell);
    uint32_t done = 0;
    for (const Nanos until = now_ns() + kLongest; done == 0;) {
      if (now_ns() > until) return "no done for bell " + std::to_string(bell);
      copies_.from_gpu(&done, &box->done, sizeof done);
    }
    return "";
  }

  /// Rings for a record and compares its out with the oracle's, padding with zeros.
  std::string call(uint32_t number) {
    const oracle::Rows& rows = rows_[number];
    std::vector<uint16_t> out(rows.x.size(), 0xFFFF);
    put(number * slot_.end + slot_.out, out.data(), out.size() * 2);
    if (std::string why = ring(number); !why.empty()) return why;
    copies_.from_gpu(out.data(), arena_.as<std::byte>() + number * slot_.end + slot_.out, out.size() * 2);
    std::vector<uint16_t> want = oracle::routed(oracle_layer(shape_), rows, 2).latent;
    std::fill(want.begin() + static_cast<ptrdiff_t>(uint64_t{shape_.latent} * static_cast<uint32_t>(valid_[number])),
              want.end(), uint16_t{0});
    return test::first_difference(out, want, shape_.latent, 0);
  }

  /// The status of the call that ended last, by its record.
  std::optional<Status> last_status() {
    CallRecord record{};
    for (const Nanos until = now_ns() + kLongest; now_ns() < until;)
      if (backend_.poll(kLane, now_ns(), record)) return static_cast<Status>(record.status);
    return {};
  }

 private:
  void need(bool good) const {
    if (!good) throw std::runtime_error(backend_.last_error());
  }
  void put(uint64_t at, const void* from, uint64_t bytes) { copies_.to_gpu(arena_.as<std::byte>() + at, from, bytes); }

  Backend& backend_;
  const Shape shape_;
  const ArenaSlot slot_;
  cuda::Memory memory_;
  Copies copies_;
  cuda::Allocation mailbox_, arena_;
  std::vector<oracle::Rows> rows_;
  std::vector<int32_t> valid_;
};

class CudaRecords : public test::GpusTest {
 protected:
  void SetUp() override {
    test::GpusTest::SetUp();
    if (IsSkipped()) return;
    for (const Shape& shape : {make_shape(7168, 3584, 3072, 896, 16), make_shape(512, 256, 128, 12, 4)}) {
      WorldOptions o;
      o.shape = shape;
      o.ranks = 2;
      o.lanes = 2;
      o.max_tokens = kMaxTokens;
      worlds_.push_back(std::make_unique<World>(spread(o)));
      shapes_.push_back(shape);
    }
  }
  /// At rank 1, which is on the last GPU.
  std::unique_ptr<StreamLane> lane(size_t world) {
    return std::make_unique<StreamLane>(*worlds_[world], 1, GetParam() - 1, shapes_[world]);
  }

  std::vector<std::unique_ptr<World>> worlds_;
  std::vector<Shape> shapes_;
};

TEST_P(CudaRecords, InTurnAgainAndInAnyOrder) {
  for (size_t world = 0; world < worlds_.size(); ++world) {
    const auto lane = this->lane(world);
    constexpr uint32_t kTokens[] = {1, 5, 16, 33, 100, 128, 64};
    for (uint32_t n = 1; n < kSlots; ++n)
      ASSERT_EQ(lane->add(n, lane->lay_out(n, kTokens[n - 1], n + 10 * world)), Status::ok);
    for (int round = 0; round < 3; ++round)
      for (uint32_t n = 1; n < kSlots; ++n) ASSERT_EQ(lane->call(n), "") << "record " << n << " in turn";
    for (int again = 0; again < 5; ++again) ASSERT_EQ(lane->call(3), "") << "the same again";
    std::mt19937_64 random(world);
    for (int i = 0; i < 40; ++i) {
      const auto n = static_cast<uint32_t>(1 + random() % (kSlots - 1));
      ASSERT_EQ(lane->call(n), "") << "record " << n << ", call " << i;
    }
  }
}

TEST_P(CudaRecords, PaddingIsReadWhenTheCallStarts) {
  const auto lane = this->lane(0);
  for (const int32_t valid : {-5, 0, 1, 30, 39, 40, 41}) {
    const Call call = lane->lay_out(1, 40, 3, valid);
    ASSERT_EQ(lane->add(1, call), Status::ok);
    EXPECT_EQ(lane->call(1), "") << valid << " valid";
  }
}

TEST_P(CudaRecords, WhatIsRegisteredAgainIsNew) {
  const auto lane = this->lane(1);
  for (uint64_t seed = 1; seed < 20; ++seed) {
    ASSERT_EQ(lane->add(1, lane->lay_out(1, static_cast<uint32_t>(seed), seed)), Status::ok);
    ASSERT_EQ(lane->add(2, lane->lay_out(2, 7, seed)), Status::ok);
    ASSERT_EQ(lane->call(1), "") << seed;
    ASSERT_EQ(lane->call(2), "") << seed;
  }
}

TEST_P(CudaRecords, WhatIsNoRecordEndsTheCallAndNothingElse) {
  const auto lane = this->lane(1);
  Call call = lane->lay_out(1, 5, 1);
  for (const uint32_t number : {0U, 4097U, 0xFFFFFFFFU}) EXPECT_EQ(lane->add(number, call), Status::internal) << number;
  ASSERT_EQ(lane->add(1, call), Status::ok);
  call.x += 8;
  EXPECT_EQ(lane->add(2, call), Status::bad_call);
  for (const uint32_t bell : {2U, 3U, 4096U}) {
    ASSERT_EQ(lane->call(1), "");
    EXPECT_EQ(lane->last_status(), Status::ok);
    ASSERT_EQ(lane->ring(bell), "") << bell;
    EXPECT_EQ(lane->last_status(), Status::bad_call) << bell;
  }
  EXPECT_EQ(lane->call(1), "");
}

INSTANTIATE_TEST_SUITE_P(On, CudaRecords, testing::Values(1, 2), test::gpus_name);

}  // namespace
}  // namespace moed
