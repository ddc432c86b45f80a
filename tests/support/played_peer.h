// A peer of a CUDA rank that a test plays by hand: it holds both segments of the link, and writes and reads lines
// through images of them in host memory. On such images the steps of the CPU back end say what the GPU has to do.
#pragma once

#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "kernels/cuda/memory.h"
#include "kernels/steps.h"
#include "tests/support/gpu.h"
#include "tests/support/tolerance.h"

namespace moed::test {

/// A segment in host memory: zeros at first, and as long as the real one.
using Image = std::vector<Line>;
inline Image empty_image(const SegmentLayout& m) { return Image(m.bytes / kLineBytes); }
inline std::byte* bytes_of(Image& image) { return reinterpret_cast<std::byte*>(image.data()); }
inline Line& line_at(Image& image, uint64_t offset) { return image[offset / kLineBytes]; }
inline const Line& line_at(const Image& image, uint64_t offset) { return image[offset / kLineBytes]; }

/// Neighbouring lines of a segment.
struct Run {
  uint64_t offset, lines;
};

inline bool has_row(const CallLine& call, uint32_t token) { return (call.bitmap[token / 8] >> (token % 8) & 1) != 0; }

/// What a source of `call` writes: its call line and the rows that it announces.
inline std::vector<Run> question_runs(const SegmentLayout& m, uint32_t lane, const CallLine& call) {
  std::vector<Run> runs = {{m.call(lane), 1}};
  for (uint32_t t = 0; t < call.tokens; ++t)
    if (has_row(call, t)) runs.push_back({m.row(lane, t), m.row_lines});
  return runs;
}

/// What answers it: the return line and a partial for every row.
inline std::vector<Run> answer_runs(const SegmentLayout& m, uint32_t lane, const CallLine& call) {
  std::vector<Run> runs = {{m.return_line(lane), 1}};
  for (uint32_t t = 0; t < call.tokens; ++t)
    if (has_row(call, t)) runs.push_back({m.partial(lane, t), m.partial_lines});
  return runs;
}

/// SESSION.COUNT
inline std::string sequence_text(uint64_t q) {
  return std::to_string(q >> kSessionShift) + "." + std::to_string(q & kCountMask);
}

/// "row of lane 1, token 3, line 2".
inline std::string place_text(const SegmentLayout& m, uint64_t offset) {
  const auto record = [&](const char* what, uint64_t region, uint64_t lines) {
    const uint64_t line = (offset - region) / kLineBytes;
    const uint64_t token = line / lines;
    return std::string(what) + " of lane " + std::to_string(token / m.max_tokens) + ", token " +
           std::to_string(token % m.max_tokens) + ", line " + std::to_string(line % lines);
  };
  if (offset < m.calls) return "header";
  if (offset < m.rows) return "call line of lane " + std::to_string((offset - m.calls) / kLineBytes);
  if (offset < m.partials) return record("row", m.rows, m.row_lines);
  if (offset < m.returns) return record("partial", m.partials, m.partial_lines);
  return "return line of lane " + std::to_string((offset - m.returns) / kLineBytes);
}

/// Where two segments differ first, with both bytes and sequences; empty: they are equal byte for byte.
inline std::string first_difference(const SegmentLayout& m, const Image& got, const Image& want) {
  for (size_t i = 0; i < want.size(); ++i) {
    const auto* a = reinterpret_cast<const uint8_t*>(&got[i]);
    const auto* b = reinterpret_cast<const uint8_t*>(&want[i]);
    const auto at = static_cast<size_t>(std::mismatch(a, a + kLineBytes, b).first - a);
    if (at == kLineBytes) continue;
    return place_text(m, i * kLineBytes) + ", byte " + std::to_string(at) + ": " + std::to_string(a[at]) +
           " instead of " + std::to_string(b[at]) + "; sequences " + sequence_text(load_sequence(got[i])) + " and " +
           sequence_text(load_sequence(want[i]));
  }
  return "";
}

/// Where two rows of BF16 differ first by more than `ulps`, with both values; empty: nowhere.
inline std::string first_difference(const std::vector<uint16_t>& got, const std::vector<uint16_t>& want, uint32_t width,
                                    int ulps) {
  if (got.size() != want.size())
    return std::to_string(got.size()) + " values instead of " + std::to_string(want.size());
  for (size_t i = 0; i < want.size(); ++i)
    if (ulps == 0 ? got[i] != want[i] : bf16_ulps(got[i], want[i]) > ulps)
      return "token " + std::to_string(i / width) + ", column " + std::to_string(i % width) + ": " +
             std::to_string(bf16_to_float(got[i])) + " (bits " + std::to_string(got[i]) + ") instead of " +
             std::to_string(bf16_to_float(want[i])) + " (bits " + std::to_string(want[i]) + ")";
  return "";
}

/// One lane of a world of two.
struct LaneAt {
  const Shape& shape;
  const SegmentLayout& layout;
  uint32_t lane;
};

/// What rank 0 of two does with one call whose line and rows lie in `rows`, by the steps of the CPU back end: partials
/// go to `answers`.
inline Source serve_on_cpu(const LaneAt& at, const ModelWeights& model, uint64_t q, Image& rows, Image& answers) {
  const Shape& s = at.shape;
  const SegmentLayout& m = at.layout;
  std::vector<Source> sources(1);
  Source& source = sources[0];
  source.lane = at.lane;
  source.sequence = q;
  load_payload(line_at(rows, m.call(at.lane)), &source.call, sizeof(CallLine));
  source.rows_segment = bytes_of(rows);
  source.answer_segment = bytes_of(answers);
  Rows copies;
  Plan plan;
  cpu::gather({.shape = &s, .layout = &m, .sources = sources, .rows = &copies});
  cpu::plan({.shape = &s, .model = &model, .rank = 0, .ranks = 2, .sources = sources, .rows = &copies, .plan = &plan});
  std::vector<float> pairs(plan.pairs.size() * s.latent);
  std::vector<float> scratch(cpu::experts_scratch(s));
  cpu::experts(
      {.shape = &s, .model = &model, .rows = &copies, .plan = &plan, .out = pairs.data(), .scratch = scratch.data()});
  cpu::send({.shape = &s,
             .layout = &m,
             .rank = 0,
             .ranks = 2,
             .sources = sources,
             .model = &model,
             .rows = &copies,
             .plan = &plan,
             .pairs = pairs.data()});
  return source;
}

/// Copies between host memory and a GPU on a stream of their own, beside passes that wait for ever new calls.
class Copies {
 public:
  explicit Copies(int gpu) : gpu_(gpu) {
    need(cudaSetDevice(gpu_), "use of the GPU");
    need(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "stream for copies");
  }
  Copies(const Copies&) = delete;
  Copies& operator=(const Copies&) = delete;
  ~Copies() { cudaStreamDestroy(stream_); }

