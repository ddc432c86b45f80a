// Lines for people and for machines, written whole by spdlog's stderr sink.
#include "daemon/log.h"

#include <spdlog/pattern_formatter.h>
#include <spdlog/sinks/stdout_sinks.h>
#include <spdlog/spdlog.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <functional>
#include <memory>
#include <mutex>
#include <utility>

namespace moed {
namespace {

constexpr uint32_t kPerWindow = 5;
constexpr uint64_t kWindowNs = 1'000'000'000;
constexpr std::size_t kMaxTexts = 256;
constexpr std::size_t kMaxValueBytes = 1024;

std::atomic<LogLevel> threshold{LogLevel::info};

/// Appends `text` with everything that is not printable ASCII escaped, and cut at kMaxValueBytes.
void append_escaped(std::string& line, std::string_view text, bool quoted) {
  constexpr char hex[] = "0123456789abcdef";
  for (const char c : text.substr(0, kMaxValueBytes)) {
    const auto byte = static_cast<unsigned char>(c);
    if (c == '\n')
      line += "\\n";
    else if (c == '\r')
      line += "\\r";
    else if (c == '\t')
      line += "\\t";
    else if (quoted && (c == '"' || c == '\\'))
      (line += '\\') += c;
    else if (byte < 0x20 || byte > 0x7E)
      ((line += "\\x") += hex[byte >> 4]) += hex[byte & 15];
    else
      line += c;
  }
  if (text.size() > kMaxValueBytes) line += "...";
}

void append_value(std::string& line, std::string_view text) {
  const bool plain = !text.empty() && std::all_of(text.begin(), text.end(), [](char c) {
    return c > ' ' && c <= '~' && c != '"' && c != '\\' && c != '=';
  });
  if (!plain) line += '"';
  append_escaped(line, text, !plain);
  if (!plain) line += '"';
}

/// The logger and the memory of what was logged: made at the first line and never destroyed, so that threads and
/// destructors may log until the process has ended.
struct Log {
  Log() : logger("moed", std::make_shared<spdlog::sinks::stderr_sink_mt>()) {
    logger.set_level(spdlog::level::trace);
    logger.set_formatter(
        std::make_unique<spdlog::pattern_formatter>("%Y-%m-%dT%H:%M:%S.%eZ %v", spdlog::pattern_time_type::utc, "\n"));
  }
  spdlog::logger logger;
  std::mutex mutex;
  RateLimit limit;
};

Log& the_log() {
  static Log* const log = new Log;
  return *log;
}

uint64_t steady_ns() {
  return static_cast<uint64_t>(
      std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
          .count());
}

}  // namespace

void Field::append_to(std::string& line) const {
  line += ' ';
  append_escaped(line, key_, false);
  line += '=';
  switch (kind_) {
    case Kind::text:
      append_value(line, text_);
      break;
    case Kind::integer:
      line += std::to_string(integer_);
      break;
    case Kind::natural:
      line += std::to_string(natural_);
      break;
    case Kind::real:
      line += fmt::format("{:g}", real_);
      break;
  }
}

std::string format_line(LogLevel level, std::string_view message, std::initializer_list<Field> fields) {
  std::string line = name(level);
  line += ' ';
  append_escaped(line, message, false);
  for (const Field& field : fields) field.append_to(line);
  return line;
}

std::optional<uint64_t> RateLimit::admit(std::string_view message, uint64_t now_ns) {
  auto at = windows_.find(message);
  if (at == windows_.end()) {
    if (windows_.size() >= kMaxTexts)
      std::erase_if(windows_,
                    [&](const auto& w) { return now_ns - w.second.start_ns >= kWindowNs && w.second.suppressed == 0; });
    if (windows_.size() >= kMaxTexts) windows_.clear();
    at = windows_.emplace(std::string(message), Window{now_ns, 0, 0}).first;
  }
  Window& window = at->second;
  if (now_ns - window.start_ns >= kWindowNs) {
    window.start_ns = now_ns;
    window.admitted = 0;
  }
  if (window.admitted == kPerWindow) {
    ++window.suppressed;
    return std::nullopt;
  }
  ++window.admitted;
  return std::exchange(window.suppressed, 0);
}

void set_level(LogLevel level) noexcept { threshold.store(level, std::memory_order_relaxed); }

bool log_enabled(LogLevel level) noexcept { return level >= threshold.load(std::memory_order_relaxed); }

bool log_line(LogLevel level, std::string_view message, std::initializer_list<Field> fields) noexcept {
  if (!log_enabled(level)) return false;
  try {
    Log& log = the_log();
    std::optional<uint64_t> suppressed;
    {
      const std::lock_guard lock(log.mutex);
      suppressed = log.limit.admit(message, steady_ns());
    }
    if (!suppressed) return false;
    std::string line = format_line(level, message, fields);
    if (*suppressed != 0) Field("suppressed", *suppressed).append_to(line);
    log.logger.log(spdlog::level::info, "{}", line);
    return true;
  } catch (...) {  // out of memory: a lost line is better than a lost daemon
    return false;
  }
}

}  // namespace moed
