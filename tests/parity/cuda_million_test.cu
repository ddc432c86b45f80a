// A million identity calls of two ranks out of step, beside a kernel that streams memory. A kernel on each GPU is the
// engine: it spoils a record's out, rings for it, waits for done and compares every element with what the float64
// oracle says, so that nothing but the daemon's own order stands between out and whoever reads it.
// MOED_MILLION: calls of both ranks together (1,000,000).
#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "daemon/abi/arena.h"
#include "daemon/abi/mailbox.h"
#include "kernels/cuda/memory.h"
#include "tests/parity/million_engine.cuh"
#include "tests/support/cases.h"
#include "tests/support/gpu.h"
#include "tests/support/link.h"
#include "tests/support/oracle.h"
#include "tests/support/played_peer.h"
#include "tests/support/tolerance.h"

namespace moed {
namespace {

using million::Chunk;
using million::kLongest;
using million::kRanks;
using million::kRecords;
using million::kTokens;
using million::Record;
using million::Tally;

constexpr int kLane = 1;
constexpr uint32_t kMaxTokens = 128;
constexpr uint64_t kChunk = 25'000;        ///< calls of one launch
constexpr Nanos kTimeout = 1'000'000'000;  ///< of a call, by the daemon
constexpr Nanos kLimit = 120'000'000'000;  ///< of all calls

void check(cudaError_t e, const char* what) {
  if (e != cudaSuccess) throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(e));
}

Shape million_shape() { return make_shape(7168, 3584, 3072, 896, 16); }

/// The input of a record and its right answer.
struct Sample {
  oracle::Rows rows;
  std::vector<uint16_t> want;
  uint32_t flags;
};

Sample sample_of(uint32_t rank, uint32_t n) {
  const Shape shape = million_shape();
  const Routing routing = n % 3 == 2 ? kRoutings[n / 3 % kRoutings.size()] : Routing::random;
  Sample s;
  s.flags = n % 4 == 3 ? kFlagNoNorm : 0;
  s.rows = make_rows(routing, shape, kRanks, kTokens[n], 100 * rank + n);
  oracle::Result right = oracle::routed(oracle_layer(shape), s.rows, kRanks);
  s.want = std::move(s.flags != 0 ? right.latent : right.out);
  return s;
}

/// Of all records of a rank, worked out once.
const std::vector<Sample>& samples(uint32_t rank) {
  static const auto all = [] {
    std::array<std::vector<Sample>, kRanks> made;
    std::vector<std::thread> threads;
    for (uint32_t r = 0; r < kRanks; ++r)
      threads.emplace_back([&made, r] {
        for (uint32_t n = 0; n < kRecords; ++n) made[r].push_back(sample_of(r, n));
      });
    for (std::thread& t : threads) t.join();
    return made;
  }();
  return all[rank];
}

/// A word of host memory that GPUs read. It stays: freeing it would wait for every stream that waits.
uint32_t* end_word() {
  static uint32_t* const word = [] {
    void* memory = nullptr;
    check(cudaSetDevice(0), "use of the GPU");
    check(cudaHostAlloc(&memory, 64, cudaHostAllocMapped | cudaHostAllocPortable), "host memory");
    return static_cast<uint32_t*>(memory);
  }();
  return word;
}
void set_end(uint32_t value) { *static_cast<volatile uint32_t*>(end_word()) = value; }

/// One rank: its back end, a lane with a GPU arena, its records there, and the kernel that is its engine.
class Caller {
 public:
  Caller(uint32_t rank, int gpu)
      : rank_(rank),
        gpu_(gpu),
        backend_(make_cuda_backend(options(rank, gpu))),
        memory_(test::loaded_driver(), gpu),
        copies_(gpu) {
    const Shape shape = million_shape();
    uint64_t arena = 0;
    uint64_t want = 0;
    for (const uint32_t t : kTokens) arena += arena_slot(shape, 0, t).end, want += uint64_t{t} * shape.latent * 2;
    LaneMemory lane;
    if (backend_->open_lane(kLane, ArenaKind::gpu, arena, lane) != Status::ok)
      throw std::runtime_error(backend_->last_error());
    std::string why;
    mailbox_ = memory_.import_fd(lane.device_mailbox, sizeof(DeviceMailbox), why);
    arena_ = memory_.import_fd(lane.arena, arena, why);
    records_ = memory_.make(sizeof(Record) * kRecords, std::nullopt, why);
    want_ = memory_.make(want, std::nullopt, why);
    tally_ = memory_.make(sizeof(Tally), std::nullopt, why);
    if (!mailbox_ || !arena_ || !records_ || !want_ || !tally_) throw std::runtime_error(why);
    copies_.to_gpu(tally_.as<void>(), &seen_, sizeof seen_);
    // As the load: a block that wants another split of L1 and shared memory keeps the loops off its multiprocessor.
    check(cudaFuncSetAttribute(million::call_and_compare, cudaFuncAttributePreferredSharedMemoryCarveout, 100),
          "carveout");
  }

