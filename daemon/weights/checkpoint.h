// A model directory in Kimi K3's Hugging Face format: config.json -> Shape; index -> the tensors of one layer and
// expert.
//
//   config.json                    text_config: sizes, router, activation, quantization_config
//   model.safetensors.index.json   weight_map: tensor -> shard; without it, one model.safetensors
//   *.safetensors                  P.experts.E.{w1,w2,w3}.{weight_packed,weight_scale}, P.routed_expert_norm.weight,
//                                  P.gate.e_score_correction_bias; P = [language_model.]model.layers.M.block_sparse_moe
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "daemon/abi/shape.h"
#include "daemon/weights/safetensors.h"

namespace moed {

/// One expert's six tensors as they lie in the file. L: latent, I: intermediate. Two E2M1 codes a byte, element 2j in
/// the low nibble; one E8M0 byte per 32 columns; row-major, no padding, any alignment.
struct ExpertTensors {
  std::span<const uint8_t> w1;        ///< gate [I, L / 2]
  std::span<const uint8_t> w1_scale;  ///< [I, L / 32]
  std::span<const uint8_t> w2;        ///< down [L, I / 2]
  std::span<const uint8_t> w2_scale;  ///< [L, I / 32]
  std::span<const uint8_t> w3;        ///< up [I, L / 2]
  std::span<const uint8_t> w3_scale;  ///< [I, L / 32]
};

using Digest = std::array<uint8_t, 32>;

/// A checkpoint, its shards mapped when first asked for and kept until the object ends. Every function throws
/// WeightsError; one thread at a time.
class Checkpoint {
 public:
  /// Reads config.json and the index. serve: a range within the model's MoE layers; none: all of them.
  explicit Checkpoint(std::string directory, std::optional<LayerRange> serve = {});

  /// first_layer and layers are those to serve.
  const Shape& shape() const { return shape_; }

  /// The tensors of one expert, 0 <= expert < experts, their dtypes and shapes checked; layer is the model's own
  /// number.
  ExpertTensors expert(uint32_t layer, uint32_t expert);

  /// Refuses an expert with a scale byte 255 (NaN in E8M0), naming tensor, row and block. Reads all of its scales.
  void check_scales(uint32_t layer, uint32_t expert);

  /// BF16 [L], copied out of the file; empty where the shape has no norm.
  std::vector<uint16_t> norm(uint32_t layer);

  /// Tells two checkpoints of one shape apart without reading all of it. SHA-256 over config.json; the index, if there
  /// is one; for each shard of the index in name order: its size (u64), its header with the length field, the first and
  /// the last 4 KiB of its data (less, where it has less); for each served layer: the norm, if the shape has one, and
  /// the router's bias. Little-endian, nothing in between. Opens and checks every shard.
  Digest digest();

 private:
  using Shards = std::map<std::string, std::unique_ptr<SafetensorsFile>>;  // by name; empty until asked for

  std::string file(const std::string& name) const { return directory_ + "/" + name; }
  std::string tensor_name(uint32_t layer, const std::string& rest) const;
  std::string expert_prefix(uint32_t layer, uint32_t expert) const;
  void read_index();
  void add_tensor(const std::string& index, const std::string& name, const std::string& shard);
  const SafetensorsFile& shard_of(const std::string& tensor);
  std::span<const uint8_t> norm_bytes(uint32_t layer);

  std::string directory_;
  Shape shape_;
  bool has_index_ = false;
  Shards shards_;
  std::unordered_map<std::string, Shards::value_type*> tensors_;
  std::string prefix_;  ///< of tensor names, up to the layer's number
};

/// Digest of synthetic weights: SHA-256 over "synthetic", seed (u64, little-endian), the shape's 128 bytes.
Digest synthetic_digest(uint64_t seed, const Shape& shape);

/// Digest of a world of identity layers: SHA-256 over "identity", the shape's 128 bytes.
Digest identity_digest(const Shape& shape);

}  // namespace moed
