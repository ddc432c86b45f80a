// Many calls from ranks out of step on a CUDA world, T and data changing with every call. Identity calls are compared
// element by element with products that are exact in every format on the way, so that there is one right answer; calls
// with real experts with the bits of every row alone. MOED_SOAK_CALLS: identity calls of all lanes together (100,000).
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "tests/support/composition.h"
#include "tests/support/gpu.h"
#include "tests/support/tolerance.h"

namespace moed {
namespace {

using test::Engine;
using test::Job;
using test::job_of;
using test::status_of;
using test::World;
using test::WorldOptions;

constexpr uint32_t kRanks = 2;
constexpr uint32_t kLanes = 2;
constexpr uint32_t kMaxPiece = 64;
constexpr uint32_t kMaxCall = 160;
constexpr Nanos kLongest = 10'000'000'000;  ///< a call without answer by then is a failure
constexpr uint16_t kPoison = 0x7FFF;

Shape soak_shape() { return make_shape(512, 512, 64, 64, 4); }

/// +-k / 8 x 2^b with k of 8..15 and b of -4..3, from 7 random bits: exact in BF16, and in E4M3 under the scale of any
/// block of such numbers.
uint16_t x_bits(uint64_t random) {
  const uint64_t b = 123 + (random >> 3 & 7);
  return static_cast<uint16_t>((random >> 6 & 1) << 15 | b << 7 | (random & 7) << 4);
}

/// One lane's calls. Weights are eighths of 1 to 4, so the products with x and all their sums have at most 8 bits.
class IdentitySoak {
 public:
  IdentitySoak(Engine& engine, uint64_t seed) : engine_(engine), random_(seed), shape_(soak_shape()) {}

  /// One call; false: wrong, said as a failure.
  bool step() {
    pause();
    prepare();
    engine_.submit(call_);
    ++calls_;
    Reply reply{};
    if (!engine_.wait(reply, kLongest)) return fault("has no answer after 10 s");
    if (status_of(reply) != Status::ok) return fault(std::string("ended as ") + name(status_of(reply)));
    if (reply.number != calls_) return fault("got the reply to call " + std::to_string(reply.number));
    return compare();
  }

  uint64_t elements() const { return elements_; }

 private:
  bool fault(const std::string& what) const {
    ADD_FAILURE() << "call " << calls_ << " of a lane, " << call_.tokens << " tokens, " << what;
    return false;
  }

