#include "daemon/model.h"

#include "daemon/abi/futex.h"
#include "daemon/log.h"

namespace moed {
namespace {

constexpr Nanos kProgress = 5'000'000'000;

/// Says how far loading has come, every few seconds.
class Progress {
 public:
  explicit Progress(uint64_t experts) : experts_(experts) {}
  void expert_done() {
    ++done_;
    const Nanos now = now_ns();
    if (now < next_) return;
    next_ = now + kProgress;
    log_info("loading weights", {{"experts", done_}, {"of", experts_}});
  }

 private:
  uint64_t experts_, done_ = 0;
  Nanos next_ = now_ns() + kProgress;
};

void load_checkpoint(Model& model, uint32_t first, uint32_t end) {
  Progress progress(uint64_t{model.shape.layers} * (end - first));
  for (uint32_t i = 0; i < model.shape.layers; ++i) {
    const uint32_t layer = model.shape.first_layer + i;
    LayerWeights& out = model.weights.layers.emplace_back();
    for (uint32_t e = first; e < end; ++e) {
      model.checkpoint->check_scales(layer, e);
      const ExpertTensors t = model.checkpoint->expert(layer, e);
      out.experts.push_back({.w1 = t.w1.data(),
                             .w1_scale = t.w1_scale.data(),
                             .w2 = t.w2.data(),
                             .w2_scale = t.w2_scale.data(),
                             .w3 = t.w3.data(),
                             .w3_scale = t.w3_scale.data()});
      progress.expert_done();
    }
    out.norm = model.checkpoint->norm(layer);
  }
}

/// One expert's six tensors in one block, in the order of ExpertWeights.
ExpertWeights make_synthetic(const Shape& s, uint64_t seed, uint32_t layer, uint32_t expert, uint8_t* at) {
  const auto tensor = [&](Matrix matrix, bool scales, uint64_t rows, uint64_t columns) {
    const std::span<uint8_t> out(at, scales ? scale_bytes(rows, columns) : packed_bytes(rows, columns));
    fill_synthetic(out, synthetic_key(seed, layer, expert, matrix), scales, columns);
    at += out.size();
    return static_cast<const uint8_t*>(out.data());
  };
  ExpertWeights w;
  w.w1 = tensor(Matrix::w1, false, s.intermediate, s.latent);
  w.w1_scale = tensor(Matrix::w1_scale, true, s.intermediate, s.latent);
  w.w2 = tensor(Matrix::w2, false, s.latent, s.intermediate);
  w.w2_scale = tensor(Matrix::w2_scale, true, s.latent, s.intermediate);
  w.w3 = tensor(Matrix::w3, false, s.intermediate, s.latent);
  w.w3_scale = tensor(Matrix::w3_scale, true, s.intermediate, s.latent);
  return w;
}

void load_synthetic(Model& model, uint64_t seed, uint32_t first, uint32_t end) {
  Progress progress(uint64_t{model.shape.layers} * (end - first));
  for (uint32_t i = 0; i < model.shape.layers; ++i) {
    LayerWeights& out = model.weights.layers.emplace_back();
    for (uint32_t e = first; e < end; ++e) {
      model.synthetic.push_back(std::make_unique_for_overwrite<uint8_t[]>(expert_bytes(model.shape)));
      out.experts.push_back(
          make_synthetic(model.shape, seed, model.shape.first_layer + i, e, model.synthetic.back().get()));
      progress.expert_done();
    }
  }
}

}  // namespace

Shape model_shape(const Config& config) {
  if (config.model.source != ModelSource::huggingface) return configured_shape(config);
  return narrowed_shape(Checkpoint(config.model.path, config.model.layers).shape(), config);
}

ModelWeights unloaded_weights(const Config& config, const Shape& shape) {
  if (config.model.source == ModelSource::identity) return {};
  LayerWeights layer;
  layer.experts.resize(first_expert(shape, config.rank + 1, config.ranks()) -
                       first_expert(shape, config.rank, config.ranks()));
  if (config.model.source == ModelSource::huggingface && shape.reduce == Reduce::sum_rmsnorm)
    layer.norm.resize(shape.latent);
  return {std::vector<LayerWeights>(shape.layers, layer)};
}

Model open_model(const Config& config) {
  Model model;
  switch (config.model.source) {
    case ModelSource::huggingface:
      model.checkpoint = std::make_unique<Checkpoint>(config.model.path, config.model.layers);
      model.shape = narrowed_shape(model.checkpoint->shape(), config);
      model.digest = model.checkpoint->digest();
      break;
    case ModelSource::synthetic:
      model.shape = configured_shape(config);
      model.digest = synthetic_digest(config.model.seed, model.shape);
      break;
    case ModelSource::identity:
      model.shape = configured_shape(config);
      model.digest = identity_digest(model.shape);
      break;
  }
  return model;
}

void load_weights(Model& model, const Config& config) {
  const uint32_t first = first_expert(model.shape, config.rank, config.ranks());
  const uint32_t end = first_expert(model.shape, config.rank + 1, config.ranks());
  if (config.model.source == ModelSource::huggingface) load_checkpoint(model, first, end);
  if (config.model.source == ModelSource::synthetic) load_synthetic(model, config.model.seed, first, end);
}

void drop_weights(Model& model) {
  model.weights = {};
  model.synthetic.clear();
  model.checkpoint.reset();
}

}  // namespace moed
