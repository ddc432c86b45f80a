// What a call may hold, through a CUDA world and a CPU world at once: afterwards the replies and the whole arenas have
// to be equal byte for byte. Two ranks, identity layers without norm, so that every right answer has one set of bits.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "tests/support/gpu.h"
#include "tests/support/synthetic.h"

namespace moed {
namespace {

using test::Engine;
using test::Job;
using test::job_of;
using test::status_of;
using test::World;
using test::WorldOptions;

constexpr uint32_t kMaxPiece = 12;
constexpr uint32_t kMaxCall = 100;
constexpr uint64_t kArena = 1 << 20;

/// Without the times, which differ.
std::string describe(const Reply& reply) {
  Reply r = reply;
  const auto* words = reinterpret_cast<const uint32_t*>(&r);
  r.total_ns = 0;
  std::string text = std::string(name(status_of(r))) + ", words";
  for (size_t i = 0; i < sizeof r / 4; ++i) text += " " + std::to_string(words[i]);
  return text;
}

class CudaCalls : public test::GpuTest {
 protected:
  void SetUp() override {
    test::GpuTest::SetUp();
    if (IsSkipped()) return;
    cuda_ = std::make_unique<World>(test::on_gpus(options(), test::gpus_to_use()));
    cpu_ = std::make_unique<World>(options());
    cuda_engine_ = cuda_->engine(1, 1, kArena);
    cpu_engine_ = cpu_->engine(1, 1, kArena);
  }

  static Shape shape() { return make_shape(128, 128, 64, 12, 4); }
  static WorldOptions options() {
    WorldOptions o;
    o.shape = shape();
    o.ranks = 2;
    o.lanes = 1;
    o.max_tokens = kMaxPiece;
    o.max_call_tokens = kMaxCall;
    return o;
  }

  static Job job(uint32_t tokens, uint32_t flags = 0, uint64_t seed = 1) {
    return job_of(make_rows(Routing::random, shape(), 2, tokens, seed), kIdentityLayer, flags | kFlagNoNorm);
  }

  using Patch = std::function<void(Call&, std::byte* arena)>;

  /// Lays a job out in both worlds, lets `patch` spoil it, calls, compares. The status, for the caller to expect.
  Status same(const Job& job, const Patch& patch = {}) {
    Reply replies[2];
    int at = 0;
    for (Engine* engine : {cuda_engine_.get(), cpu_engine_.get()}) {
      Call call = engine->lay_out(job);
      if (patch) patch(call, engine->arena());
      replies[at++] = engine->call(call);
    }
    EXPECT_EQ(describe(replies[0]), describe(replies[1]));
    const std::byte* a = cuda_engine_->arena();
    const std::byte* b = cpu_engine_->arena();
    const std::byte* differs = std::mismatch(a, a + kArena, b).first;
    EXPECT_EQ(differs, a + kArena) << "the arenas differ first at byte " << differs - a;
    return status_of(replies[1]);
  }

