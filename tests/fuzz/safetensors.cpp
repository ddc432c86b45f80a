// Checkpoints as somebody may have left them on a disk. The first byte says what the rest is:
//   'f'  a whole safetensors file
//   'h'  "N\n" and a header's JSON: a file with that header, its length right, and N bytes of data
//   'c'  parts between lines "%%": config.json, the index (empty: none), two shards as in 'h'
// Either one sentence of WeightsError, or tensors that lie within the mapping and have the sizes that the shape says.
#include "daemon/weights/safetensors.h"

#include <filesystem>
#include <map>

#include "daemon/weights/checkpoint.h"
#include "tests/fuzz/fuzz.h"
#include "tests/support/temp_dir.h"

namespace {

using namespace moed;
using namespace moed::fuzz;

constexpr size_t kMostData = 16384;

/// "N\n" + JSON as the bytes of a file, all but the data, and the file's size with it.
std::pair<std::string, size_t> file_of(std::string_view text) {
  size_t data = 0;
  size_t at = 0;
  for (; at < text.size() && at < 5 && text[at] >= '0' && text[at] <= '9'; ++at)
    data = data * 10 + static_cast<size_t>(text[at] - '0');
  if (at < text.size() && text[at] == '\n') ++at;
  const std::string_view json = text.substr(at);
  const uint64_t header = json.size();
  std::string bytes(reinterpret_cast<const char*>(&header), sizeof header);
  bytes += json;
  const size_t whole = bytes.size() + std::min(data, kMostData);
  return {std::move(bytes), whole};
}

/// Reads all bytes, so that a span beyond a mapping is seen.
void read_all(std::span<const uint8_t> bytes) {
  for (const volatile uint8_t& byte : bytes) static_cast<void>(uint8_t{byte});
}

void check_file(const std::string& path) {
  const SafetensorsFile file(path);
  require(file.header().size() + file.data().size() == file.size(), "header and data are the file");
  std::map<const uint8_t*, size_t> places;
  for (const auto& [name, tensor] : file.tensors()) {
    const auto begin = static_cast<size_t>(tensor.bytes.data() - file.data().data());
    require(tensor.bytes.empty() || begin + tensor.bytes.size() <= file.data().size(), "a tensor lies in the data");
    if (!tensor.bytes.empty())
      require(places.emplace(tensor.bytes.data(), tensor.bytes.size()).second, "no byte belongs to two tensors");
    read_all(tensor.bytes);
    try {
      require(&file.tensor(name) == &tensor, "a tensor is found by its name");
      file.bytes(name, {"U8", "BF16"}, {64, 32});
    } catch (const WeightsError& e) {
      require_sentence(e.what());
    }
  }
  size_t covered = 0;
  for (const auto& [at, bytes] : places) {
    require(at == file.data().data() + covered, "tensors lie one behind the other");
    covered += bytes;
  }
  require(covered == file.data().size(), "every byte belongs to a tensor");
}

/// The files of a model's directory; two directories see them, one with an index and one without.
struct Model {
  moed::test::TempDir directory;
  MemoryFile config, index, first, second;
  Model() {
    link("indexed/config.json", config), link("indexed/model.safetensors.index.json", index);
    link("indexed/a.safetensors", first), link("indexed/b.safetensors", second);
    link("single/config.json", config), link("single/model.safetensors", first);
  }
  void link(const std::string& name, const MemoryFile& file) const {
    const std::filesystem::path place = directory.path() + "/" + name;
    std::filesystem::create_directories(place.parent_path());
    std::filesystem::create_symlink(file.path(), place);
  }
};

void check_expert(const Shape& s, const ExpertTensors& t) {
  const size_t packed = size_t{s.intermediate} * s.latent / 2;
  const size_t scales = size_t{s.intermediate} * s.latent / kBlock;
  for (const auto& matrix : {t.w1, t.w2, t.w3}) require(matrix.size() == packed, "a matrix of packed codes");
  for (const auto& matrix : {t.w1_scale, t.w2_scale, t.w3_scale}) require(matrix.size() == scales, "its scales");
  for (const auto& matrix : {t.w1, t.w2, t.w3}) read_all(matrix);
}

/// Everything that a daemon asks of a checkpoint, of the first and the last layer and expert.
void check_checkpoint(const std::string& directory, std::optional<LayerRange> serve) {
  Checkpoint model(directory, serve);
  const Shape& s = model.shape();
  require(check(s, 1, 1).field == nullptr, "the shape is sound");
  if (serve) require(s.first_layer == serve->first && s.layers == serve->last - serve->first + 1, "as asked for");
  const auto attempt = [](auto ask) {
    try {
      ask();
    } catch (const WeightsError& e) {
      require_sentence(e.what());
    }
  };
  for (const uint32_t layer : {s.first_layer, s.first_layer + s.layers - 1, s.first_layer + s.layers}) {
    for (const uint32_t expert : {0U, s.experts - 1, s.experts}) {
      attempt([&] { check_expert(s, model.expert(layer, expert)); });
      attempt([&] { model.check_scales(layer, expert); });
    }
    attempt([&] {
      const size_t values = model.norm(layer).size();
      require(values == (s.reduce == Reduce::sum ? 0 : s.latent), "a norm of one row");
    });
  }
  attempt([&] { require(model.digest() == model.digest(), "one model, one digest"); });
}

void check_directory(std::string_view text) {
  static Model model;
  std::vector<std::string> parts = parts_of(text);
  parts.resize(4);
  model.config.set(parts[0]);
  model.index.set(parts[1]);
  const auto [first, first_size] = file_of(parts[2]);
  model.first.set(first, first_size);
  const auto [second, second_size] = file_of(parts[3]);
  model.second.set(second, second_size);
  const std::string directory = model.directory.path() + (parts[1].empty() ? "/single" : "/indexed");
  check_checkpoint(directory, {});
  check_checkpoint(directory, LayerRange{1, 1});
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static MemoryFile file;
  if (size == 0) return 0;
  const std::string_view rest(reinterpret_cast<const char*>(data) + 1, size - 1);
  try {
    if (data[0] == 'c') {
      check_directory(rest);
    } else if (data[0] == 'h') {
      const auto [bytes, whole] = file_of(rest);
      file.set(bytes, whole);
      check_file(file.path());
    } else if (data[0] == 'f') {
      file.set(rest);
      check_file(file.path());
    }
  } catch (const WeightsError& e) {
    require_sentence(e.what());
  }
  return 0;
}
