// The table of shapes and routings that every back end must answer, and random rows for one of them.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "daemon/abi/shape.h"
#include "tests/support/oracle.h"

namespace moed {

/// How ids are chosen. Each is a fault that somebody met or a limit of a plan.
enum class Routing {
  random,       ///< distinct experts of each token
  one_expert,   ///< every slot of every token names the same expert: a token counts it top_k times
  one_rank,     ///< distinct experts, all of the first rank: the others receive nothing
  empty,        ///< the experts of the middle third are never named
  duplicates,   ///< each token names one expert in half of its slots
  masked,       ///< every third slot is -1
  all_masked,   ///< nothing but -1
  some_silent,  ///< every second token is -1 throughout
  ties,         ///< equal weights and equal rows: equal answers
  last,         ///< the greatest ids only
};

inline constexpr std::array<Routing, 10> kRoutings = {
    Routing::random, Routing::one_expert, Routing::one_rank,    Routing::empty, Routing::duplicates,
    Routing::masked, Routing::all_masked, Routing::some_silent, Routing::ties,  Routing::last};

inline std::string name(Routing r) {
  static constexpr std::array<const char*, 10> kNames = {"random", "one_expert", "one_rank",    "empty", "duplicates",
                                                         "masked", "all_masked", "some_silent", "ties",  "last"};
  return kNames[static_cast<std::size_t>(r)];
}

struct CaseShape {
  const char* name;
  Shape shape;
  uint32_t ranks;
  uint32_t tokens;
};

inline Shape make_shape(uint32_t hidden, uint32_t latent, uint32_t intermediate, uint32_t experts, uint32_t top_k) {
  Shape s;
  s.hidden = hidden;
  s.latent = latent;
  s.intermediate = intermediate;
  s.experts = experts;
  s.top_k = top_k;
  s.first_layer = 1;
  s.layers = 1;
  return s;
}

/// Small enough for a float64 oracle in a test; odd token counts and worlds that do not divide the experts among them.
inline std::vector<CaseShape> case_shapes() {
  std::vector<CaseShape> all = {
      {"least", make_shape(8, 64, 32, 1, 1), 1, 1},
      {"golden", make_shape(512, 256, 128, 32, 4), 1, 8},
      {"golden over 3", make_shape(512, 256, 128, 32, 4), 3, 7},
      {"golden over 5", make_shape(512, 256, 128, 32, 4), 5, 9},
      {"an expert a rank", make_shape(128, 128, 64, 6, 2), 6, 5},
      {"top_k of experts", make_shape(256, 128, 64, 16, 16), 4, 5},
      {"greatest top_k", make_shape(128, 64, 96, 48, 32), 4, 6},
      {"wide latent, narrow expert", make_shape(64, 1024, 32, 8, 2), 2, 3},
      {"narrow latent, wide expert", make_shape(64, 64, 1024, 8, 2), 2, 3},
      {"silu without norm", make_shape(128, 128, 64, 12, 3), 2, 8},
      {"latent equals hidden", make_shape(192, 192, 96, 9, 3), 2, 33},
  };
  all[9].shape.activation = Activation::silu;
  all[9].shape.reduce = Reduce::sum;
  return all;
}

/// Uniform in [0, 1) with 24 bits: the same on every machine and library.
inline float uniform(std::mt19937_64& random) { return static_cast<float>(random() >> 40) * 0x1p-24F; }

/// Roughly normal with variance 1: the sum of twelve uniform numbers less six.
inline float normal(std::mt19937_64& random) {
  float sum = -6;
  for (int i = 0; i < 12; ++i) sum += uniform(random);
  return sum;
}

/// The id in slot k of token t.
inline int32_t routed_id(Routing routing, const Shape& s, uint32_t ranks, uint32_t t, uint32_t k, uint32_t start) {
  const auto e = static_cast<uint64_t>(s.experts);
  const uint64_t distinct = (uint64_t{start} + k) % e;
  const uint64_t first_rank = std::max<uint64_t>(e / ranks, 1);
  switch (routing) {
    case Routing::random:
      return static_cast<int32_t>(distinct);
    case Routing::one_expert:
      return static_cast<int32_t>(e / 2);
    case Routing::one_rank:
      return static_cast<int32_t>(distinct % first_rank);
    case Routing::empty: {
      const uint64_t third = e / 3;
      const uint64_t other = distinct % (e - third);
      return static_cast<int32_t>(other < third ? other : other + third);
    }
    case Routing::duplicates:
      return static_cast<int32_t>(k < (s.top_k + 1) / 2 ? start % e : distinct);
    case Routing::masked:
      return (t * s.top_k + k) % 3 == 1 ? -1 : static_cast<int32_t>(distinct);
    case Routing::all_masked:
      return -1;
    case Routing::some_silent:
      return t % 2 == 1 ? -1 : static_cast<int32_t>(distinct);
    case Routing::ties:
      return static_cast<int32_t>(k % e);
    case Routing::last:
      return static_cast<int32_t>(e - 1 - k % e);
  }
  return -1;
}

/// Rows for one case, from a seed. x: normal, each token scaled by its own power of two; weights: positive, summing
/// to 1.
inline oracle::Rows make_rows(Routing routing, const Shape& s, uint32_t ranks, uint32_t tokens, uint64_t seed) {
  std::mt19937_64 random(seed * 1000 + static_cast<uint64_t>(routing));
  oracle::Rows rows;
  for (uint32_t t = 0; t < tokens; ++t) {
    if (routing == Routing::ties && t > 0) {
      for (uint32_t i = 0; i < s.latent; ++i) rows.x.push_back(rows.x[i]);
    } else {
      const int power = static_cast<int>(random() % 7) - 3;
      for (uint32_t i = 0; i < s.latent; ++i)
        rows.x.push_back(oracle::bf16_bits(std::ldexp(double{normal(random)}, power)));
    }
    const auto start = static_cast<uint32_t>(random() % s.experts);
    for (uint32_t k = 0; k < s.top_k; ++k) rows.ids.push_back(routed_id(routing, s, ranks, t, k, start));
    std::vector<float> w(s.top_k, 1.0F);
    float sum = 0;
    for (float& v : w) sum += v = routing == Routing::ties ? 1.0F : 0.05F + uniform(random);
    for (const float v : w) rows.weights.push_back(v / sum);
  }
  return rows;
}

/// The oracle's description of a shape; expert (empty: identity) and norm are the caller's.
inline oracle::Layer oracle_layer(const Shape& s) {
  oracle::Layer m;
  m.latent = s.latent;
  m.intermediate = s.intermediate;
  m.experts = s.experts;
  m.top_k = s.top_k;
  m.silu = s.activation == Activation::silu;
  m.beta = double{s.act_beta};
  m.linear_beta = double{s.act_linear_beta};
  m.eps = double{s.norm_eps};
  return m;
}

}  // namespace moed
