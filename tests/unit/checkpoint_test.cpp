// The golden checkpoint, copies of it that were damaged on purpose, and the model digest.
// The oracle reads shards by searching the raw header for a name, and hashes with sha256sum.
#include "daemon/weights/checkpoint.h"

#include <gtest/gtest.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <nlohmann/json.hpp>
#include <random>
#include <sstream>

namespace moed {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

const std::string kGolden = MOED_GOLDEN "/checkpoint";
constexpr const char* kShard1 = "model-00001-of-00002.safetensors";
constexpr const char* kShard2 = "model-00002-of-00002.safetensors";
constexpr const char* kIndex = "model.safetensors.index.json";
const std::string kLayer1 = "language_model.model.layers.1.block_sparse_moe.";

std::string read(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  std::ostringstream out;
  out << in.rdbuf();
  return out.str();
}

void write(const std::string& path, const std::string& bytes) {
  std::ofstream(path, std::ios::binary | std::ios::trunc)
      .write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
}

/// Where a tensor's bytes lie in the file: {begin, end}, found by searching the header's text.
std::pair<size_t, size_t> find_tensor(const std::string& file, const std::string& name) {
  uint64_t header = 0;
  std::memcpy(&header, file.data(), 8);
  const size_t at = file.find('"' + name + '"');
  if (at == std::string::npos || at > 8 + header) throw std::runtime_error(name + " is not in the header");
  const std::string offsets = "\"data_offsets\": [";
  const char* numbers = file.data() + file.find(offsets, at) + offsets.size();
  char* comma = nullptr;
  const size_t begin = strtoull(numbers, &comma, 10), end = strtoull(comma + 1, nullptr, 10);
  return {8 + header + begin, 8 + header + end};
}

std::string hex(const Digest& digest) {
  std::string out;
  for (const uint8_t b : digest)
    for (const int nibble : {b >> 4, b & 15}) out += "0123456789abcdef"[nibble];
  return out;
}

class CheckpointTest : public ::testing::Test {
 protected:
  void SetUp() override {
    char name[] = "/tmp/moed_checkpoint_XXXXXX";
    ASSERT_NE(mkdtemp(name), nullptr);
    directory_ = name;
  }
  void TearDown() override { fs::remove_all(directory_); }

  std::string at(const std::string& name) const { return directory_ + "/" + name; }
  void copy_golden() const {
    for (const auto& entry : fs::directory_iterator(kGolden)) {
      const std::string to = at(entry.path().filename());
      fs::remove(to);
      write(to, read(entry.path()));
    }
  }
  /// config.json with `change` applied to its text_config, the rest as golden.
  void change_config(const std::function<void(json&)>& change) const {
    json config = json::parse(read(kGolden + "/config.json"));
    change(config["text_config"]);
    write(at("config.json"), config.dump());
  }
  void change_index(const std::function<void(json&)>& change) const {
    json index = json::parse(read(kGolden + "/" + kIndex));
    change(index);
    write(at(kIndex), index.dump());
  }
  void flip(const std::string& name, size_t byte) const {
    std::string bytes = read(at(name));
    ASSERT_LT(byte, bytes.size());
    bytes[byte] = static_cast<char>(bytes[byte] ^ 1);
    write(at(name), bytes);
  }
  std::string sha256sum(const std::string& bytes) const {
    write(at("hashed"), bytes);
    FILE* pipe = popen(("sha256sum " + at("hashed")).c_str(), "r");
    if (pipe == nullptr) return "no pipe";
    char out[65] = {};
    const size_t got = fread(out, 1, 64, pipe);
    return pclose(pipe) == 0 && got == 64 ? out : "sha256sum failed";
  }
  /// Expects a refusal whose sentence has every one of `parts`.
  template <class Action>
  static void expect_refused(Action action, const std::vector<std::string>& parts) {
    try {
      action();
      ADD_FAILURE() << "not refused";
    } catch (const WeightsError& error) {
      const std::string text = error.what();
      for (const std::string& part : parts)
        EXPECT_NE(text.find(part), std::string::npos) << part << " is not in: " << text;
    }
  }
  void expect_open_refused(const std::vector<std::string>& parts) const {
    expect_refused([&] { Checkpoint checkpoint(directory_); }, parts);
  }
  void expect_config_refused(const std::function<void(json&)>& change, const std::vector<std::string>& parts) const {
    change_config(change);
    std::vector<std::string> all = parts;
    all.insert(all.end(), {at("config.json"), "needed"});
    expect_open_refused(all);
  }

