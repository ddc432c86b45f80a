// moed serve | check | version.
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <iostream>

#include "control/ucx.h"
#include "daemon/backends.h"
#include "daemon/check.h"
#include "daemon/config.h"
#include "daemon/daemon.h"
#include "daemon/log.h"
#include "daemon/model.h"
#include "daemon/rank_lock.h"
#include "daemon/version.h"

namespace moed {
namespace {

/// Exit codes of interfaces.md section 13.
enum Exit {
  kLeft = 0,
  kUsage = 64,
  kConfig = 65,
  kWeights = 66,
  kPort = 69,
  kInternal = 70,
  kGpu = 71,
  kMemory = 73,
  kIdentity = 74,
  kStuck = 75
};

/// What the configuration asks for and this build cannot do.
void refuse_unbuilt(const Config& config) {
  if (config.backend == BackendKind::cuda && !built_with_cuda())
    throw ConfigError("backend = cuda, but this build has the cpu back end only");
  if (config.transport != Transport::heap) throw ConfigError("transport = nccl, but this build has heap only");
}

/// Runs `what` and turns what it throws into an exit code and one sentence.
int guarded(const std::function<int()>& what) {
  const auto fail = [](int code, const char* text) {
    log_error("ending", {{"reason", text}, {"exit", code}});
    return code;
  };
  try {
    return what();
  } catch (const ConfigError& e) {
    return fail(kConfig, e.what());
  } catch (const WeightsError& e) {
    return fail(kWeights, e.what());
  } catch (const RankHeld& e) {
    return fail(kIdentity, e.what());
  } catch (const GpuError& e) {
    return fail(kGpu, e.what());
  } catch (const std::bad_alloc& e) {
    return fail(kMemory, e.what());
  } catch (const std::system_error& e) {
    return fail(kMemory, e.what());
  } catch (const std::runtime_error& e) {
    return fail(kPort, e.what());
  } catch (const std::exception& e) {
    return fail(kInternal, e.what());
  }
}

int serve(const Config& config) {
  set_level(config.log.level);
  refuse_unbuilt(config);
  Daemon daemon(config);
  const Status ended = daemon.run();
  if (ended == Status::ok) return kLeft;
  std::_Exit(ended == Status::device_lost
                 ? kGpu
                 : kStuck);  // nothing is joined or freed: calls into a GPU that failed may never return
}

int check(const Config& config) {
  const Shape shape = model_shape(config);
  BackendOptions options = whole_backend_options(config, shape);
  options.weights = unloaded_weights(config, shape);
  Backend::Memory planned = planned_bytes(config, options);
  planned.arena = uint64_t{config.limits.lanes} * config.limits.arena_mb << 20;
  MachineFacts facts = read_machine(config);
  if (built_with_cuda()) facts.gpu = gpu_lacks(config, options);
  std::cout << check_report(config, shape, planned, facts);
  return 0;
}

int main_of(int argc, char** argv) {
  CLI::App app{"moed serves the routed experts of a mixture-of-experts model"};
  app.require_subcommand(1);
  std::string file;
  std::vector<std::string> sets;
  std::string rank;
  const auto add = [&](const char* name, const char* help) {
    CLI::App* command = app.add_subcommand(name, help);
    command->add_option("--config", file, "YAML file; without it the defaults hold");
    command->add_option("--set", sets, "a.b=c, over the file; repeatable")->take_all();
    command->add_option("--rank", rank, "short for --set rank=");
    return command;
  };
  const CLI::App* serve_command = add("serve", "run one rank in the foreground");
  const CLI::App* check_command = add("check", "print the effective configuration, what it needs and what is missing");
  app.add_subcommand("version", "print version and build");
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? 0 : kUsage;
  }
  if (!rank.empty()) sets.push_back("rank=" + rank);
  if (*serve_command) return guarded([&] { return serve(load_config(file, sets)); });
  if (*check_command) return guarded([&] { return check(load_config(file, sets)); });
  std::cout << "moed " << kVersion << " (" << kCommit << ", abi " << kAbi << ", cuda " << built_cuda_version()
            << ", ucx " << control::UcxWorker::version() << ", nccl none)\n";
  return 0;
}

}  // namespace
}  // namespace moed

int main(int argc, char** argv) {
  moed::prepare_backends();
  // UCX reads these while its library is loaded, before main: it must not patch mmap, nor own our signals.
  if (std::getenv("UCX_MEM_EVENTS") == nullptr) {
    ::setenv("UCX_MEM_EVENTS", "n", 1);
    ::setenv("UCX_ERROR_SIGNALS", "", 0);
    std::error_code failed;  // where it fails we go on as we are
    const std::string self = std::filesystem::read_symlink("/proc/self/exe", failed);
    if (!failed) ::execv(self.c_str(), argv);
  }
  std::signal(SIGPIPE, SIG_IGN);  // a reader of our log that went away is no reason to end
  return moed::main_of(argc, argv);
}
