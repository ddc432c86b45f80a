// What must hold between keys, and what the configuration means to others: the shape, the back end's options,
// addresses.
#include <arpa/inet.h>

#include <algorithm>
#include <charconv>

#include "daemon/config_keys.h"

namespace moed {
namespace {

constexpr std::size_t kMaxSocketPrefix = 90;  // sun_path has 108 bytes; RANK.sock and its neighbours need the rest

bool is_host_name(std::string_view text) {
  return !text.empty() && text.size() <= 253 && std::all_of(text.begin(), text.end(), [](char c) {
    return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '.' || c == '-' ||
           c == '_';
  });
}

bool is_v6(const std::string& text) {
  in6_addr address{};
  // inet_pton reads up to the first zero byte.
  return text.find('\0') == text.npos && ::inet_pton(AF_INET6, text.c_str(), &address) == 1;
}

std::string range_text(const LayerRange& r) {
  return std::to_string(r.first) + (r.first == r.last ? "" : "-" + std::to_string(r.last));
}

/// The key that sets what check() calls `field`.
std::string key_of(std::string_view field) {
  if (field == "ranks") return "control.peers";
  if (field == "max_tokens") return "limits.max_tokens";
  return "model.shape." + std::string(field);
}

/// Narrows `shape` to the configured layers and checks the result.
std::optional<ConfigFault> narrow(Shape& shape, const Config& config) {
  const auto fault = check(shape, config.ranks(), config.limits.max_tokens);
  if (fault.field != nullptr) {
    const std::string key = key_of(fault.field);
    return ConfigFault{key, key + " = " + std::to_string(fault.value) + " is not " + fault.limit, "control.peers"};
  }
  if (!config.model.layers) return std::nullopt;
  const LayerRange served = *config.model.layers;
  const LayerRange all{shape.first_layer, shape.first_layer + shape.layers - 1};
  if (served.first < all.first || served.last > all.last)
    return ConfigFault{"model.layers",
                       "model.layers = " + range_text(served) + " is outside the model's " + range_text(all)};
  shape.first_layer = served.first;
  shape.layers = served.last - served.first + 1;
  return std::nullopt;
}

Shape whole_shape(const ShapeConfig& from) {
  Shape s;
  s.hidden = from.hidden;
  s.latent = from.latent;
  s.intermediate = from.intermediate;
  s.shared_intermediate = from.shared_intermediate;
  s.experts = from.experts;
  s.top_k = from.top_k;
  s.first_layer = 1;
  s.layers = from.layers;
  s.activation = from.activation;
  s.reduce = from.reduce;
  return s;
}

std::optional<ConfigFault> model_fault(const Config& config, const std::function<bool(std::string_view)>& given) {
  const ModelConfig& model = config.model;
  if (model.source != ModelSource::huggingface) {
    if (!model.path.empty())
      return ConfigFault{"model.path", "model.path = " + shown(model.path, true) +
                                           " is only for model.source huggingface, here " + name(model.source)};
    Shape shape = whole_shape(model.shape);
    return narrow(shape, config);
  }
  if (model.path.empty())
    return ConfigFault{"model.source", "model.source = huggingface needs model.path, the checkpoint's directory"};
  for (const ConfigKey& key : config_keys())
    if (key.path.starts_with("model.shape.") && given(key.path))
      return ConfigFault{
          key.path, key.path + " is not for model.source huggingface: the checkpoint gives the shape; leave it out"};
  return std::nullopt;
}

std::optional<ConfigFault> drill_fault(const Config& config) {
  if (config.debug.flip_after_ms == 0) return std::nullopt;
  const ShapeConfig& shape = config.model.shape;
  const auto outside = [](const std::string& key, uint64_t value, uint64_t first, uint64_t last) {
    return ConfigFault{key, key + " = " + std::to_string(value) + " is outside " + std::to_string(first) + ".." +
                                std::to_string(last) + " of model.shape"};
  };
  const DebugConfig& debug = config.debug;
  if (config.model.source == ModelSource::synthetic) {
    if (debug.flip_layer < 1 || debug.flip_layer > shape.layers)
      return outside("debug.flip_layer", debug.flip_layer, 1, shape.layers);
    if (debug.flip_expert >= shape.experts)
      return outside("debug.flip_expert", debug.flip_expert, 0, shape.experts - 1);
    return std::nullopt;
  }
  return ConfigFault{"debug.flip_after_ms", "debug.flip_after_ms = " + std::to_string(config.debug.flip_after_ms) +
                                                " is only for model.source synthetic, here " +
                                                name(config.model.source)};
}

std::optional<ConfigFault> trust_fault(const Config& config) {
  const ControlConfig& control = config.control;
  if (!control.secret_dir.empty()) return std::nullopt;
  constexpr const char* kRemedy = "; name a directory of keys in control.secret_dir";
  for (const std::string& peer : control.peers)
    if (!is_loopback(parse_endpoint(peer)->host))
      return ConfigFault{"control.peers", "control.secret_dir is empty, but control.peers has " + shown(peer, true) +
                                              ", which is not a loopback address" + kRemedy};
  if (!control.listen.empty() && !is_loopback(parse_endpoint(control.listen)->host))
    return ConfigFault{"control.listen", "control.secret_dir is empty, but control.listen = " +
                                             shown(control.listen, true) + " is not a loopback address" + kRemedy};
  return std::nullopt;
}

}  // namespace

std::optional<ConfigFault> find_fault(const Config& config, const std::function<bool(std::string_view)>& given) {
  if (const std::size_t bytes = config.run_dir.size() + config.group.size(); bytes > kMaxSocketPrefix)
    return ConfigFault{"run_dir", "run_dir = " + shown(config.run_dir, true) + " and group = " + shown(config.group) +
                                      " have " + std::to_string(bytes) + " bytes together, at most " +
                                      std::to_string(kMaxSocketPrefix)};
  if (config.rank >= config.ranks())
    return ConfigFault{"rank", "rank = " + std::to_string(config.rank) + " is outside 0.." +
                                   std::to_string(config.ranks() - 1) + ": control.peers has " +
                                   std::to_string(config.ranks()) + (config.ranks() == 1 ? " entry" : " entries") +
                                   ", one a rank"};
  if (config.heartbeat.lost_after_ms < 2 * config.heartbeat.interval_ms)
    return ConfigFault{"heartbeat.lost_after_ms",
                       "heartbeat.lost_after_ms = " + std::to_string(config.heartbeat.lost_after_ms) +
                           " is under twice heartbeat.interval_ms = " + std::to_string(config.heartbeat.interval_ms),
                       "heartbeat.interval_ms"};
  if (auto fault = trust_fault(config)) return fault;
  if (auto fault = drill_fault(config)) return fault;
  return model_fault(config, given);
}

Shape narrowed_shape(const Shape& model, const Config& config) {
  Shape shape = model;
  if (const auto fault = narrow(shape, config)) throw ConfigError(fault->text);
  return shape;
}

Shape configured_shape(const Config& config) { return narrowed_shape(whole_shape(config.model.shape), config); }

BackendOptions backend_options(const Config& config, const Shape& shape) {
  BackendOptions o;
  o.shape = shape;
  o.rank = config.rank;
  o.ranks = config.ranks();
  o.lanes = config.limits.lanes;
  o.max_tokens = config.limits.max_tokens;
  o.max_call_tokens = config.limits.max_call_tokens;
  o.on_lost_rank = config.calls.on_lost_rank;
  o.linger_us = config.serve.linger_us;
  o.max_pairs = config.serve.max_pairs;
  const DebugConfig& debug = config.debug;
  o.drills = {debug.experts_delay_us, debug.loop_delay_us, debug.send_delay_us, debug.call_delay_us,
              debug.for_ms,           debug.flip_layer,    debug.flip_expert,   debug.flip_after_ms};
  return o;
}

std::optional<Endpoint> parse_endpoint(std::string_view text) {
  const auto colon = text.rfind(':');
  if (colon == text.npos) return std::nullopt;
  std::string host(text.substr(0, colon));
  const std::string_view digits = text.substr(colon + 1);
  Endpoint endpoint;
  const auto [stop, error] = std::from_chars(digits.data(), digits.data() + digits.size(), endpoint.port);
  if (digits.empty() || error != std::errc() || stop != digits.data() + digits.size()) return std::nullopt;
  if (host.size() > 2 && host.front() == '[' && host.back() == ']') {
    host = host.substr(1, host.size() - 2);
    if (!is_v6(host)) return std::nullopt;
  } else if (!host.empty() && !is_host_name(host)) {
    return std::nullopt;
  }
  endpoint.host = host;
  return endpoint;
}

bool is_loopback(const std::string& host) {
  in_addr v4{};
  in6_addr v6{};
  if (::inet_pton(AF_INET, host.c_str(), &v4) == 1) return (ntohl(v4.s_addr) >> 24) == 127;
  if (::inet_pton(AF_INET6, host.c_str(), &v6) == 1) return IN6_IS_ADDR_LOOPBACK(&v6);
  return host == "localhost";
}

const char* name(BackendKind kind) { return kind == BackendKind::cuda ? "cuda" : "cpu"; }

const char* name(Transport transport) { return transport == Transport::nccl ? "nccl" : "heap"; }

const char* name(ModelSource source) {
  if (source == ModelSource::huggingface) return "huggingface";
  return source == ModelSource::synthetic ? "synthetic" : "identity";
}

const char* name(Sharing sharing) {
  if (sharing == Sharing::mps) return "mps";
  return sharing == Sharing::timesliced ? "timesliced" : "dedicated";
}

const char* name(HandleChoice handles) {
  if (handles == HandleChoice::fabric) return "fabric";
  return handles == HandleChoice::fd ? "fd" : "auto";
}

}  // namespace moed
