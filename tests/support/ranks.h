// A world in this process with one engine a rank, all of which call at once.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "tests/support/world.h"

namespace moed::test {

inline constexpr uint64_t kRanksArena = 4 << 20;

/// One lane a rank and identity layers, until the caller says otherwise.
inline WorldOptions world_of(const Shape& shape, uint32_t ranks, uint32_t max_tokens) {
  WorldOptions o;
  o.shape = shape;
  o.ranks = ranks;
  o.lanes = 1;
  o.max_tokens = max_tokens;
  return o;
}

/// Calls of a round are submitted together and then waited for.
struct Ranks {
  explicit Ranks(WorldOptions options) : world(std::move(options)) {}

  void attach(uint32_t ranks) {
    for (uint32_t r = 0; r < ranks; ++r) engines.push_back(world.engine(r, 1, kRanksArena));
  }

  /// Replies and rows of one round, by rank.
  struct Round {
    std::vector<Reply> replies;
    std::vector<std::vector<uint16_t>> rows;
  };
  Round call(const std::vector<Job>& jobs) {
    std::vector<Call> calls;
    for (size_t r = 0; r < jobs.size(); ++r) calls.push_back(engines[r]->lay_out(jobs[r]));
    for (size_t r = 0; r < jobs.size(); ++r) engines[r]->submit(calls[r]);
    Round round{std::vector<Reply>(jobs.size()), {}};
    for (size_t r = 0; r < jobs.size(); ++r) {
      EXPECT_TRUE(engines[r]->wait(round.replies[r])) << "rank " << r << " has no answer";
      round.rows.push_back(engines[r]->out(calls[r]));
    }
    return round;
  }

  /// Whether a rank has served so many rows since it began. A pass is counted a moment after its answer, so this waits
  /// up to 5 s.
  bool served(uint32_t rank, double rows) {
    const std::string name = "\nmoed_serve_rows_total ";
    double seen = -1;
    for (const Nanos until = now_ns() + 5'000'000'000; seen != rows && now_ns() < until;) {
      const std::string text = world.metrics(rank).text({});
      const size_t at = text.find(name);
      seen = at == std::string::npos ? -1 : std::stod(text.substr(at + name.size()));
    }
    EXPECT_EQ(seen, rows) << "rows served at rank " << rank;
    return seen == rows;
  }

  World world;
  std::vector<std::unique_ptr<Engine>> engines;  // they leave before their world goes
};

}  // namespace moed::test
