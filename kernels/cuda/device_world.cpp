#include "kernels/cuda/device_world.h"

#include <algorithm>
#include <cstring>
#include <mutex>
#include <new>
#include <vector>

#include "kernels/cuda/side.h"

namespace moed::cuda {
namespace {

constexpr uint64_t kGranule = 2 << 20;  ///< of GPU memory
constexpr uint32_t kFollowers = 64;     ///< blocks of a loop that do not lead
constexpr uint64_t kMostWatches = 512;  ///< call lines beyond which a look at all of them takes too long for a loop
constexpr uint32_t kMostFollowers = 128;
constexpr uint32_t kMarks = kMostFollowers * kWatched;  ///< those of more call lines than that are one each

constexpr uint64_t round_up(uint64_t bytes, uint64_t to) { return (bytes + to - 1) / to * to; }

uint32_t local_experts(const BackendOptions& o) {
  return first_expert(o.shape, o.rank + 1, o.ranks) - first_expert(o.shape, o.rank, o.ranks);
}

/// Bytes of all layers' experts and norms.
uint64_t all_weights(const BackendOptions& o) {
  uint64_t bytes = 0;
  for (const LayerWeights& layer : o.weights.layers)
    bytes += round_up(layer.experts.size() * expert_bytes(o.shape) + layer.norm.size() * 2, 256);
  return bytes;
}

/// The constants that follow from the options alone.
World constants(const BackendOptions& o) {
  World w{};
  w.shape = o.shape;
  w.layout = segment_layout(o.shape, o.lanes, o.max_tokens);
  w.row = row_layout(o.shape);
  w.rank = o.rank;
  w.ranks = o.ranks;
  w.first = first_expert(o.shape, o.rank, o.ranks);
  w.local = local_experts(o);
  w.max_call_tokens = o.max_call_tokens;
  w.drop = o.on_lost_rank == OnLostRank::drop ? 1 : 0;
  w.max_pairs = std::max(o.shape.top_k * o.max_tokens, o.max_pairs);
  w.max_rows = w.max_pairs / o.shape.top_k;
  w.row_stride = static_cast<uint32_t>(w.layout.row_lines * kLinePayload);
  w.per_latent = 1.0 / o.shape.latent;
  w.per_expert = 1.0F / static_cast<float>(o.shape.experts);
  w.per_slot = (0xFFFFU + o.shape.top_k) / o.shape.top_k;
  w.linger_ns = uint64_t{o.linger_us} * 1000;
  w.experts_delay_ns = uint64_t{o.drills.experts_delay_us} * 1000;
  w.send_delay_ns = uint64_t{o.drills.send_delay_us} * 1000;
  w.call_delay_ns = uint64_t{o.drills.call_delay_us} * 1000;
  w.delay_for_ns = uint64_t{o.drills.for_ms} * 1'000'000;
  w.model_layers = static_cast<uint32_t>(o.weights.layers.size());
  const bool drills = w.experts_delay_ns + w.send_delay_ns + w.call_delay_ns != 0;
  const bool many = uint64_t{w.ranks} * w.layout.lanes_all > kMostWatches;
  w.long_way = drills || many || o.tuning.long_way ? 1 : 0;
  w.settle = o.tuning.unsettled ? kSettleNone : o.tuning.fence ? kSettleFence : kSettleConfirm;
  return w;
}

/// Calls take(pointer, count) for every array of a World. Without experts there is nothing to multiply.
template <class Take>
bool each_array(World& w, Take take) {
  const uint64_t watches = uint64_t{w.ranks} * w.layout.lanes_all;
  const uint64_t sources = watches + 1;  // one that does not fit any more is read before it is left
  const uint64_t slots = uint64_t{w.layout.lanes_all} * w.max_call_tokens * w.shape.top_k;
  const uint64_t rows = w.max_rows;
  const uint64_t row_slots = rows * w.shape.top_k;
  const uint64_t pairs = w.model_layers != 0 ? w.max_pairs : 0;
  const uint64_t keys = uint64_t{w.model_layers} * w.local;
  return take(w.pictures, kPictures) && take(w.present, 32) && take(w.disarm, 32) && take(w.faults, 16) &&
         take(w.lane, w.layout.lanes_all) && take(w.begun, w.layout.lanes_all + 1) &&
         take(w.calls, uint64_t{w.layout.lanes_all} * kMostRecords) && take(w.call_ticket, w.layout.lanes_all) &&
         take(w.serve_go, 1) && take(w.mark, watches + kMarks) && take(w.ids, slots) && take(w.weights, slots) &&
         take(w.serve, 1) && take(w.watch, watches) && take(w.source, sources) && take(w.place, rows) &&
         take(w.gathered, rows * w.row_stride) && take(w.key_count, keys) && take(w.key_first, keys) &&
         take(w.pair_key, row_slots) && take(w.pair_rank, row_slots) && take(w.pair_of, row_slots) &&
         take(w.pair, pairs) && take(w.group, pairs) && take(w.middle, pairs * w.shape.intermediate) &&
         take(w.middle_scale, pairs * (w.shape.intermediate / kBlock)) && take(w.product, pairs * w.shape.latent);
}

/// Boards are kept for the next back end of this process: freeing host memory that the GPU sees waits for every stream
/// of the process that waits, those of other back ends too.
struct Boards {
  std::mutex mutex;
  std::vector<Board*> free;
};
Boards& boards() {
  static auto* all = new Boards;  // outlives whatever is destroyed when the process ends
  return *all;
}

/// A board of zeros; nullptr: why.
Board* take_board(std::string& why) {
  void* memory = nullptr;
  {
    const std::lock_guard lock(boards().mutex);
    if (!boards().free.empty()) {
      memory = boards().free.back();
      boards().free.pop_back();
    }
  }
  if (memory == nullptr) {
    const cudaError_t e = cudaHostAlloc(&memory, sizeof(Board), cudaHostAllocMapped | cudaHostAllocPortable);
    if (e != cudaSuccess) {
      why = cuda_text("host memory for what the GPU reports", e);
      return nullptr;
    }
  }
  std::memset(memory, 0, sizeof(Board));
  return new (memory) Board;
}

}  // namespace

std::string cuda_text(const char* what, cudaError_t error) {
  return std::string(what) + ": " + cudaGetErrorString(error) + " (" + cudaGetErrorName(error) + ")";
}

Backend::Memory planned(const BackendOptions& options) {
  World w = constants(options);
  Backend::Memory m;
  m.heap = round_up(w.layout.bytes, kGranule) * options.ranks;
  m.weights = all_weights(options);
  each_array(w, [&]<class T>(T*&, uint64_t count) {
    m.scratch += round_up(count * sizeof(T), 256);
    return true;
  });
  return m;
}

DeviceWorld::~DeviceWorld() {
  if (board_ == nullptr) return;
  const std::lock_guard lock(boards().mutex);
  boards().free.push_back(board_);
}

/// What waits holds at most a quarter of the GPU: half of it serves, half is the lanes', and the blocks that lead do
/// not follow.
void DeviceWorld::share_multiprocessors(uint32_t count, const BackendOptions::Tuning& tuning) {
  World& w = world_;
  const uint32_t half = std::clamp(count / 2 - 1, 2U, kFollowers + 1);
  const uint32_t left = count > half + 1 ? count - half - 1 : 1;  // lane 0 has one
  const uint32_t each = std::clamp(left / std::max(1U, w.layout.lanes_all - 1), 1U, kFollowers + 1);
  w.serve_blocks = tuning.serve_blocks != 0 ? std::clamp(tuning.serve_blocks, 2U, kMostFollowers + 1) : half;
  w.call_blocks = tuning.call_blocks != 0 ? tuning.call_blocks : each;
}

/// All arrays lie in one allocation, so that each does not round up to a granule of its own.
Status DeviceWorld::make(Memory& memory, const BackendOptions& options, const GpuFacts& gpu, Side& side,
                         std::string& why) {
  world_ = constants(options);
  share_multiprocessors(static_cast<uint32_t>(gpu.multiprocessors), options.tuning);
  uint64_t bytes = 0;
  each_array(world_, [&]<class T>(T*&, uint64_t count) {
    bytes += round_up(count * sizeof(T), 256);
    return true;
  });
  scratch_ = memory.make(bytes, std::nullopt, why);
  if (!scratch_) return Status::no_memory;
  uint64_t at = 0;
  each_array(world_, [&]<class T>(T*& out, uint64_t count) {
    out = reinterpret_cast<T*>(scratch_.as<std::byte>() + at);
    at += round_up(count * sizeof(T), 256);
    return true;
  });
  board_ = take_board(why);
  if (board_ == nullptr) return Status::no_memory;
  world_.board = board_;
  if (side.zero(scratch_.as<void>(), bytes) && side.settle()) return upload(memory, options, side, why);
  why = "zeroing the scratch memory failed; see nvidia-smi for errors of this GPU";
  return Status::device_lost;
}

/// Copies weights and norms to exportable memory, each expert's six tensors as one block.
Status DeviceWorld::upload(Memory& memory, const BackendOptions& options, Side& side, std::string& why) {
  const uint64_t bytes = all_weights(options) + round_up(options.weights.layers.size() * sizeof(DeviceLayer), 256);
  if (options.weights.layers.empty()) return Status::ok;
  weights_ = memory.make(bytes, HandleKind::cuda_fd, why);
  if (!weights_) return Status::no_memory;
  const Shape& s = options.shape;
  const uint64_t packed = packed_bytes(s.intermediate, s.latent);
  const uint64_t scales = scale_bytes(s.intermediate, s.latent);
  auto* at = weights_.as<uint8_t>();
  bool good = true;
  const auto put = [&](const void* from, uint64_t n) {
    good = good && side.to_gpu(at, from, n);
    at += n;
  };
  std::vector<DeviceLayer> layers;
  for (const LayerWeights& layer : options.weights.layers) {
    DeviceLayer& out = layers.emplace_back();
    out.experts = layer.experts.empty() ? nullptr : at;
    for (const ExpertWeights& x : layer.experts) {
      put(x.w1, packed), put(x.w1_scale, scales);
      put(x.w3, packed), put(x.w3_scale, scales);
      put(x.w2, packed), put(x.w2_scale, scales);
    }
    out.norm = layer.norm.empty() ? nullptr : reinterpret_cast<const uint16_t*>(at);
    put(layer.norm.data(), layer.norm.size() * 2);
    at = weights_.as<uint8_t>() + round_up(static_cast<uint64_t>(at - weights_.as<uint8_t>()), 256);
  }
  world_.layers = reinterpret_cast<const DeviceLayer*>(at);
  put(layers.data(), layers.size() * sizeof(DeviceLayer));
  if (good && side.settle()) return Status::ok;
  why = "copying the weights to the GPU failed; see nvidia-smi for errors of this GPU";
  return Status::device_lost;
}

void DeviceWorld::flip_when_due(const BackendOptions& options, Side& side, Nanos now) {
  const Drills& d = options.drills;
  if (flipped_ || d.flip_after_ms == 0 || now < made_ + uint64_t{d.flip_after_ms} * 1'000'000) return;
  flipped_ = true;
  const uint32_t m = d.flip_layer - options.shape.first_layer;
  const uint32_t local = d.flip_expert - world_.first;
  DeviceLayer layer{};
  if (m >= options.weights.layers.size() || local >= world_.local) return;
  if (!side.from_gpu(&layer, world_.layers + m, sizeof layer) || layer.experts == nullptr) return;
  auto* const at = const_cast<uint8_t*>(layer.experts) + local * expert_bytes(options.shape) +
                   expert_offsets(options.shape).w2_scale;
  uint8_t scale = 0;
  if (!side.from_gpu(&scale, at, 1)) return;
  scale ^= 4;
  if (side.to_gpu(at, &scale, 1)) side.settle();
}

}  // namespace moed::cuda
