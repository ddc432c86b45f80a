// The table of keys and the checks of single values. Checks between keys: config_check.cpp.
#include "daemon/config_keys.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <limits>
#include <type_traits>
#include <utility>

namespace moed {
namespace {

using Kind = ConfigKey::Kind;

constexpr uint32_t kMinute = 60'000;  // in ms
constexpr uint32_t kTenMinutes = 600'000;
constexpr uint32_t kHour = 3'600'000;
constexpr uint32_t kLongestDelayUs = 60'000'000;

const char* name(OnLostRank choice) { return choice == OnLostRank::drop ? "drop" : "fail"; }
const char* name(Activation activation) { return activation == Activation::silu ? "silu" : "situ"; }
const char* name(Reduce reduce) { return reduce == Reduce::sum ? "sum" : "rmsnorm"; }

std::string not_what(const RawValue& value, const std::string& expects) {
  if (value.list) return " is a list, not " + expects;
  return " = " + shown(value.text, value.quoted) + " is not " + expects;
}

/// A decimal whole number without sign (but '-'), leading zeros, point or exponent.
bool is_whole(std::string_view text) {
  if (text.starts_with('-')) text.remove_prefix(1);
  if (text.empty() || (text.size() > 1 && text[0] == '0')) return false;
  return std::all_of(text.begin(), text.end(), [](char c) { return c >= '0' && c <= '9'; });
}

/// A key that holds a whole number in min..max; `field` gives its place in a Config.
template <typename Place>
ConfigKey number(std::string path, std::type_identity_t<std::remove_cvref_t<std::invoke_result_t<Place, Config&>>> min,
                 std::type_identity_t<std::remove_cvref_t<std::invoke_result_t<Place, Config&>>> max, Place field) {
  using Number = std::remove_cvref_t<std::invoke_result_t<Place, Config&>>;
  const std::string range = std::to_string(min) + ".." + std::to_string(max);
  const std::string expects = "a whole number in " + range;
  auto set = [=](Config& config, const RawValue& value) -> std::string {
    if (value.list || value.quoted || !is_whole(value.text)) return not_what(value, expects);
    Number n{};
    const char* const end = value.text.data() + value.text.size();
    const auto [stop, error] = std::from_chars(value.text.data(), end, n);
    if (error != std::errc() || stop != end || n < min || n > max)
      return " = " + shown(value.text) + " is outside " + range;
    field(config) = n;
    return "";
  };
  return {std::move(path), expects, Kind::number, set, [=](const Config& c) { return std::to_string(field(c)); }};
}

/// A key that holds one of a few words, spelled by name().
template <typename Choice, typename Place>
ConfigKey choice(std::string path, std::initializer_list<Choice> all, Place field) {
  const std::vector<Choice> choices = all;
  std::string expects = "one of ";
  for (const Choice c : choices) expects.append(c == choices.front() ? "" : ", ").append(name(c));
  auto set = [=](Config& config, const RawValue& value) -> std::string {
    for (const Choice c : choices)
      if (!value.list && value.text == name(c)) return field(config) = c, "";
    return not_what(value, expects);
  };
  return {std::move(path), expects, Kind::choice, set, [=](const Config& c) -> std::string { return name(field(c)); }};
}

template <typename Place>
ConfigKey toggle(std::string path, Place field) {
  auto set = [=](Config& config, const RawValue& value) -> std::string {
    if (value.list || value.quoted || (value.text != "true" && value.text != "false"))
      return not_what(value, "true or false");
    return field(config) = value.text == "true", "";
  };
  return {std::move(path), "true or false", Kind::choice, set,
          [=](const Config& c) -> std::string { return field(c) ? "true" : "false"; }};
}

std::string quote(std::string_view text) {
  std::string out = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') out += '\\';
    out += c;
  }
  return out + '"';
}

using Check = bool (*)(std::string_view);

/// A key that holds text which `good` accepts.
template <typename Place>
ConfigKey text(std::string path, std::string expects, Check good, Place field) {
  auto set = [=](Config& config, const RawValue& value) -> std::string {
    if (value.list || !good(value.text)) return not_what(value, expects);
    return field(config) = value.text, "";
  };
  return {std::move(path), expects, Kind::text, set, [=](const Config& c) { return quote(field(c)); }};
}

bool of_characters(std::string_view text, std::string_view others) {
  return std::all_of(text.begin(), text.end(), [&](char c) {
    return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || others.find(c) != others.npos;
  });
}

bool is_group(std::string_view t) {
  return !t.empty() && t.size() <= 31 && of_characters(t, "._-") && t != "." && t != "..";
}

/// Continuation bytes that follow a UTF-8 lead byte; -1: not one.
int utf8_tail(unsigned char lead) {
  if (lead < 0x80) return 0;
  if (lead >= 0xC3 && lead < 0xE0) return 1;  // without C2: the C1 control characters
  if (lead >= 0xE0 && lead < 0xF0) return 2;
  return lead >= 0xF0 && lead < 0xF5 ? 3 : -1;
}

/// Text without control characters and with well-formed UTF-8, so that what is printed loads again.
bool is_line(std::string_view t) {
  for (std::size_t i = 0; i < t.size(); ++i) {
    const auto byte = static_cast<unsigned char>(t[i]);
    int tail = utf8_tail(byte);
    if (byte < 0x20 || byte == 0x7F || tail < 0) return false;
    for (; tail > 0; --tail)
      if (++i == t.size() || (static_cast<unsigned char>(t[i]) & 0xC0U) != 0x80) return false;
  }
  return t.size() <= 4096;
}

bool is_file(std::string_view t) { return !t.empty() && is_line(t); }
bool is_revision(std::string_view t) { return t.size() <= 31 && is_line(t); }

bool is_device(std::string_view t) {
  if (t.starts_with("GPU-") || t.starts_with("MIG-")) return t.size() > 4 && t.size() <= 80 && of_characters(t, "-/");
  return is_whole(t) && t.size() <= 3 && t[0] != '-';
}

bool is_listen(std::string_view t) {
  const auto endpoint = parse_endpoint(t);
  return t.empty() || (endpoint && endpoint->port != 0);
}
bool is_http_listen(std::string_view t) { return t.empty() || parse_endpoint(t); }

bool is_port_pair(std::string_view t, PortRange& out) {
  const auto dash = t.find('-');
  if (dash == t.npos || dash == 0) return false;
  const auto low = parse_endpoint(":" + std::string(t.substr(0, dash)));
  const auto high = parse_endpoint(":" + std::string(t.substr(dash + 1)));
  if (!low || !high || low->port == 0 || low->port > high->port) return false;
  out = {low->port, high->port};
  return true;
}

ConfigKey ports() {
  const std::string expects = "a range of ports such as 7600-8099, in 1..65535";
  return {"control.ucx_ports", expects, Kind::text,
          [=](Config& c, const RawValue& v) -> std::string {
            return !v.list && is_port_pair(v.text, c.control.ucx_ports) ? "" : not_what(v, expects);
          },
          [](const Config& c) {
            return std::to_string(c.control.ucx_ports.low) + "-" + std::to_string(c.control.ucx_ports.high);
          }};
}

ConfigKey peers() {
  const std::string expects = "a list of 1 to 128 entries host:port";
  auto set = [=](Config& config, const RawValue& value) -> std::string {
    if (!value.list) return not_what(value, expects);
    if (value.items.empty() || value.items.size() > kMaxRanks)
      return " has " + std::to_string(value.items.size()) + " entries, outside 1.." + std::to_string(kMaxRanks);
    for (std::size_t i = 0; i < value.items.size(); ++i) {
      const std::string entry = " = " + shown(value.items[i], true) + " (rank " + std::to_string(i) + ")";
      const auto endpoint = parse_endpoint(value.items[i]);
      if (!endpoint || endpoint->host.empty() || endpoint->port == 0)
        return entry + " is not host:port with a port in 1..65535";
      const auto same =
          std::find(value.items.begin(), value.items.begin() + static_cast<std::ptrdiff_t>(i), value.items[i]);
      if (const auto first = same - value.items.begin(); first != static_cast<std::ptrdiff_t>(i))
        return entry + " is also the entry of rank " + std::to_string(first) + "; every rank needs its own";
    }
    return config.control.peers = value.items, "";
  };
  auto get = [](const Config& config) {
    std::string out = "[";
    for (const std::string& peer : config.control.peers) out += (out.size() > 1 ? ", " : "") + quote(peer);
    return out + "]";
  };
  return {"control.peers", expects, Kind::list, set, get};
}

ConfigKey layers() {
  const std::string expects = "all, or a range in 0..65535 such as 1-2";
  auto set = [=](Config& config, const RawValue& value) -> std::string {
    if (!value.list && value.text == "all") return config.model.layers.reset(), "";
    const auto dash = std::min(value.text.find('-'), value.text.size());
    const std::string first = value.text.substr(0, dash);
    const std::string last = dash == value.text.size() ? first : value.text.substr(dash + 1);
    if (value.list || !is_whole(first) || !is_whole(last) || first.size() > 5 || last.size() > 5 || last[0] == '-')
      return not_what(value, expects);
    const LayerRange range{static_cast<uint32_t>(std::stoul(first)), static_cast<uint32_t>(std::stoul(last))};
    if (range.first > range.last || range.last > 65535) return not_what(value, expects);
    return config.model.layers = range, "";
  };
  auto get = [](const Config& config) -> std::string {
    const auto& range = config.model.layers;
    if (!range) return "all";
    return std::to_string(range->first) + (range->first == range->last ? "" : "-" + std::to_string(range->last));
  };
  return {"model.layers", expects, Kind::choice, set, get};
}

// The place of a value in a Config, const or not; a member's name cannot stand in parentheses.
// NOLINTBEGIN(bugprone-macro-parentheses)
#define AT(member) \
  [](auto& c) -> auto& { return c.member; }
// NOLINTEND(bugprone-macro-parentheses)

std::vector<ConfigKey> model_keys() {
  return {
      choice("model.source", {ModelSource::identity, ModelSource::synthetic, ModelSource::huggingface},
             AT(model.source)),
      text("model.path", "a directory's name", is_line, AT(model.path)),
      text("model.revision", "up to 31 bytes on one line", is_revision, AT(model.revision)),
      number("model.seed", 0, std::numeric_limits<uint64_t>::max(), AT(model.seed)),
      layers(),
      number("model.shape.hidden", 8, kMaxWidth, AT(model.shape.hidden)),
      number("model.shape.latent", 64, kMaxWidth, AT(model.shape.latent)),
      number("model.shape.intermediate", 32, 65536, AT(model.shape.intermediate)),
      number("model.shape.shared_intermediate", 0, 131072, AT(model.shape.shared_intermediate)),
      number("model.shape.experts", 1, kMaxExperts, AT(model.shape.experts)),
      number("model.shape.top_k", 1, kMaxTopK, AT(model.shape.top_k)),
      number("model.shape.layers", 1, 65535, AT(model.shape.layers)),
      choice("model.shape.activation", {Activation::situ, Activation::silu}, AT(model.shape.activation)),
      choice("model.shape.reduce", {Reduce::sum_rmsnorm, Reduce::sum}, AT(model.shape.reduce)),
  };
}

std::vector<ConfigKey> call_keys() {
  return {
      number("limits.lanes", 1, kMaxLanes, AT(limits.lanes)),
      number("limits.max_tokens", 1, kMaxTokens, AT(limits.max_tokens)),
      number("limits.max_call_tokens", 1, 1'048'576, AT(limits.max_call_tokens)),
      number("limits.slots", 1, 64, AT(limits.slots)),
      number("limits.arena_mb", 1, 65536, AT(limits.arena_mb)),
      number("calls.deadline_ms", 1, kMinute, AT(calls.deadline_ms)),
      number("calls.first_deadline_ms", 1, kMinute, AT(calls.first_deadline_ms)),
      choice("calls.on_lost_rank", {OnLostRank::fail, OnLostRank::drop}, AT(calls.on_lost_rank)),
      number("serve.linger_us", 0, 1000, AT(serve.linger_us)),
      number("serve.max_pairs", 1, 1'048'576, AT(serve.max_pairs)),
      number("service.spin_us", 0, 1'000'000, AT(service.spin_us)),
      number("service.cpu", -1, 1023, AT(service.cpu)),
  };
}

std::vector<ConfigKey> world_keys() {
  return {
      peers(),
      text("control.listen", "host:port, :port or empty, with a port in 1..65535", is_listen, AT(control.listen)),
      text("control.secret_dir", "a directory's name", is_line, AT(control.secret_dir)),
      ports(),
      number("heartbeat.interval_ms", 10, kMinute, AT(heartbeat.interval_ms)),
      number("heartbeat.lost_after_ms", 20, kTenMinutes, AT(heartbeat.lost_after_ms)),
      choice("gpu.sharing", {Sharing::mps, Sharing::dedicated, Sharing::timesliced}, AT(gpu.sharing)),
      choice("gpu.handles", {HandleChoice::automatic, HandleChoice::fd, HandleChoice::fabric}, AT(gpu.handles)),
      number("gpu.stuck_after_ms", 100, kTenMinutes, AT(gpu.stuck_after_ms)),
  };
}

std::vector<ConfigKey> operator_keys() {
  return {
      text("http.listen", "host:port, :port or empty, with a port in 0..65535", is_http_listen, AT(http.listen)),
      number("keeper.restarts_per_minute", 0, 60, AT(keeper.restarts_per_minute)),
      number("canary.period_ms", 0, kHour, AT(canary.period_ms)),
      number("recorder.calls", 1, 65536, AT(recorder.calls)),
      toggle("metrics.experts", AT(metrics.experts)),
      choice("log.level", {LogLevel::debug, LogLevel::info, LogLevel::warn, LogLevel::error}, AT(log.level)),
      number("debug.experts_delay_us", 0, kLongestDelayUs, AT(debug.experts_delay_us)),
      number("debug.loop_delay_us", 0, kLongestDelayUs, AT(debug.loop_delay_us)),
      number("debug.send_delay_us", 0, kLongestDelayUs, AT(debug.send_delay_us)),
      number("debug.call_delay_us", 0, kLongestDelayUs, AT(debug.call_delay_us)),
      number("debug.for_ms", 0, kHour, AT(debug.for_ms)),
      number("debug.flip_layer", 0, 65535, AT(debug.flip_layer)),
      number("debug.flip_expert", 0, kMaxExperts - 1, AT(debug.flip_expert)),
      number("debug.flip_after_ms", 0, kHour, AT(debug.flip_after_ms)),
  };
}

std::vector<ConfigKey> all_keys() {
  std::vector<ConfigKey> all{
      text("group", "1 to 31 of the characters A-Z a-z 0-9 . _ -, other than . and ..", is_group, AT(group)),
      number("rank", 0, kMaxRanks - 1, AT(rank)),
      choice("backend", {BackendKind::cpu, BackendKind::cuda}, AT(backend)),
      text("device", "a CUDA ordinal or a GPU UUID (GPU-...)", is_device, AT(device)),
      text("run_dir", "a directory's name", is_file, AT(run_dir)),
      choice("transport", {Transport::heap, Transport::nccl}, AT(transport)),
  };
  for (const auto& part : {model_keys(), call_keys(), world_keys(), operator_keys()})
    all.insert(all.end(), part.begin(), part.end());
  return all;
}

#undef AT

/// Levenshtein distance of two short texts.
std::size_t distance(std::string_view a, std::string_view b) {
  std::vector<std::size_t> row(b.size() + 1);
  for (std::size_t j = 0; j <= b.size(); ++j) row[j] = j;
  for (std::size_t i = 1; i <= a.size(); ++i) {
    std::size_t diagonal = std::exchange(row[0], i);
    for (std::size_t j = 1; j <= b.size(); ++j) {
      const std::size_t substituted = diagonal + (a[i - 1] == b[j - 1] ? 0 : 1);
      diagonal = row[j];
      row[j] = std::min({row[j] + 1, row[j - 1] + 1, substituted});
    }
  }
  return row[b.size()];
}

std::string_view last_part(std::string_view path) { return path.substr(path.rfind('.') + 1); }

}  // namespace

