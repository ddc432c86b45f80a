// Reads config.json strictly (every key used is required, what cannot be served is refused by name) and finds tensors.
#include "daemon/weights/checkpoint.h"

#include <fcntl.h>
#include <openssl/evp.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <nlohmann/json.hpp>
#include <system_error>
#include <type_traits>

namespace moed {

namespace {

using nlohmann::json;

constexpr const char* kConfig = "config.json";
constexpr const char* kIndex = "model.safetensors.index.json";
constexpr const char* kSingle = "model.safetensors";
constexpr const char* kFormat = "mxfp4-pack-quantized";
constexpr uint64_t kMaxConfigBytes = 16ULL << 20;
constexpr uint64_t kMaxIndexBytes = 1ULL << 30;  // Kimi K3's is some 60 MB
constexpr uint64_t kSampleBytes = 4096;

std::vector<uint8_t> read_file(const std::string& path, uint64_t limit) {
  const Fd fd(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  if (!fd) refuse(path, ": cannot be opened: ", std::generic_category().message(errno));
  struct stat status {};
  if (::fstat(fd.get(), &status) != 0) refuse(path, ": fstat: ", std::generic_category().message(errno));
  if (!S_ISREG(status.st_mode)) refuse(path, ": not a regular file");
  const auto bytes = static_cast<uint64_t>(status.st_size);
  if (bytes > limit) refuse(path, ": ", bytes, " bytes, at most ", limit, " are read");
  std::vector<uint8_t> out(bytes);
  for (uint64_t at = 0; at < bytes;) {
    const ssize_t got = ::read(fd.get(), out.data() + at, bytes - at);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) refuse(path, ": read: ", std::generic_category().message(errno));
    if (got == 0) refuse(path, ": ended at byte ", at, " of ", bytes, " while it was read");
    at += static_cast<uint64_t>(got);
  }
  return out;
}

/// One object of config.json and where it is, for errors.
class Keys {
 public:
  Keys(const json& object, std::string file, std::string path)
      : object_(object), file_(std::move(file)), path_(std::move(path)) {}

  /// Whether the key is there and not null.
  bool has(const char* key) const {
    const auto at = object_.find(key);
    return at != object_.end() && !at->is_null();
  }
  uint32_t integer(const char* key, uint32_t least, uint32_t most) const {
    const json& v = at(key);
    if (!v.is_number_unsigned() || v.get<uint64_t>() < least || v.get<uint64_t>() > most)
      wrong(key, "an integer from " + std::to_string(least) + " to " + std::to_string(most));
    return v.get<uint32_t>();
  }
  float number(const char* key, float above, float most) const {
    const json& v = at(key);
    // Compared as stored: what rounds to the lower limit is as useless as the limit.
    const float f = v.is_number() ? static_cast<float>(std::clamp(v.get<double>(), -1e30, 1e30)) : above;
    if (!(f > above) || f > most) wrong(key, spell("a number above ", above, " and up to ", most));
    return f;
  }
  bool boolean(const char* key) const {
    if (!at(key).is_boolean()) wrong(key, "true or false");
    return at(key).get<bool>();
  }
  std::string text(const char* key) const {
    if (!at(key).is_string()) wrong(key, "a string");
    return at(key).get<std::string>();
  }
  Keys object(const char* key) const {
    if (!at(key).is_object()) wrong(key, "an object");
    return {at(key), file_, path_ + key + "."};
  }
  /// For a key of which only one value can be served.
  void must_be(const char* key, const json& value) const {
    if (at(key) != value) wrong(key, value.dump(), kOnly);
  }
  void must_be_absent(const char* key) const {
    if (has(key)) wrong(key, "null", kOnly);
  }
  const json& members() const { return object_; }
  [[noreturn]] void wrong(const char* key, const std::string& needed, const char* why = "") const {
    const auto at = object_.find(key);
    const std::string value = at == object_.end() ? "missing" : shown(at->dump());
    refuse(file_, ": ", path_, key, " is ", value, ", ", needed, " is needed", why);
  }

 private:
  static constexpr const char* kOnly = ": nothing else can be served";

  const json& at(const char* key) const {
    static const json kNull;
    const auto at = object_.find(key);
    return at == object_.end() ? kNull : *at;
  }
  template <class... Parts>
  static std::string spell(const Parts&... parts) {
    std::ostringstream text;
    (text << ... << parts);
    return text.str();
  }