  std::string directory_;
};

Shape golden_shape() {
  Shape s;
  s.hidden = 512, s.latent = 256, s.intermediate = 128, s.shared_intermediate = 256;
  s.experts = 32, s.top_k = 4, s.first_layer = 1, s.layers = 2;
  s.activation = Activation::situ, s.reduce = Reduce::sum_rmsnorm, s.router = Router::sigmoid_bias;
  s.renormalise = 1, s.norm_eps = 1e-5F, s.act_beta = 4, s.act_linear_beta = 25, s.routed_scale = 1;
  return s;
}

TEST_F(CheckpointTest, GoldenShape) { EXPECT_EQ(Checkpoint(kGolden).shape(), golden_shape()); }

TEST_F(CheckpointTest, EveryGoldenExpertAndNormHasTheBytesOfTheFile) {
  Checkpoint checkpoint(kGolden);
  for (uint32_t m = 1; m <= 2; ++m) {
    const std::string shard = read(kGolden + "/" + (m == 1 ? kShard1 : kShard2));
    const std::string moe = "language_model.model.layers." + std::to_string(m) + ".block_sparse_moe.";
    const auto same = [&](std::span<const uint8_t> got, const std::string& name, size_t bytes) {
      const auto [begin, end] = find_tensor(shard, moe + name);
      ASSERT_EQ(end - begin, bytes) << name;
      ASSERT_EQ(got.size(), bytes) << name;
      EXPECT_EQ(std::memcmp(got.data(), shard.data() + begin, bytes), 0) << name;
    };
    for (uint32_t e = 0; e < 32; ++e) {
      const ExpertTensors t = checkpoint.expert(m, e);
      const std::string expert = "experts." + std::to_string(e) + ".";
      same(t.w1, expert + "w1.weight_packed", 128 * 128);
      same(t.w1_scale, expert + "w1.weight_scale", 128 * 8);
      same(t.w2, expert + "w2.weight_packed", 256 * 64);
      same(t.w2_scale, expert + "w2.weight_scale", 256 * 4);
      same(t.w3, expert + "w3.weight_packed", 128 * 128);
      same(t.w3_scale, expert + "w3.weight_scale", 128 * 8);
      EXPECT_NO_THROW(checkpoint.check_scales(m, e));
    }
    const std::vector<uint16_t> norm = checkpoint.norm(m);
    same({reinterpret_cast<const uint8_t*>(norm.data()), norm.size() * 2}, "routed_expert_norm.weight", 512);
  }
}

TEST_F(CheckpointTest, ServesARangeOfLayers) {
  Checkpoint one(kGolden, LayerRange{2, 2});
  EXPECT_EQ(one.shape().first_layer, 2U);
  EXPECT_EQ(one.shape().layers, 1U);
  EXPECT_EQ(one.norm(2), Checkpoint(kGolden).norm(2));
  expect_refused([&] { one.norm(1); }, {kGolden, "layer 1", "2-2"});
  expect_refused([&] { one.expert(3, 0); }, {"layer 3", "2-2"});
  expect_refused([&] { one.expert(2, 32); }, {kGolden, "expert 32", "below 32"});
  EXPECT_EQ(Checkpoint(kGolden, LayerRange{1, 2}).shape(), golden_shape());
  for (const LayerRange bad : {LayerRange{0, 1}, {2, 1}, {1, 3}, {3, 3}, {0, 0xFFFFFFFF}})
    expect_refused([&] { Checkpoint checkpoint(kGolden, bad); },
                   {"layers " + std::to_string(bad.first) + "-" + std::to_string(bad.last), "1-2", kGolden});
}

TEST_F(CheckpointTest, OpensOnlyShardsThatHoldWhatIsAskedFor) {
  copy_golden();
  fs::remove(at(kShard2));
  Checkpoint checkpoint(directory_);
  EXPECT_NO_THROW(checkpoint.expert(1, 31));
  expect_refused([&] { checkpoint.expert(2, 0); }, {at(kShard2), "cannot be opened"});
  expect_refused([&] { checkpoint.digest(); }, {at(kShard2), "cannot be opened"});
}

TEST_F(CheckpointTest, ASingleFileNeedsNoIndexAndMayHaveTheShortPrefix) {
  copy_golden();
  change_config([](json& text) { text["num_hidden_layers"] = 2; });
  fs::remove(at(kIndex));
  fs::remove(at(kShard2));
  expect_open_refused({directory_, kIndex, "model.safetensors"});
  fs::rename(at(kShard1), at("model.safetensors"));
  const auto golden = Checkpoint(kGolden).norm(1);
  EXPECT_EQ(Checkpoint(directory_).norm(1), golden);

  std::string bytes = read(at("model.safetensors"));
  const std::string prefix = "language_model.model.layers.";
  uint64_t header = 0;
  std::memcpy(&header, bytes.data(), 8);
  // Spaces behind the header keep its length.
  std::string text = bytes.substr(8, header);
  for (size_t i; (i = text.find(prefix)) != std::string::npos;) text.erase(i, 15);
  text.resize(header, ' ');
  write(at("model.safetensors"), bytes.replace(8, header, text));
  Checkpoint renamed(directory_);
  EXPECT_EQ(renamed.norm(1), golden);
  EXPECT_EQ(renamed.expert(1, 5).w2.size(), 256U * 64);

  write(at("model.safetensors"), std::string("\2\0\0\0\0\0\0\0{}", 10));
  expect_open_refused({at("model.safetensors"), "model.layers."});
}

TEST_F(CheckpointTest, TensorsAtOddOffsets) {
  copy_golden();
  std::string bytes = read(at(kShard1));
  uint64_t header = 0;
  std::memcpy(&header, bytes.data(), 8);
  const auto golden = Checkpoint(kGolden).norm(1);
  ++header;  // one more space moves all data by a byte
  std::memcpy(bytes.data(), &header, 8);
  write(at(kShard1), bytes.insert(7 + header, " "));
  Checkpoint odd(directory_);
  EXPECT_EQ(reinterpret_cast<uintptr_t>(odd.expert(1, 0).w1.data()) % 2, 1U);
  EXPECT_EQ(odd.norm(1), golden);
}

TEST_F(CheckpointTest, ReadsEveryKeyOfTheConfig) {
  fs::copy(kGolden + "/" + kIndex, at(kIndex));
  change_config([](json& text) {
    text.update(json::parse(R"({
      "hidden_size": 264, "routed_expert_hidden_size": 192, "moe_intermediate_size": 96, "num_experts": 65,
      "num_experts_per_token": 5, "num_shared_experts": 3, "first_k_dense_replace": 2, "num_hidden_layers": 9,
      "rms_norm_eps": 0.25, "activation_situ_beta": 2, "activation_situ_linear_beta": 8.5,
      "routed_scaling_factor": 2.5, "moe_renormalize": false, "latent_moe_use_norm": false})"));
  });
  Shape s;
  s.hidden = 264, s.latent = 192, s.intermediate = 96, s.shared_intermediate = 288;
  s.experts = 65, s.top_k = 5, s.first_layer = 2, s.layers = 7;
  s.reduce = Reduce::sum, s.renormalise = 0, s.norm_eps = 0.25F;
  s.act_beta = 2, s.act_linear_beta = 8.5F, s.routed_scale = 2.5F;
  EXPECT_EQ(Checkpoint(directory_).shape(), s);
  EXPECT_TRUE(Checkpoint(directory_).norm(2).empty());

  change_config([](json& text) {
    for (const char* key : {"routed_expert_hidden_size", "activation_situ_beta", "activation_situ_linear_beta"})
      text.erase(key);
    text["hidden_act"] = "silu";
  });
  EXPECT_EQ(Checkpoint(directory_).shape().latent, 512U);
  EXPECT_EQ(Checkpoint(directory_).shape().activation, Activation::silu);
}

TEST_F(CheckpointTest, RefusesAConfigWithoutAKeyOrOfAnotherType) {
  const json keys = json::parse(R"(["hidden_size", "num_hidden_layers", "first_k_dense_replace", "moe_layer_freq",
      "num_experts", "num_experts_per_token", "num_shared_experts", "moe_intermediate_size", "latent_moe_use_norm",
      "rms_norm_eps", "hidden_act", "activation_situ_beta", "activation_situ_linear_beta", "moe_router_activation_func",
      "topk_method", "num_expert_group", "topk_group", "moe_renormalize", "routed_scaling_factor",
      "quantization_config"])");
  for (const std::string key : keys) {
    expect_config_refused([&](json& text) { text.erase(key); }, {"text_config." + key + " is missing"});
    expect_config_refused([&](json& text) { text[key] = nullptr; }, {"text_config." + key + " is null"});
    expect_config_refused([&](json& text) { text[key] = {"a", 1}; }, {"text_config." + key + " is [\"a\",1]"});
  }
}

