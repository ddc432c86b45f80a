// Reads YAML as a stream of events, so that repeated keys, anchors and deep nesting are seen and refused where they
// stand; values go through the table in config_keys.cpp. The only file that includes yaml-cpp.
#include "daemon/config.h"

#include <yaml-cpp/eventhandler.h>
#include <yaml-cpp/exceptions.h>
#include <yaml-cpp/parser.h>

#include <algorithm>
#include <cerrno>
#include <map>
#include <sstream>
#include <system_error>
#include <utility>

#include "daemon/abi/fd.h"
#include "daemon/config_keys.h"

namespace moed {
namespace {

constexpr std::size_t kMaxFileBytes = 1 << 20;

/// One value of one document, and where it stands.
struct Setting {
  const ConfigKey* key;
  RawValue value;
  std::string place;
};

std::string sections_keys(std::string_view section) {
  std::string out;
  for (const ConfigKey& key : config_keys())
    if (key.path.starts_with(std::string(section) + "."))
      out += (out.empty() ? "" : ", ") + key.path.substr(section.size() + 1);
  return out;
}

/// Collects the settings of one document. Nesting cannot exceed that of the table: every map is a known section.
class Reader : public YAML::EventHandler {
 public:
  /// source: what messages name; lines: whether they add a line; base: the path of the document's root, empty in a
  /// file.
  Reader(std::string source, bool lines, std::string base)
      : source_(std::move(source)), lines_(lines), base_(std::move(base)) {}

  std::vector<Setting> settings;

  std::string place(const YAML::Mark& mark) const {
    return lines_ ? source_ + ":" + std::to_string(std::max(mark.line, 0) + 1) : source_;
  }
  [[noreturn]] void refuse(const YAML::Mark& mark, const std::string& why) const {
    throw ConfigError(place(mark) + ": " + why);
  }

  void OnDocumentStart(const YAML::Mark& mark) override {
    if (std::exchange(started_, true)) refuse(mark, "a second YAML document is not accepted; keep one");
  }
  void OnDocumentEnd() override {}

  void OnAlias(const YAML::Mark& mark, YAML::anchor_t) override {
    refuse(mark, "a YAML alias (*name) is not accepted; write the value out");
  }

  void OnNull(const YAML::Mark& mark, YAML::anchor_t anchor) override {
    check_plain(mark, "", anchor);
    if (maps_.empty() && base_.empty()) return;  // a document of comments only
    if (in_list_ || expects_key()) refuse(mark, "an empty entry is not accepted");
    const std::string path = take_path();
    const ConfigKey* key = find_key(path);
    refuse(mark, path + " has no value; give it " +
                     (key != nullptr ? key->expects : "the keys " + sections_keys(path)) + ", or leave it out");
  }

  void OnScalar(const YAML::Mark& mark, const std::string& tag, YAML::anchor_t anchor,
                const std::string& value) override {
    check_plain(mark, tag, anchor);
    if (in_list_) return settings.back().value.items.push_back(value);
    if (expects_key()) return take_key(mark, value);
    const std::string path = take_path();
    if (path.empty()) refuse(mark, shown(value) + " is not a map of keys");
    if (const ConfigKey* key = find_key(path))
      return settings.push_back({key, {value, tag == "!", false, {}}, place(mark)});
    refuse(mark, path + " = " + shown(value, tag == "!") + " is not a map; it has the keys " + sections_keys(path));
  }

  void OnSequenceStart(const YAML::Mark& mark, const std::string& tag, YAML::anchor_t anchor,
                       YAML::EmitterStyle::value) override {
    check_plain(mark, tag, anchor);
    if (in_list_) refuse(mark, settings.back().key->path + " has a list as an entry; entries are text");
    if (expects_key()) refuse(mark, "a list as a key is not accepted");
    const std::string path = take_path();
    const ConfigKey* key = find_key(path);
    if (key == nullptr)
      refuse(mark, (path.empty() ? "a list" : path + " is a list, which") + std::string(" is not a map of keys"));
    settings.push_back({key, {"", false, true, {}}, place(mark)});
    in_list_ = true;
  }
  void OnSequenceEnd() override { in_list_ = false; }

  void OnMapStart(const YAML::Mark& mark, const std::string& tag, YAML::anchor_t anchor,
                  YAML::EmitterStyle::value) override {
    check_plain(mark, tag, anchor);
    if (in_list_) refuse(mark, settings.back().key->path + " has a map as an entry; entries are text");
    if (expects_key()) refuse(mark, "a map as a key is not accepted");
    const std::string path = take_path();
    if (const ConfigKey* key = find_key(path)) refuse(mark, path + " is a map, not " + key->expects);
    maps_.push_back({path, ""});
  }
  void OnMapEnd() override { maps_.pop_back(); }

 private:
  struct Map {
    std::string path, key;  ///< key: read, its value not yet; empty: a key comes next
  };

  bool expects_key() const { return !maps_.empty() && maps_.back().key.empty(); }

  /// The path that the value now met belongs to.
  std::string take_path() {
    if (maps_.empty()) return base_;
    return join(std::exchange(maps_.back().key, ""));
  }

