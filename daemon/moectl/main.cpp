// moectl: status, call, bench, trace and top. Exits 0 done, 1 the answer is no, 2 usage, 3 not reachable.
#include <CLI/CLI.hpp>
#include <cstdio>
#include <exception>
#include <map>

#include "daemon/moectl/bench.h"
#include "daemon/moectl/call.h"
#include "daemon/moectl/lane.h"
#include "daemon/moectl/status.h"
#include "daemon/moectl/top.h"
#include "daemon/moectl/trace.h"

namespace {

using namespace moed::ctl;

constexpr const char* kSocketHelp = "socket of the daemon; else $MOED_SOCKET, else the only one under /run/moed";

void add_layer(CLI::App& command, uint32_t& layer, bool required) {
  CLI::Option_group* group = command.add_option_group("layer");
  group->add_option("--layer", layer, "the model's own number of the layer");
  group->add_flag_callback(
      "--identity", [&layer] { layer = MOED_LAYER_IDENTITY; }, "experts that return their input");
  group->require_option(required ? 1 : 0, 1);
}

void add_flag_bit(CLI::App& command, const char* option, uint32_t& flags, uint32_t bit, const char* help) {
  command.add_flag_callback(
      option, [&flags, bit] { flags |= bit; }, help);
}

CLI::App& add_call(CLI::App& app, CallOptions& o) {
  CLI::App& call = *app.add_subcommand("call", "one call with arrays from files (raw, little-endian)");
  call.add_option("--socket", o.socket, kSocketHelp);
  add_layer(call, o.layer, true);
  call.add_option("--x", o.x, "BF16 [T, width], or E4M3 codes with --wire; its size gives T")->required();
  call.add_option("--ids", o.ids, "int32 [T, top_k], -1: no expert")->required();
  call.add_option("--weights", o.weights, "float32 [T, top_k]")->required();
  call.add_option("--out", o.out, "where to write the result, BF16 as x");
  call.add_option("--kind", o.kind, "routed (x is the latent) or layer (x is the hidden state)")
      ->transform(CLI::CheckedTransformer(std::map<std::string, uint32_t>{{"routed", 0}, {"layer", 1}}));
  add_flag_bit(call, "--no-norm", o.flags, MOED_FLAG_NO_NORM, "the sum, not normalised");
  add_flag_bit(call, "--ids64", o.flags, MOED_FLAG_IDS64, "ids are int64");
  add_flag_bit(call, "--weights-bf16", o.flags, MOED_FLAG_WEIGHTS16, "weights are BF16");
  add_flag_bit(call, "--mask", o.flags, MOED_FLAG_MASK, "a bad id counts as -1");
  CLI::Option* wire = call.add_flag_callback(
      "--wire", [&o] { o.flags |= MOED_FLAG_WIRE; }, "x is quantised already");
  CLI::Option* scales = call.add_option("--scales", o.scales, "E8M0 bytes [T, width / 32]");
  wire->needs(scales);
  scales->needs(wire);
  call.add_option("--valid", o.valid, "tokens from here on are padding");
  call.add_option("--timeout-us", o.timeout_us, "0: the daemon's own deadline");
  call.add_flag("--dry", o.dry, "the call is checked only, the result is zeros");
  return call;
}

CLI::App& add_bench(CLI::App& app, BenchOptions& o) {
  CLI::App& bench = *app.add_subcommand("bench", "latency of calls, one after the other");
  bench.add_option("--socket", o.socket, kSocketHelp);
  bench.add_option("--tokens", o.tokens, "tokens of a call, one row of the table each")
      ->delimiter(',')
      ->capture_default_str();
  CLI::Option* calls = bench.add_option("--calls", o.calls, "calls of a row")->check(CLI::Range(1U, 1'000'000'000U));
  bench.add_option("--seconds", o.seconds, "how long a row lasts")->check(CLI::Range(0.001, 86400.0))->excludes(calls);
  add_layer(bench, o.layer, false);
  bench.add_option("--warmup", o.warmup, "calls before those that count")->capture_default_str();
  bench.add_option("--spin-us", o.spin_us, "how long to spin for an answer before sleeping")
      ->check(CLI::Range(1U, 1'000'000U))
      ->capture_default_str();
  bench.add_option("--seed", o.seed, "of the random inputs")->capture_default_str();
  bench.add_option("--pin-cpu", o.pin_cpu, "CPU to run on");
  bench
      .add_option("--may-lose", o.may_lose,
                  "a rank that may come and go: calls that end with peer_lost, peer_timeout, not_ready or degraded and "
                  "name it alone are counted as lost, are no failures, and are 1 ms apart")
      ->check(CLI::Range(0, 127));
  bench.add_flag("--check", o.check, "compare every answer with the first, bit for bit");
  bench.add_flag("--json", o.json, "one JSON object instead of the table");
  return bench;
}

constexpr const char* kSocketsHelp = "socket of a daemon, several for several ranks; without one as for status";

CLI::App& add_trace(CLI::App& app, TraceOptions& o) {
  CLI::App& trace = *app.add_subcommand(
      "trace",
      "the last calls and serve passes as Chrome trace events (chrome://tracing, ui.perfetto.dev): a process for each "
      "rank, a track for each lane and one for serve passes; ranks lie side by side by the clocks of their machines");
  trace.add_option("--socket", o.sockets, kSocketsHelp);
  trace
      .add_option("--last", o.last, "so many calls and as many passes of each rank; without it all that are remembered")
      ->check(CLI::Range(1U, 1'000'000'000U));
  trace.add_option("--out", o.out, "file to write; without it standard output");
  return trace;
}

CLI::App& add_top(CLI::App& app, TopOptions& o) {
  CLI::App& top = *app.add_subcommand("top",
                                      "a live view: calls a second, latency, links, and which peer and which cause "
                                      "(its queue, experts, send, the wire) "
                                      "calls waited for since the frame before");
  top.add_option("--socket", o.sockets, kSocketsHelp);
  top.add_option("--interval-ms", o.interval_ms, "from one frame to the next")
      ->check(CLI::Range(10U, 3'600'000U))
      ->capture_default_str();
  top.add_option("--count", o.count, "frames to show; without it until Ctrl-C")->check(CLI::Range(1U, 1'000'000'000U));
  return top;
}

int run(int argc, char** argv) {
  CLI::App app("asks a moed daemon");
  app.require_subcommand(1);
  std::string status_socket;
  bool status_json = false;
  CLI::App& status = *app.add_subcommand("status", "what a daemon says of itself");
  status.add_option("--socket", status_socket, kSocketHelp);
  status.add_flag("--json", status_json, "the daemon's JSON as it is");
  CallOptions call_options;
  const CLI::App& call = add_call(app, call_options);
  BenchOptions bench_options;
  const CLI::App& bench = add_bench(app, bench_options);
  TraceOptions trace_options;
  const CLI::App& trace = add_trace(app, trace_options);
  TopOptions top_options;
  const CLI::App& top = add_top(app, top_options);
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? kDone : kUsage;
  }
  if (call.parsed()) return run_call(call_options);
  if (bench.parsed()) return run_bench(bench_options);
  if (trace.parsed()) return run_trace(trace_options);
  if (top.parsed()) return run_top(top_options);
  return run_status(status_socket, status_json);
}

}  // namespace

int main(int argc, char** argv) {
  try {
    return run(argc, argv);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "moectl: %s\n", error.what());
    return kNo;
  }
}