TEST_F(CheckpointTest, RefusesAConfigBeyondItsRanges) {
  const json bad = json::parse(R"([
      ["hidden_size", 0], ["hidden_size", -512], ["hidden_size", 516], ["hidden_size", 16392], ["hidden_size", 512.0],
      ["hidden_size", "512"], ["hidden_size", 4294967808], ["num_hidden_layers", 0], ["num_hidden_layers", 65536],
      ["first_k_dense_replace", 3], ["num_experts", 0], ["num_experts", 65001], ["num_experts_per_token", 0],
      ["num_experts_per_token", 33], ["num_shared_experts", 65], ["moe_intermediate_size", 16],
      ["moe_intermediate_size", 100], ["moe_intermediate_size", 65568], ["routed_expert_hidden_size", 224],
      ["routed_expert_hidden_size", 16448], ["routed_expert_hidden_size", "x"], ["rms_norm_eps", 0],
      ["rms_norm_eps", 1e-60], ["rms_norm_eps", 1.5], ["rms_norm_eps", true], ["activation_situ_beta", -4],
      ["activation_situ_linear_beta", 1e300], ["routed_scaling_factor", 0], ["latent_moe_use_norm", 1],
      ["moe_renormalize", "true"]])");
  for (const json& b : bad) {
    const std::string key = b[0];
    expect_config_refused([&](json& text) { text[key] = b[1]; }, {"text_config." + key + " is " + b[1].dump() + ","});
  }
  expect_config_refused([](json& text) { text["num_experts"] = 3; }, {"num_experts_per_token is 4", "1 to 3"});
  expect_config_refused([](json& text) { text["num_hidden_layers"] = 1; }, {"first_k_dense_replace is 1", "0 to 0"});
  expect_config_refused([](json& text) { text["hidden_size"] = 72, text.erase("routed_expert_hidden_size"); },
                        {"text_config.hidden_size is 72", "multiple of 64"});
}

