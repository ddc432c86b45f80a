// Reads what the machine has and compares it with what a configuration needs.
#include "daemon/check.h"

#include <dlfcn.h>
#include <linux/futex.h>
#include <sched.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <fstream>
#include <sstream>
#include <system_error>

#include "kernels/heap.h"

namespace moed {
namespace {

constexpr uint64_t kMib = 1 << 20;

/// MemAvailable of /proc/meminfo in bytes; 0 when it is not there.
uint64_t available_memory() {
  std::ifstream file("/proc/meminfo");
  std::string key;
  uint64_t kib = 0;
  for (std::string line; std::getline(file, line);) {
    std::istringstream words(line);
    if (words >> key >> kib && key == "MemAvailable:") return kib * 1024;
  }
  return 0;
}

/// What the control group (version 2, as a container sees its own) still allows; no limit: the largest number.
uint64_t group_memory() {
  uint64_t limit = 0, used = 0;
  std::ifstream("/sys/fs/cgroup/memory.max") >> limit;  // "max" is not a number: stays 0
  std::ifstream("/sys/fs/cgroup/memory.current") >> used;
  if (limit == 0) return UINT64_MAX;
  return limit > used ? limit - used : 0;
}

std::vector<int> allowed_cpus() {
  std::vector<int> cpus;
  cpu_set_t set;
  CPU_ZERO(&set);
  if (::sched_getaffinity(0, sizeof set, &set) != 0) return cpus;
  for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu)
    if (CPU_ISSET(cpu, &set)) cpus.push_back(cpu);
  return cpus;
}

/// Why `directory` or, where it is not there yet, its nearest existing parent cannot be written.
std::string directory_fault(std::string directory) {
  struct stat info {};
  while (::stat(directory.c_str(), &info) != 0) {
    if (errno != ENOENT) return directory + ": " + std::generic_category().message(errno);
    while (directory.size() > 1 && directory.ends_with('/')) directory.pop_back();
    const auto slash = directory.rfind('/');
    if (slash == std::string::npos)
      directory = ".";
    else
      directory.resize(std::max<std::size_t>(slash, 1));
  }
  if (!S_ISDIR(info.st_mode)) return directory + ": " + std::generic_category().message(ENOTDIR);
  if (::access(directory.c_str(), W_OK | X_OK) != 0) return directory + ": " + std::generic_category().message(errno);
  return "";
}

bool has_futex_waitv() {
  // No words to wait on: EINVAL from a kernel that has it; ENOSYS, or EPERM under a filter, from others.
  return ::syscall(SYS_futex_waitv, nullptr, 0, 0, nullptr, CLOCK_MONOTONIC) < 0 && errno == EINVAL;
}

bool has_cuda_driver() {
  void* driver = ::dlopen("libcuda.so.1", RTLD_LAZY | RTLD_LOCAL);
  if (driver != nullptr) ::dlclose(driver);
  return driver != nullptr;
}

/// Ranks whose entry names the same host as ours: they share this machine's CPUs.
uint32_t daemons_here(const Config& config) {
  const std::string own = parse_endpoint(config.control.peers[config.rank])->host;
  const auto same = [&](const std::string& peer) {
    const std::string host = parse_endpoint(peer)->host;
    return host == own || (is_loopback(host) && is_loopback(own));
  };
  return static_cast<uint32_t>(std::count_if(config.control.peers.begin(), config.control.peers.end(), same));
}

std::string mib(uint64_t bytes) { return std::to_string((bytes + kMib - 1) / kMib) + " MiB"; }

std::string plural(uint64_t n, const std::string& one) { return std::to_string(n) + " " + one + (n == 1 ? "" : "s"); }

std::string table_row(std::string part, uint64_t bytes, const std::string& note) {
  std::string number = std::to_string(bytes);
  part.resize(std::max<std::size_t>(part.size(), 9), ' ');
  number.insert(0, number.size() < 16 ? 16 - number.size() : 0, ' ');
  return part + number + (note.empty() ? "" : "  " + note) + "\n";
}

uint64_t total_bytes(const Config& config, const Backend::Memory& planned) {
  return planned.heap + planned.weights + arena_bytes(config) + planned.scratch;
}

uint32_t own_experts(const Config& config, const Shape& shape) {
  return first_expert(shape, config.rank + 1, config.ranks()) - first_expert(shape, config.rank, config.ranks());
}

/// The CUDA back end speaks for itself; without it the build is what is missing first.
void add_gpu_lacks(const MachineFacts& facts, std::vector<std::string>& out) {
  if (facts.gpu) {
    for (const std::string& sentence : *facts.gpu) out.push_back("gpu: " + sentence);
    return;
  }
  out.push_back("cuda: this build has the cpu back end only; use a build with CUDA or set backend to cpu");
  if (!facts.cuda_driver)
    out.push_back("cuda: libcuda.so.1 does not load; install the NVIDIA driver or set backend to cpu");
}

}  // namespace

