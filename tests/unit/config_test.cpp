// Configuration: defaults, the documented example, every bad value's sentence, and inputs that nobody would write.
#include "daemon/config.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdlib>
#include <fstream>
#include <random>
#include <sstream>
#include <string>
#include <vector>

#include "daemon/config_keys.h"
#include "tests/unit/config_file.h"

namespace moed {
namespace {

const std::string kExample = MOED_SOURCE "/deploy/config/cpu.yaml";

std::string read(const std::string& file) {
  std::ostringstream out;
  out << std::ifstream(file).rdbuf();
  return out.str();
}

TEST_F(ConfigFile, NothingGivenIsTheDefault) {
  EXPECT_EQ(load_config("", {}), Config{});
  EXPECT_EQ(load(""), Config{});
  EXPECT_EQ(load("# only a comment\n"), Config{});
  EXPECT_EQ(load("---\n...\n"), Config{});
  EXPECT_EQ(load("{}"), Config{});
}

TEST_F(ConfigFile, ExampleIsTheDefaultAndHasEveryKey) {
  EXPECT_EQ(load_config(kExample, {}), Config{});
  // Every line of the effective configuration stands in the example, where a comment follows it.
  const std::string example = read(kExample);
  std::istringstream lines(effective_yaml(Config{}));
  unsigned keys = 0;
  for (std::string line; std::getline(lines, line); ++keys) {
    const auto at = example.find("\n" + line);
    ASSERT_NE(at, std::string::npos) << line;
    const std::string rest = example.substr(at + 1 + line.size(), example.find('\n', at + 1) - at - 1 - line.size());
    if (line.ends_with(":")) continue;
    EXPECT_NE(rest.find("  # "), std::string::npos) << line << " has no comment";
  }
  EXPECT_GT(keys, config_keys().size());
}

// The defaults as the documentation shows them, typed out a second time.
TEST(ConfigDefaults, AreTheDocumentedOnes) {
  const Config c;
  EXPECT_EQ(c.group, "moed");
  EXPECT_EQ(c.rank, 0U);
  EXPECT_EQ(c.backend, BackendKind::cpu);
  EXPECT_EQ(c.device, "0");
  EXPECT_EQ(c.run_dir, "/run/moed");
  EXPECT_EQ(c.transport, Transport::heap);
  EXPECT_EQ(c.model.source, ModelSource::identity);
  EXPECT_EQ(c.model.seed, 1U);
  EXPECT_FALSE(c.model.layers);
  EXPECT_EQ(c.limits, (LimitsConfig{2, 128, 65536, 2, 64}));
  EXPECT_EQ(c.calls, (CallsConfig{2000, 60000, OnLostRank::fail}));
  EXPECT_EQ(c.serve, (ServeConfig{3, 8192}));
  EXPECT_EQ(c.service, (ServiceConfig{50, -1}));
  EXPECT_EQ(c.control.peers, std::vector<std::string>{"127.0.0.1:7400"});
  EXPECT_EQ(c.control.ucx_ports, (PortRange{7600, 8099}));
  EXPECT_EQ(c.heartbeat, (HeartbeatConfig{100, 1000}));
  EXPECT_EQ(c.gpu, (GpuConfig{Sharing::dedicated, HandleChoice::automatic, 2000}));
  EXPECT_EQ(c.http.listen, "127.0.0.1:9400");
  EXPECT_EQ(c.keeper.restarts_per_minute, 5U);
  EXPECT_EQ(c.canary.period_ms, 5000U);
  EXPECT_EQ(c.recorder.calls, 4096U);
  EXPECT_FALSE(c.metrics.experts);
  EXPECT_EQ(c.log.level, LogLevel::info);
  EXPECT_EQ(c.debug, (DebugConfig{0, 0, 0, 0, 0}));
  const Shape s = configured_shape(c);
  EXPECT_EQ(s.hidden, 512U);
  EXPECT_EQ(s.latent, 256U);
  EXPECT_EQ(s.intermediate, 128U);
  EXPECT_EQ(s.shared_intermediate, 256U);
  EXPECT_EQ(s.experts, 32U);
  EXPECT_EQ(s.top_k, 4U);
  EXPECT_EQ(s.first_layer, 1U);
  EXPECT_EQ(s.layers, 2U);
  EXPECT_EQ(s.activation, Activation::situ);
  EXPECT_EQ(s.reduce, Reduce::sum_rmsnorm);
}

// Another value for every key: that each reaches its own member shows in the printed text and survives a reload.
const std::vector<std::string> kOthers = {"group=b.c",
                                          "rank=1",
                                          "backend=cuda",
                                          "device=GPU-12ab",
                                          "run_dir=/tmp/a \"b\" \\c",
                                          "transport=nccl",
                                          "model.source=synthetic",
                                          "model.path=",
                                          "model.revision=r \xC3\xA9 1",
                                          "model.seed=18446744073709551615",
                                          "model.layers=2-3",
                                          "model.shape.hidden=1024",
                                          "model.shape.latent=128",
                                          "model.shape.intermediate=64",
                                          "model.shape.shared_intermediate=7",
                                          "model.shape.experts=48",
                                          "model.shape.top_k=3",
                                          "model.shape.layers=5",
                                          "model.shape.activation=silu",
                                          "model.shape.reduce=sum",
                                          "limits.lanes=64",
                                          "limits.max_tokens=832",
                                          "limits.max_call_tokens=1048576",
                                          "limits.slots=3",
                                          "limits.arena_mb=65",
                                          "calls.deadline_ms=11",
                                          "calls.first_deadline_ms=12",
                                          "calls.on_lost_rank=drop",
                                          "serve.linger_us=13",
                                          "serve.max_pairs=14",
                                          "service.spin_us=15",
                                          "service.cpu=16",
                                          "control.peers=[\"[::1]:1\", localhost:2]",
                                          "control.listen=[::1]:17",
                                          "control.secret_dir=/s",
                                          "control.ucx_ports=18-19",
                                          "heartbeat.interval_ms=20",
                                          "heartbeat.lost_after_ms=210",
                                          "gpu.sharing=mps",
                                          "gpu.handles=fabric",
                                          "gpu.stuck_after_ms=220",
                                          "http.listen=:0",
                                          "keeper.restarts_per_minute=23",
                                          "canary.period_ms=0",
                                          "recorder.calls=24",
                                          "metrics.experts=true",
                                          "log.level=error",
                                          "debug.experts_delay_us=25",
                                          "debug.loop_delay_us=26",
                                          "debug.send_delay_us=27",
                                          "debug.call_delay_us=28",
                                          "debug.for_ms=29",
                                          "debug.flip_layer=3",
                                          "debug.flip_expert=31",
                                          "debug.flip_after_ms=32"};

TEST_F(ConfigFile, EveryKeyIsSetPrintedAndReloaded) {
  ASSERT_EQ(kOthers.size(), config_keys().size());
  for (std::size_t i = 0; i < kOthers.size(); ++i)
    EXPECT_TRUE(kOthers[i].starts_with(config_keys()[i].path + "="))
        << kOthers[i] << " stands at " << config_keys()[i].path;
  const Config c = load_config("", kOthers);
  const std::string yaml = effective_yaml(c);
  EXPECT_EQ(load(yaml), c) << yaml;
  EXPECT_EQ(effective_yaml(load(yaml)), yaml);
  std::istringstream mine(yaml), defaults(effective_yaml(Config{}));
  for (std::string a, b; std::getline(mine, a) && std::getline(defaults, b);) {
    if (a.ends_with(":") || a.starts_with("  path:")) continue;
    EXPECT_NE(a, b);
  }
  EXPECT_EQ(c.model.layers, (LayerRange{2, 3}));
  EXPECT_EQ(c.run_dir, "/tmp/a \"b\" \\c");
  EXPECT_EQ(c.debug, (DebugConfig{25, 26, 27, 28, 29, 3, 31, 32}));
  EXPECT_EQ(c.limits, (LimitsConfig{64, 832, 1048576, 3, 65}));
  EXPECT_EQ(c.control.peers, (std::vector<std::string>{"[::1]:1", "localhost:2"}));
  const BackendOptions o = backend_options(c, configured_shape(c));
  EXPECT_EQ(o.drills.call_delay_us, 28U);
  EXPECT_EQ(o.max_pairs, 14U);
  EXPECT_EQ(o.ranks, 2U);
  EXPECT_EQ(o.rank, 1U);
}

TEST_F(ConfigFile, SetsGoOverTheFileInOrder) {
  const Config c =
      load("limits: {lanes: 3, slots: 4}\nmodel: {source: synthetic, shape: {intermediate: 64}}\n",
           {"limits.lanes=5", "limits.lanes=6", "limits={max_tokens: 7}", "http.listen=", "log.level=warn"});
  EXPECT_EQ(c.limits.lanes, 6U);
  EXPECT_EQ(c.limits.slots, 4U);
  EXPECT_EQ(c.limits.max_tokens, 7U);
  EXPECT_EQ(c.http.listen, "");
  EXPECT_EQ(c.log.level, LogLevel::warn);
  EXPECT_EQ(c.model.shape.shared_intermediate, 128U) << "twice the intermediate width";
}

TEST_F(ConfigFile, HuggingfaceLeavesTheShapeToTheCheckpoint) {
  const Config c = load("model: {source: huggingface, path: /weights, layers: 1-2}");
  const std::string yaml = effective_yaml(c);
  EXPECT_EQ(yaml.find("shape"), std::string::npos);
  EXPECT_EQ(load(yaml), c);
  Shape k3;
  k3.hidden = 7168;
  k3.latent = 3584;
  k3.intermediate = 3072;
  k3.experts = 896;
  k3.top_k = 16;
  k3.first_layer = 1;
  k3.layers = 92;
  const Shape narrowed = narrowed_shape(k3, c);
  EXPECT_EQ(narrowed.first_layer, 1U);
  EXPECT_EQ(narrowed.layers, 2U);
  k3.first_layer = 2;
  EXPECT_THROW(narrowed_shape(k3, c), ConfigError);
}

TEST_F(ConfigFile, LayersNarrowTheShape) {
  const auto layers = [&](const std::string& text) {
    return configured_shape(load("model: {layers: " + text + ", shape: {layers: 9}}"));
  };
  EXPECT_EQ(layers("all").first_layer, 1U);
  EXPECT_EQ(layers("all").layers, 9U);
  EXPECT_EQ(layers("3-5").first_layer, 3U);
  EXPECT_EQ(layers("3-5").layers, 3U);
  EXPECT_EQ(layers("9").first_layer, 9U);
  EXPECT_EQ(layers("9").layers, 1U);
}

TEST_F(ConfigFile, BadSetsNameSet) {
  EXPECT_EQ(set_refusal("limits.lanes=65"), "--set: limits.lanes = 65 is outside 1..64");
  EXPECT_EQ(set_refusal("limits.lane=6"), "--set: limits.lane is not a key; did you mean limits.lanes?");
  EXPECT_EQ(set_refusal("limits={lane: 6}"), "--set: limits.lane is not a key; did you mean limits.lanes?");
  EXPECT_EQ(set_refusal("limits=6"),
            "--set: limits = 6 is not a map; it has the keys lanes, max_tokens, max_call_tokens, slots, arena_mb");
  EXPECT_EQ(set_refusal("limits.lanes"), "--set: \"limits.lanes\" is not KEY=VALUE, such as limits.lanes=4");
  EXPECT_EQ(set_refusal("=3"), "--set: \"=3\" is not KEY=VALUE, such as limits.lanes=4");
  EXPECT_EQ(set_refusal("limits.lanes="), "--set: limits.lanes has no value; give it a whole number in 1..64");
  EXPECT_EQ(set_refusal("rank=1").substr(0, 28), "--set: rank = 1 is outside 0");
  EXPECT_EQ(set_refusal("group=\"a").substr(0, 21), "--set: not valid YAML");
  EXPECT_EQ(set_refusal("metrics.experts=on"), "--set: metrics.experts = on is not true or false");
  EXPECT_EQ(set_refusal("rank=0\nlimits: 3").substr(0, 5), "--set");
  EXPECT_EQ(set_refusal("group=a\nb"), "--set: group = a\\x0ab is not " + find_key("group")->expects);
  EXPECT_EQ(set_refusal("run_dir=\xff").substr(0, 22), "--set: run_dir = \\xff ");
  // The file's value is fine, the override is not: the override is named.
  EXPECT_EQ(refusal("limits: {lanes: 3}", {"limits.lanes=65"}), "--set: limits.lanes = 65 is outside 1..64");
}

TEST(ConfigSet, TextIsTakenAsItStands) {
  const auto with = [](const std::string& set) { return load_config("", std::vector<std::string>{set}); };
  EXPECT_EQ(with("http.listen=[::1]:80").http.listen, "[::1]:80");
  EXPECT_EQ(with("http.listen=\"[::1]:80\"").http.listen, "[::1]:80");
  EXPECT_EQ(with("run_dir=/a #b: c").run_dir, "/a #b: c");
  EXPECT_EQ(with("run_dir='/a'").run_dir, "/a");
  EXPECT_EQ(with("device=3").device, "3");
}

TEST(ConfigRead, UnreadableFilesAreNamed) {
  const auto refused = [](const std::string& file) -> std::string {
    try {
      load_config(file, {});
    } catch (const ConfigError& e) {
      return e.what();
    }
    return "";
  };
  EXPECT_EQ(refused("/nowhere/c.yaml"), "/nowhere/c.yaml: cannot be read: No such file or directory");
  EXPECT_EQ(refused("/"), "/: cannot be read: Is a directory");
  EXPECT_EQ(refused("/dev/zero"), "/dev/zero: has more than 1 MiB; a configuration is smaller");
  EXPECT_EQ(load_config("/dev/null", {}), Config{});
}

TEST(ConfigEndpoint, ParsesHostAndPort) {
  struct Case {
    std::string text, host;
    int port;  // -1: none
  };
  for (const Case& c : std::vector<Case>{{"localhost:80", "localhost", 80},
                                         {":80", "", 80},
                                         {"[::1]:80", "::1", 80},
                                         {"10.0.0.1:65535", "10.0.0.1", 65535},
                                         {"a:0", "a", 0},
                                         {"a:", "", -1},
                                         {"a", "", -1},
                                         {"", "", -1},
                                         {":", "", -1},
                                         {"[]:1", "", -1},
                                         {"[::1]", "", -1},
                                         {"::1:1", "", -1},
                                         {"a b:1", "", -1},
                                         {"a:-1", "", -1},
                                         {"a:1x", "", -1},
                                         {"a:+1", "", -1},
                                         {"a: 1", "", -1},
                                         {"[a]:1", "", -1},
                                         {"a/b:1", "", -1}}) {
    const auto endpoint = parse_endpoint(c.text);
    ASSERT_EQ(endpoint.has_value(), c.port >= 0) << c.text;
    if (!endpoint) continue;
    EXPECT_EQ(endpoint->host, c.host) << c.text;
    EXPECT_EQ(endpoint->port, c.port) << c.text;
  }
  for (const char* host : {"127.0.0.1", "127.255.255.254", "::1", "localhost"}) EXPECT_TRUE(is_loopback(host)) << host;
  for (const char* host : {"", "128.0.0.1", "127.a.b.c", "127.example.com", "localhost.example.com", "::2", "0.0.0.0"})
    EXPECT_FALSE(is_loopback(host)) << host;
}

TEST_F(ConfigFile, DeepAndLargeInputIsRefused) {
  const std::size_t n = 300'000;
  const auto many = [](const std::string& part) {
    std::string out;
    while (out.size() < n) out += part;
    return out;
  };
  EXPECT_NE(refusal(std::string(n, '[')), "");
  EXPECT_NE(refusal(std::string(n, '{')), "");
  EXPECT_NE(refusal("limits: " + std::string(n, '{')), "");
  EXPECT_NE(refusal("control: {peers: " + std::string(n, '[')), "");
  EXPECT_NE(refusal(many("? ")), "");
  EXPECT_NE(refusal(many("- ")), "");
  EXPECT_NE(refusal(many("a: ")), "");
  EXPECT_NE(refusal(many("&a [")), "");
  EXPECT_NE(refusal("group: " + std::string(n, 'g')), "");
  EXPECT_LT(refusal(std::string(n, 'g') + ": 1").size(), 300U);
  EXPECT_NE(refusal("limits: {lanes: " + std::string(n, '9') + "}"), "");
  EXPECT_EQ(refusal("rank: 0 #" + std::string(1 << 20, 'x')),
            "c.yaml: has more than 1 MiB; a configuration is smaller");
  std::string bomb = "group: &a a\n";
  for (char c = 'b'; c < 'k'; ++c) bomb += std::string(1, c) + ": &" + c + " [*a, *a, *a, *a, *a, *a, *a, *a]\n";
  EXPECT_NE(refusal(bomb), "");
}

TEST_F(ConfigFile, DamagedExamplesAreTakenOrRefusedNeverMore) {
  const std::string example = read(kExample);
  std::mt19937 random(20261129);
  const auto below = [&](std::size_t n) { return static_cast<std::size_t>(random() % n); };
  unsigned refused = 0, taken = 0;
  const auto attempt = [&](const std::string& text) {
    try {
      const Config c = load(text);
      EXPECT_EQ(load(effective_yaml(c)), c);
      ++taken;
    } catch (const ConfigError&) {
      ++refused;
    }
  };
  for (std::size_t cut = 0; cut < example.size(); cut += 1 + below(40)) attempt(example.substr(0, cut));
  const std::string special = std::string(1, '\0') + "\n\t :,[]{}&*!|>'\"%@`#?-~\xff\xc3\xef\xbb\xbf";
  for (int i = 0; i < 1500; ++i) {
    std::string text = example;
    for (std::size_t n = 1 + below(3); n > 0; --n) {
      const std::size_t at = below(text.size());
      const char c = below(2) == 0 ? special[below(special.size())] : static_cast<char>(random());
      if (below(3) == 0)
        text.insert(at, 1, c);
      else if (below(2) == 0)
        text.erase(at, 1 + below(30));
      else
        text[at] = c;
    }
    attempt(text);
  }
  for (int i = 0; i < 500; ++i) {
    std::string text(below(200), '\0');
    for (char& c : text) c = below(2) == 0 ? special[below(special.size())] : static_cast<char>(random());
    attempt(text);
  }
  EXPECT_GT(refused, 500U);
  EXPECT_GT(taken, 100U);
}

TEST(ConfigKeys, EveryKeyRefusesWhatItCannotHold) {
  for (const ConfigKey& key : config_keys()) {
    if (key.kind == ConfigKey::Kind::text) continue;
    const std::string at = "--set: " + key.path;
    std::vector<std::string> values{"nonsense", "~", "{a: 1}", "\x01"};
    if (key.kind == ConfigKey::Kind::number)
      values.insert(values.end(), {"1.5", "12abc", "99999999999999999999999", "1e3", "''", "[1]", "true"});
    for (const std::string& value : values) {
      const std::string what = set_refusal(key.path + "=" + value);
      EXPECT_TRUE(what.starts_with(value == "\x01" ? "--set: " : at)) << key.path << "=" << value << "\n" << what;
    }
  }
}

}  // namespace
}  // namespace moed
