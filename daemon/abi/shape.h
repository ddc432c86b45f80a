// The sizes and formats of a model's MoE layers, and which rank owns which expert.
#pragma once

#include <cstdint>

namespace moed {

inline constexpr uint32_t kMaxRanks = 128;
inline constexpr uint32_t kMaxTokens = 832;  ///< bits of a call line's bitmap
inline constexpr uint32_t kMaxLanes = 64;    ///< engine lanes; lane 0 is the daemon's own and comes on top
inline constexpr uint32_t kMaxTopK = 32;
inline constexpr uint32_t kMaxExperts = 65000;
inline constexpr uint32_t kMaxWidth = 16384;  ///< of hidden and latent
inline constexpr uint32_t kBlock = 32;        ///< elements that share one E8M0 scale (OCP MX)
inline constexpr uint32_t kIdentityLayer = 0xFFFFFFFFu;

enum class Wire : uint8_t { mxfp8 = 0 };
enum class WeightFormat : uint8_t { mxfp4 = 0 };
enum class Activation : uint8_t { situ = 0, silu = 1 };
enum class Reduce : uint8_t { sum = 0, sum_rmsnorm = 1 };
enum class Router : uint8_t { none = 0, sigmoid_bias = 1 };

/// A model's MoE layers as data. Compared whole between daemons, and part of the model digest: all 128 bytes count.
struct Shape {
  uint32_t hidden = 0;               ///< H: width of the hidden state
  uint32_t latent = 0;               ///< L: width of a row; equal to hidden where the model has no projection
  uint32_t intermediate = 0;         ///< I: width inside one expert
  uint32_t shared_intermediate = 0;  ///< width inside the shared expert, 0: none
  uint32_t experts = 0;              ///< E: routed experts of a layer, over all ranks
  uint32_t top_k = 0;                ///< K: slots of a token
  uint32_t first_layer = 0;          ///< the model's own number of the first MoE layer served
  uint32_t layers = 0;               ///< contiguous layers from there
  Wire wire = Wire::mxfp8;
  WeightFormat weights = WeightFormat::mxfp4;
  Activation activation = Activation::situ;
  Reduce reduce = Reduce::sum_rmsnorm;
  Router router = Router::sigmoid_bias;
  uint8_t renormalise = 1;
  uint8_t pad[2] = {};
  float norm_eps = 1e-5F;
  float act_beta = 4.0F;
  float act_linear_beta = 25.0F;
  float routed_scale = 1.0F;
  uint32_t reserved[18] = {};

  bool operator==(const Shape&) const = default;
};
static_assert(sizeof(Shape) == 128);

/// Layers to serve, in the model's own numbers, both ends included.
struct LayerRange {
  uint32_t first = 0, last = 0;
  bool operator==(const LayerRange&) const = default;
};

/// What makes a shape unusable: the field's name, its value and what is allowed. field == nullptr: nothing does.
struct ShapeFault {
  const char* field = nullptr;
  uint64_t value = 0;
  const char* limit = "";
};

/// Checks a shape for a world of `ranks` with calls of `max_tokens` rows; the first fault found.
constexpr ShapeFault check(const Shape& s, uint32_t ranks, uint32_t max_tokens) {
  if (ranks < 1 || ranks > kMaxRanks) return {"ranks", ranks, "1..128"};
  if (max_tokens < 1 || max_tokens > kMaxTokens) return {"max_tokens", max_tokens, "1..832"};
  if (s.hidden < 8 || s.hidden > kMaxWidth || s.hidden % 8 != 0)
    return {"hidden", s.hidden, "a multiple of 8 up to 16384"};
  if (s.latent < 64 || s.latent > kMaxWidth || s.latent % 64 != 0)
    return {"latent", s.latent, "a multiple of 64 up to 16384"};
  if (s.intermediate < 32 || s.intermediate > 65536 || s.intermediate % 32 != 0)
    return {"intermediate", s.intermediate, "a multiple of 32 up to 65536"};
  if (s.top_k < 1 || s.top_k > kMaxTopK) return {"top_k", s.top_k, "1..32"};
  if (s.experts < 1 || s.experts > kMaxExperts) return {"experts", s.experts, "1..65000"};
  if (s.experts < ranks) return {"experts", s.experts, "at least one a rank"};
  if (s.layers < 1 || s.layers > 65535 || s.first_layer > 65535) return {"layers", s.layers, "1..65535"};
  return {};
}

/// First expert of rank r; rank r owns [first(r), first(r + 1)): contiguous, as even as possible.
constexpr uint32_t first_expert(const Shape& s, uint32_t rank, uint32_t ranks) {
  return static_cast<uint32_t>(uint64_t{rank} * s.experts / ranks);
}

/// The rank that owns expert e, 0 <= e < experts.
constexpr uint32_t owner(const Shape& s, uint32_t expert, uint32_t ranks) {
  return ((expert + 1) * ranks - 1) / s.experts;  // below 65,001 x 128
}

}  // namespace moed
