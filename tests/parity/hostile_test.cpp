// What a peer that is buggy or hostile may put into its segment: it spoils its own calls and nobody else's.
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <thread>

#include "tests/support/jobs.h"
#include "tests/support/world.h"

namespace moed {
namespace {

using test::Engine;
using test::expect_all;
using test::Job;
using test::simple_job;
using test::small_shape;
using test::status_of;

/// One real rank of two; the other is played by the test, which holds both segments of the link.
class HostilePeer : public testing::Test {
 protected:
  HostilePeer()
      : server_(make_cpu_backend(options(0))),
        peer_(make_cpu_backend(options(1))),
        metrics_(info()),
        service_(*server_, metrics_, loop()) {
    Handle there;
    Handle back;
    Handle bell;
    if (server_->make_segment(1, there) != Status::ok || peer_->make_segment(0, back) != Status::ok ||
        peer_->make_doorbell(bell) != Status::ok || server_->map_segment(1, back, bell) != Status::ok)
      throw std::runtime_error(server_->last_error() + peer_->last_error());
    server_->link_changed(1, LinkState::ready, kSession);
    written_ = Mapping(there.fd, layout_.bytes);
    answered_ = Mapping(back.fd, layout_.bytes);
    engine_ = std::make_unique<Engine>(*server_, service_, small_shape(), 1, 1 << 20);
  }

  static BackendOptions options(uint32_t rank) {
    BackendOptions o;
    o.shape = small_shape();
    o.rank = rank;
    o.ranks = 2;
    o.lanes = 1;
    o.max_tokens = 16;
    return o;
  }
  static MetricsInfo info() {
    MetricsInfo i;
    i.ranks = 2;
    return i;
  }
  static ServiceOptions loop() {
    ServiceOptions o;
    o.shape = small_shape();
    o.idle.spin_us = 0;
    o.lanes = 1;
    return o;
  }

  static CallLine good_line() {
    CallLine line;
    line.layer = kIdentityLayer;
    line.tokens = 2;
    line.bitmap[0] = 3;
    return line;
  }

  void send_rows(uint64_t q, const std::vector<int32_t>& ids) {
    std::vector<std::byte> row(row_layout(small_shape()).bytes);
    std::memcpy(row.data(), ids.data(), ids.size() * 4);
    for (uint32_t t = 0; t < 16; ++t)
      store_record(reinterpret_cast<Line*>(written_.data() + layout_.row(1, t)), row.data(), row.size(), q);
  }
  void send_line(uint64_t q, const CallLine& line) {
    store_line(*reinterpret_cast<Line*>(written_.data() + layout_.call(1)), &line, sizeof line, q);
    server_->wake();
  }

  /// The status of the server's answer to q; pending: none within `limit`.
  Status answer(uint64_t q, Nanos limit = 5'000'000'000) {
    ReturnLine line;
    const auto& place = *reinterpret_cast<const Line*>(answered_.data() + layout_.return_line(1));
    for (const Nanos until = now_ns() + limit; load_line(place, &line, sizeof line, q) != Seen::same;) {
      if (now_ns() > until) return Status::pending;
      std::this_thread::yield();
    }
    return static_cast<Status>(line.status);
  }

  Status exchange(const CallLine& line, const std::vector<int32_t>& ids) {
    const uint64_t q = sequence(kSession, ++count_);
    send_rows(q, ids);
    send_line(q, line);
    return answer(q);
  }

  /// Serve passes that the server has run.
  double passes() const {
    const std::string text = metrics_.text({});
    const std::string name = "\nmoed_serve_passes_total ";
    const size_t at = text.find(name);
    return at == std::string::npos ? -1 : std::stod(text.substr(at + name.size()));
  }

  /// The server's own engine, whose experts are local: it must not notice anything.
  void expect_undisturbed() {
    Reply reply{};
    expect_all(engine_->run(simple_job(5, {0}, 3), reply), 6);
    ASSERT_EQ(status_of(reply), Status::ok);
  }