TEST_F(CheckpointTest, RefusesByNameWhatCannotBeServed) {
  const json bad = json::parse(R"([["moe_layer_freq", 2], ["moe_router_activation_func", "softmax"],
      ["topk_method", "greedy"], ["num_expert_group", 8], ["topk_group", 4], ["hidden_act", "gelu"],
      ["activation_clamp", 10.0]])");
  for (const json& b : bad) {
    const std::string key = b[0];
    expect_config_refused([&](json& text) { text[key] = b[1]; }, {"text_config." + key + " is " + b[1].dump() + ","});
  }

  const std::string q = "text_config.quantization_config.", g = q + "config_groups.group_0.";
  const auto quantization = [&](const char* pointer, const json& value, const std::string& named) {
    expect_config_refused([&](json& text) { text["quantization_config"][json::json_pointer(pointer)] = value; },
                          {named + " is " + value.dump()});
  };
  quantization("/quant_method", "awq", q + "quant_method");
  quantization("/format", "nvfp4-pack-quantized", q + "format");
  quantization("/config_groups", json::object(), q + "config_groups");
  quantization("/config_groups/group_0/format", "int-quantized", g + "format");
  quantization("/config_groups/group_0/input_activations", {{"num_bits", 8}}, g + "input_activations");
  quantization("/config_groups/group_0/weights/num_bits", 8, g + "weights.num_bits");
  quantization("/config_groups/group_0/weights/group_size", 16, g + "weights.group_size");
  // A second group is checked as the first.
  expect_config_refused(
      [](json& text) {
        json& groups = text["quantization_config"]["config_groups"];
        groups["group_1"] = groups["group_0"];
        groups["group_1"]["weights"]["num_bits"] = 8;
      },
      {q + "config_groups.group_1.weights.num_bits is 8"});
}

