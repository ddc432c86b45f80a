// What the identity layer must answer, computed with frexp, ldexp and nearbyint: nothing is shared with the back ends.
#pragma once

#include <cstdint>
#include <vector>

namespace moed::ctl {

/// The inputs of a call: x BF16 [T, L], ids [T, K], weights [T, K].
struct Inputs {
  uint32_t tokens = 0, width = 0, top_k = 0;
  std::vector<uint16_t> x;
  std::vector<int32_t> ids;
  std::vector<float> weights;
};

/// Random inputs from `seed`: x of both signs over some powers of two, ids distinct where there are enough experts,
/// weights in (0, 1).
Inputs random_inputs(uint32_t tokens, uint32_t width, uint32_t top_k, uint32_t experts, uint64_t seed);

/// BF16 [T, L] that an identity call without norm gives for finite x away from the smallest exponents, in a world of
/// `ranks` that share `experts`.
std::vector<uint16_t> identity_answer(const Inputs& in, uint32_t experts, uint32_t ranks);

/// Whether two BF16 numbers are equal; 0 and -0 are.
bool same_number(uint16_t a, uint16_t b);

}  // namespace moed::ctl
