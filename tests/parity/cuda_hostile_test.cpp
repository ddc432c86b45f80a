// What a peer that is buggy, slow or hostile may put into its segment of a CUDA rank: it spoils its own calls and
// nobody else's. Also what it may answer: its statuses are never ours, and an answer that comes late is no answer.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <climits>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "tests/support/played_peer.h"

namespace moed {
namespace {

using test::Image;
using test::Job;
using test::line_at;
using test::PlayedPeer;
using test::PlayedWorld;
using test::simple_job;
using test::small_shape;
using test::status_of;

constexpr Nanos kMs = 1'000'000;
constexpr uint32_t kMost = 16;  ///< tokens of a piece

/// Experts 0 to 3 are of rank 0, which is real; 4 to 7 of the peer.
class CudaHostile : public test::GpusTest {
 protected:
  void SetUp() override {
    test::GpusTest::SetUp();
    if (IsSkipped()) return;
    world_ = std::make_unique<PlayedWorld>(small_shape(), ModelWeights{}, 1, kMost, GetParam() - 1);
  }

  PlayedPeer& peer() { return world_->peer(); }
  Image& out() { return world_->peer().outgoing(); }
  const SegmentLayout& layout() { return world_->peer().layout(); }
  uint64_t next() { return sequence(PlayedPeer::kSession, ++count_); }

  /// Tokens 0 and 1.
  static CallLine good_line() {
    CallLine line;
    line.layer = kIdentityLayer;
    line.tokens = 2;
    line.bitmap[0] = 3;
    return line;
  }

  /// One row of ones with weights of one: its partial is the number of its experts that are local.
  void write_row(uint64_t q, uint32_t token, const std::array<int32_t, 2>& ids) {
    const Shape s = small_shape();
    const RowLayout at = row_layout(s);
    std::vector<uint8_t> row(at.bytes);
    const std::array<float, 2> weights = {1, 1};
    std::memcpy(row.data(), ids.data(), sizeof ids);
    std::memcpy(row.data() + at.weights, weights.data(), sizeof weights);
    std::fill_n(row.begin() + at.scales, s.latent / kBlock, uint8_t{127});
    std::fill_n(row.begin() + at.codes, s.latent, float_to_e4m3(1));
    store_record(&line_at(out(), layout().row(1, token)), row.data(), row.size(), q);
  }
  void write_rows(uint64_t q, const std::array<int32_t, 2>& ids) {
    for (uint32_t t = 0; t < kMost; ++t) write_row(q, t, ids);
  }
  void write_line(uint64_t q, const CallLine& line) {
    store_line(line_at(out(), layout().call(1)), &line, sizeof line, q);
  }

  /// The status in the server's answer to q; pending: none within `limit`.
  Status answer(uint64_t q, Nanos limit = 5000 * kMs) {
    ReturnLine line;
    if (!peer().await({{layout().return_line(1), 1}}, q, limit).empty()) return Status::pending;
    load_payload(line_at(peer().incoming(), layout().return_line(1)), &line, sizeof line);
    return static_cast<Status>(line.status);
  }

  Status exchange(const CallLine& line, const std::array<int32_t, 2>& ids) {
    const uint64_t q = next();
    write_rows(q, ids);
    write_line(q, line);
    peer().push();
    return answer(q);
  }

  /// The answer to q is good: every value of its two partials is `value`.
  void expect_partials(uint64_t q, float value, Nanos limit = 5000 * kMs) {
    ASSERT_EQ(peer().await(test::answer_runs(layout(), 1, good_line()), q, limit), "");
    ASSERT_EQ(answer(q), Status::ok);
    std::vector<uint16_t> partial(small_shape().latent);
    for (uint32_t t = 0; t < 2; ++t) {
      ASSERT_EQ(load_record(&line_at(peer().incoming(), layout().partial(1, t)), partial.data(), partial.size() * 2, q),
                Seen::same);
      for (size_t i = 0; i < partial.size(); ++i)
        ASSERT_EQ(bf16_to_float(partial[i]), value) << "token " << t << ", column " << i;
    }
  }
  void expect_served() {
    const uint64_t q = next();
    write_rows(q, {1, 5});
    write_line(q, good_line());
    peer().push();
    expect_partials(q, 1);
  }

  /// Rank 0's own engine, whose experts are local: it must not notice anything.
  void expect_undisturbed() {
    Reply reply{};
    test::expect_all(world_->engine().run(simple_job(5, {0}, 3), reply), 6);
    ASSERT_EQ(status_of(reply), Status::ok) << name(status_of(reply));
  }
  void expect_undisturbed_for(Nanos time) {
    for (const Nanos until = now_ns() + time; now_ns() < until && !HasFailure();) expect_undisturbed();
  }

  double passes() {
    const std::string text = world_->metrics().text({});
    const std::string name = "\nmoed_serve_passes_total ";
    const size_t at = text.find(name);
    return at == std::string::npos ? -1 : std::stod(text.substr(at + name.size()));
  }