  const json& object_;
  std::string file_, path_;
};

/// Kimi K3 has the block in text_config; other exporters put it at the top.
void check_quantization(const Keys& root, const Keys& text) {
  const Keys block =
      (text.has("quantization_config") || !root.has("quantization_config") ? text : root).object("quantization_config");
  block.must_be("quant_method", "compressed-tensors");
  if (block.has("format")) block.must_be("format", kFormat);
  const Keys groups = block.object("config_groups");
  if (groups.members().empty()) block.wrong("config_groups", "at least one group");
  for (const auto& [name, unused] : groups.members().items()) {
    const Keys group = groups.object(name.c_str());
    if (group.has("format") || !block.has("format")) group.must_be("format", kFormat);
    group.must_be_absent("input_activations");
    group.must_be_absent("output_activations");
    const Keys weights = group.object("weights");
    weights.must_be("num_bits", 4);
    weights.must_be("group_size", 32);
  }
}

void read_sizes(const Keys& text, Shape& s) {
  text.must_be("moe_layer_freq", 1);
  const uint32_t decoder_layers = text.integer("num_hidden_layers", 1, 65535);
  s.first_layer = text.integer("first_k_dense_replace", 0, decoder_layers - 1);
  s.layers = decoder_layers - s.first_layer;
  s.hidden = text.integer("hidden_size", 8, kMaxWidth);
  s.latent =
      text.has("routed_expert_hidden_size") ? text.integer("routed_expert_hidden_size", 64, kMaxWidth) : s.hidden;
  s.intermediate = text.integer("moe_intermediate_size", 32, 65536);
  s.shared_intermediate = text.integer("num_shared_experts", 0, 64) * s.intermediate;
  s.experts = text.integer("num_experts", 1, kMaxExperts);
  s.top_k = text.integer("num_experts_per_token", 1, std::min(kMaxTopK, s.experts));
  // The rest of what a shape must be, such as multiples.
  const ShapeFault fault = check(s, 1, 1);
  if (fault.field == nullptr) return;
  const std::string field = fault.field;
  const char* key = field == "hidden"         ? "hidden_size"
                    : field == "intermediate" ? "moe_intermediate_size"
                    : field != "latent"       ? fault.field
                    : s.latent == s.hidden    ? "hidden_size"
                                              : "routed_expert_hidden_size";
  text.wrong(key, fault.limit);
}

void read_router(const Keys& text, Shape& s) {
  text.must_be("moe_router_activation_func", "sigmoid");
  text.must_be("topk_method", "noaux_tc");
  text.must_be("num_expert_group", 1);
  text.must_be("topk_group", 1);
  s.router = Router::sigmoid_bias;
  s.renormalise = text.boolean("moe_renormalize") ? 1 : 0;
  s.routed_scale = text.number("routed_scaling_factor", 0, 1e6F);
}

void read_activation(const Keys& text, Shape& s) {
  const std::string act = text.text("hidden_act");
  if (act != "situ" && act != "silu") text.wrong("hidden_act", "\"situ\" or \"silu\"");
  text.must_be_absent("activation_clamp");
  s.activation = act == "situ" ? Activation::situ : Activation::silu;
  if (s.activation == Activation::situ) {
    s.act_beta = text.number("activation_situ_beta", 0, 1e6F);
    s.act_linear_beta = text.number("activation_situ_linear_beta", 0, 1e6F);
  }
  s.reduce = text.boolean("latent_moe_use_norm") ? Reduce::sum_rmsnorm : Reduce::sum;
  s.norm_eps = text.number("rms_norm_eps", 0, 1);
}

Shape read_shape(const std::string& file) {
  const json root = parse_object(read_file(file, kMaxConfigBytes), file);
  const Keys top(root, file, "");
  const Keys text = top.object("text_config");
  Shape s;
  read_sizes(text, s);
  read_router(text, s);
  read_activation(text, s);
  check_quantization(top, text);
  return s;
}

void narrow(Shape& s, LayerRange serve, const std::string& directory) {
  const uint32_t last = s.first_layer + s.layers - 1;
  if (serve.first > serve.last || serve.first < s.first_layer || serve.last > last)
    refuse("layers ", serve.first, '-', serve.last, " are not within ", s.first_layer, '-', last,
           ", the MoE layers of ", directory);
  s.first_layer = serve.first;
  s.layers = serve.last - serve.first + 1;
}

/// SHA-256 over what is added.
class Sha256 {
 public:
  Sha256() : context_(EVP_MD_CTX_new(), EVP_MD_CTX_free) {
    if (!context_ || EVP_DigestInit_ex(context_.get(), EVP_sha256(), nullptr) != 1) fail();
  }
  void add(std::span<const uint8_t> bytes) {
    if (EVP_DigestUpdate(context_.get(), bytes.data(), bytes.size()) != 1) fail();
  }
  void add(std::string_view text) { add({reinterpret_cast<const uint8_t*>(text.data()), text.size()}); }
  template <class T>
  void add_value(const T& value) {
    static_assert(std::has_unique_object_representations_v<T> || std::is_same_v<T, Shape>);
    add({reinterpret_cast<const uint8_t*>(&value), sizeof value});
  }
  Digest end() {
    Digest out{};
    if (EVP_DigestFinal_ex(context_.get(), out.data(), nullptr) != 1) fail();
    return out;
  }

