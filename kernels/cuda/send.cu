// The end of the serve pass: weighted partials to their sources, return lines, the record.
#include "kernels/cuda/device.cuh"
#include "kernels/cuda/passes.h"

namespace moed::cuda {
namespace {

constexpr uint32_t kSendThreads = 256, kSendBlocks = 264, kReturnThreads = 128;
constexpr uint32_t kLineValues = kLinePayload / 2;
constexpr uint64_t kLongestPause = 5'000'000;  ///< between looks at a source whose rows are incomplete

/// Identity: x times the sum of the row's local weights in slot order.
__device__ float identity_value(const World& w, const uint8_t* row, float weight, uint32_t column) {
  const float x = e4m3_to_float(row[w.row.codes + column]) * e8m0_to_float(row[w.row.scales + column / kBlock]);
  return x * weight;
}

__device__ float local_weight(const World& w, const uint8_t* row) {
  const auto* ids = reinterpret_cast<const int32_t*>(row);
  const auto* weights = reinterpret_cast<const float*>(row + w.row.weights);
  float sum = 0.0F;
  for (uint32_t k = 0; k < w.shape.top_k; ++k)
    if (is_local(w, ids[k])) sum += weights[k];
  return sum;
}

/// Experts: the FP32 sum of weight times product over the row's local slots, in slot order.
__device__ float experts_value(const World& w, const uint8_t* row, uint32_t index, uint32_t column) {
  const auto* weights = reinterpret_cast<const float*>(row + w.row.weights);
  const uint32_t* pair_of = w.pair_of + index * w.shape.top_k;
  float sum = 0.0F;
  for (uint32_t k = 0; k < w.shape.top_k; ++k)
    if (pair_of[k] != kNoPair) sum += weights[k] * w.product[uint64_t{pair_of[k]} * w.shape.latent + column];
  return sum;
}

__global__ void send(const __grid_constant__ World w) {
  ServeState& s = *w.serve;
  if (!has_work(s.working)) return;
  if (blockIdx.x == 0 && threadIdx.x == 0 && s.sources != 0) {
    s.send = global_time();
    drill(w, w.send_delay_ns);
  }
  const uint32_t part = threadIdx.x % kLineLanes;
  for (uint32_t index = blockIdx.x; index < s.rows; index += gridDim.x) {
    const Place place = w.place[index];
    const DeviceSource& source = w.source[place.source];
    if (!served(source)) continue;
    const uint8_t* row = w.gathered + uint64_t{index} * w.row_stride;
    const bool identity = layer_experts(w, source.call.layer) == nullptr;
    const float weight = identity ? local_weight(w, row) : 0.0F;
    std::byte* lines = source.answer_segment + w.layout.partial(source.lane, place.token);
    for (uint32_t l = threadIdx.x / kLineLanes; l < w.layout.partial_lines; l += blockDim.x / kLineLanes) {
      uint64_t word[2] = {0, 0};
      for (uint32_t i = 0; i < 8; ++i) {
        const uint32_t column = l * kLineValues + part * 8 + i;
        if (column >= w.shape.latent || (part == kLineLanes - 1 && i >= 4)) break;
        const float v = identity ? identity_value(w, row, weight, column) : experts_value(w, row, index, column);
        word[i / 4] |= uint64_t{float_to_bf16(v)} << (16 * (i % 4));
      }
      store_line(lines + l * kLineBytes, {word[0], word[1]}, source.sequence);
    }
  }
}

/// Eight lanes store one source's return line.
__device__ void store_return(const World& w, const DeviceSource& source, uint32_t sources, uint32_t rows,
                             uint64_t now) {
  const ServeState& s = *w.serve;
  const uint32_t part = threadIdx.x % kLineLanes;
  const bool good = source.status == static_cast<uint32_t>(Status::ok);
  const uint32_t experts = saturated(s.send - s.experts);
  const uint32_t sent = saturated(now - s.send);
  uint32_t word[4] = {0, 0, 0, 0};
  if (part == 0) {
    word[0] = source.status;
    word[1] = good ? source.rows : 0;
    word[2] = rows;
    word[3] = sources;
  } else if (part == 1) {
    word[0] = saturated(source.queue_ns);
    word[1] = experts;
    word[2] = sent;
  }
  store_line(source.answer_segment + w.layout.return_line(source.lane),
             {word[0] | uint64_t{word[1]} << 32, word[2] | uint64_t{word[3]} << 32}, source.sequence);
}

/// A source whose rows were not complete is looked at again, ever more seldom: rows may be late because their GPU is
/// busy, and whoever announces rows and never sends them costs the others one short wait in 5 ms.
__device__ void look_again(const World& w, const DeviceSource& source, uint64_t now) {
  Watch& watch = w.watch[source.rank * w.layout.lanes_all + source.lane];
  if (source.incomplete != kMissing) watch.retries = 0;
  if (source.incomplete != kMissing || watch.served != source.sequence || watch.pending != 0) return;
  watch.pending = source.sequence;
  watch.since = w.serve->gather;
  watch.again = now + min(kRowsNs << min(watch.retries, 10U), kLongestPause);
  ++watch.retries;
}

/// What the host is told of a pass. The first warp.
__device__ void record_pass(const World& w, uint32_t sources, uint32_t rows, uint64_t now) {
  ServeState& s = *w.serve;
  const uint64_t number = s.records + 1;
  ServeRecord r{};
  r.rows = rows;
  r.sources = sources;
  r.pairs = s.pairs;
  for (uint32_t i = 0; i < s.sources; ++i)
    if (w.source[i].status != static_cast<uint32_t>(Status::ok) || w.source[i].incomplete == kMissing) ++r.refused;
  r.weight_bytes = s.groups * expert_bytes(w.shape);
  r.wait_ns = s.waited;
  r.gather_ns = s.experts - s.gather;
  r.experts_ns = s.send - s.experts;
  r.send_ns = now - s.send;
  __syncwarp();
  store_tagged(w.board->served[number % kServeRecords], r, number, offsetof(ServeRecord, reserved));
  if (threadIdx.x != 0) return;
  s.records = number;
  store_u64(&w.board->records, number);
}

__global__ void returns(const __grid_constant__ World w) {
  ServeState& s = *w.serve;
  if (!has_work(s.working)) return;
  __shared__ uint32_t sources;
  __shared__ uint32_t rows;
  if (threadIdx.x == 0) sources = rows = 0;
  __syncthreads();
  for (uint32_t i = threadIdx.x; i < s.sources; i += blockDim.x) {
    if (w.source[i].incomplete == 0) atomicAdd(&sources, 1U);
    if (served(w.source[i])) atomicAdd(&rows, w.source[i].rows);
  }
  __syncthreads();
  const uint64_t now = global_time();
  for (uint32_t i = threadIdx.x / kLineLanes; i < s.sources; i += blockDim.x / kLineLanes)
    if (w.source[i].incomplete == 0) store_return(w, w.source[i], sources, rows, now);
  for (uint32_t i = threadIdx.x; i < s.sources; i += blockDim.x) look_again(w, w.source[i], now);
  if (threadIdx.x < 32 && s.sources != 0) record_pass(w, sources, rows, now);
  if (threadIdx.x == 0 && s.sources != 0) store_u64(&w.board->answered, s.chosen);
}

}  // namespace

void launch_send(const World& w, cudaStream_t stream) { launch(send, {kSendBlocks, kSendThreads}, stream, w); }
void launch_returns(const World& w, cudaStream_t stream) { launch(returns, {1, kReturnThreads}, stream, w); }

}  // namespace moed::cuda