  /// A call of rank 0 that needs the peer, and the sequence with which it asks; 0: it does not ask.
  Call submit(const Job& job, uint64_t& q) {
    peer().pull();
    const uint64_t before = load_sequence(line_at(peer().incoming(), layout().call(1)));
    const Call call = world_->engine().lay_out(job);
    world_->engine().submit(call);
    q = before;
    for (const Nanos until = now_ns() + 5000 * kMs; q == before && now_ns() < until;) {
      peer().pull();
      q = load_sequence(line_at(peer().incoming(), layout().call(1)));
    }
    EXPECT_NE(q, before) << "rank 0 does not ask";
    return call;
  }
  static Job asking(uint32_t timeout_us = 20'000'000) {
    Job job = simple_job(3, {2}, 1);
    job.timeout_us = timeout_us;
    return job;
  }

  void write_partials(uint64_t q, uint32_t tokens, float value) {
    const std::vector<uint16_t> partial(small_shape().latent, oracle::bf16_bits(double{value}));
    for (uint32_t t = 0; t < tokens; ++t)
      store_record(&line_at(out(), layout().partial(1, t)), partial.data(), partial.size() * 2, q);
  }
  void write_return(uint64_t q, uint32_t status = 0) {
    const ReturnLine line{.status = status, .rows = 3, .pass_rows = 3, .pass_sources = 1};
    store_line(line_at(out(), layout().return_line(1)), &line, sizeof line, q);
  }

  /// How a call ends that did not work because of the peer.
  void expect_blamed(const Call& call, Status status, int64_t value) {
    Reply reply{};
    ASSERT_TRUE(world_->engine().wait(reply, 5000 * kMs)) << "the call does not end";
    EXPECT_EQ(status_of(reply), status) << name(status_of(reply));
    EXPECT_EQ(reply.ranks[0], 2U);
    EXPECT_EQ(reply.ranks[1], 0U);
    EXPECT_EQ(reply.value, value);
    test::expect_all(world_->engine().out(call), 0);
  }
  /// How one ends whose peer answered with partials of `value`.
  void expect_good(const Call& call, float value) {
    Reply reply{};
    ASSERT_TRUE(world_->engine().wait(reply, 5000 * kMs)) << "the call does not end";
    EXPECT_EQ(status_of(reply), Status::ok) << name(status_of(reply));
    test::expect_all(world_->engine().out(call), value);
  }