TEST_F(CheckpointTest, RefusesADamagedConfigOrIndex) {
  expect_open_refused({at("config.json"), "cannot be opened"});
  copy_golden();
  write(at("config.json"), "{\"text_config\":");
  expect_open_refused({at("config.json"), "not JSON at byte"});
  write(at("config.json"), "{}");
  expect_open_refused({at("config.json"), "text_config is missing"});
  write(at("config.json"), R"({"text_config":{"num_experts":1,"num_experts":2}})");
  expect_open_refused({at("config.json"), "num_experts appears twice"});
  copy_golden();
  write(at(kIndex), "[]");
  expect_open_refused({at(kIndex), "array"});
  write(at(kIndex), "{}");
  expect_open_refused({at(kIndex), "weight_map is missing"});
  write(at(kIndex), R"({"weight_map":{"a":"x.safetensors"}})");
  expect_open_refused({at(kIndex), "none of 1 tensors", "model.layers."});
  const std::string name = kLayer1 + "gate.weight";
  for (const json& shard :
       {json(7), json(""), json("../up.safetensors"), json("/etc/passwd"), json("a.bin"), json(".safetensors")}) {
    change_index([&](json& index) { index["weight_map"][name] = shard; });
    expect_open_refused({at(kIndex), name, shard.dump(), "needed"});
  }
  const std::string bias = kLayer1 + "experts.3.w1.bias";
  change_index([&](json& index) { index["weight_map"][bias] = kShard1; });
  expect_open_refused({at(kIndex), bias, "cannot be served"});
}

TEST_F(CheckpointTest, RefusesMissingTensorsAndOtherShapes) {
  copy_golden();
  const std::string w2 = kLayer1 + "experts.7.w2.weight_scale";
  change_index([&](json& index) { index["weight_map"].erase(w2); });
  expect_refused([&] { Checkpoint(directory_).expert(1, 7); }, {at(kIndex), w2, "missing"});
  EXPECT_NO_THROW(Checkpoint(directory_).expert(1, 6));
  change_index([&](json& index) { index["weight_map"][w2] = kShard2; });  // not in that shard
  expect_refused([&] { Checkpoint(directory_).expert(1, 7); }, {at(kShard2), w2, "missing"});
  copy_golden();
  change_config([](json& text) { text["moe_intermediate_size"] = 160; });
  expect_refused([&] { Checkpoint(directory_).expert(1, 0); },
                 {at(kShard1), kLayer1 + "experts.0.w1.weight_packed", "U8 [128, 128]", "U8 [160, 128]"});
  change_config([](json& text) { text["routed_expert_hidden_size"] = 320; });
  expect_refused([&] { Checkpoint(directory_).norm(1); },
                 {at(kShard1), kLayer1 + "routed_expert_norm.weight", "BF16 [256]", "BF16 [320]"});
  change_config([](json& text) { text["num_experts"] = 16; });
  expect_refused([&] { Checkpoint(directory_).digest(); },
                 {at(kShard1), kLayer1 + "gate.e_score_correction_bias", "F32 [32]", "F32 or BF16 [16]"});
}

TEST_F(CheckpointTest, RefusesAScaleThatIsNaN) {
  copy_golden();
  for (const std::string matrix : {"w1", "w2", "w3"}) {
    const std::string name = kLayer1 + "experts.9." + matrix + ".weight_scale";
    const std::string whole = read(at(kShard1));
    std::string bytes = whole;
    const auto [begin, end] = find_tensor(bytes, name);
    const size_t columns = matrix == "w2" ? 4 : 8;
    bytes[begin + 5 * columns + 3] = '\xff';
    bytes[end - 1] = '\xff';
    write(at(kShard1), bytes);
    expect_refused([&] { Checkpoint(directory_).check_scales(1, 9); }, {at(kShard1), name, "255", "row 5, block 3"});
    EXPECT_NO_THROW(Checkpoint(directory_).check_scales(1, 8));
    EXPECT_NO_THROW(Checkpoint(directory_).expert(1, 9));
    bytes[begin + 5 * columns + 3] = '\xfe';
    bytes[end - 1] = '\xfe';
    write(at(kShard1), bytes);
    EXPECT_NO_THROW(Checkpoint(directory_).check_scales(1, 9));
    write(at(kShard1), whole);
  }
}