  std::string join(const std::string& key) const {
    return maps_.back().path.empty() ? key : maps_.back().path + "." + key;
  }

  void take_key(const YAML::Mark& mark, const std::string& key) {
    const std::string path = join(key);
    if (key.empty() || key.find('.') != std::string::npos || (find_key(path) == nullptr && !is_section(path)))
      refuse(mark, shown(path) + " is not a key; did you mean " + nearest_key(path) + "?" +
                       (find_key(path) != nullptr ? " (In a file each part stands on its own: a: {b: c}.)" : ""));
    const auto [before, fresh] = seen_.emplace(path, place(mark));
    if (!fresh) refuse(mark, path + " is given twice, first at " + before->second + "; leave one out");
    maps_.back().key = key;
  }

  void check_plain(const YAML::Mark& mark, const std::string& tag, YAML::anchor_t anchor) const {
    if (anchor != 0) refuse(mark, "a YAML anchor (&name) is not accepted; write the value out");
    if (!tag.empty() && tag != "?" && tag != "!")
      refuse(mark, "a YAML tag (" + shown(tag) + ") is not accepted; leave it out");
  }

  std::string source_;
  bool lines_;
  std::string base_;
  std::vector<Map> maps_;
  std::map<std::string, std::string> seen_;  ///< path -> place
  bool in_list_ = false;
  bool started_ = false;
};

std::vector<Setting> read_yaml(const std::string& text, Reader reader) {
  if (text.find('\0') != std::string::npos)
    reader.refuse(YAML::Mark(), "a NUL byte is not accepted; the text is UTF-8");
  std::istringstream stream(text +
                            "\n#");  // yaml-cpp takes an open quote as closed when a line end is all that follows
  try {
    YAML::Parser parser(stream);
    while (parser.HandleNextDocument(reader)) continue;
  } catch (const YAML::Exception& e) {
    reader.refuse(e.mark, "not valid YAML: " + printable(e.msg, 200));
  }
  return std::move(reader.settings);
}

std::string read_file(const std::string& file) {
  const auto fail = [&] {
    throw ConfigError(printable(file, 4096) + ": cannot be read: " + std::generic_category().message(errno));
  };
  const Fd fd(::open(file.c_str(), O_RDONLY | O_CLOEXEC));
  if (!fd) fail();
  std::string text;
  char part[16384];
  while (text.size() <= kMaxFileBytes) {
    const ssize_t n = ::read(fd.get(), part, sizeof part);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) fail();
    if (n == 0) return text;
    text.append(part, static_cast<std::size_t>(n));
  }
  throw ConfigError(printable(file, 4096) + ": has more than 1 MiB; a configuration is smaller");
}

/// The settings of one --set: text keys take their value as it stands, so that [::1]:80 needs no quotes.
std::vector<Setting> read_set(const std::string& set) {
  const std::string place = "--set";
  const auto equals = set.find('=');
  if (equals == std::string::npos || equals == 0)
    throw ConfigError(place + ": " + shown(set, true) + " is not KEY=VALUE, such as limits.lanes=4");
  const std::string path = set.substr(0, equals);
  const std::string value = set.substr(equals + 1);
  const ConfigKey* key = find_key(path);
  if (key == nullptr && !is_section(path))
    throw ConfigError(place + ": " + shown(path) + " is not a key; did you mean " + nearest_key(path) + "?");
  const bool quoted = value.starts_with('"') || value.starts_with('\'');
  if (key != nullptr && key->kind == ConfigKey::Kind::text && !quoted) return {{key, {value, false, false, {}}, place}};
  auto settings = read_yaml(value, Reader(place, false, path));
  if (settings.empty() && key != nullptr)
    throw ConfigError(place + ": " + path + " has no value; give it " + key->expects);
  return settings;
}

}  // namespace

Config load_config(const std::string& file, std::span<const std::string> sets) {
  std::vector<Setting> settings;
  if (!file.empty()) settings = read_yaml(read_file(file), Reader(printable(file, 4096), true, ""));
  for (const std::string& set : sets)
    for (Setting& setting : read_set(set)) settings.push_back(std::move(setting));

  Config config;
  std::map<std::string, std::string, std::less<>> places;
  for (const Setting& setting : settings) {
    if (const std::string why = setting.key->set(config, setting.value); !why.empty())
      throw ConfigError(setting.place + ": " + setting.key->path + why);
    places[setting.key->path] = setting.place;
  }
  if (!places.contains("model.shape.shared_intermediate"))
    config.model.shape.shared_intermediate = 2 * config.model.shape.intermediate;

  const auto given = [&](std::string_view path) { return places.find(path) != places.end(); };
  if (const auto fault = find_fault(config, given)) {
    const auto place = places.find(given(fault->key) ? fault->key : fault->other);
    const std::string otherwise = file.empty() ? "configuration" : printable(file, 4096);
    throw ConfigError((place != places.end() ? place->second : otherwise) + ": " + fault->text);
  }
  return config;
}

}  // namespace moed
