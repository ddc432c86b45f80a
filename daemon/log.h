// Logging to stderr, one line each: time (UTC), level, message, key=value. For example
//
//   2026-11-29T22:10:03.123Z info link ready peer=3 session=2 took_ms=41
//
// Thread-safe; never throws. Whatever a value holds, a line stays one line of printable ASCII.
#pragma once

#include <concepts>
#include <cstdint>
#include <initializer_list>
#include <map>
#include <optional>
#include <string>
#include <string_view>

namespace moed {

enum class LogLevel : uint32_t { debug = 0, info = 1, warn = 2, error = 3 };

constexpr const char* name(LogLevel level) {
  constexpr const char* names[] = {"debug", "info", "warn", "error"};
  return static_cast<uint32_t>(level) < 4 ? names[static_cast<uint32_t>(level)] : "unknown";
}

/// One key=value; it only refers to a text value, so it lives as long as the statement that logs it.
class Field {
 public:
  Field(std::string_view key, std::string_view value) : key_(key), kind_(Kind::text), text_(value) {}
  Field(std::string_view key, const std::string& value) : Field(key, std::string_view(value)) {}
  Field(std::string_view key, const char* value) : Field(key, std::string_view(value == nullptr ? "" : value)) {}
  Field(std::string_view key, bool value) : Field(key, std::string_view(value ? "true" : "false")) {}
  Field(std::string_view key, double value) : key_(key), kind_(Kind::real), real_(value) {}
  template <std::signed_integral T>
  Field(std::string_view key, T value) : key_(key), kind_(Kind::integer), integer_(value) {}
  template <std::unsigned_integral T>
  Field(std::string_view key, T value) : key_(key), kind_(Kind::natural), natural_(value) {}

  /// Appends " key=value".
  void append_to(std::string& line) const;

 private:
  enum class Kind { text, integer, natural, real };
  std::string_view key_;
  Kind kind_;
  std::string_view text_;
  union {
    int64_t integer_ = 0;
    uint64_t natural_;
    double real_;
  };
};

/// Lines below this level are left out; info at the start.
void set_level(LogLevel level) noexcept;
bool log_enabled(LogLevel level) noexcept;

/// Logs one line. The same message text comes at most five times a second; the first line after that says suppressed=N.
/// False: it was held back, or its level is off.
bool log_line(LogLevel level, std::string_view message, std::initializer_list<Field> fields = {}) noexcept;

inline void log_debug(std::string_view message, std::initializer_list<Field> fields = {}) noexcept {
  log_line(LogLevel::debug, message, fields);
}
inline void log_info(std::string_view message, std::initializer_list<Field> fields = {}) noexcept {
  log_line(LogLevel::info, message, fields);
}
inline void log_warn(std::string_view message, std::initializer_list<Field> fields = {}) noexcept {
  log_line(LogLevel::warn, message, fields);
}
inline void log_error(std::string_view message, std::initializer_list<Field> fields = {}) noexcept {
  log_line(LogLevel::error, message, fields);
}

/// The line without its time: "info link ready peer=3".
std::string format_line(LogLevel level, std::string_view message, std::initializer_list<Field> fields);

/// At most five equal messages a second. Not thread-safe; remembers at most 256 texts.
class RateLimit {
 public:
  /// How many equal messages were held back since the last one let through; nothing: hold this one back too.
  /// now_ns: any steady clock.
  std::optional<uint64_t> admit(std::string_view message, uint64_t now_ns);

 private:
  struct Window {
    uint64_t start_ns = 0;
    uint32_t admitted = 0;
    uint64_t suppressed = 0;
  };
  std::map<std::string, Window, std::less<>> windows_;
};

}  // namespace moed
