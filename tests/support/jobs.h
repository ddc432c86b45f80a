// Small jobs whose answers are plain sums, for tests of the protocol.
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

inline void expect_all(const std::vector<uint16_t>& rows, float value) {
  for (const uint16_t bits : rows) ASSERT_EQ(oracle::bf16_value(bits), double{value});
}

}  // namespace moed::test
