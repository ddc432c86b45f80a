// Reads tests/golden: the arrays (raw little-endian files) and the tensors of its checkpoint. Trusts its input; the
// daemon's own reader of checkpoints is daemon/weights.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <ios>
#include <nlohmann/json.hpp>
#include <stdexcept>
#include <string>
#include <vector>

#include "tests/support/oracle.h"

namespace moed {

/// Where the arrays lie: tests/golden of the source tree, or MOED_GOLDEN_DIR for a test that runs on another machine.
inline std::string golden_dir() {
  const char* dir = std::getenv("MOED_GOLDEN_DIR");
  return dir == nullptr || *dir == 0 ? MOED_GOLDEN : dir;
}

/// All elements of a file; throws std::runtime_error when it is missing or holds no whole number of elements.
template <class T>
std::vector<T> read_elements(const std::string& path) {
  std::ifstream file(path, std::ios::binary | std::ios::ate);
  if (!file) throw std::runtime_error("cannot open " + path);
  const auto bytes = static_cast<std::size_t>(file.tellg());
  if (bytes == 0 || bytes % sizeof(T) != 0) throw std::runtime_error(path + " holds no whole number of elements");
  std::vector<T> out(bytes / sizeof(T));
  file.seekg(0);
  file.read(reinterpret_cast<char*>(out.data()), static_cast<std::streamsize>(bytes));
  if (!file) throw std::runtime_error("cannot read " + path);
  return out;
}

/// All elements of DIR/NAME.bin.
template <class T>
std::vector<T> read_array(const std::string& dir, const std::string& name) {
  return read_elements<T>(dir + "/" + name + ".bin");
}

/// The shard of layer m of DIR/checkpoint: make.py writes one shard a layer.
class GoldenShard {
 public:
  GoldenShard(const std::string& dir, int layer, int layers) {
    auto number = [](int n) { return std::string(5 - std::to_string(n).size(), '0') + std::to_string(n); };
    bytes_ =
        read_elements<uint8_t>(dir + "/checkpoint/model-" + number(layer) + "-of-" + number(layers) + ".safetensors");
    uint64_t head = 0;
    std::memcpy(&head, bytes_.data(), sizeof head);
    header_ = nlohmann::json::parse(bytes_.begin() + 8, bytes_.begin() + 8 + static_cast<std::ptrdiff_t>(head));
    data_ = 8 + head;
    prefix_ = "language_model.model.layers." + std::to_string(layer) + ".block_sparse_moe.";
  }

  /// First byte of a tensor, named as in the checkpoint after "block_sparse_moe.".
  const uint8_t* tensor(const std::string& name) const {
    return bytes_.data() + data_ + header_.at(prefix_ + name).at("data_offsets").at(0).get<uint64_t>();
  }

  /// The six tensors of an expert as values.
  oracle::Expert expert(uint32_t id, std::size_t latent, std::size_t intermediate) const {
    auto matrix = [&](const char* w, std::size_t rows, std::size_t columns) {
      const std::string base = "experts." + std::to_string(id) + "." + w;
      return oracle::mxfp4_values(tensor(base + ".weight_packed"), tensor(base + ".weight_scale"), rows, columns);
    };
    return {matrix("w1", intermediate, latent), matrix("w2", latent, intermediate), matrix("w3", intermediate, latent)};
  }

  /// The norm weight [latent] as values.
  std::vector<double> norm(std::size_t latent) const {
    std::vector<uint16_t> bits(latent);
    std::memcpy(bits.data(), tensor("routed_expert_norm.weight"), latent * 2);
    std::vector<double> out;
    for (const uint16_t b : bits) out.push_back(oracle::bf16_value(b));
    return out;
  }

 private:
  std::vector<uint8_t> bytes_;
  nlohmann::json header_;
  std::string prefix_;
  std::size_t data_ = 0;
};

}  // namespace moed
