// Choosing what a serve pass takes: looks at the call lines of all lanes, lingers for lanes that took part in the last
// passes, and takes whole sources in turn.
#pragma once

#include "kernels/cuda/device.cuh"

namespace moed::cuda {

inline constexpr uint64_t kNewerNs = 500'000;  ///< at most so long until a source's newer call is looked at
inline constexpr uint32_t kMayMiss = 2;        ///< passes that a source may miss before nobody lingers for it
inline constexpr uint32_t kMostSources = 64;   ///< of one pass, with rows or without: choosing takes its time, too
inline constexpr uint32_t kCallWords = kMaxTokens / 32;

__device__ inline bool is_due(const Watch& watch, uint64_t now) { return watch.pending != 0 && now >= watch.again; }

/// What one look at all call lines has found, over the threads of the block.
struct Looked {
  uint32_t present;  ///< picture
  uint32_t pending, missing;
};

/// Notes every call line that is new and when it was seen.
__device__ inline void look_at(const World& w, Looked& looked, uint64_t last_look, uint64_t now) {
  const Picture& picture = w.pictures[looked.present];
  const uint32_t watches = w.ranks * w.layout.lanes_all;
  for (uint32_t i = threadIdx.x; i < watches; i += blockDim.x) {
    Watch& watch = w.watch[i];
    const DeviceLink& link = picture.link[i / w.layout.lanes_all];
    if (link.state == LinkState::ready) {
      const std::byte* line = link.mine + w.layout.call(i % w.layout.lanes_all);
      const uint64_t seen = load_u64(reinterpret_cast<const uint64_t*>(line + kLinePayload));
      if (seen >> kSessionShift == link.session && seen != watch.pending && seen > watch.served) {
        watch.pending = seen;
        watch.since = last_look;
        watch.again = min(watch.again, now + kNewerNs);
      }
    }
    if (is_due(watch, now)) looked.pending = 1;
    if (watch.pending == 0 && watch.recent > 0) looked.missing = 1;
  }
}

/// Whether the copied call line is one that a sound peer may send; counts its rows.
__device__ inline Status check_call(const World& w, const CallLine& call, uint32_t& rows) {
  rows = 0;
  for (uint32_t k = 0; k < kCallWords; ++k) {
    const uint32_t bits = bitmap_words(call)[k];
    const uint32_t first = k * 32;
    if (first + 32 > call.tokens && (call.tokens <= first ? bits : bits >> (call.tokens - first)) != 0)
      return Status::bad_call;
    rows += __popc(bits);
  }
  const bool known = call.layer == kIdentityLayer ||
                     (call.layer >= w.shape.first_layer && call.layer - w.shape.first_layer < w.shape.layers);
  return call.tokens <= w.layout.max_tokens && known ? Status::ok : Status::bad_call;
}

/// What choosing carries from one source to the next; one thread's.
struct Choice {
  uint32_t sources, rows, first_left;
  bool left;
};

/// Takes one pending watch into the pass, unless it does not fit any more. Lanes 0 to 7 of a warp read the line.
__device__ inline void take_source(const World& w, uint32_t at, const DeviceLink& link, uint64_t now, Choice& choice) {
  Watch& watch = w.watch[at];
  DeviceSource& source = w.source[choice.sources];  // one more than are taken has its place
  const uint32_t lane = at % w.layout.lanes_all;
  const uint64_t noted = watch.pending;
  __syncwarp();
  if (threadIdx.x == 0) watch.pending = 0;
  if (link.state != LinkState::ready || noted >> kSessionShift != link.session) return;
  uint64_t sequence = 0;
  if (threadIdx.x < kLineLanes) {
    const ulonglong2 words = load_16(link.mine + w.layout.call(lane) + threadIdx.x * 16);
    auto* call = reinterpret_cast<uint64_t*>(&source.call);
    sequence = words.y;
    if (threadIdx.x < kLineLanes - 1) {  // the last lane holds padding and the sequence
      call[threadIdx.x * 2] = words.x;
      call[threadIdx.x * 2 + 1] = words.y;
    }
  }
  sequence = __shfl_sync(0xFFFFFFFFU, sequence, kLineLanes - 1);
  __syncwarp();
  if (sequence >> kSessionShift != link.session || threadIdx.x != 0) return;
  uint32_t rows = 0;
  const Status status = check_call(w, source.call, rows);
  if (status != Status::ok) rows = 0;
  if (choice.sources == kMostSources || (choice.sources > 0 && (choice.rows + rows) * w.shape.top_k > w.max_pairs)) {
    if (!choice.left) choice.first_left = at;
    choice.left = true;
    watch.pending = sequence;
    return;
  }
  source.rank = at / w.layout.lanes_all;
  source.lane = lane;
  source.sequence = sequence;  // it may have gone on since it was noted
  source.rows_segment = link.mine;
  source.answer_segment = link.theirs;
  source.queue_ns = now > watch.since ? now - watch.since : 0;
  source.first_row = choice.rows;
  source.rows = rows;
  source.status = static_cast<uint32_t>(status);
  source.incomplete = 0;
  choice.rows += rows;
  ++choice.sources;
  watch.served = sequence;
  watch.recent = kMayMiss;
  w.serve->next = (at + 1) % (w.ranks * w.layout.lanes_all);
}

/// Takes whole sources, from the one after the one served last, while they fit. One warp.
__device__ inline void choose(const World& w, uint32_t present, uint64_t now, Choice& choice) {
  const uint32_t watches = w.ranks * w.layout.lanes_all;
  const uint32_t start = w.serve->next;
  for (uint32_t base = 0; base < watches; base += 32) {
    const uint32_t i = base + threadIdx.x;
    const uint32_t at = i < watches ? (start + i) % watches : 0;
    const bool pending = i < watches && is_due(w.watch[at], now);
    if (i < watches && w.watch[at].pending == 0 && w.watch[at].recent > 0) --w.watch[at].recent;
    for (uint32_t left = __ballot_sync(0xFFFFFFFFU, pending); left != 0; left &= left - 1) {
      const uint32_t one = __shfl_sync(0xFFFFFFFFU, at, __ffs(left) - 1);
      take_source(w, one, w.pictures[present].link[one / w.layout.lanes_all], now, choice);
      __syncwarp();
    }
  }
}

/// Names the row of every token that a source has sent.
__device__ inline void place_rows(const World& w, uint32_t source) {
  const DeviceSource& s = w.source[source];
  if (s.status != static_cast<uint32_t>(Status::ok)) return;
  const uint32_t* bits = bitmap_words(s.call);
  for (uint32_t t = threadIdx.x; t < s.call.tokens; t += blockDim.x) {
    if ((bits[t / 32] >> (t % 32) & 1) == 0) continue;
    uint32_t before = __popc(bits[t / 32] & ((1U << (t % 32)) - 1));
    for (uint32_t k = 0; k < t / 32; ++k) before += __popc(bits[k]);
    w.place[s.first_row + before] = {source, t};
  }
}

/// A block waits for call lines, at the latest until `until`, lingers for those that may be missing, and chooses what
/// this pass serves.
__device__ inline void choose_sources(const World& w, uint64_t loop, uint64_t until) {
  ServeState& s = *w.serve;
  __shared__ Looked looked;
  __shared__ Choice choice;
  if (threadIdx.x == 0) choice = {};
  __syncthreads();
  const bool come = wait_block(until, w.disarm, w.disarm, [&](uint64_t now) {
    if (threadIdx.x == 0) looked = {load_u32(w.present), 0, 0};
    __syncthreads();
    look_at(w, looked, s.last_look, now);
    __syncthreads();
    if (threadIdx.x != 0) return false;
    s.last_look = now;
    if (looked.pending == 0) return false;
    if (s.first_pending == 0) s.first_pending = now;
    return looked.missing == 0 || now >= s.first_pending + w.linger_ns;
  });
  if (!come) return;
  const uint64_t now = global_time();
  if (threadIdx.x < 32) choose(w, looked.present, now, choice);
  __syncthreads();
  for (uint32_t i = 0; i < choice.sources; ++i) place_rows(w, i);
  if (threadIdx.x != 0) return;
  if (choice.left) s.next = choice.first_left;
  s.sources = choice.sources;
  s.rows = choice.rows;
  s.gather = now;
  s.waited = now - s.first_pending;
  s.chosen = loop;
  if (choice.sources != 0) store_u64(&w.board->serving, loop);
  s.first_pending = choice.left ? now : 0;
}

}  // namespace moed::cuda
