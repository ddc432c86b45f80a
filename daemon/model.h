// The model that a daemon serves: its shape, this rank's expert weights and the digest that peers and engines compare.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "daemon/config.h"
#include "daemon/weights/checkpoint.h"
#include "kernels/experts.h"

namespace moed {

/// Owns what `weights` points to; moves, never copies.
struct Model {
  Shape shape;
  ModelWeights weights;
  Digest digest{};
  std::unique_ptr<Checkpoint> checkpoint;             ///< huggingface: the mapped shards
  std::vector<std::unique_ptr<uint8_t[]>> synthetic;  ///< one block an expert
};

/// The shape alone, nothing loaded. Throws ConfigError, WeightsError.
Shape model_shape(const Config& config);
/// As many layers and experts as this rank will load, without their bytes: to plan with, never to serve.
ModelWeights unloaded_weights(const Config& config, const Shape& shape);

/// Shape and digest, nothing loaded: what peers compare. Throws ConfigError or WeightsError naming file and tensor.
Model open_model(const Config& config);
/// Loads this rank's experts, logging progress. Throws WeightsError naming file and tensor.
void load_weights(Model& model, const Config& config);
/// Gives back what load_weights() took: for a back end that keeps a copy of its own. Shape and digest stay.
void drop_weights(Model& model);

}  // namespace moed