 private:
  [[noreturn]] static void fail() { refuse("model digest: OpenSSL refuses SHA-256: install its default provider"); }
  std::unique_ptr<EVP_MD_CTX, decltype(&EVP_MD_CTX_free)> context_;
};

}  // namespace

Checkpoint::Checkpoint(std::string directory, std::optional<LayerRange> serve) : directory_(std::move(directory)) {
  shape_ = read_shape(file(kConfig));
  if (serve) narrow(shape_, *serve, directory_);
  read_index();
}

void Checkpoint::read_index() {
  has_index_ = ::access(file(kIndex).c_str(), F_OK) == 0;
  if (has_index_) {
    const std::string index = file(kIndex);
    const json root = parse_object(read_file(index, kMaxIndexBytes), index);
    const Keys weight_map = Keys(root, index, "").object("weight_map");
    for (const auto& [name, shard] : weight_map.members().items()) {
      if (!shard.is_string())
        refuse(index, ": tensor ", shown(name), " is at ", shown(shard.dump()), ", a file name is needed");
      add_tensor(index, name, shard.get_ref<const std::string&>());
    }
  } else {
    if (::access(file(kSingle).c_str(), F_OK) != 0)
      refuse(directory_, ": has neither ", kIndex, " nor ", kSingle, ": give the directory of a whole checkpoint");
    auto& only = shards_[kSingle] = std::make_unique<SafetensorsFile>(file(kSingle));
    for (const auto& [name, unused] : only->tensors()) add_tensor(file(kSingle), name, kSingle);
  }
  if (prefix_.empty())
    refuse(file(has_index_ ? kIndex : kSingle), ": none of ", tensors_.size(),
           " tensors begins with language_model.model.layers. or model.layers.: not a model of this format");
}

void Checkpoint::add_tensor(const std::string& index, const std::string& name, const std::string& shard) {
  constexpr std::string_view kExtension = ".safetensors";
  if (shard.find('/') != std::string::npos || shard.size() <= kExtension.size() ||
      std::string_view(shard).substr(shard.size() - kExtension.size()) != kExtension)
    refuse(index, ": tensor ", shown(name), " is at \"", shown(shard), "\", a file name NAME.safetensors is needed");
  const std::string_view view = name;
  if (view.starts_with("language_model.model.layers.")) prefix_ = "language_model.model.layers.";
  if (view.starts_with("model.layers.") && prefix_.empty()) prefix_ = "model.layers.";
  if (view.find(".block_sparse_moe.experts.") != view.npos && view.ends_with(".bias"))
    refuse(index, ": tensor ", shown(name), " is a bias of a routed expert, which cannot be served");
  tensors_.emplace(name, &*shards_.try_emplace(shard).first);
}

std::string Checkpoint::tensor_name(uint32_t layer, const std::string& rest) const {
  if (layer < shape_.first_layer || layer - shape_.first_layer >= shape_.layers)
    refuse(directory_, ": layer ", layer, " is not among those served, ", shape_.first_layer, '-',
           shape_.first_layer + shape_.layers - 1);
  return prefix_ + std::to_string(layer) + ".block_sparse_moe." + rest;
}

std::string Checkpoint::expert_prefix(uint32_t layer, uint32_t expert) const {
  if (expert >= shape_.experts) refuse(directory_, ": expert ", expert, " is not below ", shape_.experts);
  return tensor_name(layer, "experts." + std::to_string(expert) + ".");
}

const SafetensorsFile& Checkpoint::shard_of(const std::string& tensor) {
  const auto at = tensors_.find(tensor);
  if (at == tensors_.end())
    refuse(file(has_index_ ? kIndex : kSingle), ": tensor ", tensor, " is missing among ", tensors_.size(),
           ": copy the checkpoint again");
  auto& [name, opened] = *at->second;
  if (!opened) opened = std::make_unique<SafetensorsFile>(file(name));
  return *opened;
}

ExpertTensors Checkpoint::expert(uint32_t layer, uint32_t expert) {
  const std::string prefix = expert_prefix(layer, expert);
  const auto bytes = [&](const char* rest, uint64_t rows, uint64_t columns) {
    const std::string name = prefix + rest;
    return shard_of(name).bytes(name, {"U8"}, {rows, columns});
  };
  const uint64_t l = shape_.latent, i = shape_.intermediate;
  return {bytes("w1.weight_packed", i, l / 2), bytes("w1.weight_scale", i, l / kBlock),
          bytes("w2.weight_packed", l, i / 2), bytes("w2.weight_scale", l, i / kBlock),
          bytes("w3.weight_packed", i, l / 2), bytes("w3.weight_scale", i, l / kBlock)};
}

void Checkpoint::check_scales(uint32_t layer, uint32_t expert) {
  const ExpertTensors t = this->expert(layer, expert);
  const uint64_t l = shape_.latent / kBlock, i = shape_.intermediate / kBlock;
  const struct {
    const char* name;
    std::span<const uint8_t> scales;
    uint64_t columns;
  } matrices[] = {{"w1", t.w1_scale, l}, {"w2", t.w2_scale, i}, {"w3", t.w3_scale, l}};
  for (const auto& m : matrices) {
    const void* found = std::memchr(m.scales.data(), 255, m.scales.size());
    if (found == nullptr) continue;
    const std::string name = expert_prefix(layer, expert) + m.name + ".weight_scale";
    const auto at = static_cast<uint64_t>(static_cast<const uint8_t*>(found) - m.scales.data());
    refuse(shard_of(name).path(), ": tensor ", name, " has scale byte 255 (NaN) at row ", at / m.columns, ", block ",
           at % m.columns, ", at most 254 is needed: copy the file again");
  }
}

std::span<const uint8_t> Checkpoint::norm_bytes(uint32_t layer) {
  if (shape_.reduce == Reduce::sum) return {};
  const std::string name = tensor_name(layer, "routed_expert_norm.weight");
  return shard_of(name).bytes(name, {"BF16"}, {shape_.latent});
}

std::vector<uint16_t> Checkpoint::norm(uint32_t layer) {
  const auto bytes = norm_bytes(layer);
  std::vector<uint16_t> out(bytes.size() / 2);
  if (!bytes.empty()) std::memcpy(out.data(), bytes.data(), bytes.size());
  return out;
}

Digest Checkpoint::digest() {
  Sha256 sha;
  sha.add(read_file(file(kConfig), kMaxConfigBytes));
  if (has_index_) sha.add(read_file(file(kIndex), kMaxIndexBytes));
  for (const auto& [name, opened] : shards_) {
    // A shard that nobody else asked for is not kept: its list of tensors is large.
    std::unique_ptr<SafetensorsFile> passing;
    if (!opened) passing = std::make_unique<SafetensorsFile>(file(name));
    const SafetensorsFile& shard = opened ? *opened : *passing;
    const auto data = shard.data();
    sha.add_value(shard.size());
    sha.add(shard.header());
    sha.add(data.first(std::min<uint64_t>(kSampleBytes, data.size())));
    sha.add(data.last(std::min<uint64_t>(kSampleBytes, data.size())));
  }
  for (uint32_t m = shape_.first_layer; m - shape_.first_layer < shape_.layers; ++m) {
    const std::string bias = tensor_name(m, "gate.e_score_correction_bias");
    sha.add(norm_bytes(m));
    sha.add(shard_of(bias).bytes(bias, {"F32", "BF16"}, {shape_.experts}));
  }
  return sha.end();
}

Digest synthetic_digest(uint64_t seed, const Shape& shape) {
  Sha256 sha;
  sha.add("synthetic");
  sha.add_value(seed);
  sha.add_value(shape);
  return sha.end();
}

Digest identity_digest(const Shape& shape) {
  Sha256 sha;
  sha.add("identity");
  sha.add_value(shape);
  return sha.end();
}

}  // namespace moed