uint64_t arena_bytes(const Config& config) { return uint64_t{config.limits.lanes} * config.limits.arena_mb * kMib; }

uint64_t needed_files(const Config& config) {
  constexpr uint64_t kOwn = 64;     // log, listeners, event descriptors, HTTP connections, shards of a checkpoint
  constexpr uint64_t kPerLane = 6;  // socket, mailboxes, arena, and their duplicates on the way out
  constexpr uint64_t kPerPeer = 8;  // two segments, two doorbells, connections of rendezvous and UCX, fetches
  return kOwn + kPerLane * config.limits.lanes + kPerPeer * (config.ranks() - 1);
}

MachineFacts read_machine(const Config& config) {
  MachineFacts facts;
  facts.available_bytes = std::min(available_memory(), group_memory());
  rlimit files{};
  if (::getrlimit(RLIMIT_NOFILE, &files) == 0) facts.open_files = files.rlim_cur;
  facts.cpus = allowed_cpus();
  facts.run_dir_fault = directory_fault(config.run_dir + "/" + config.group);
  facts.cuda_driver = config.backend == BackendKind::cuda && has_cuda_driver();
  facts.futex_waitv = has_futex_waitv();
  return facts;
}

std::vector<std::string> missing(const Config& config, const Backend::Memory& planned, const MachineFacts& facts) {
  std::vector<std::string> out;
  // On the GPU the parts lie in its own memory, which is not looked at here.
  const uint64_t total = total_bytes(config, planned);
  if (config.backend == BackendKind::cpu && total > facts.available_bytes)
    out.push_back("memory: needs " + mib(total) + ", " + mib(facts.available_bytes) +
                  " available; lower limits.arena_mb, limits.lanes, limits.max_tokens or model.layers");
  if (const uint64_t files = needed_files(config); files > facts.open_files)
    out.push_back("descriptors: " + plural(config.limits.lanes, "lane") + " and " + plural(config.ranks(), "rank") +
                  " need " + std::to_string(files) + ", the limit is " + std::to_string(facts.open_files) +
                  "; raise it (ulimit -n)");
  if (!facts.run_dir_fault.empty())
    out.push_back("run_dir: " + facts.run_dir_fault + "; make it writable for this user or set run_dir");
  const uint32_t daemons = daemons_here(config);
  if (config.service.spin_us > 0 && daemons > facts.cpus.size())
    out.push_back("cpus: " + plural(daemons, "service thread") + " of this machine's ranks spin, it has " +
                  plural(facts.cpus.size(), "CPU") + "; set service.spin_us to 0");
  const int cpu = config.service.cpu;
  if (cpu >= 0 && std::find(facts.cpus.begin(), facts.cpus.end(), cpu) == facts.cpus.end())
    out.push_back("cpus: service.cpu = " + std::to_string(cpu) +
                  " is not a CPU that this process may use; set another or -1");
  if (config.backend == BackendKind::cuda) add_gpu_lacks(facts, out);
  if (!facts.futex_waitv)
    out.push_back(
        "futex_waitv: missing, so that a sleeping daemon wakes up to 1 ms late; use Linux 5.16 or newer and allow it");
  return out;
}

std::string check_report(const Config& config, const Shape& shape, const Backend::Memory& planned,
                         const MachineFacts& facts) {
  std::string out = effective_yaml(config);
  const uint64_t segment = segment_layout(shape, config.limits.lanes, config.limits.max_tokens).bytes;
  out += "\npart                 bytes\n";
  out += table_row("heap", planned.heap, plural(config.ranks(), "segment") + " of " + std::to_string(segment));
  out += table_row("weights", planned.weights,
                   plural(shape.layers, "layer") + " of " + plural(own_experts(config, shape), "expert"));
  out += table_row("arena", arena_bytes(config),
                   plural(config.limits.lanes, "lane") + " of " + std::to_string(config.limits.arena_mb) + " MiB");
  out += table_row("scratch", planned.scratch, "");
  out += table_row("total", total_bytes(config, planned), mib(total_bytes(config, planned)));

  const std::vector<std::string> lacks = missing(config, planned, facts);
  out += lacks.empty() ? "\nthis machine lacks nothing\n" : "\nthis machine lacks\n";
  for (const std::string& sentence : lacks) out += "  " + sentence + "\n";
  return out;
}

}  // namespace moed
