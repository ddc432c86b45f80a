// Configuration as an operator may write it: a YAML file and --set overrides, parts of the input between lines "%%";
// the first is the file (empty: none). Either one sentence of ConfigError, or a checked configuration whose printed
// form loads to the same.
#include "daemon/config.h"

#include "tests/fuzz/fuzz.h"

namespace {

using namespace moed;
using namespace moed::fuzz;

constexpr size_t kMostSets = 8;

/// What everybody behind load_config relies on.
void check_loaded(const Config& config) {
  require(config.rank < config.ranks() && config.ranks() <= kMaxRanks, "rank within 1..128 ranks");
  require(config.run_dir.size() + config.group.size() <= 90, "run_dir and group fit a socket's path");
  for (const std::string& peer : config.control.peers) {
    const auto endpoint = parse_endpoint(peer);
    require(endpoint && !endpoint->host.empty() && endpoint->port != 0, "a peer is host:port", peer);
    require(!config.control.secret_dir.empty() || is_loopback(endpoint->host), "no key: loopback only", peer);
  }
  if (config.model.source == ModelSource::huggingface) return;
  const Shape shape = configured_shape(config);
  require(check(shape, config.ranks(), config.limits.max_tokens).field == nullptr, "the shape is sound");
  const BackendOptions options = backend_options(config, shape);
  require(planned_memory(options).heap > 0, "a back end of it can be planned");
}

/// What is printed loads to the same, and printing that gives the same text.
void check_printed(const Config& config) {
  static MemoryFile file;
  const std::string printed = effective_yaml(config);
  file.set(printed);
  try {
    const Config again = load_config(file.path(), {});
    require(again == config, "the printed configuration loads to the same", printed);
    require(effective_yaml(again) == printed, "and prints the same", printed);
  } catch (const ConfigError& e) {
    require(false, "the printed configuration loads", e.what() + ("\n" + printed));
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static MemoryFile file;
  std::vector<std::string> sets = parts_of({reinterpret_cast<const char*>(data), size});
  const std::string yaml = std::move(sets.front());
  sets.erase(sets.begin());
  if (sets.size() > kMostSets) sets.resize(kMostSets);
  file.set(yaml);
  Config config;
  try {
    config = load_config(yaml.empty() ? "" : file.path(), sets);
  } catch (const ConfigError& e) {
    require_sentence(e.what());
    return 0;
  }
  check_loaded(config);
  check_printed(config);
  return 0;
}
