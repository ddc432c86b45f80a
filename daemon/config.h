// The configuration of one daemon: a YAML file and --set overrides, checked once, into one struct whose nested structs
// are named as the YAML keys. The defaults below are the documented ones.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "daemon/abi/shape.h"
#include "daemon/log.h"
#include "kernels/backend.h"

namespace moed {

/// One sentence: place (FILE:LINE or --set), key, value, limit.
class ConfigError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

enum class BackendKind : uint32_t { cpu = 0, cuda = 1 };
enum class Transport : uint32_t { heap = 0, nccl = 1 };
enum class ModelSource : uint32_t { identity = 0, synthetic = 1, huggingface = 2 };
enum class Sharing : uint32_t { mps = 0, dedicated = 1, timesliced = 2 };
enum class HandleChoice : uint32_t { automatic = 0, fd = 1, fabric = 2 };

struct ShapeConfig {
  uint32_t hidden = 512, latent = 256, intermediate = 128;
  uint32_t shared_intermediate = 256;  ///< not given: 2 * intermediate
  uint32_t experts = 32, top_k = 4, layers = 2;
  Activation activation = Activation::situ;
  Reduce reduce = Reduce::sum_rmsnorm;
  bool operator==(const ShapeConfig&) const = default;
};

struct ModelConfig {
  ModelSource source = ModelSource::identity;
  std::string path, revision;
  uint64_t seed = 1;
  std::optional<LayerRange> layers;
  ShapeConfig shape;  ///< without meaning for huggingface
  bool operator==(const ModelConfig&) const = default;
};

struct LimitsConfig {
  uint32_t lanes = 2, max_tokens = 128, max_call_tokens = 65536, slots = 2, arena_mb = 64;
  bool operator==(const LimitsConfig&) const = default;
};

struct CallsConfig {
  uint32_t deadline_ms = 2000, first_deadline_ms = 60000;
  OnLostRank on_lost_rank = OnLostRank::fail;
  bool operator==(const CallsConfig&) const = default;
};

struct ServeConfig {
  uint32_t linger_us = 3, max_pairs = 8192;
  bool operator==(const ServeConfig&) const = default;
};

struct ServiceConfig {
  uint32_t spin_us = 50;
  int32_t cpu = -1;  ///< -1: not pinned
  bool operator==(const ServiceConfig&) const = default;
};

/// TCP ports, both ends included.
struct PortRange {
  uint16_t low = 7600, high = 8099;
  bool operator==(const PortRange&) const = default;
};

struct ControlConfig {
  std::vector<std::string> peers{"127.0.0.1:7400"};  ///< host:port, one a rank: their number is the world's size
  std::string listen, secret_dir;
  PortRange ucx_ports;
  bool operator==(const ControlConfig&) const = default;
};

struct HeartbeatConfig {
  uint32_t interval_ms = 100, lost_after_ms = 1000;
  bool operator==(const HeartbeatConfig&) const = default;
};

struct GpuConfig {
  Sharing sharing = Sharing::dedicated;
  HandleChoice handles = HandleChoice::automatic;
  uint32_t stuck_after_ms = 2000;
  bool operator==(const GpuConfig&) const = default;
};

struct HttpConfig {
  std::string listen = "127.0.0.1:9400";  ///< empty: off; port 0: any free one
  bool operator==(const HttpConfig&) const = default;
};

struct KeeperConfig {
  uint32_t restarts_per_minute = 5;
  bool operator==(const KeeperConfig&) const = default;
};

struct CanaryConfig {
  uint32_t period_ms = 5000;  ///< 0: off
  bool operator==(const CanaryConfig&) const = default;
};

struct RecorderConfig {
  uint32_t calls = 4096;
  bool operator==(const RecorderConfig&) const = default;
};

struct MetricsConfig {
  bool experts = false;
  bool operator==(const MetricsConfig&) const = default;
};

struct LogConfig {
  LogLevel level = LogLevel::info;
  bool operator==(const LogConfig&) const = default;
};

struct DebugConfig {
  uint32_t experts_delay_us = 0, loop_delay_us = 0, send_delay_us = 0, call_delay_us = 0, for_ms = 0;
  uint32_t flip_layer = 0, flip_expert = 0, flip_after_ms = 0;
  bool operator==(const DebugConfig&) const = default;
};

struct Config {
  std::string group = "moed";
  uint32_t rank = 0;
  BackendKind backend = BackendKind::cpu;
  std::string device = "0";  ///< CUDA ordinal or GPU UUID
  std::string run_dir = "/run/moed";
  Transport transport = Transport::heap;
  ModelConfig model;
  LimitsConfig limits;
  CallsConfig calls;
  ServeConfig serve;
  ServiceConfig service;
  ControlConfig control;
  HeartbeatConfig heartbeat;
  GpuConfig gpu;
  HttpConfig http;
  KeeperConfig keeper;
  CanaryConfig canary;
  RecorderConfig recorder;
  MetricsConfig metrics;
  LogConfig log;
  DebugConfig debug;

  uint32_t ranks() const { return static_cast<uint32_t>(control.peers.size()); }
  bool operator==(const Config&) const = default;
};

/// Reads `file` (empty: the defaults; at most 1 MiB), then each of `sets` ("a.b=c") over it in order, and checks the
/// whole. Throws ConfigError. What this build or machine cannot do is not refused here.
Config load_config(const std::string& file, std::span<const std::string> sets);

/// Every key with its value as YAML that loads to the same Config; model.shape is left out for huggingface.
std::string effective_yaml(const Config& config);

/// The shape of an identity or synthetic model: layers from 1, narrowed by model.layers and checked. Throws
/// ConfigError.
Shape configured_shape(const Config& config);

/// A model's shape narrowed by model.layers and checked against the world. Throws ConfigError.
Shape narrowed_shape(const Shape& model, const Config& config);

/// What the configuration says of a back end; weights, incarnation and in_process are the caller's.
BackendOptions backend_options(const Config& config, const Shape& shape);

/// "host:port", "[v6]:port" or ":port" (host empty: all addresses), brackets removed; nothing if it is none of them.
struct Endpoint {
  std::string host;
  uint16_t port = 0;
};
std::optional<Endpoint> parse_endpoint(std::string_view text);

/// 127.0.0.0/8 as four numbers, ::1 or localhost.
bool is_loopback(const std::string& host);

const char* name(BackendKind kind);
const char* name(Transport transport);
const char* name(ModelSource source);
const char* name(Sharing sharing);
const char* name(HandleChoice handles);

}  // namespace moed