  Backend& backend() { return *backend_; }
  const Tally& tally() const { return seen_; }
  uint64_t asked() const { return quota_; }

  /// Lays all records out and registers them. flip: an element of record 1 whose right answer is made a wrong one.
  void prepare(std::optional<uint32_t> flip) {
    const Shape shape = million_shape();
    std::vector<Record> records;
    uint64_t at = 0;
    auto* want_at = want_.as<uint16_t>();
    for (uint32_t n = 0; n < kRecords; ++n) {
      const Sample& sample = samples(rank_)[n];
      std::vector<uint16_t> want = sample.want;
      if (flip && n == 1) want[*flip] ^= 0x40;
      copies_.to_gpu(want_at, want.data(), want.size() * 2);
      ArenaSlot slot = arena_slot(shape, 0, kTokens[n]);
      slot.out += n % 8 * 16;  // 16 bytes are all that out is aligned to; what is beyond is the unused `valid`
      auto* const out = reinterpret_cast<uint16_t*>(arena_.as<std::byte>() + at + slot.out);
      records.push_back({out, want_at, static_cast<uint32_t>(want.size() / 8), sample.flags != 0 ? 0 : kNormUlps});
      want_at += want.size();
      add(n, at, slot, sample);
      at += slot.end;
    }
    copies_.to_gpu(records_.as<void>(), records.data(), records.size() * sizeof(Record));
  }

  void ask(uint64_t calls) { quota_ = calls; }

  /// Starts the next chunk when the last one has ended. False: all calls have been made, one had no end, or it is late.
  bool advance(Nanos until, uint32_t* place) {
    if (over_) return false;
    check(cudaSetDevice(gpu_), "use of the GPU");
    const cudaError_t e = cudaStreamQuery(copies_.stream());
    if (e == cudaErrorNotReady) return true;
    check(e, "calls");
    copies_.from_gpu(&seen_, tally_.as<void>(), sizeof seen_);
    const Nanos now = now_ns();
    over_ = seen_.calls != begun_ || begun_ == quota_ || now >= until;
    if (over_) return false;
    const Chunk chunk = {mailbox_.as<DeviceMailbox>(),
                         records_.as<Record>(),
                         tally_.as<Tally>(),
                         place,
                         begun_,
                         std::min(kChunk, quota_ - begun_),
                         until - now,
                         rank_};
    million::call_and_compare<<<1, million::kThreads, 0, copies_.stream()>>>(chunk);
    check(cudaGetLastError(), "launch");
    begun_ += chunk.calls;
    return true;
  }

 private:
  static BackendOptions options(uint32_t rank, int gpu) {
    BackendOptions o;
    o.shape = million_shape();
    o.rank = rank;
    o.ranks = kRanks;
    o.lanes = 1;
    o.max_tokens = kMaxTokens;
    o.in_process = true;
    o.device = std::to_string(gpu);
    o.park = std::getenv("MOED_NO_PARK") == nullptr;
    return o;
  }

  void add(uint32_t n, uint64_t at, const ArenaSlot& slot, const Sample& sample) {
    Call call{};
    call.layer = kIdentityLayer;
    call.tokens = kTokens[n];
    call.flags = sample.flags;
    call.x = at + slot.x;
    call.ids = at + slot.ids;
    call.weights = at + slot.weights;
    call.out = at + slot.out;
    const auto put = [&](uint64_t to, const auto& v) {
      copies_.to_gpu(arena_.as<std::byte>() + to, v.data(), v.size() * sizeof v[0]);
    };
    put(call.x, sample.rows.x);
    put(call.ids, sample.rows.ids);
    put(call.weights, sample.rows.weights);
    if (backend_->add_record(kLane, 1 + n, call, kTimeout) != Status::ok)
      throw std::runtime_error(backend_->last_error());
  }

