// One question to a daemon without a lane, and reading the JSON that it answers.
#pragma once

#include <cstddef>
#include <nlohmann/json.hpp>
#include <span>
#include <string>
#include <type_traits>
#include <vector>

#include "daemon/abi/fd.h"
#include "daemon/abi/futex.h"
#include "daemon/abi/status.h"
#include "daemon/client/connect.h"

namespace moed::ctl {

using Json = nlohmann::json;

/// Where an answer goes, how long it is, and the descriptors that came with it.
struct Heard {
  std::span<std::byte> answer;
  std::size_t got = 0;
  std::vector<Fd> fds{};
};

/// Sends one message to the daemon at `socket` (empty: libmoed's choice) and takes the answer, all within `limit`.
/// daemon_lost: nobody answers; others as connect.h says.
Status ask(const std::string& socket, Nanos limit, std::span<const std::byte> question, Heard& heard, Sentence& why);

/// The daemon's state as JSON text.
Status ask_status(const std::string& socket, Nanos limit, std::string& json, Sentence& why);

/// Appends like printf; at most 511 bytes.
void append(std::string& to, const char* format, ...) __attribute__((format(printf, 2, 3)));

/// A member of an object whose type may be another than expected in a newer daemon.
template <class T>
T get(const Json& object, const char* key, T otherwise) {
  const auto at = object.find(key);
  if (!object.is_object() || at == object.end()) return otherwise;
  if constexpr (std::is_same_v<T, std::string>) {
    return at->is_string() ? at->template get<std::string>() : otherwise;
  } else if constexpr (std::is_same_v<T, bool>) {
    return at->is_boolean() ? at->template get<bool>() : otherwise;
  } else if constexpr (std::is_integral_v<T>) {
    return at->is_number_unsigned() ? at->template get<T>() : otherwise;
  } else {
    return at->is_number() ? at->template get<T>() : otherwise;
  }
}

/// A member of an object; null when there is none.
const Json& child(const Json& object, const char* key);

/// "ready", or why not.
std::string readiness(const Json& state);

}  // namespace moed::ctl