TEST_F(CheckpointTest, DigestIsThatOfTheDefinition) {
  const std::string golden = kGolden + "/";
  std::string hashed = read(golden + "config.json") + read(golden + kIndex), tensors;
  for (const char* name : {kShard1, kShard2}) {
    const std::string bytes = read(golden + name);
    uint64_t header = 0, size = bytes.size();
    std::memcpy(&header, bytes.data(), 8);
    hashed += std::string(reinterpret_cast<const char*>(&size), 8) + bytes.substr(0, 8 + header + 4096) +
              bytes.substr(size - 4096);
    const std::string moe =
        std::string("language_model.model.layers.") + (name == kShard1 ? "1" : "2") + ".block_sparse_moe.";
    for (const char* tensor : {"routed_expert_norm.weight", "gate.e_score_correction_bias"}) {
      const auto [begin, end] = find_tensor(bytes, moe + tensor);
      tensors += bytes.substr(begin, end - begin);
    }
  }
  const std::string expected = sha256sum(hashed + tensors);
  EXPECT_EQ(expected.size(), 64U);
  EXPECT_EQ(hex(Checkpoint(kGolden).digest()), expected);
}

TEST_F(CheckpointTest, DigestTellsCheckpointsApart) {
  const auto digest = [&] { return Checkpoint(directory_).digest(); };
  copy_golden();
  const Digest golden = digest();
  EXPECT_EQ(golden, Checkpoint(kGolden).digest());
  EXPECT_NE(golden, Checkpoint(kGolden, LayerRange{2, 2}).digest());
  Checkpoint opened(directory_);
  opened.expert(1, 0);
  EXPECT_EQ(golden, opened.digest());  // shards open already or not

  const std::string shard = read(at(kShard1));
  uint64_t header = 0;
  std::memcpy(&header, shard.data(), 8);
  const size_t data = 8 + header;
  const size_t norm = find_tensor(shard, kLayer1 + "routed_expert_norm.weight").first;
  const size_t bias = find_tensor(shard, kLayer1 + "gate.e_score_correction_bias").first;
  for (const size_t byte :
       {data, data + 4095, norm, norm + 511, bias, bias + 127, shard.size() - 1, shard.size() - 4096}) {
    flip(kShard1, byte);
    EXPECT_NE(golden, digest()) << byte;
    flip(kShard1, byte);
  }
  flip(kShard1, data + 4096);  // the middle of the data is not read
  EXPECT_EQ(golden, digest());
  flip(kShard1, data + 4096);

  write(at("config.json"), read(at("config.json")) + " ");
  EXPECT_NE(golden, digest());
  copy_golden();
  write(at(kIndex), read(at(kIndex)) + " ");
  EXPECT_NE(golden, digest());
  copy_golden();
  EXPECT_EQ(golden, digest());
}

TEST_F(CheckpointTest, DigestOfModelsWithoutFiles) {
  const Shape shape = golden_shape();
  const std::string bytes(reinterpret_cast<const char*>(&shape), sizeof shape);
  EXPECT_EQ(hex(identity_digest(shape)), sha256sum("identity" + bytes));
  EXPECT_EQ(hex(synthetic_digest(0x0102030405060708, shape)),
            sha256sum("synthetic\x08\x07\x06\x05\x04\x03\x02\x01" + bytes));
  EXPECT_NE(synthetic_digest(1, shape), synthetic_digest(2, shape));
}

TEST_F(CheckpointTest, TruncatedShardsAreRefused) {
  copy_golden();
  std::mt19937 random(1);
  size_t bytes = fs::file_size(at(kShard1));
  std::vector<size_t> lengths{bytes - 1, 0};
  for (int i = 0; i < 50; ++i)
    lengths.push_back(random() % (i % 2 == 0 ? bytes : 40000));  // half of them near the header
  std::sort(lengths.rbegin(), lengths.rend());
  for (const size_t length : lengths) {
    fs::resize_file(at(kShard1), length);
    Checkpoint truncated(directory_);
    expect_refused([&] { truncated.expert(1, 0); }, {at(kShard1)});
    expect_refused([&] { truncated.norm(1); }, {at(kShard1)});
    expect_refused([&] { truncated.digest(); }, {at(kShard1)});
  }
}

}  // namespace
}  // namespace moed