const std::vector<ConfigKey>& config_keys() {
  static const std::vector<ConfigKey> keys = all_keys();
  return keys;
}

const ConfigKey* find_key(std::string_view path) {
  for (const ConfigKey& key : config_keys())
    if (key.path == path) return &key;
  return nullptr;
}

bool is_section(std::string_view path) {
  return std::any_of(config_keys().begin(), config_keys().end(), [&](const ConfigKey& key) {
    return key.path.size() > path.size() && key.path.starts_with(path) && key.path[path.size()] == '.';
  });
}

std::string nearest_key(std::string_view path) {
  constexpr std::size_t kLongest = 64;  // of the table's keys none is longer
  path = path.substr(0, kLongest);
  std::string nearest;
  std::size_t least = std::numeric_limits<std::size_t>::max();
  auto consider = [&](std::string_view candidate) {
    const std::size_t d = std::min(distance(path, candidate), distance(last_part(path), last_part(candidate)) + 1);
    if (d >= least) return;
    least = d;
    nearest = candidate;
  };
  for (const ConfigKey& key : config_keys()) {
    for (auto dot = key.path.find('.'); dot != std::string::npos; dot = key.path.find('.', dot + 1))
      consider(std::string_view(key.path).substr(0, dot));
    consider(key.path);
  }
  return nearest;
}