  /// Every lane has a pace of its own that changes all the time.
  void pause() {
    const uint64_t r = random_();
    if (r % 1024 == 0) return std::this_thread::sleep_for(std::chrono::milliseconds(1));
    if (r % 4 != 0) return;
    for (const Nanos until = now_ns() + (r >> 32) % 50'000; now_ns() < until;) std::this_thread::yield();
  }

  /// Mostly 1 to 16 tokens, at times none, at times several pieces.
  uint32_t choose_tokens() {
    const uint64_t r = random_();
    if (r % 64 == 0) return static_cast<uint32_t>((r >> 32) % (kMaxCall + 1));
    return r % 32 == 1 ? 0 : 1 + static_cast<uint32_t>((r >> 32) % 16);
  }

  void prepare() {
    const uint64_t row = uint64_t{shape_.latent} * 2;
    call_ = {};
    call_.layer = random_() % 2 == 0 ? kIdentityLayer : 1;  // without weights every layer is an identity layer
    call_.tokens = choose_tokens();
    call_.flags = kFlagNoNorm;
    call_.timeout_us = 20'000'000;
    call_.ids = 256;
    call_.weights = call_.ids + round_up(uint64_t{kMaxCall} * shape_.top_k * 4, 256);
    call_.x = call_.weights + round_up(uint64_t{kMaxCall} * shape_.top_k * 4, 256);
    call_.out = call_.x + kMaxCall * row;
    sums_.assign(call_.tokens, 0.0F);
    for (uint32_t t = 0; t < call_.tokens; ++t) {
      for (uint64_t i = 0; i < shape_.latent; i += 8) {
        uint64_t r = random_();
        for (uint64_t j = 0; j < 8; ++j, r >>= 8) at<uint16_t>(call_.x)[t * shape_.latent + i + j] = x_bits(r);
      }
      prepare_routing(t);
    }
    std::fill_n(at<uint16_t>(call_.out), (call_.tokens + uint64_t{1}) * shape_.latent, kPoison);  // and a row behind
  }

  /// Any experts of both ranks, at times none.
  void prepare_routing(uint32_t t) {
    for (uint32_t k = 0; k < shape_.top_k; ++k) {
      const uint64_t r = random_();
      const uint64_t slot = uint64_t{t} * shape_.top_k + k;
      const bool none = r % 8 == 0;
      const float weight = static_cast<float>(1 + (r >> 8) % 4) * 0.125F;
      at<int32_t>(call_.ids)[slot] = none ? -1 : static_cast<int32_t>((r >> 32) % shape_.experts);
      at<float>(call_.weights)[slot] = weight;
      if (!none) sums_[t] += weight;
    }
  }

  bool compare() {
    const uint16_t* x = at<uint16_t>(call_.x);
    const uint16_t* out = at<uint16_t>(call_.out);
    for (uint64_t t = 0; t < call_.tokens; ++t)
      for (uint64_t i = t * shape_.latent; i < (t + 1) * shape_.latent; ++i) {
        const float product = std::bit_cast<float>(uint32_t{x[i]} << 16) * sums_[t];
        const auto want = static_cast<uint16_t>(sums_[t] == 0.0F ? 0 : std::bit_cast<uint32_t>(product) >> 16);
        if (out[i] != want)
          return fault("token " + std::to_string(t) + " column " + std::to_string(i % shape_.latent) + ": " +
                       std::to_string(oracle::bf16_value(out[i])) + ", right is " +
                       std::to_string(oracle::bf16_value(want)));
      }
    elements_ += uint64_t{call_.tokens} * shape_.latent;
    const uint16_t* behind = out + uint64_t{call_.tokens} * shape_.latent;
    for (uint64_t i = 0; i < shape_.latent; ++i)
      if (behind[i] != kPoison) return fault("wrote behind its out at column " + std::to_string(i));
    return true;
  }

  template <class T>
  T* at(uint64_t offset) {
    return reinterpret_cast<T*>(engine_.arena() + offset);
  }

  Engine& engine_;
  std::mt19937_64 random_;
  const Shape shape_;
  Call call_{};
  std::vector<float> sums_;  ///< of each token's weights
  uint64_t calls_ = 0, elements_ = 0;
};

WorldOptions soak_options(const Shape& shape, uint32_t max_tokens, uint32_t lanes = kLanes) {
  WorldOptions o;
  o.shape = shape;
  o.ranks = kRanks;
  o.lanes = lanes;
  o.max_tokens = max_tokens;
  o.spin_us = 50;
  return test::on_gpus(o, test::gpus_to_use());
}

std::vector<std::unique_ptr<Engine>> all_engines(World& world, uint32_t lanes = kLanes) {
  std::vector<std::unique_ptr<Engine>> engines;
  for (uint32_t rank = 0; rank < kRanks; ++rank)
    for (uint32_t lane = 1; lane <= lanes; ++lane) engines.push_back(world.engine(rank, lane));
  return engines;
}

/// So many identity calls, from all lanes of both ranks at once.
void soak(uint32_t lanes, uint64_t calls) {
  World world(soak_options(soak_shape(), kMaxPiece, lanes));
  const auto engines = all_engines(world, lanes);
  std::atomic<uint64_t> begun{0};
  std::atomic<uint64_t> right{0};
  std::atomic<uint64_t> elements{0};
  std::atomic<bool> failed{false};
  const Nanos start = now_ns();
  std::vector<std::thread> threads;
  for (size_t i = 0; i < engines.size(); ++i)
    threads.emplace_back([&, i] {
      IdentitySoak soak(*engines[i], 1000 + i);
      while (!failed && begun++ < calls) {
        if (soak.step())
          ++right;
        else
          failed = true;
      }
      elements += soak.elements();
    });
  for (std::thread& t : threads) t.join();
  EXPECT_EQ(right, calls);
  std::printf("%llu of %llu identity calls right, %llu elements compared, %.1f s, %d GPUs\n",
              static_cast<unsigned long long>(right), static_cast<unsigned long long>(calls),
              static_cast<unsigned long long>(elements), static_cast<double>(now_ns() - start) * 1e-9,
              test::gpus_to_use());
}

class CudaSoak : public test::GpuTest {};

TEST_F(CudaSoak, IdentityCallsOfRanksOutOfStep) {
  const char* asked = std::getenv("MOED_SOAK_CALLS");
  const uint64_t calls = asked == nullptr ? 100'000 : std::strtoull(asked, nullptr, 10);
  ASSERT_GT(calls, 0U) << "MOED_SOAK_CALLS has to be a number of calls";
  soak(kLanes, calls);
}

/// 24 call lines: the blocks that follow in a serve loop watch them in two groups.
TEST_F(CudaSoak, ElevenLanes) { soak(11, 8'000); }

TEST_F(CudaSoak, AThousandCallsOfExperts) {
  const Shape shape = make_shape(256, 256, 128, 32, 4);
  const test::SyntheticModel model(shape, 11);
  WorldOptions o = soak_options(shape, 24);
  o.weights = [&](uint32_t r) { return model.of_rank(r, kRanks); };
  World world(o);
  const oracle::Rows rows = make_rows(Routing::random, shape, kRanks, 24, 9);
  const Job all = job_of(rows, 1, 0);
  const std::vector<uint16_t> alone = test::rows_alone(*world.engine(1), shape, all);
  oracle::Layer layer = oracle_layer(shape);
  layer.expert = [&](uint32_t e) { return model.values(1, e); };
  const Closeness c = compare_rows(alone, oracle::routed(layer, rows, kRanks).out, shape.latent);
  ASSERT_TRUE(c.ok) << c.text();
  test::call_subsets(all_engines(world), shape, all, alone, 1000 / (kRanks * kLanes));
}

}  // namespace
}  // namespace moed