  cudaStream_t stream() const { return stream_; }

  void to_gpu(void* to, const void* from, uint64_t bytes) const { copy(to, from, bytes, cudaMemcpyHostToDevice); }
  void from_gpu(void* to, const void* from, uint64_t bytes) const { copy(to, from, bytes, cudaMemcpyDeviceToHost); }

  /// Waits for what was queued on the stream, at most 10 s.
  void settle() const {
    cudaError_t e = cudaStreamQuery(stream_);
    for (const Nanos until = now_ns() + 10'000'000'000; e == cudaErrorNotReady && now_ns() < until;) {
      std::this_thread::yield();
      e = cudaStreamQuery(stream_);
    }
    need(e, "work on a stream that has 10 s to end");
  }

 private:
  static void need(cudaError_t e, const char* what) {
    if (e != cudaSuccess) throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(e));
  }
  void copy(void* to, const void* from, uint64_t bytes, cudaMemcpyKind kind) const {
    if (bytes == 0) return;
    need(cudaSetDevice(gpu_), "use of the GPU");
    need(cudaMemcpyAsync(to, from, bytes, kind, stream_), "copy");
    settle();
  }

  const int gpu_;
  cudaStream_t stream_ = nullptr;
};

/// The process's driver, which counting GPUs has started.
inline const cuda::Driver& loaded_driver() {
  std::string why;
  const cuda::Driver* driver = cuda::driver(why);
  if (driver == nullptr) throw std::runtime_error(why);
  return *driver;
}

/// Rank 1 of a world of two, whose rank 0 is `backend`. The link is mapped and ready from the start.
class PlayedPeer {
 public:
  static constexpr uint32_t kSession = 3;

  /// gpu: whose memory rank 0 writes to.
  PlayedPeer(Backend& backend, const Shape& shape, uint32_t lanes, uint32_t max_tokens, int gpu)
      : backend_(backend),
        layout_(segment_layout(shape, lanes, max_tokens)),
        memory_(loaded_driver(), gpu),
        copies_(gpu),
        outgoing_(empty_image(layout_)),
        incoming_(empty_image(layout_)) {
    std::string why;
    Handle theirs;
    need(backend.make_segment(1, theirs) == Status::ok, backend.last_error());
    there_ = memory_.import_fd(theirs.fd, theirs.bytes, why);
    Handle bell;
    need(backend.make_doorbell(bell) == Status::ok, backend.last_error());
    bell_ = memory_.import_fd(bell.fd, bell.bytes, why);
    need(static_cast<bool>(bell_), why);
    here_ = memory_.make(layout_.bytes, HandleKind::cuda_fd, why);
    Handle ours;
    ours.kind = HandleKind::cuda_fd;
    ours.bytes = layout_.bytes;
    need(there_ && here_ && memory_.export_fd(here_, ours.fd, why), why);
    const SegmentHeader header = header_of(1, 0);
    std::memcpy(bytes_of(incoming_), &header, sizeof header);
    copies_.to_gpu(here_.as<void>(), incoming_.data(), layout_.bytes);
    copies_.from_gpu(outgoing_.data(), there_.as<void>(), layout_.bytes);
    const SegmentHeader found = header_of(0, 1);
    need(std::memcmp(bytes_of(outgoing_), &found, sizeof found) == 0, "the segment at rank 0 has another header");
    sent_ = outgoing_;
    need(backend.map_segment(1, ours, Handle{}) == Status::ok, backend.last_error());
    backend.link_changed(1, LinkState::ready, kSession);
    pull();  // the test of the link has written lines
  }
  PlayedPeer(const PlayedPeer&) = delete;
  PlayedPeer& operator=(const PlayedPeer&) = delete;
  ~PlayedPeer() {
    backend_.link_changed(1, LinkState::lost, 0);
    backend_.retire(1);
  }

