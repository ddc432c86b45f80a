// Calls whose right answers are known: rows with the answer that the float64 oracle vouches for and that every later
// call must repeat bit for bit, from whatever rank.
#pragma once

#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <cstdio>
#include <string>
#include <vector>

#include "daemon/abi/call.h"
#include "daemon/abi/futex.h"
#include "daemon/abi/status.h"
#include "tests/support/cases.h"
#include "tests/support/process.h"
#include "tests/support/synthetic.h"
#include "tests/support/tolerance.h"

namespace moed::test {

struct Question {
  oracle::Rows rows;
  uint32_t layer = 1;
  std::vector<uint16_t> answer;  ///< of the first call; empty before
};

/// What the daemons of these tests serve, as settings and as the oracle's numbers.
struct QuestionModel {
  static constexpr uint32_t kSeed = 9;
  static Shape shape() {
    Shape s = make_shape(128, 64, 32, 32, 4);
    s.layers = 2;
    return s;
  }
  static std::vector<std::string> sets() {
    return {"model.source=synthetic", "model.seed=9", "limits.max_tokens=16", "limits.arena_mb=1",
            "model.shape={hidden: 128, latent: 64, intermediate: 32, experts: 32, top_k: 4, layers: 2}"};
  }
  SyntheticModel weights{shape(), kSeed};

  std::vector<uint16_t> right(const Question& q, uint32_t ranks) const {
    oracle::Layer m = oracle_layer(shape());
    if (q.layer != MOED_LAYER_IDENTITY) m.expert = [&](uint32_t e) { return weights.values(q.layer, e); };
    return oracle::routed(m, q.rows, ranks).latent;
  }
};

/// Rows whose experts are all of the ranks for which `wanted` is true, each rank being asked by some token if there are
/// enough.
template <class Wanted>
Question question(uint32_t layer, uint32_t tokens, uint32_t ranks, uint64_t seed, Wanted wanted) {
  const Shape s = QuestionModel::shape();
  Question q{make_rows(Routing::random, s, ranks, tokens, seed), layer, {}};
  std::vector<int32_t> experts;
  for (uint32_t e = 0; e < s.experts; ++e)
    if (wanted(owner(s, e, ranks))) experts.push_back(static_cast<int32_t>(e));
  for (size_t i = 0; i < q.rows.ids.size(); ++i) q.rows.ids[i] = experts[(i * 7 + seed) % experts.size()];
  return q;
}

/// How calls ended, by status; any thread.
class Tally {
 public:
  void add(uint32_t status) { ++counts_[std::min(status, kStatuses - 1)]; }
  uint64_t of(Status status) const { return counts_[static_cast<uint32_t>(status)]; }
  std::string text() const {
    std::string line;
    for (uint32_t s = 0; s < kStatuses; ++s)
      if (counts_[s] != 0) line += std::string(" ") + name(static_cast<Status>(s)) + " " + std::to_string(counts_[s]);
    return line;
  }

 private:
  std::array<std::atomic<uint64_t>, kStatuses> counts_{};
};

/// One lane that asks. Every call ends within its deadline and 100 ms.
class Asker {
 public:
  explicit Asker(const std::string& socket, uint32_t deadline_us = 2'000'000)
      : lane_(socket), deadline_us_(deadline_us) {}

  moed_reply_t ask(const Question& q) {
    const moed_call_t call = lay_out(q);
    moed_reply_t reply{};
    const Nanos start = now_ns();
    const moed_status status = moed_call(lane_.get(), &call, &reply);
    const Nanos took = now_ns() - start;
    EXPECT_LE(took, deadline_us_ * 1000ULL + 100'000'000) << moed_status_name(status);
    EXPECT_NE(status, MOED_PENDING);
    longest_ = std::max(longest_, took);
    reply.status = status;  // of a daemon that is gone there is no reply
    return reply;
  }

  void submit(const Question& q) {
    const moed_call_t call = lay_out(q);
    submitted_ = now_ns();
    ASSERT_EQ(moed_submit(lane_.get(), &call), MOED_OK);
  }
  moed_reply_t wait() {
    moed_reply_t reply{};
    const moed_status status = moed_wait(lane_.get(), &reply, deadline_us_ + 100'000);
    EXPECT_NE(status, MOED_PENDING);
    longest_ = std::max(longest_, now_ns() - submitted_);
    reply.status = status;
    return reply;
  }

  std::vector<uint16_t> out() const { return lane_.out(call_); }
  Nanos longest() const { return longest_; }

  /// The answer's bits are those of the question; the first time the oracle has to agree.
  bool right(Question& q, const QuestionModel& model, uint32_t ranks) const {
    if (q.answer.empty()) {
      const Closeness c = compare_rows(out(), model.right(q, ranks), QuestionModel::shape().latent);
      EXPECT_TRUE(c.ok) << c.text();
      if (c.ok) q.answer = out();
      return c.ok;
    }
    return out() == q.answer;
  }

 private:
  moed_call_t lay_out(const Question& q) {
    const auto tokens = static_cast<uint32_t>(q.rows.ids.size() / QuestionModel::shape().top_k);
    call_ = lane_.slot(q.layer, tokens);
    call_.flags = MOED_FLAG_NO_NORM;
    call_.timeout_us = deadline_us_;
    lane_.put(call_.x, q.rows.x);
    lane_.put(call_.ids, q.rows.ids);
    lane_.put(call_.weights, q.rows.weights);
    lane_.put(call_.out, std::vector<uint16_t>(uint64_t{tokens} * QuestionModel::shape().latent, 0x7FFF));
    return call_;
  }

  Lane lane_;
  const uint32_t deadline_us_;
  moed_call_t call_{};
  Nanos submitted_ = 0, longest_ = 0;
};

/// "ranks 2": exactly these.
inline bool names_only(const moed_reply_t& reply, uint32_t rank) {
  return reply.ranks[rank / 64] == uint64_t{1} << (rank % 64) && reply.ranks[1 - rank / 64] == 0;
}

}  // namespace moed::test
