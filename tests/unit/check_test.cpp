// What `moed check` says: the table of bytes, and one sentence for each thing that a machine lacks.
#include "daemon/check.h"

#include <gtest/gtest.h>
#include <regex.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdlib>
#include <string>
#include <vector>

namespace moed {
namespace {

constexpr uint64_t kMib = 1 << 20;

/// A machine that lacks nothing, with a build that has both back ends.
MachineFacts rich_machine() { return {64ULL << 30, 65536, {0, 1, 2, 3}, "", true, true, std::vector<std::string>{}}; }

Config loaded(std::vector<std::string> sets) { return load_config("", sets); }

/// The only sentence that `facts` lacks, or a note of how many there are.
std::string only_lack(const Config& config, const Backend::Memory& planned, const MachineFacts& facts) {
  const auto lacks = missing(config, planned, facts);
  return lacks.size() == 1 ? lacks[0] : std::to_string(lacks.size()) + " sentences";
}

/// Whether `text` matches a POSIX extended pattern.
bool matches(const std::string& text, const std::string& pattern) {
  regex_t compiled;
  if (::regcomp(&compiled, pattern.c_str(), REG_EXTENDED | REG_NOSUB) != 0) ADD_FAILURE() << "bad pattern " << pattern;
  const bool found = ::regexec(&compiled, text.c_str(), 0, nullptr, 0) == 0;
  ::regfree(&compiled);
  return found;
}

void expect_has(const std::string& text, const std::string& part) {
  EXPECT_NE(text.find(part), std::string::npos) << "no \"" << part << "\" in:\n" << text;
}

TEST(Check, RichMachineLacksNothing) { EXPECT_TRUE(missing(Config{}, {}, rich_machine()).empty()); }

TEST(Check, MemoryCountsAllPartsAndTheArenas) {
  MachineFacts facts = rich_machine();
  const Backend::Memory planned{10 * kMib, 20 * kMib, 0, 30 * kMib};
  facts.available_bytes = (10 + 20 + 30 + 2 * 64) * kMib;
  EXPECT_TRUE(missing(Config{}, planned, facts).empty());
  --facts.available_bytes;
  const std::string lack = only_lack(Config{}, planned, facts);
  expect_has(lack, "memory: needs 188 MiB");
  expect_has(lack, "limits.arena_mb");
  EXPECT_TRUE(missing(loaded({"backend=cuda"}), planned, facts).empty()) << "GPU memory is not host memory";
}

TEST(Check, DescriptorsGrowWithLanesAndPeers) {
  const Config small, lanes = loaded({"limits.lanes=64"}), peers = loaded({"control.peers=[localhost:1, localhost:2]"});
  EXPECT_GT(needed_files(lanes), needed_files(small));
  EXPECT_GT(needed_files(peers), needed_files(small));
  MachineFacts facts = rich_machine();
  facts.open_files = needed_files(lanes);
  EXPECT_TRUE(missing(lanes, {}, facts).empty());
  --facts.open_files;
  expect_has(only_lack(lanes, {}, facts),
             "descriptors: 64 lanes and 1 rank need " + std::to_string(needed_files(lanes)));
}

TEST(Check, RunDirFaultIsNamed) {
  MachineFacts facts = rich_machine();
  facts.run_dir_fault = "/run/moed: Permission denied";
  expect_has(only_lack(Config{}, {}, facts), "run_dir: /run/moed: Permission denied");
}

TEST(Check, SpinningThreadsOfRanksOnThisMachine) {
  MachineFacts facts = rich_machine();
  facts.cpus = {0, 1};
  const std::string four = "control.peers=[127.0.0.1:1, localhost:2, '[::1]:3', 127.0.0.2:4]";
  expect_has(only_lack(loaded({four}), {}, facts), "cpus: 4 service threads");
  EXPECT_TRUE(missing(loaded({four, "service.spin_us=0"}), {}, facts).empty());
  const std::string apart = "control.peers=[a:1, b:1, c:1, d:1]";
  EXPECT_TRUE(missing(loaded({apart, "control.secret_dir=/keys"}), {}, facts).empty());
}

TEST(Check, PinnedCpuMustBeAllowed) {
  EXPECT_TRUE(missing(loaded({"service.cpu=3"}), {}, rich_machine()).empty());
  expect_has(only_lack(loaded({"service.cpu=4"}), {}, rich_machine()), "service.cpu = 4");
}

TEST(Check, WhatTheGpuLacksOnlyForCuda) {
  MachineFacts facts = rich_machine();
  facts.gpu = {"no GPU; set backend to cpu", "too little memory"};
  EXPECT_TRUE(missing(Config{}, {}, facts).empty());
  const std::vector<std::string> expected{"gpu: no GPU; set backend to cpu", "gpu: too little memory"};
  EXPECT_EQ(missing(loaded({"backend=cuda"}), {}, facts), expected);
}

TEST(Check, ABuildWithoutCudaSaysSoAndLooksForTheDriver) {
  MachineFacts facts = rich_machine();
  facts.gpu.reset();
  EXPECT_TRUE(missing(Config{}, {}, facts).empty());
  expect_has(only_lack(loaded({"backend=cuda"}), {}, facts), "cuda: this build has the cpu back end only");
  facts.cuda_driver = false;
  const auto lacks = missing(loaded({"backend=cuda"}), {}, facts);
  ASSERT_EQ(lacks.size(), 2U);
  expect_has(lacks[1], "libcuda.so.1");
}

TEST(Check, FutexWaitv) {
  MachineFacts facts = rich_machine();
  facts.futex_waitv = false;
  expect_has(only_lack(Config{}, {}, facts), "futex_waitv");
}

TEST(Check, EverySentenceIsOneLine) {
  const Config config = loaded({"limits.lanes=64", "service.cpu=9", "backend=cpu"});
  MachineFacts nothing;
  nothing.run_dir_fault = "/x: No such file or directory";
  const auto lacks = missing(config, {1, 1, 1, 1}, nothing);
  EXPECT_EQ(lacks.size(), 6U);
  for (const auto& sentence : lacks) EXPECT_EQ(sentence.find('\n'), std::string::npos) << sentence;
}

TEST(Check, ReportHasYamlTableAndLacks) {
  const Config config =
      loaded({"model.source=synthetic", "control.peers=[localhost:1, localhost:2, localhost:3]", "rank=2"});
  MachineFacts facts = rich_machine();
  const std::string rich = check_report(config, configured_shape(config), {3000, 4000, 0, 5000}, facts);
  EXPECT_TRUE(rich.starts_with("group: \"moed\"\nrank: 2\n"));
  EXPECT_TRUE(matches(rich, "\nheap +3000  3 segments of [1-9][0-9]+\n")) << rich;
  EXPECT_TRUE(matches(rich, "\nweights +4000  2 layers of 11 experts\n")) << rich;
  EXPECT_TRUE(matches(rich, "\narena +134217728  2 lanes of 64 MiB\n")) << rich;
  EXPECT_TRUE(matches(rich, "\nscratch +5000\n")) << rich;
  EXPECT_TRUE(matches(rich, "\ntotal +134229728  129 MiB\n")) << rich;
  EXPECT_TRUE(rich.ends_with("\nthis machine lacks nothing\n")) << rich;
  facts.futex_waitv = false;
  const std::string poor = check_report(config, configured_shape(config), {}, facts);
  EXPECT_TRUE(matches(poor, "\nthis machine lacks\n  futex_waitv: [^\n]+\n$")) << poor;
}

TEST(ReadMachine, SeesThisMachine) {
  char name[] = "/tmp/moed-check-XXXXXX";
  const std::string directory = ::mkdtemp(name);
  const MachineFacts facts = read_machine(loaded({"run_dir=" + directory + "/not/yet"}));
  EXPECT_GT(facts.available_bytes, kMib);
  EXPECT_GT(facts.open_files, 2U);
  EXPECT_FALSE(facts.cpus.empty());
  EXPECT_EQ(facts.run_dir_fault, "");
  EXPECT_NE(::access((directory + "/not").c_str(), F_OK), 0) << "looking must not make anything";
  ::rmdir(directory.c_str());
}

TEST(ReadMachine, NamesWhatStandsInTheWayOfRunDir) {
  EXPECT_EQ(read_machine(loaded({"run_dir=/dev/null"})).run_dir_fault, "/dev/null/moed: Not a directory");
}

}  // namespace
}  // namespace moed
