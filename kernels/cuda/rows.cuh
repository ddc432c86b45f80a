// A token's row record: made from x by the source's blocks, cut into lines and stored to every rank that owns one of
// the token's experts. The same bits whichever kernel makes it. Loops are short and go over whole warps: this code runs
// once a call, and what does not fit the instruction cache is what it would wait for.
#pragma once

#include "kernels/cuda/device.cuh"
#include "kernels/cuda/sizes.cuh"

namespace moed::cuda {

/// Threads that make a row, or a sum, together: the first of a block, with a barrier of their own.
inline constexpr uint32_t kTeam = 256;
inline constexpr uint32_t kTeamGroups = kTeam / kLineLanes;
__device__ inline uint32_t team_thread() { return threadIdx.x; }
__device__ inline void sync_team() { sync_some(1, kTeam); }

/// One of a token's ranks, as its lines need it. In shared memory: every token asks.
struct Peer {
  std::byte* theirs;      ///< where we write
  const std::byte* mine;  ///< where that rank writes
  uint32_t* bell;         ///< its doorbell
  uint64_t awaited;       ///< sequence of the present piece
  uint32_t session;
  uint32_t ready;
};

/// Eight codes, and the scale byte of their block.
struct Codes {
  uint64_t codes;
  uint32_t scale;
};

/// Eight codes of a block with a NaN or more; NaNs do not count for the scale. Whole warps; rare.
__device__ inline Codes quantise_with_nans(const ulonglong2& x) {
  uint32_t greatest = 0;
  for (uint32_t i = 0; i < 8; ++i) {
    const auto magnitude = static_cast<uint32_t>((i < 4 ? x.x : x.y) >> (16 * (i % 4)) & 0x7FFFU);
    if (magnitude <= 0x7F80U) greatest = max(greatest, magnitude);
  }
  greatest = max(greatest, __shfl_xor_sync(0xFFFFFFFFU, greatest, 1));
  greatest = max(greatest, __shfl_xor_sync(0xFFFFFFFFU, greatest, 2));
  const uint8_t scale = mxfp8_scale_bf16(static_cast<uint16_t>(greatest));
  const float m = mxfp8_multiplier(scale);
  uint64_t codes = 0;
  for (uint32_t i = 0; i < 8; ++i) {
    const auto bits = static_cast<uint16_t>((i < 4 ? x.x : x.y) >> (16 * (i % 4)));
    codes |= uint64_t{mxfp8_code(bf16_to_float(bits), m)} << (8 * i);
  }
  return {codes, scale};
}

/// Eight BF16 values of x as eight codes; four neighbouring threads have a block of 32. Whole warps. The instruction
/// rounds numbers as numbers.h does; `nan` is set where that is not enough.
__device__ inline Codes quantise_8(const ulonglong2& x, bool& nan) {
  uint32_t pair[4];
  to_pairs(x, pair);
  uint32_t greatest = greatest_of(pair);
  greatest = max(greatest, __shfl_xor_sync(0xFFFFFFFFU, greatest, 1));
  greatest = max(greatest, __shfl_xor_sync(0xFFFFFFFFU, greatest, 2));
  nan = nan || greatest > 0x7F80U;
  // mxfp8_scale_bf16 without its branches: an Inf's exponent gives 254 by the smaller of the two.
  const uint32_t exponent = greatest >> 7;
  const uint32_t mantissa = greatest & 0x7FU;
  const uint32_t up = exponent - 8 + (mantissa > 0x60 ? 1 : 0);
  const uint32_t scale = exponent == 255 ? 254 : greatest >= (9U << 7 | 0x60U) ? up : 0;
  const float m = scale == 0 ? 0.0F : float_of(scale == 254 ? 0x00400000U : (254U - scale) << 23);
  uint32_t code[4];
#pragma unroll
  for (uint32_t i = 0; i < 4; ++i)
    code[i] = e4m3_pair(float_of(pair[i] << 16) * m, float_of(pair[i] & 0xFFFF0000U) * m);
  return {code[0] | code[1] << 16 | uint64_t{code[2] | code[3] << 16} << 32, scale};
}

/// x of one token, as it goes into a row.
struct TokenInput {
  const std::byte* x;       ///< BF16 [L], or codes [L]
  const std::byte* scales;  ///< of the wire format; nullptr: x is BF16
};

/// Bytes of shared memory for x of one token.
MOED_HD inline uint32_t input_bytes(const Shape& s) { return s.latent * 2; }

/// Starts copying a token's x into shared memory. A team.
template <class Z>
__device__ void fetch_input(const World& w, const TokenInput& in, uint8_t* to) {
  const uint32_t bytes = Z::latent(w) * (in.scales == nullptr ? 2 : 1);
#pragma unroll 2
  for (uint32_t at = team_thread() * 16; at < bytes; at += kTeam * 16) copy_16(to + at, in.x + at, 16);
}

/// Zeros behind a row record, up to whole lines. A team.
template <class Z>
__device__ void pad_row(const World& w, uint8_t* row) {
#pragma unroll 1
  for (uint32_t i = Z::row_bytes(w) + team_thread(); i < Z::row_stride(w); i += kTeam) row[i] = 0;
}

/// Eight codes, and their block's scale, into a row record whose parts are even.
template <class Z>
__device__ void put_codes(const World& w, uint8_t* row, uint32_t piece, const Codes& c) {
  auto* const to = reinterpret_cast<uint16_t*>(row + Z::codes(w) + piece * 8);
  if ((Z::codes(w) & 7U) == 0) {
    *reinterpret_cast<uint64_t*>(to) = c.codes;
  } else {
    for (uint32_t i = 0; i < 4; ++i) to[i] = static_cast<uint16_t>(c.codes >> (16 * i));
  }
  if (piece % 4 == 0) row[Z::scales(w) + piece / 4] = static_cast<uint8_t>(c.scale);
}

/// The codes of this warp's pieces once more, NaNs among them; rare.
template <class Z>
__device__ __noinline__ void make_codes_with_nans(const World& w, const uint8_t* x, uint8_t* row) {
  const uint32_t lane = threadIdx.x % 32;
#pragma unroll 1
  for (uint32_t base = team_thread() - lane; base < Z::latent(w) / 8; base += kTeam) {
    const bool mine = base + lane < Z::latent(w) / 8;
    ulonglong2 words = {0, 0};
    if (mine) words = *reinterpret_cast<const ulonglong2*>(x + (base + lane) * 16);
    const Codes c = quantise_with_nans(words);
    if (mine) put_codes<Z>(w, row, base + lane, c);
  }
}

/// Codes and scales of a token into its row record in shared memory, whose parts are even. `x`: what fetch_input has
/// brought. A team.
template <class Z>
__device__ void make_codes(const World& w, const TokenInput& in, const uint8_t* x, uint8_t* row) {
  const uint32_t pieces = Z::latent(w) / 8;
  bool nan = false;
  if (in.scales != nullptr) {
#pragma unroll 1
    for (uint32_t i = team_thread(); i < pieces; i += kTeam)
      put_codes<Z>(w, row, i, {*reinterpret_cast<const uint64_t*>(x + i * 8), load_u8(in.scales + i / 4)});
    return;
  }
  // Two at a time, whether there are two or not: what one waits for, the other fills.
#pragma unroll 1
  for (uint32_t base = team_thread(); base - threadIdx.x % 32 < pieces; base += 2 * kTeam) {
    ulonglong2 words[2];
    Codes codes[2];
#pragma unroll
    for (uint32_t j = 0; j < 2; ++j) {
      words[j] = {0, 0};
      if (base + j * kTeam < pieces) words[j] = *reinterpret_cast<const ulonglong2*>(x + (base + j * kTeam) * 16);
    }
#pragma unroll
    for (uint32_t j = 0; j < 2; ++j) codes[j] = quantise_8(words[j], nan);
#pragma unroll
    for (uint32_t j = 0; j < 2; ++j)
      if (base + j * kTeam < pieces) put_codes<Z>(w, row, base + j * kTeam, codes[j]);
  }
  if (__any_sync(0xFFFFFFFFU, nan) != 0) make_codes_with_nans<Z>(w, x, row);
}

/// Stores a row record in shared memory as lines to each of `ranks`, eight lanes a line. A team.
template <class Z>
__device__ void store_row(const World& w, const Peer* peers, uint32_t lane, uint32_t token, const RankSet& ranks,
                          const uint8_t* row) {
  const uint64_t at = Z::row_at(w, lane, token);
#pragma unroll 1
  for (uint32_t l = team_thread() / kLineLanes; l < Z::row_lines(w); l += kTeamGroups) {
    const ulonglong2 words = record_words(reinterpret_cast<const uint64_t*>(row), l);
#pragma unroll 1
    for (uint32_t part = 0; part < kMaxRanks / 32; ++part) {
      auto left = static_cast<uint32_t>(ranks.word[part / 2] >> (part % 2 * 32));
#pragma unroll 1
      for (; left != 0; left &= left - 1) {
        const Peer& peer = peers[part * 32 + __ffs(static_cast<int>(left)) - 1];
        store_line(peer.theirs + at + l * kLineBytes, words, peer.awaited);
      }
      if (part * 32 + 32 >= w.ranks) break;
    }
  }
}

}  // namespace moed::cuda