  const SegmentLayout& layout() const { return layout_; }

  /// What the peer writes at rank 0. Nothing goes out before push().
  Image& outgoing() { return outgoing_; }

  /// Sends what has changed. Nobody promises that a copy stores lines whole: payloads go first, sequences follow.
  void push() {
    Image bare = outgoing_;
    for (size_t i = 0; i < bare.size(); ++i)
      if (std::memcmp(&bare[i], &sent_[i], kLineBytes) != 0) bare[i].word[kLineWords - 1] = 0;
    copies_.to_gpu(there_.as<void>(), bare.data(), layout_.bytes);
    copies_.to_gpu(there_.as<void>(), outgoing_.data(), layout_.bytes);
    sent_ = outgoing_;
    ring();
  }
  /// What every source does behind a call line.
  void ring() {
    uint32_t wake = 0;
    copies_.from_gpu(&wake, &bell_.as<Doorbell>()->wake, sizeof wake);
    ++wake;
    copies_.to_gpu(&bell_.as<Doorbell>()->wake, &wake, sizeof wake);
  }

  /// What rank 0 had written here at the last pull() or await().
  const Image& incoming() const { return incoming_; }
  void pull() { copies_.from_gpu(incoming_.data(), here_.as<void>(), layout_.bytes); }

  /// Waits until all lines of `runs` carry q. Empty; or which line does not after `limit`.
  std::string await(const std::vector<Run>& runs, uint64_t q, Nanos limit = 5'000'000'000) {
    const Nanos until = now_ns() + limit;
    for (;;) {
      pull();
      std::string lacks;
      for (const Run& run : runs)
        for (uint64_t i = 0; i < run.lines && lacks.empty(); ++i) lacks = lacking(run.offset + i * kLineBytes, q);
      if (lacks.empty()) break;
      if (now_ns() > until) return lacks;
      std::this_thread::yield();
    }
    pull();  // a copy may catch a line half written; one that began after its sequence was there does not
    return "";
  }

 private:
  static void need(bool good, const std::string& why) {
    if (!good) throw std::runtime_error("a played peer cannot be made: " + why);
  }
  SegmentHeader header_of(uint32_t owner, uint32_t writer) const {
    SegmentHeader header;
    header.owner = owner;
    header.writer = writer;
    header.bytes = layout_.bytes;
    header.digest = layout_digest(layout_);
    return header;
  }
  std::string lacking(uint64_t offset, uint64_t q) const {
    const uint64_t seen = load_sequence(line_at(incoming_, offset));
    if (seen == q) return "";
    return place_text(layout_, offset) + " carries " + sequence_text(seen) + ", awaited is " + sequence_text(q);
  }

  Backend& backend_;
  const SegmentLayout layout_;
  cuda::Memory memory_;
  Copies copies_;
  cuda::Allocation there_, here_, bell_;
  Image outgoing_, sent_, incoming_;
};

/// Rank 0 of two on GPU 0, with a service loop and an engine on lane 1; rank 1 is played.
class PlayedWorld {
 public:
  PlayedWorld(const Shape& shape, ModelWeights weights, uint32_t lanes, uint32_t max_tokens, int peer_gpu)
      : backend_(make_cuda_backend(options(shape, std::move(weights), lanes, max_tokens))),
        metrics_(info()),
        service_(*backend_, metrics_, loop(shape, lanes)),
        peer_(*backend_, shape, lanes, max_tokens, peer_gpu),
        engine_(*backend_, service_, shape, 1, 1 << 20) {}

  PlayedPeer& peer() { return peer_; }
  Engine& engine() { return engine_; }
  Metrics& metrics() { return metrics_; }

 private:
  static BackendOptions options(const Shape& shape, ModelWeights weights, uint32_t lanes, uint32_t max_tokens) {
    BackendOptions o;
    o.shape = shape;
    o.weights = std::move(weights);
    o.ranks = 2;
    o.lanes = lanes;
    o.max_tokens = max_tokens;
    o.max_call_tokens = 256;
    o.handles = HandleKind::cuda_fd;
    o.park = std::getenv("MOED_NO_PARK") == nullptr;
    return o;
  }
  static MetricsInfo info() {
    MetricsInfo i;
    i.ranks = 2;
    return i;
  }
  static ServiceOptions loop(const Shape& shape, uint32_t lanes) {
    ServiceOptions o;
    o.shape = shape;
    o.idle.spin_us = 0;
    o.lanes = lanes;
    return o;
  }

  std::unique_ptr<Backend> backend_;
  Metrics metrics_;
  ServiceLoop service_;
  PlayedPeer peer_;
  Engine engine_;  // first to go: it lets its lane go through the others
};

}  // namespace moed::test
