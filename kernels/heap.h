// A segment of the heap: everything that one peer may write at a rank. One walk gives all offsets and the size.
//
//   header    1 line                                 by the owner, before the handle is given
//   calls     lanes_all lines                        by the peer as source: CallLine
//   rows      lanes_all x max_tokens x row_lines     by the peer as source: ids, weights, scales, codes of one token
//   partials  lanes_all x max_tokens x partial_lines by the peer as expert rank, for the owner's lanes: BF16[L]
//   returns   lanes_all lines                        by the peer as expert rank, for the owner's lanes: ReturnLine
//
// lanes_all = lanes + 1: lane 0 is the daemon's own. Every region starts on a line; no two ranks ever write one line.
#pragma once

#include <cstdint>

#include "daemon/abi/shape.h"
#include "kernels/lines.h"

namespace moed {

inline constexpr uint64_t kHeapMagic = 0x31504145'44454f4dULL;  // "MOEDEAP1"
inline constexpr uint32_t kLayoutVersion = 1;

/// First line of a segment; both ends of a link compare it before the link is ready.
struct SegmentHeader {
  uint64_t magic = kHeapMagic;
  uint32_t version = kLayoutVersion;
  uint32_t owner = 0;   ///< rank whose memory this is
  uint32_t writer = 0;  ///< rank that may write it
  uint32_t pad = 0;
  uint64_t bytes = 0;
  uint64_t digest = 0;  ///< layout_digest
};
static_assert(sizeof(SegmentHeader) <= kLinePayload);

/// The call that the source has dispatched to this rank.
struct CallLine {
  uint32_t layer = 0;
  uint16_t tokens = 0;
  uint16_t generation = 0;  ///< of the placement; 0 now
  uint8_t bitmap[kMaxTokens / 8] = {};
};
static_assert(sizeof(CallLine) == 112 && sizeof(CallLine) <= kLinePayload);

/// The end of an expert rank's answer, with its own times.
struct ReturnLine {
  uint32_t status = 0;  ///< Status
  uint32_t rows = 0;
  uint32_t pass_rows = 0;
  uint32_t pass_sources = 0;
  uint32_t queue_ns = 0;
  uint32_t experts_ns = 0;
  uint32_t send_ns = 0;
};
static_assert(sizeof(ReturnLine) <= kLinePayload);

/// One line beside the segments: how a sleeping rank is woken. A hint, never a proof.
struct alignas(128) Doorbell {
  uint32_t asleep;  ///< written by its owner only
  uint32_t wake;    ///< incremented by peers
  uint32_t pad[30];
};
static_assert(sizeof(Doorbell) == kLineBytes);

/// Where the parts of one token's row record lie: ids int32[K], weights float32[K], scales u8[L/32], codes u8[L].
struct RowLayout {
  uint32_t weights, scales, codes, bytes;
};

inline constexpr uint32_t kMaxRowBytes = kMaxTopK * 8 + kMaxWidth / kBlock + kMaxWidth;

MOED_HD constexpr RowLayout row_layout(const Shape& s) {
  RowLayout r{};
  r.weights = s.top_k * 4;
  r.scales = r.weights + s.top_k * 4;
  r.codes = r.scales + s.latent / kBlock;
  r.bytes = r.codes + s.latent;
  return r;
}

/// Offsets of one segment. All 64-bit: at 64 lanes, 832 tokens and the widest rows a segment passes 2^31 bytes, a heap
/// of two 2^32.
struct SegmentLayout {
  uint32_t lanes_all = 0, max_tokens = 0;
  uint64_t row_lines = 0, partial_lines = 0;
  uint64_t calls = 0, rows = 0, partials = 0, returns = 0, bytes = 0;

  MOED_HD constexpr uint64_t call(uint64_t lane) const { return calls + lane * kLineBytes; }
  MOED_HD constexpr uint64_t row(uint64_t lane, uint64_t token) const {
    return rows + (lane * max_tokens + token) * row_lines * kLineBytes;
  }
  MOED_HD constexpr uint64_t partial(uint64_t lane, uint64_t token) const {
    return partials + (lane * max_tokens + token) * partial_lines * kLineBytes;
  }
  MOED_HD constexpr uint64_t return_line(uint64_t lane) const { return returns + lane * kLineBytes; }
};

/// The walk. `lanes` engine lanes; shape and max_tokens as check() allows.
MOED_HD constexpr SegmentLayout segment_layout(const Shape& s, uint32_t lanes, uint32_t max_tokens) {
  SegmentLayout m{};
  m.lanes_all = lanes + 1;
  m.max_tokens = max_tokens;
  m.row_lines = lines_of(row_layout(s).bytes);
  m.partial_lines = lines_of(uint64_t{s.latent} * 2);
  uint64_t at = kLineBytes;  // the header
  m.calls = at;
  at += uint64_t{m.lanes_all} * kLineBytes;
  m.rows = at;
  at += uint64_t{m.lanes_all} * max_tokens * m.row_lines * kLineBytes;
  m.partials = at;
  at += uint64_t{m.lanes_all} * max_tokens * m.partial_lines * kLineBytes;
  m.returns = at;
  at += uint64_t{m.lanes_all} * kLineBytes;
  m.bytes = at;
  return m;
}

/// A number that differs whenever two segments would be walked differently (FNV-1a over the walk's results).
MOED_HD constexpr uint64_t layout_digest(const SegmentLayout& m) {
  uint64_t h = 0xcbf29ce484222325ULL;
  const uint64_t words[] = {kLayoutVersion, m.lanes_all, m.max_tokens, m.row_lines, m.partial_lines, m.bytes};
  for (const uint64_t word : words)
    for (int i = 0; i < 8; ++i) h = (h ^ (word >> (8 * i) & 0xFF)) * 0x100000001b3ULL;
  return h;
}

}  // namespace moed