std::string printable(std::string_view text, std::size_t most) {
  constexpr char hex[] = "0123456789abcdef";
  std::string out;
  for (const char c : text.substr(0, most)) {
    const auto byte = static_cast<unsigned char>(c);
    if (byte < 0x20 || byte > 0x7E)
      ((out += "\\x") += hex[byte >> 4]) += hex[byte & 15];
    else
      out += c;
  }
  if (text.size() > most) out += "...";
  return out;
}

std::string shown(std::string_view text, bool quoted) {
  const std::string out = printable(text, 60);
  return quoted || out.empty() || out.find(' ') != std::string::npos ? '"' + out + '"' : out;
}

std::string effective_yaml(const Config& config) {
  std::string out, section;
  for (const ConfigKey& key : config_keys()) {
    const auto dot = key.path.rfind('.');
    const std::string parent = dot == std::string::npos ? "" : key.path.substr(0, dot);
    if (parent == "model.shape" && config.model.source == ModelSource::huggingface) continue;
    const auto depth = static_cast<std::size_t>(std::count(key.path.begin(), key.path.end(), '.'));
    if (parent != section && !parent.empty()) out.append(2 * (depth - 1), ' ').append(last_part(parent)).append(":\n");
    section = parent;
    out.append(2 * depth, ' ').append(last_part(key.path)).append(": ").append(key.get(config)).append("\n");
  }
  return out;
}

}  // namespace moed