  static constexpr uint32_t kSession = 3;
  const SegmentLayout layout_ = segment_layout(small_shape(), 1, 16);
  std::unique_ptr<Backend> server_, peer_;
  Metrics metrics_;
  ServiceLoop service_;
  Mapping written_, answered_;
  std::unique_ptr<Engine> engine_;
  uint64_t count_ = 0;
  uint64_t calls_seen_ = 0;
};

TEST_F(HostilePeer, CallLinesAndIdsAreChecked) {
  EXPECT_EQ(exchange(good_line(), {4, 5}), Status::ok);
  CallLine tokens = good_line();
  tokens.tokens = 17;
  EXPECT_EQ(exchange(tokens, {4, 5}), Status::bad_call);
  CallLine bits = good_line();
  bits.bitmap[103] = 0x80;
  EXPECT_EQ(exchange(bits, {4, 5}), Status::bad_call);
  CallLine layer = good_line();
  layer.layer = 77;
  EXPECT_EQ(exchange(layer, {4, 5}), Status::bad_call);
  for (const int32_t id : {8, -2, 1 << 30, INT32_MAX, INT32_MIN}) {
    EXPECT_EQ(exchange(good_line(), {4, id}), Status::bad_route) << id;
    expect_undisturbed();
  }
  EXPECT_EQ(exchange(good_line(), {-1, 5}), Status::ok);
}

TEST_F(HostilePeer, SequencesThatAreNotTheirTurnAreNotServed) {
  EXPECT_EQ(exchange(good_line(), {4, 5}), Status::ok);
  for (const uint64_t q :
       {sequence(kSession, 1), sequence(kSession - 1, 50), sequence(kSession + 1, 50), uint64_t{0}, UINT64_MAX}) {
    send_rows(q, {4, 5});
    send_line(q, good_line());
    EXPECT_EQ(answer(q, 50'000'000),
              q == sequence(kSession, 1) ? Status::ok : Status::pending);  // the ok is the first call's
    expect_undisturbed();
  }
  count_ += 1000;
  EXPECT_EQ(exchange(good_line(), {4, 5}), Status::ok);
}

TEST_F(HostilePeer, AnnouncedRowsThatNeverComeHoldNobodyUp) {
  const uint64_t q = sequence(kSession, ++count_);
  const double before = passes();
  ASSERT_GE(before, 0);
  send_line(q, good_line());  // and no rows
  EXPECT_EQ(answer(q, 200'000'000), Status::pending);
  EXPECT_GT(passes(), before);
  EXPECT_LE(passes(), before + 5);  // given up after a few looks
  for (int i = 0; i < 20; ++i) expect_undisturbed();
  EXPECT_EQ(exchange(good_line(), {4, 5}), Status::ok);
  const uint64_t passed = sequence(kSession, ++count_);
  send_rows(passed + 1, {4, 5});  // gone on to the next call already
  send_line(passed, good_line());
  EXPECT_EQ(answer(passed, 100'000'000), Status::pending);
  expect_undisturbed();
}

TEST_F(HostilePeer, ItsStatusIsNeverOurs) {
  for (const uint32_t said : {1U, 2U, 3U, 4U, 5U, 6U, 9U, 13U, 14U, 19U, 20U, UINT32_MAX}) {
    Job job = simple_job(3, {2}, 1);  // its experts
    const Call call = engine_->lay_out(job);
    engine_->submit(call);
    const auto& ours = *reinterpret_cast<const Line*>(answered_.data() + layout_.call(1));
    const uint64_t before = calls_seen_;
    for (const Nanos until = now_ns() + 5'000'000'000; load_sequence(ours) == before && now_ns() < until;)
      std::this_thread::yield();
    calls_seen_ = load_sequence(ours);
    ASSERT_NE(calls_seen_, before);
    const ReturnLine line{said, 3, 3, 1, 0, 0, 0};
    store_line(*reinterpret_cast<Line*>(written_.data() + layout_.return_line(1)), &line, sizeof line, calls_seen_);
    Reply reply{};
    ASSERT_TRUE(engine_->wait(reply));
    EXPECT_EQ(status_of(reply), Status::internal) << said;
    EXPECT_EQ(reply.ranks[0], 2U);
    EXPECT_EQ(reply.value, int64_t{said});
    expect_all(engine_->out(call), 0);
    expect_undisturbed();
  }
}

}  // namespace
}  // namespace moed