  std::unique_ptr<PlayedWorld> world_;
  uint64_t count_ = 0;  ///< of the peer's lane 1
};

TEST_P(CudaHostile, CallLinesAndIdsAreChecked) {
  expect_served();
  std::vector<CallLine> bad(7, good_line());
  bad[0].tokens = kMost + 1;
  bad[1].tokens = UINT16_MAX;
  bad[2].bitmap[103] = 0x80;
  bad[3].bitmap[0] = 7;  // the bit behind the last token
  bad[4].layer = 77;
  bad[5].layer = 0;
  std::fill(std::begin(bad[6].bitmap), std::end(bad[6].bitmap), uint8_t{0xFF});
  for (size_t i = 0; i < bad.size(); ++i) {
    EXPECT_EQ(exchange(bad[i], {1, 5}), Status::bad_call) << "call line " << i;
    expect_undisturbed();
  }
  for (const int32_t id : {8, -2, 1 << 30, INT32_MAX, INT32_MIN}) {
    EXPECT_EQ(exchange(good_line(), {1, id}), Status::bad_route) << id;
    expect_undisturbed();
  }
  EXPECT_EQ(exchange(good_line(), {-1, 5}), Status::ok);
  expect_served();
}

TEST_P(CudaHostile, SequencesThatAreNotTheirTurnAreNotServed) {
  constexpr uint32_t kSession = PlayedPeer::kSession;
  expect_served();
  for (const uint64_t q : {sequence(kSession - 1, 50), sequence(kSession + 1, 50), uint64_t{0}, UINT64_MAX}) {
    write_rows(q, {1, 5});
    write_line(q, good_line());
    peer().push();
    expect_undisturbed();
    if (q == 0) continue;  // return lines that were never written carry it, too
    EXPECT_EQ(answer(q, 50 * kMs), Status::pending) << test::sequence_text(q);
  }
  expect_served();
  const Image before = peer().incoming();
  const uint64_t again = sequence(kSession, 1);  // served long ago
  write_rows(again, {1, 5});
  write_line(again, good_line());
  peer().push();
  expect_undisturbed_for(50 * kMs);
  peer().pull();
  EXPECT_EQ(test::first_difference(layout(), peer().incoming(), before), "");
  count_ += 1000;
  expect_served();
}

TEST_P(CudaHostile, RowsThatComeLateAreAnsweredAndHoldNobodyUp) {
  expect_served();
  for (const uint32_t rows_before : {0U, 1U}) {
    const double before = passes();
    ASSERT_GE(before, 0);
    const uint64_t q = next();
    if (rows_before != 0) write_row(q, 0, {1, 5});
    write_line(q, good_line());
    peer().push();
    EXPECT_EQ(answer(q, 200 * kMs), Status::pending);
    EXPECT_GT(passes(), before) << "nobody looked";
    EXPECT_LE(passes(), before + 60) << "looked at more often than every 5 ms";
    expect_undisturbed_for(200 * kMs);
    EXPECT_EQ(answer(q, 0), Status::pending);
    write_rows(q, {1, 5});
    peer().push();
    expect_partials(q, 1, 100 * kMs);
  }
  const uint64_t never = next();
  write_line(never, good_line());
  peer().push();
  expect_undisturbed();
  expect_served();  // its next call is taken instead
}

TEST_P(CudaHostile, ACallWhoseRowsANewerCallOverwritesIsDropped) {
  for (const bool all : {true, false}) {
    const uint64_t passed = next();
    const uint64_t q = next();
    write_rows(q, {1, 5});
    if (!all) write_row(passed, 0, {1, 5});
    write_line(passed, good_line());
    peer().push();
    EXPECT_EQ(answer(passed, 100 * kMs), Status::pending);
    expect_undisturbed();
    write_rows(q, {0, 1});
    write_line(q, good_line());
    peer().push();
    expect_partials(q, 2);
  }
}

/// Anything at all in every line that the peer may write: with sequences of any kind, then with that of its next call,
/// then with that and a sound call line over rows of any content.
TEST_P(CudaHostile, RandomBytesEverywhere) {
  std::mt19937_64 random(23);
  count_ = 1000;  // so that no line of these looks like an answer to a call of rank 0
  for (int round = 0; round < 60 && !HasFailure(); ++round) {
    const uint64_t q = next();
    for (size_t i = 1; i < out().size(); ++i) {
      for (uint64_t& word : out()[i].word) word = random();
      if (round % 3 != 0) out()[i].word[kLineWords - 1] = q;
    }
    if (round % 3 == 2) write_line(q, good_line());
    peer().push();
    expect_undisturbed();
    if (round % 3 != 0) {
      const Status status = answer(q);
      EXPECT_TRUE(status == Status::bad_call || status == Status::bad_route) << name(status) << " in round " << round;
    }
  }
  expect_served();
  uint64_t q = 0;
  const Call call = submit(asking(), q);
  write_partials(q, 3, 4);
  write_return(q);
  peer().push();
  expect_good(call, 4);
}

TEST_P(CudaHostile, ItsStatusIsNeverOurs) {
  for (const uint32_t said : {1U, 2U, 3U, 4U, 5U, 6U, 9U, 13U, 14U, 19U, 20U, UINT32_MAX}) {
    SCOPED_TRACE(said);
    uint64_t q = 0;
    const Call call = submit(asking(), q);
    write_partials(q, 3, 1);
    write_return(q, said);
    peer().push();
    expect_blamed(call, Status::internal, int64_t{said});
    expect_undisturbed();
  }
}

TEST_P(CudaHostile, AReturnLineWithoutAllPartialsIsTheirFault) {
  for (const uint32_t tokens : {0U, 1U, 2U}) {
    SCOPED_TRACE(std::to_string(tokens) + " of 3 partials");
    uint64_t q = 0;
    const Call call = submit(asking(), q);
    write_partials(q, tokens, 7);
    write_return(q);
    peer().push();
    expect_blamed(call, Status::internal, 0);
    expect_undisturbed();
  }
  uint64_t q = 0;
  const Call torn = submit(asking(), q);
  write_partials(q, 3, 7);
  line_at(out(), layout().partial(1, 1) + kLineBytes).word[kLineWords - 1] = q - 1;  // one line of token 1
  write_return(q);
  peer().push();
  expect_blamed(torn, Status::internal, 0);
  const Call good = submit(asking(), q);
  write_partials(q, 3, 5);
  write_return(q);
  peer().push();
  expect_good(good, 5);
}

TEST_P(CudaHostile, AnAnswerToAnExpiredCallIsNoAnswerToTheNext) {
  for (int round = 0; round < 5 && !HasFailure(); ++round) {
    uint64_t late = 0;
    uint64_t q = 0;
    const Nanos called = now_ns();
    const Call expired = submit(asking(50'000), late);
    expect_blamed(expired, Status::peer_timeout, 0);
    EXPECT_GE(now_ns() - called, 50 * kMs);
    EXPECT_LT(now_ns() - called, 200 * kMs);
    if (round % 2 == 0) {  // before the next call asks
      write_partials(late, 3, 9);
      write_return(late);
      peer().push();
    }
    const Call call = submit(asking(), q);
    EXPECT_EQ(q, late + 1);
    if (round % 2 == 1) {  // while it waits
      write_partials(late, 3, 9);
      write_return(late);
      peer().push();
    }
    Reply reply{};
    ASSERT_FALSE(world_->engine().wait(reply, 5 * kMs)) << "an answer to the expired call ended the next one";
    write_partials(q, 3, 5);
    write_return(q);
    peer().push();
    expect_good(call, 5);
    expect_undisturbed();
  }
}

INSTANTIATE_TEST_SUITE_P(On, CudaHostile, testing::Values(1, 2), test::gpus_name);

}  // namespace
}  // namespace moed