  std::unique_ptr<World> cuda_, cpu_;
  std::unique_ptr<Engine> cuda_engine_, cpu_engine_;  // before their worlds go
};

template <class T>
void put(std::byte* arena, uint64_t offset, size_t index, T value) {
  std::memcpy(arena + offset + index * sizeof value, &value, sizeof value);
}

TEST_F(CudaCalls, EveryFieldBeyondItsLimitIsNamed) {
  const std::vector<void (*)(Call&)> faults = {
      [](Call& c) { c.kind = 2; },
      [](Call& c) { c.layer = 7; },
      [](Call& c) { c.layer = 0; },
      [](Call& c) { c.tokens = kMaxCall + 1; },
      [](Call& c) { c.tokens = std::numeric_limits<uint32_t>::max(); },
      [](Call& c) { c.flags |= 64; },
      [](Call& c) { c.x += 8; },
      [](Call& c) { c.x = kArena; },
      [](Call& c) { c.x = ~uint64_t{15}; },
      [](Call& c) { c.flags |= kFlagWire, c.scales = kArena - 16; },
      [](Call& c) { c.ids = kArena - 16; },
      [](Call& c) { c.weights = kArena - 16; },
      [](Call& c) { c.out = kArena - 16; },
      [](Call& c) { c.valid = kArena; },
      [](Call& c) { c.valid = 4; },
      [](Call& c) { c.timeout_us = kMaxTimeoutUs + 1; },
      [](Call& c) { c.reserved[14] = 1; },
  };
  for (size_t i = 0; i < faults.size(); ++i) {
    SCOPED_TRACE("fault " + std::to_string(i));
    EXPECT_EQ(same(job(5), [&](Call& c, std::byte*) { faults[i](c); }), Status::bad_call);
    EXPECT_EQ(same(job(5)), Status::ok);
  }
  EXPECT_EQ(same(job(5), [](Call& c, std::byte*) { c.kind = 1; }), Status::unsupported);
}

TEST_F(CudaCalls, ABadIdIsNamedWithTokenSlotAndValue) {
  constexpr uint32_t kTokens = 30;  // three pieces: all ids are checked before the first is sent
  const uint32_t slots = kTokens * shape().top_k;
  for (const int32_t bad : {-2, 12, 13, std::numeric_limits<int32_t>::max(), std::numeric_limits<int32_t>::min()})
    for (const uint32_t slot : {0U, 3U, 50U, slots - 1}) {
      const Job j = job(kTokens, 0, slot);
      const auto one = [&](Call& c, std::byte* arena) { put(arena, c.ids, slot, bad); };
      EXPECT_EQ(same(j, one), Status::bad_route) << bad << " in slot " << slot;
    }
  for (const int64_t bad : {int64_t{-2}, int64_t{12}, int64_t{1} << 32, (int64_t{1} << 32) + 3, -(int64_t{1} << 32) - 1,
                            std::numeric_limits<int64_t>::max(), std::numeric_limits<int64_t>::min()})
    EXPECT_EQ(same(job(kTokens, kFlagIds64), [&](Call& c, std::byte* arena) { put(arena, c.ids, 41, bad); }),
              Status::bad_route)
        << bad;
  const auto several = [&](Call& c, std::byte* arena) {
    for (const uint32_t slot : {17U, 18U, 40U, slots - 1}) put(arena, c.ids, slot, static_cast<int32_t>(slot + 100));
  };
  EXPECT_EQ(same(job(kTokens), several), Status::bad_route);
  EXPECT_EQ(same(job(kTokens)), Status::ok);
}

TEST_F(CudaCalls, AMaskedIdCountsAsNoneAndTheFirstIsNamed) {
  for (const uint32_t first : {0U, 9U, 100U}) {
    const auto several = [&](Call& c, std::byte* arena) {
      put(arena, c.ids, first, int32_t{-7});
      for (uint32_t slot = first + 5; slot < 120; slot += 3) put(arena, c.ids, slot, static_cast<int32_t>(12 + slot));
    };
    EXPECT_EQ(same(job(30, kFlagMask), several), Status::masked);
  }
  const auto all = [](Call& c, std::byte* arena) {
    for (uint32_t slot = 0; slot < 20; ++slot) put(arena, c.ids, slot, int32_t{99});
  };
  EXPECT_EQ(same(job(5, kFlagMask), all), Status::masked);
  EXPECT_EQ(same(job(5, kFlagMask)), Status::ok);
}

TEST_F(CudaCalls, DryCallsAreCheckedAndEndWithZeros) {
  for (World* world : {cuda_.get(), cpu_.get()}) world->backend(1).set_dry(1, true);
  EXPECT_EQ(same(job(5)), Status::dry);
  EXPECT_EQ(same(job(30)), Status::dry);
  EXPECT_EQ(same(job(0)), Status::dry);
  const auto bad = [](Call& c, std::byte* arena) { put(arena, c.ids, 2, int32_t{12}); };
  EXPECT_EQ(same(job(5), bad), Status::bad_route);
  EXPECT_EQ(same(job(5, kFlagMask), bad), Status::dry);
  EXPECT_EQ(same(job(5), [](Call& c, std::byte*) { c.x = 8; }), Status::bad_call);
  for (World* world : {cuda_.get(), cpu_.get()}) world->backend(1).set_dry(1, false);
  EXPECT_EQ(same(job(5)), Status::ok);
}

TEST_F(CudaCalls, PaddingSendsNothingAndGetsZeros) {
  for (const uint32_t tokens : {5U, 12U, 30U})
    for (const int32_t valid : {std::numeric_limits<int32_t>::min(), -1, 0, 1, 4, 11, 12, 13, 29, 30, 31,
                                std::numeric_limits<int32_t>::max()}) {
      Job j = job(tokens, 0, tokens);
      j.valid = valid;
      EXPECT_EQ(same(j), Status::ok) << tokens << " tokens, " << valid << " valid";
      const auto rubbish = [&](Call& c, std::byte* arena) {  // ids of padding are not looked at
        for (auto t = static_cast<uint32_t>(std::clamp(valid, 0, 100)); t < tokens; ++t)
          put(arena, c.ids, uint64_t{t} * shape().top_k, int32_t{77});
      };
      EXPECT_EQ(same(j, rubbish), Status::ok) << tokens << " tokens, " << valid << " valid, rubbish in the padding";
    }
}

TEST_F(CudaCalls, NoTokensAndManyPieces) {
  for (const uint32_t tokens : {0U, 1U, kMaxPiece - 1, kMaxPiece, kMaxPiece + 1, 2 * kMaxPiece, kMaxCall - 1, kMaxCall})
    EXPECT_EQ(same(job(tokens, 0, tokens)), Status::ok) << tokens << " tokens";
  Job none = job(0);
  none.valid = 3;
  EXPECT_EQ(same(none), Status::ok);
}

TEST_F(CudaCalls, EveryFormOfIdsAndWeights) {
  for (const uint32_t flags : {0U, kFlagIds64, kFlagWeights16, kFlagIds64 | kFlagWeights16})
    for (const uint32_t tokens : {1U, 5U, 40U})
      for (const Routing routing : kRoutings) {
        const oracle::Rows rows = make_rows(routing, shape(), 2, tokens, 13);
        EXPECT_EQ(same(job_of(rows, kIdentityLayer, flags | kFlagNoNorm)), Status::ok) << name(routing) << " " << flags;
      }
}

/// A world without weights: every layer of the model is an identity layer, too.
TEST_F(CudaCalls, ALayerWithoutWeightsIsTheIdentity) {
  Job j = job(9);
  j.layer = 1;
  EXPECT_EQ(same(j), Status::ok);
}

constexpr uint16_t kStrange[] = {0x7FC0, 0xFFFF, 0x7F80, 0xFF80, 0x0000, 0x8000, 0x0001, 0x8001,
                                 0x007F, 0x0080, 0x7F7F, 0xFF7F, 0x3F80, 0x04E0, 0x04E1, 0x0460};

/// BF16 bits of every kind, in blocks that hold them all and in blocks of one kind only.
std::vector<uint16_t> strange_rows(uint32_t tokens, uint32_t latent) {
  std::vector<uint16_t> x(uint64_t{tokens} * latent);
  for (size_t i = 0; i < x.size(); ++i)
    x[i] = i / kBlock % 2 == 0 ? kStrange[i % std::size(kStrange)] : kStrange[i / kBlock % std::size(kStrange)];
  return x;
}

TEST_F(CudaCalls, NansInfinitiesAndSubnormalsInXAndWeights) {
  const Shape s = shape();
  Job j = job(24);
  j.x = strange_rows(24, s.latent);
  EXPECT_EQ(same(j), Status::ok);
  const float inf = std::numeric_limits<float>::infinity();
  const float nan = std::numeric_limits<float>::quiet_NaN();
  for (const float weight : {nan, -nan, inf, -inf, 0.0F, -0.0F, 1e-45F, 1e-38F, 3e38F, -3e38F}) {
    j.weights[5] = j.weights[8] = j.weights[9] = weight;
    for (const uint32_t flags : {0U, kFlagWeights16}) {
      j.flags = flags | kFlagNoNorm;
      EXPECT_EQ(same(j), Status::ok) << weight;
    }
  }
  std::mt19937_64 random(5);
  for (int round = 0; round < 20; ++round) {  // any bits at all
    for (uint16_t& x : j.x) x = static_cast<uint16_t>(random());
    EXPECT_EQ(same(j), Status::ok);
  }
}

/// The same call with rows quantised by the oracle. (What travels cannot be seen from outside; that both give equal
/// bits says that the codes and scales that dispatch made are the oracle's.)
Job in_wire_format(const Job& bf16, uint32_t latent) {
  Job j = bf16;
  j.flags |= kFlagWire;
  for (size_t at = 0; at < bf16.x.size(); at += latent) {
    std::vector<float> row;
    for (size_t i = at; i < at + latent; ++i) row.push_back(static_cast<float>(oracle::bf16_value(bf16.x[i])));
    const oracle::Quantised q = oracle::mxfp8(row);
    j.codes.insert(j.codes.end(), q.codes.begin(), q.codes.end());
    j.scales.insert(j.scales.end(), q.scales.begin(), q.scales.end());
  }
  return j;
}

TEST_F(CudaCalls, RowsInWireFormatGiveTheBitsOfBf16Rows) {
  for (const uint32_t tokens : {1U, 8U, 40U}) {
    for (const bool strange : {false, true}) {
      Job j = job(tokens, 0, 31);
      if (strange) j.x = strange_rows(tokens, shape().latent);
      const Job wire = in_wire_format(j, shape().latent);
      EXPECT_EQ(same(wire), Status::ok);
      Reply reply{};
      EXPECT_EQ(cuda_engine_->run(j, reply), cuda_engine_->run(wire, reply)) << tokens << " tokens";
      static_cast<void>(cpu_engine_->run(j, reply));  // both engines number their calls alike
      static_cast<void>(cpu_engine_->run(wire, reply));
    }
  }
}

/// Codes and scales that no quantiser makes: both NaN codes, the NaN scale, the least and the greatest scale.
TEST_F(CudaCalls, EveryCodeAndEveryScaleInWireFormat) {
  Job j = job(64, kFlagWire);
  const Shape s = shape();
  for (uint32_t i = 0; i < 64 * s.latent; ++i) j.codes.push_back(static_cast<uint8_t>(i * 37 + i / 256));
  for (uint32_t i = 0; i < 64 * s.latent / kBlock; ++i) j.scales.push_back(static_cast<uint8_t>(i));
  EXPECT_EQ(same(j), Status::ok);
}

class CudaWire : public test::GpuTest {};

/// With real experts, too, a row gives the same bits whoever quantised it.
TEST_F(CudaWire, ExpertsOfRowsInWireFormatGiveTheBitsOfBf16Rows) {
  const Shape shape = make_shape(256, 192, 96, 12, 4);
  const test::SyntheticModel model(shape, 5);
  WorldOptions o;
  o.shape = shape;
  o.ranks = 2;
  o.lanes = 1;
  o.max_tokens = 40;
  o.weights = [&](uint32_t r) { return model.of_rank(r, 2); };
  World world(test::on_gpus(o, test::gpus_to_use()));
  const auto engine = world.engine(0);
  for (const Routing routing : kRoutings) {
    const Job j = job_of(make_rows(routing, shape, 2, 21, 14), 1, 0);
    Reply reply{};
    const auto bf16 = engine->run(j, reply);
    ASSERT_EQ(status_of(reply), Status::ok) << name(routing);
    EXPECT_EQ(engine->run(in_wire_format(j, shape.latent), reply), bf16) << name(routing);
    EXPECT_EQ(status_of(reply), Status::ok) << name(routing);
  }
}

}  // namespace
}  // namespace moed
