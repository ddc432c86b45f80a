// The table of configuration keys: path, what it may hold, how it is set and printed. Reading files, --set, suggestions
// and the printed configuration all come from it.
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "daemon/config.h"

namespace moed {

/// A value as it was written.
struct RawValue {
  std::string text;
  bool quoted = false;
  bool list = false;
  std::vector<std::string> items;  ///< of a list
};

struct ConfigKey {
  enum class Kind { number, text, choice, list };

  std::string path;     ///< dotted
  std::string expects;  ///< such as "a whole number in 1..64"
  Kind kind;
  /// Empty when the value is taken, else what to say after the key: " = 65 is outside 1..64".
  std::function<std::string(Config&, const RawValue&)> set;
  std::function<std::string(const Config&)> get;  ///< as YAML
};

/// In the order of the documentation; keys of one section stand together.
const std::vector<ConfigKey>& config_keys();

/// nullptr: no such key.
const ConfigKey* find_key(std::string_view path);

/// A path that other keys lie under, such as limits.
bool is_section(std::string_view path);

/// The key or section whose name is nearest to `path`, by edit distance; a right name in the wrong section is near.
std::string nearest_key(std::string_view path);

/// What is wrong between keys, and which key to look at: `key`, or `other` where key was not given.
struct ConfigFault {
  std::string key, text;
  std::string other = {};
};

/// The first fault between keys that are each in range; `given` says whether a key was set at all.
std::optional<ConfigFault> find_fault(const Config& config, const std::function<bool(std::string_view)>& given);

/// One line of printable ASCII: other bytes escaped, cut after `most` bytes.
std::string printable(std::string_view text, std::size_t most);

/// A value for a message: printable, at most 60 bytes, in quotes where that helps.
std::string shown(std::string_view text, bool quoted = false);

}  // namespace moed
