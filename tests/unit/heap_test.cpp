// The layout of a segment: aligned, disjoint, ending at its size, whatever the shape; exact beyond 2^31 and 2^32 bytes.
#include "kernels/heap.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <random>
#include <set>
#include <string>
#include <vector>

namespace moed {
namespace {

__extension__ typedef unsigned __int128 Wide;

struct Case {
  Shape shape;
  uint32_t ranks, lanes, max_tokens;
};

Shape make_shape(uint32_t latent, uint32_t top_k, uint32_t experts = 896) {
  Shape s;
  s.hidden = 7168;
  s.latent = latent;
  s.intermediate = 3072;
  s.experts = experts;
  s.top_k = top_k;
  s.first_layer = 1;
  s.layers = 92;
  return s;
}

/// The corners of every limit, then random shapes: 216 in all.
std::vector<Case> cases() {
  std::vector<Case> all;
  for (const uint32_t latent : {64U, 3584U, kMaxWidth})
    for (const uint32_t top_k : {1U, 16U, kMaxTopK})
      for (const uint32_t lanes : {1U, kMaxLanes})
        for (const uint32_t tokens : {1U, kMaxTokens})
          all.push_back({make_shape(latent, top_k), tokens == 1 ? 1U : kMaxRanks, lanes, tokens});
  std::mt19937_64 random(20);
  auto pick = [&random](uint32_t low, uint32_t high) {
    return low + static_cast<uint32_t>(random() % (high - low + 1));
  };
  while (all.size() < 216) {
    const uint32_t ranks = pick(1, kMaxRanks);
    all.push_back({make_shape(64 * pick(1, 256), pick(1, kMaxTopK), pick(ranks, 4096)), ranks, pick(1, kMaxLanes),
                   pick(1, kMaxTokens)});
  }
  return all;
}

std::string text(const Case& c) {
  return "latent " + std::to_string(c.shape.latent) + " top_k " + std::to_string(c.shape.top_k) + " ranks " +
         std::to_string(c.ranks) + " lanes " + std::to_string(c.lanes) + " tokens " + std::to_string(c.max_tokens);
}

/// Who stores into a record. The two passes of one peer run at the same time, so they count as two writers.
enum class Writer { owner, call_pass, serve_pass };

struct Piece {
  Writer writer;
  uint64_t at, bytes;
};

/// Every record of a segment, in the order of the picture in heap.h.
std::vector<Piece> pieces(const SegmentLayout& m) {
  std::vector<Piece> all{{Writer::owner, 0, kLineBytes}};
  for (uint64_t lane = 0; lane < m.lanes_all; ++lane) all.push_back({Writer::call_pass, m.call(lane), kLineBytes});
  for (uint64_t lane = 0; lane < m.lanes_all; ++lane)
    for (uint64_t t = 0; t < m.max_tokens; ++t)
      all.push_back({Writer::call_pass, m.row(lane, t), m.row_lines * kLineBytes});
  for (uint64_t lane = 0; lane < m.lanes_all; ++lane)
    for (uint64_t t = 0; t < m.max_tokens; ++t)
      all.push_back({Writer::serve_pass, m.partial(lane, t), m.partial_lines * kLineBytes});
  for (uint64_t lane = 0; lane < m.lanes_all; ++lane)
    all.push_back({Writer::serve_pass, m.return_line(lane), kLineBytes});
  return all;
}

TEST(Heap, RecordsTileTheSegmentExactly) {
  int shapes = 0;
  for (const Case& c : cases()) {
    ASSERT_EQ(check(c.shape, c.ranks, c.max_tokens).field, nullptr) << text(c);
    const SegmentLayout m = segment_layout(c.shape, c.lanes, c.max_tokens);
    ASSERT_EQ(m.lanes_all, c.lanes + 1);
    uint64_t end = 0;
    for (const Piece& p : pieces(m)) {
      ASSERT_EQ(p.at % kLineBytes, 0U) << text(c);
      ASSERT_EQ(p.at, end) << text(c);  // neither gap nor overlap with the record before
      end = p.at + p.bytes;
    }
    ASSERT_EQ(end, m.bytes) << text(c);
    ++shapes;
  }
  EXPECT_GE(shapes, 200);
}

TEST(Heap, NoTwoWritersShareALine) {
  for (const Case& c : cases()) {
    if (uint64_t{c.lanes} * c.max_tokens > 4000) continue;  // line by line only where that is quick
    const SegmentLayout m = segment_layout(c.shape, c.lanes, c.max_tokens);
    std::vector<int> writer(m.bytes / kLineBytes, -1);
    for (const Piece& p : pieces(m)) {
      for (uint64_t line = p.at / kLineBytes; line * kLineBytes < p.at + p.bytes; ++line) {
        ASSERT_LT(line, writer.size()) << text(c);
        ASSERT_EQ(writer[line], -1) << text(c) << " line " << line << " of writer " << static_cast<int>(p.writer);
        writer[line] = static_cast<int>(p.writer);
      }
    }
    ASSERT_EQ(std::count(writer.begin(), writer.end(), -1), 0) << text(c);
  }
}

TEST(Heap, RecordsHoldTheirPayload) {
  for (const Case& c : cases()) {
    const SegmentLayout m = segment_layout(c.shape, c.lanes, c.max_tokens);
    const uint64_t row = 8 * uint64_t{c.shape.top_k} + c.shape.latent / 32 + c.shape.latent;
    ASSERT_EQ(row_layout(c.shape).bytes, row) << text(c);
    ASSERT_GE(m.row_lines * 120, row) << text(c);
    ASSERT_LT((m.row_lines - 1) * 120, row) << text(c);
    ASSERT_GE(m.partial_lines * 120, 2 * uint64_t{c.shape.latent}) << text(c);
    ASSERT_LT((m.partial_lines - 1) * 120, 2 * uint64_t{c.shape.latent}) << text(c);
    const uint64_t records = uint64_t{c.lanes + 1} * c.max_tokens;
    ASSERT_EQ(m.bytes, 128 * (1 + 2 * uint64_t{c.lanes + 1} + records * (m.row_lines + m.partial_lines))) << text(c);
  }
}

TEST(Heap, PartsOfARowAreInOrderAndAligned) {
  for (const Case& c : cases()) {
    const RowLayout r = row_layout(c.shape);
    ASSERT_EQ(r.weights, 4 * c.shape.top_k) << text(c);
    ASSERT_EQ(r.scales, r.weights + 4 * c.shape.top_k) << text(c);
    ASSERT_EQ(r.codes, r.scales + c.shape.latent / 32) << text(c);
    ASSERT_EQ(r.bytes, r.codes + c.shape.latent) << text(c);
    ASSERT_EQ(r.weights % 4, 0U) << text(c);
  }
}

TEST(Heap, KimiK3) {
  const Shape s = make_shape(3584, 16);
  const SegmentLayout m = segment_layout(s, 2, 128);
  EXPECT_EQ(row_layout(s).bytes, 3824U);
  EXPECT_EQ(m.row_lines, 32U);
  EXPECT_EQ(m.partial_lines, 60U);
  EXPECT_EQ(m.calls, 128U);
  EXPECT_EQ(m.rows, 512U);
  EXPECT_EQ(m.partials, 1573376U);
  EXPECT_EQ(m.returns, 4522496U);
  EXPECT_EQ(m.bytes, 4522880U);
}

/// F08: an offset is row x stride, so a product in 32 bits goes wrong only from some row on. Every row is compared with
/// the same product in 128 bits, across 2^31 within one segment and across 2^32 within one rank's heap.
TEST(Heap, OffsetsAtTheLimitsAre64Bit) {
  const SegmentLayout m = segment_layout(make_shape(kMaxWidth, kMaxTopK), kMaxLanes, kMaxTokens);
  EXPECT_EQ(m.row_lines, 143U);
  EXPECT_EQ(m.partial_lines, 274U);
  uint64_t beyond = 0;
  for (uint64_t lane = 0; lane <= kMaxLanes; ++lane) {
    for (uint64_t t = 0; t < kMaxTokens; ++t) {
      const Wide record = Wide{lane} * kMaxTokens + t;
      ASSERT_EQ(Wide{m.row(lane, t)}, Wide{m.rows} + record * 143 * 128) << lane << " " << t;
      ASSERT_EQ(Wide{m.partial(lane, t)}, Wide{m.partials} + record * 274 * 128) << lane << " " << t;
      beyond += m.partial(lane, t) >= uint64_t{1} << 31;
    }
  }
  EXPECT_GT(beyond, 0U) << "no offset passed 2^31: the test looked at nothing";
  EXPECT_EQ(m.bytes, 2886590848U);
  const Wide heap = Wide{m.bytes} * kMaxRanks;
  EXPECT_GT(heap, Wide{1} << 38);
  EXPECT_EQ(Wide{m.bytes * kMaxRanks}, heap);
}

TEST(Heap, OffsetsStayExactBeyond32Bits) {
  const SegmentLayout m = segment_layout(make_shape(3584, 16), kMaxLanes, kMaxTokens);
  // Records around the first one whose offset from its region's start passes 2^31, 2^32 and 2^33 bytes.
  for (const int power : {31, 32, 33}) {
    const uint64_t record = (uint64_t{1} << power) / (m.partial_lines * kLineBytes);
    for (uint64_t r = record - 1; r <= record + 1; ++r) {
      const uint64_t lane = r / kMaxTokens;
      const uint64_t t = r % kMaxTokens;
      EXPECT_EQ(Wide{m.partial(lane, t)}, Wide{m.partials} + Wide{r} * 60 * 128) << power;
      EXPECT_EQ(Wide{m.row(lane, t)}, Wide{m.rows} + Wide{r} * 32 * 128) << power;
    }
  }
}

TEST(Heap, DigestTellsLayoutsApart) {
  std::set<uint64_t> seen;
  auto add = [&seen](uint32_t latent, uint32_t top_k, uint32_t lanes, uint32_t tokens) {
    return seen.insert(layout_digest(segment_layout(make_shape(latent, top_k), lanes, tokens))).second;
  };
  EXPECT_TRUE(add(3584, 16, 2, 128));
  EXPECT_FALSE(add(3584, 16, 2, 128));
  EXPECT_TRUE(add(3584, 16, 3, 128));
  EXPECT_TRUE(add(3584, 16, 2, 129));
  EXPECT_TRUE(add(3648, 16, 2, 128));
  EXPECT_TRUE(add(3584, 32, 2, 128));
  // Equal sizes, other lanes and tokens: 4 lanes_all x 6 tokens and 6 x 4 hold equally many records.
  EXPECT_TRUE(add(256, 4, 3, 6));
  EXPECT_TRUE(add(256, 4, 5, 4));
}

TEST(Heap, SequenceKeepsSessionAndCountApart) {
  EXPECT_EQ(sequence(1, 1), (uint64_t{1} << 44) + 1);
  EXPECT_EQ(sequence(kMaxSession, kCountMask), ~uint64_t{0});
  EXPECT_LT(sequence(1, kCountMask), sequence(2, 1));
  EXPECT_EQ(sequence(5, 7) >> kSessionShift, 5U);
  EXPECT_EQ(sequence(5, 7) & kCountMask, 7U);
}

}  // namespace
}  // namespace moed