  const uint32_t rank_;
  const int gpu_;
  std::unique_ptr<Backend> backend_;
  cuda::Memory memory_;
  test::Copies copies_;
  cuda::Allocation mailbox_, arena_, records_, want_, tally_;
  Tally seen_{};
  uint64_t quota_ = 0, begun_ = 0;
  bool over_ = false;
};

/// The load of one GPU.
class Load {
 public:
  explicit Load(int gpu) : gpu_(gpu), memory_(test::loaded_driver(), gpu), copies_(gpu) {
    std::string why;
    bulk_ = memory_.make(million::kBulk, std::nullopt, why);
    words_ = memory_.make((kRanks + 2) * sizeof(uint32_t), std::nullopt, why);
    if (!bulk_ || !words_) throw std::runtime_error(why);
    constexpr uint32_t none[kRanks + 2] = {};
    copies_.to_gpu(words_.as<void>(), none, sizeof none);
    // As a kernel that keeps what it streams in shared memory: else no other block that has some fits beside it.
    check(cudaFuncSetAttribute(million::stream_memory, cudaFuncAttributePreferredSharedMemoryCarveout, 100),
          "carveout");
  }
  Load(const Load&) = delete;
  Load& operator=(const Load&) = delete;
  ~Load() {
    set_end(1);
    for (const Nanos until = now_ns() + 5'000'000'000;
         now_ns() < until && cudaStreamQuery(copies_.stream()) != cudaSuccess;)
      std::this_thread::yield();
  }

  uint32_t* place(uint32_t rank) const { return words_.as<uint32_t>() + rank; }

  void start(int blocks_each) {
    int processors = 0;
    check(cudaSetDevice(gpu_), "use of the GPU");
    check(cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, gpu_), "multiprocessors");
    const million::Stream s = {bulk_.as<uint4>(), end_word(), words_.as<uint32_t>(), place(kRanks + 1),
                               kLimit + kLimit / 8};
    million::stream_memory<<<processors * blocks_each, million::kLoadThreads, 16 << 10, copies_.stream()>>>(s);
    check(cudaGetLastError(), "launch");
  }

 private:
  const int gpu_;
  cuda::Memory memory_;
  test::Copies copies_;
  cuda::Allocation bulk_, words_;
};

/// Both ranks, linked and served, and the load.
class Million {
 public:
  explicit Million(int gpus, std::optional<uint32_t> flip = {}) : gpus_(gpus) {
    set_end(0);
    for (uint32_t r = 0; r < kRanks; ++r) caller_.push_back(std::make_unique<Caller>(r, static_cast<int>(r) % gpus));
    for (uint32_t r = 0; r < kRanks; ++r) test::give_segment(backend(r), r, backend(1 - r), 1 - r);
    for (uint32_t r = 0; r < kRanks; ++r) backend(r).link_changed(static_cast<int>(1 - r), LinkState::ready, 1);
    for (uint32_t r = 0; r < kRanks; ++r) caller_[r]->prepare(r == 1 ? flip : std::nullopt);
    for (int gpu = 0; gpu < gpus; ++gpu) load_.push_back(std::make_unique<Load>(gpu));
    for (uint32_t r = 0; r < kRanks; ++r)
      threads_.emplace_back([this, r] {
        ServeRecord served{};
        CallRecord record{};
        while (!stop_) {
          static_cast<void>(backend(r).serve(now_ns(), served));
          if (backend(r).poll(kLane, now_ns(), record) && record.status != 0) status_ = record.status;
        }
      });
  }
  Million(const Million&) = delete;
  Million& operator=(const Million&) = delete;
  ~Million() {
    load_.clear();
    stop_ = true;
    for (std::thread& t : threads_) t.join();
    for (uint32_t r = 0; r < kRanks; ++r) backend(r).link_changed(static_cast<int>(1 - r), LinkState::lost, 0);
    for (uint32_t r = 0; r < kRanks; ++r) backend(r).retire(static_cast<int>(1 - r));
  }

  void run(uint64_t calls) {
    for (const auto& load : load_) load->start(gpus_ == 1 ? 1 : 2);  // two ranks' loops need the room
    for (uint32_t r = 0; r < kRanks; ++r) caller_[r]->ask(calls / kRanks + (r < calls % kRanks ? 1 : 0));
    const Nanos until = now_ns() + kLimit;
    for (bool busy = true; busy; std::this_thread::sleep_for(std::chrono::microseconds(200))) {
      busy = false;
      for (uint32_t r = 0; r < kRanks; ++r)
        busy = caller_[r]->advance(until, load_[r % load_.size()]->place(r)) || busy;
      if (now_ns() > until + 3 * kLongest) throw std::runtime_error("a kernel that rings goes on after its time");
    }
  }

  Backend& backend(uint32_t rank) { return caller_[rank]->backend(); }
  const Caller& caller(uint32_t rank) const { return *caller_[rank]; }
  /// The last one that was not ok, of calls that were polled.
  Status status() const { return static_cast<Status>(status_.load()); }

