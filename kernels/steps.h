// The steps of the two passes, one argument struct each. A call pass is dispatch, wait, reduce; a serve pass is gather,
// plan, experts, send. What waits between them is the back end's.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "daemon/abi/call.h"
#include "kernels/experts.h"
#include "kernels/heap.h"

namespace moed {

/// A set of ranks.
struct RankSet {
  uint64_t word[2] = {};
  constexpr void add(uint32_t r) { word[r / 64] |= uint64_t{1} << (r % 64); }
  constexpr void remove(uint32_t r) { word[r / 64] &= ~(uint64_t{1} << (r % 64)); }
  constexpr bool has(uint32_t r) const { return (word[r / 64] >> (r % 64) & 1) != 0; }
  constexpr bool empty() const { return (word[0] | word[1]) == 0; }
  constexpr void add(const RankSet& other) {
    word[0] |= other.word[0];
    word[1] |= other.word[1];
  }
};

/// Ranks that own one of a token's experts; -1 owns none. ids: K checked ids.
inline RankSet token_ranks(std::span<const int32_t> ids, const Shape& s, uint32_t ranks) {
  RankSet set;
  for (const int32_t id : ids)
    if (id >= 0) set.add(owner(s, static_cast<uint32_t>(id), ranks));
  return set;
}

/// Where a rank's lines go, and the sequence they carry. segment == nullptr: the rank is left out.
struct Destination {
  std::byte* segment = nullptr;
  uint64_t sequence = 0;
};

/// Rows of tokens [0, tokens) of one piece to the ranks that own their experts, then one call line per such rank.
struct DispatchArgs {
  const Shape* shape;
  const SegmentLayout* layout;
  uint32_t ranks, lane, layer;
  uint32_t tokens;                  ///< at most max_tokens, padding excluded
  bool wire;                        ///< x holds E4M3 codes, scales their E8M0 bytes
  const std::byte* x;               ///< BF16 [tokens, L] or codes [tokens, L]
  const std::byte* scales;          ///< E8M0 [tokens, L / 32] when wire, else not read
  const int32_t* ids;               ///< [tokens, K], checked
  const float* weights;             ///< [tokens, K]
  std::span<const Destination> to;  ///< by rank
  uint32_t first = 0;               ///< rank whose call line is stored first; the others follow in turn
};

/// Sum of the partials in rank order, one rounding to BF16, then RMSNorm where norm is set.
struct ReduceArgs {
  const Shape* shape;
  const SegmentLayout* layout;
  uint32_t ranks, lane;
  uint32_t tokens;
  bool norm;
  const int32_t* ids;                 ///< [tokens, K]
  const uint16_t* gamma;              ///< BF16 [L] or nullptr: 1
  std::span<const Destination> from;  ///< by rank: the segment that this rank writes here; nullptr: left out
  uint16_t* out;                      ///< BF16 [tokens, L]
};

/// One call that a serve pass takes: whose it is, and its call line as copied and checked.
struct Source {
  uint32_t rank = 0, lane = 0;
  uint64_t sequence = 0;
  CallLine call{};
  const std::byte* rows_segment = nullptr;  ///< here: what the source wrote
  std::byte* answer_segment = nullptr;      ///< there: what we may write
  uint64_t queue_ns = 0;
  // Filled by the pass:
  uint32_t first_row = 0, rows = 0;
  Status status = Status::ok;
  Seen seen = Seen::same;  ///< anything else: not served in this pass
};

/// Private, packed copies of the rows of a pass. Capacities are fixed when the back end is made.
struct Rows {
  struct Place {
    uint32_t source, token;
  };
  uint32_t count = 0;
  std::vector<Place> place;
  std::vector<int32_t> ids;     ///< [rows, K]
  std::vector<float> weights;   ///< [rows, K]
  std::vector<uint8_t> scales;  ///< [rows, L / 32]
  std::vector<uint8_t> codes;   ///< [rows, L]
};

struct GatherArgs {
  const Shape* shape;
  const SegmentLayout* layout;
  std::span<Source> sources;
  Rows* rows;
};

/// One (row, slot) whose expert is local.
struct Pair {
  uint32_t layer, local, row, slot;
};

/// Pairs sorted by (layer, local expert, row, slot); pair_of[row, slot] is the pair's index or kNoPair.
struct Plan {
  std::vector<Pair> pairs;
  std::vector<uint32_t> pair_of;  ///< [rows, K]
  uint32_t experts = 0;           ///< distinct (layer, expert)
};
inline constexpr uint32_t kNoPair = 0xFFFFFFFFu;

struct PlanArgs {
  const Shape* shape;
  const ModelWeights* model;
  uint32_t rank, ranks;
  std::span<const Source> sources;
  const Rows* rows;
  Plan* plan;
};

struct ExpertsArgs {
  const Shape* shape;
  const ModelWeights* model;
  const Rows* rows;
  const Plan* plan;
  float* out;      ///< [pairs, L], FP32, not yet weighted
  float* scratch;  ///< experts_scratch() floats
};

struct SendArgs {
  const Shape* shape;
  const SegmentLayout* layout;
  uint32_t rank, ranks;
  std::span<const Source> sources;
  const ModelWeights* model;
  const Rows* rows;
  const Plan* plan;
  const float* pairs;  ///< [pairs, L]
};

/// The weights of a layer by the model's number; nullptr: identity experts.
inline const LayerWeights* layer_weights(const ModelWeights& model, const Shape& s, uint32_t layer) {
  if (layer == kIdentityLayer || layer < s.first_layer || layer - s.first_layer >= model.layers.size()) return nullptr;
  const LayerWeights& w = model.layers[layer - s.first_layer];
  return w.experts.empty() ? nullptr : &w;
}

namespace cpu {

inline constexpr uint32_t kExpertsTile = 64;  ///< rows of one expert that share one decoding of its weights
constexpr uint64_t experts_scratch(const Shape& s) {
  return uint64_t{kExpertsTile} * (s.latent + s.intermediate) +
         2 * (s.latent > s.intermediate ? s.latent : s.intermediate);
}

void dispatch(const DispatchArgs& a);
/// False: a partial was not there although its return line was; `culprit` is its rank.
[[nodiscard]] bool reduce(const ReduceArgs& a, uint32_t& culprit);
void gather(const GatherArgs& a);
void plan(const PlanArgs& a);
void experts(const ExpertsArgs& a);
/// Partials of every served source; its return line is the caller's, because it carries the time this took.
void send(const SendArgs& a);

}  // namespace cpu
}  // namespace moed
