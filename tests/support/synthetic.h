// Synthetic experts for tests: the daemon's bytes for a back end, and the same bytes as values for the oracle.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <vector>

#include "kernels/experts.h"
#include "tests/support/oracle.h"

namespace moed::test {

/// All experts of all layers of a shape, made once; any rank's part of them.
class SyntheticModel {
 public:
  SyntheticModel(const Shape& shape, uint64_t seed) : shape_(shape) {
    for (uint32_t i = 0; i < shape.layers; ++i)
      for (uint32_t e = 0; e < shape.experts; ++e) add(seed, shape.first_layer + i, e);
  }

  /// The experts of rank r, without norm weights (they are 1).
  ModelWeights of_rank(uint32_t rank, uint32_t ranks) const {
    ModelWeights w;
    for (uint32_t i = 0; i < shape_.layers; ++i) {
      LayerWeights& layer = w.layers.emplace_back();
      for (uint32_t e = first_expert(shape_, rank, ranks); e < first_expert(shape_, rank + 1, ranks); ++e)
        layer.experts.push_back(experts_[i * shape_.experts + e]);
    }
    return w;
  }

  oracle::Expert values(uint32_t layer, uint32_t expert) const {
    const ExpertWeights& w = at(layer, expert);
    const size_t l = shape_.latent;
    const size_t n = shape_.intermediate;
    return {oracle::mxfp4_values(w.w1, w.w1_scale, n, l), oracle::mxfp4_values(w.w2, w.w2_scale, l, n),
            oracle::mxfp4_values(w.w3, w.w3_scale, n, l)};
  }

  /// Flips a bit of the first scale of W2, or of the first weights of W1. No rank may compute meanwhile; a race
  /// detector does not know that none does, because the lines that order it are relaxed.
  __attribute__((no_sanitize("thread"), noinline)) void flip_scale(uint32_t layer, uint32_t expert) {
    *const_cast<uint8_t*>(at(layer, expert).w2_scale) ^= 4;
  }
  __attribute__((no_sanitize("thread"), noinline)) void flip_sign(uint32_t layer, uint32_t expert) {
    *const_cast<uint8_t*>(at(layer, expert).w1) ^= 8;
  }

 private:
  const ExpertWeights& at(uint32_t layer, uint32_t expert) const {
    return experts_[(layer - shape_.first_layer) * shape_.experts + expert];
  }

  const uint8_t* tensor(uint64_t key, bool scales, uint64_t rows, uint64_t columns) {
    memory_.emplace_back(scales ? scale_bytes(rows, columns) : packed_bytes(rows, columns));
    fill_synthetic(memory_.back(), key, scales, columns);
    return memory_.back().data();
  }

  void add(uint64_t seed, uint32_t layer, uint32_t expert) {
    const auto key = [&](Matrix m) { return synthetic_key(seed, layer, expert, m); };
    const uint64_t l = shape_.latent;
    const uint64_t n = shape_.intermediate;
    ExpertWeights w;
    w.w1 = tensor(key(Matrix::w1), false, n, l);
    w.w1_scale = tensor(key(Matrix::w1_scale), true, n, l);
    w.w2 = tensor(key(Matrix::w2), false, l, n);
    w.w2_scale = tensor(key(Matrix::w2_scale), true, l, n);
    w.w3 = tensor(key(Matrix::w3), false, n, l);
    w.w3_scale = tensor(key(Matrix::w3_scale), true, n, l);
    experts_.push_back(w);
  }

  Shape shape_;
  std::vector<std::vector<uint8_t>> memory_;
  std::vector<ExpertWeights> experts_;
};

}  // namespace moed::test
