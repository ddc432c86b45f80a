// moectl call: reads the arrays, calls, prints the reply and writes the result.
#include "daemon/moectl/call.h"

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <vector>

#include "daemon/moectl/lane.h"

namespace moed::ctl {
namespace {

struct CloseFile {
  void operator()(std::FILE* file) const { std::fclose(file); }
};
using File = std::unique_ptr<std::FILE, CloseFile>;

bool read_file(const std::string& path, std::vector<char>& out) {
  const File file(std::fopen(path.c_str(), "rb"));
  char buffer[65536];
  std::size_t got = 0;
  while (file && (got = std::fread(buffer, 1, sizeof buffer, file.get())) > 0)
    out.insert(out.end(), buffer, buffer + got);
  if (file && std::ferror(file.get()) == 0) return true;
  std::fprintf(stderr, "moectl: %s cannot be read: %s\n", path.c_str(), std::strerror(errno));
  return false;
}

bool write_file(const std::string& path, const std::byte* data, uint64_t bytes) {
  File file(std::fopen(path.c_str(), "wb"));
  if (file && std::fwrite(data, 1, bytes, file.get()) == bytes && std::fclose(file.release()) == 0) return true;
  std::fprintf(stderr, "moectl: %s cannot be written: %s\n", path.c_str(), std::strerror(errno));
  return false;
}

struct Inputs {
  std::vector<char> x, scales, ids, weights;
};

/// Reads the files and sets the call's tokens; false, said on stderr: a file is missing or has a wrong size.
bool read_inputs(const CallOptions& options, const moed_info& info, moed_call_t& call, Inputs& in) {
  const bool wire = (call.flags & MOED_FLAG_WIRE) != 0;
  if (!read_file(options.x, in.x) || !read_file(options.ids, in.ids) || !read_file(options.weights, in.weights))
    return false;
  if (wire && !read_file(options.scales, in.scales)) return false;
  const uint64_t row = uint64_t{width_of(info, call.kind)} * (wire ? 1 : 2);
  if (in.x.size() % row != 0 || in.x.size() / row > UINT32_MAX) {
    std::fprintf(stderr, "moectl: %s has %zu bytes, expected a multiple of %llu (%u elements a token)\n",
                 options.x.c_str(), in.x.size(), static_cast<unsigned long long>(row), width_of(info, call.kind));
    return false;
  }
  call.tokens = static_cast<uint32_t>(in.x.size() / row);
  const ArrayBytes expected = bytes_of(info, call);
  const struct {
    const std::string& path;
    std::size_t size;
    uint64_t expected;
  } files[] = {{options.scales, in.scales.size(), expected.scales},
               {options.ids, in.ids.size(), expected.ids},
               {options.weights, in.weights.size(), expected.weights}};
  for (const auto& f : files) {
    if (f.size == f.expected) continue;
    std::fprintf(stderr, "moectl: %s has %zu bytes, %llu expected for %u tokens with %u slots\n", f.path.c_str(),
                 f.size, static_cast<unsigned long long>(f.expected), call.tokens, info.top_k);
    return false;
  }
  return true;
}

}  // namespace

int run_call(const CallOptions& options) {
  moed_options attach_options{};
  attach_options.size = sizeof attach_options;
  attach_options.dry = options.dry ? 1 : 0;
  attach_options.name = "moectl-call";
  Lane lane;
  if (const Exit failed = attach(options.socket, attach_options, lane); failed != kDone) return failed;
  moed_call_t call{};
  call.kind = options.kind;
  call.layer = options.layer;
  call.flags = options.flags;
  call.timeout_us = options.timeout_us;
  Inputs in;
  if (!read_inputs(options, lane.info, call, in)) return kUsage;
  if (!place(lane, call)) return kNo;
  const struct {
    uint64_t offset;
    const std::vector<char>& data;
  } arrays[] = {{call.x, in.x}, {call.scales, in.scales}, {call.ids, in.ids}, {call.weights, in.weights}};
  for (const auto& a : arrays)
    if (!a.data.empty()) std::memcpy(lane.arena + a.offset, a.data.data(), a.data.size());
  if (options.valid)
    std::memcpy(lane.arena + call.valid, &*options.valid, sizeof *options.valid);
  else
    call.valid = 0;

  moed_reply_t reply{};
  const moed_status status = moed_call(lane.handle.get(), &call, &reply);
  std::printf("%s\n", describe(lane, call, status, reply).c_str());
  const Exit result = exit_of(status);
  if (result != kDone || options.out.empty()) return result;
  return write_file(options.out, lane.arena + call.out, bytes_of(lane.info, call).out) ? kDone : kUsage;
}

}  // namespace moed::ctl
