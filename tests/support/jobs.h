// Jobs: small ones whose answers are plain sums, for tests of the protocol, and rows of cases.h.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <vector>

#include "tests/support/cases.h"
#include "tests/support/world.h"

namespace moed::test {

inline Shape small_shape() { return make_shape(64, 64, 32, 8, 2); }  // two experts a rank

inline Status status_of(const Reply& r) { return static_cast<Status>(r.status); }

/// T tokens, slot k of token t to one of the experts 2p and 2p + 1 for p in pairs (in a world of 4, rank p owns pair
/// p); x is exact in MXFP8, so that the answer is a plain sum.
inline Job simple_job(uint32_t tokens, std::vector<uint32_t> pairs, float x, float weight = 1.0F) {
  const Shape s = small_shape();
  Job job;
  job.flags = kFlagNoNorm;
  job.x.assign(uint64_t{tokens} * s.latent, oracle::bf16_bits(double{x}));
  for (uint32_t t = 0; t < tokens; ++t)
    for (uint32_t k = 0; k < s.top_k; ++k) {
      job.ids.push_back(static_cast<int32_t>(pairs[k % pairs.size()] * 2 + t % 2));
      job.weights.push_back(weight);
    }
  return job;
}

/// Rows of cases.h as a job.
inline Job job_of(const oracle::Rows& rows, uint32_t layer, uint32_t flags) {
  Job job;
  job.layer = layer;
  job.flags = flags;
  job.x = rows.x;
  job.ids = rows.ids;
  job.weights = rows.weights;
  return job;
}

/// Takes rows `pick` of a BF16 job.
inline Job pick_rows(const Job& all, const Shape& s, const std::vector<uint32_t>& pick) {
  Job job;
  job.layer = all.layer;
  job.flags = all.flags;
  for (const uint32_t t : pick) {
    job.x.insert(job.x.end(), all.x.begin() + t * s.latent, all.x.begin() + (t + 1) * s.latent);
    job.ids.insert(job.ids.end(), all.ids.begin() + t * s.top_k, all.ids.begin() + (t + 1) * s.top_k);
    job.weights.insert(job.weights.end(), all.weights.begin() + t * s.top_k, all.weights.begin() + (t + 1) * s.top_k);
  }
  return job;
}

inline void expect_all(const std::vector<uint16_t>& rows, float value) {
  for (const uint16_t bits : rows) ASSERT_EQ(oracle::bf16_value(bits), double{value});
}

}  // namespace moed::test