 private:
  const int gpus_;
  std::vector<std::unique_ptr<Caller>> caller_;
  std::vector<std::unique_ptr<Load>> load_;
  std::vector<std::thread> threads_;
  std::atomic<bool> stop_{false};
  std::atomic<uint32_t> status_{0};
};

/// Calls of both ranks together, by MOED_MILLION or `otherwise`.
uint64_t calls_asked(uint64_t otherwise) {
  const char* text = std::getenv("MOED_MILLION");
  return text == nullptr ? otherwise : std::strtoull(text, nullptr, 10);
}

std::string difference_text(uint32_t rank, const million::Difference& d) {
  const uint32_t latent = million_shape().latent;
  return "call " + std::to_string(d.call) + " of rank " + std::to_string(rank) + ", record " +
         std::to_string(d.record) + " of " + std::to_string(kTokens[d.record]) + " tokens: token " +
         std::to_string(d.element / latent) + " element " + std::to_string(d.element % latent) + " is " +
         std::to_string(oracle::bf16_value(d.got)) + " (bits " + std::to_string(d.got) + "), right is " +
         std::to_string(oracle::bf16_value(d.want)) + " (bits " + std::to_string(d.want) + ")";
}

/// What all of a rank's calls have to compare.
uint64_t elements_of(uint32_t rank, uint64_t calls) {
  uint64_t tokens = 0;
  for (uint64_t i = 0; i < calls; ++i) tokens += kTokens[million::step_of(rank, i).record];
  return tokens * million_shape().latent;
}

class CudaMillion : public test::GpusTest {};

TEST_P(CudaMillion, IdentityCallsOfRanksOutOfStepBesideALoad) {
  const uint64_t calls = calls_asked(1'000'000);
  ASSERT_GT(calls, 0U) << "MOED_MILLION has to be a number of calls";
  RecordProperty("calls", std::to_string(calls));
  Million million(GetParam());
  const Nanos start = now_ns();
  million.run(calls);
  const double seconds = static_cast<double>(now_ns() - start) * 1e-9;
  uint64_t done = 0;
  uint64_t elements = 0;
  uint64_t wrong = 0;
  for (uint32_t r = 0; r < kRanks; ++r) {
    const Tally& t = million.caller(r).tally();
    done += t.calls, elements += t.elements, wrong += t.wrong;
    EXPECT_EQ(t.endless, 0U) << "call " << t.endless - 1 << " of rank " << r << " had no end within 2 s";
    EXPECT_EQ(t.wrong, 0U) << difference_text(r, t.first);
    EXPECT_EQ(t.calls, million.caller(r).asked()) << "calls of rank " << r << " after " << seconds << " s";
    EXPECT_EQ(t.elements, elements_of(r, million.caller(r).asked())) << "elements of rank " << r;
    EXPECT_EQ(million.backend(r).health(), Status::ok) << million.backend(r).last_error();
  }
  EXPECT_EQ(million.status(), Status::ok) << name(million.status());
  EXPECT_EQ(done, calls) << "the limit is " << kLimit / 1'000'000'000 << " s";
  std::printf("%llu of %llu identity calls compared, %llu elements, %llu wrong, %.1f s, %d GPUs\n",
              static_cast<unsigned long long>(done), static_cast<unsigned long long>(calls),
              static_cast<unsigned long long>(elements), static_cast<unsigned long long>(wrong), seconds, GetParam());
}

/// The comparison itself: one element of one record that is not what it should be, by 64 steps of BF16.
TEST_P(CudaMillion, AWrongElementIsFoundWhereItIs) {
  constexpr uint64_t kCalls = 2000;
  constexpr uint32_t kRecord = 1;
  const uint32_t flip = 3 * million_shape().latent + 1234;
  Million million(GetParam(), flip);
  million.run(kCalls);
  EXPECT_EQ(million.caller(0).tally().wrong, 0U) << difference_text(0, million.caller(0).tally().first);
  uint64_t times = 0;
  for (uint64_t i = 0; i < kCalls / kRanks; ++i) times += million::step_of(1, i).record == kRecord ? 1 : 0;
  const Tally& t = million.caller(1).tally();
  EXPECT_EQ(t.wrong, times);
  EXPECT_EQ(t.first.record, kRecord);
  EXPECT_EQ(t.first.element, flip);
  EXPECT_EQ(t.first.want ^ 0x40, samples(1)[kRecord].want[flip]);
}

INSTANTIATE_TEST_SUITE_P(On, CudaMillion, testing::Values(1, 2), test::gpus_name);

}  // namespace
}  // namespace moed
