// How close is close enough: the limits of design.md section 6, each with its reason, and the comparison that uses
// them. Moves of data (ids, codes, identity rows, combine without norm) are compared bit for bit and have no limit
// here.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <sstream>
#include <string>

namespace moed {

/// SiTU in FP32 against float64: two tanhf, one expf and five products, each within one or two units of 2^-24, so some
/// 1e-6; ten times that for other maths libraries. The absolute part covers results next to 0.
inline constexpr double kSituRelative = 1e-5;
inline constexpr double kSituAbsolute = 1e-6;

/// Norm of a row's error over the norm of the row. One rounding to BF16 gives 2^-9 / sqrt(3) = 1.1e-3 at most, partial,
/// sum and norm together some 2e-3; the rest is for E4M3 codes of the intermediate that FP32 and float64 round apart.
inline constexpr double kRowNorm = 5e-3;

/// Largest error of one element over the root mean square of its row. An element of four times the RMS has BF16 steps
/// of 2^-7 x 4 = 3 % of it; a wrong scale, code or weight of one expert shows as far more.
inline constexpr double kElementOfRms = 0.05;

/// RMSNorm in FP32 against float64, from equal input: a result may fall on the other side of one rounding.
inline constexpr int kNormUlps = 1;

/// Steps between two BF16 numbers, +0 and -0 being equal; a NaN is infinitely far from all but a NaN.
inline int bf16_ulps(uint16_t a, uint16_t b) {
  auto is_nan = [](uint16_t v) { return (v & 0x7FFF) > 0x7F80; };
  if (is_nan(a) || is_nan(b)) return is_nan(a) && is_nan(b) ? 0 : std::numeric_limits<int>::max();
  auto ordered = [](uint16_t v) { return (v & 0x8000) != 0 ? -int{v & 0x7FFF} : int{v}; };
  return std::abs(ordered(a) - ordered(b));
}

/// The worst figures of a comparison and where they are.
struct Closeness {
  bool ok = true;
  double norm = 0;     ///< worst row: norm of the error over the norm of the row
  double element = 0;  ///< worst element: error over the RMS of its row
  std::size_t norm_row = 0;
  std::size_t row = 0, column = 0;  ///< of the worst element
  std::string why;                  ///< the first element beyond a limit; empty if ok

  std::string text() const {
    std::ostringstream s;
    s << "row error " << norm << " (row " << norm_row << ", limit " << kRowNorm << "), element error " << element
      << " of the RMS (row " << row << " column " << column << ", limit " << kElementOfRms << ")" << why;
    return s.str();
  }
};

/// Compares BF16 [rows, width] element by element with what an oracle says. A row that the oracle has as zeros must be
/// +0 bit for bit; a NaN must be met by a NaN, an infinity by itself.
inline Closeness compare_rows(std::span<const uint16_t> got, std::span<const uint16_t> want, std::size_t width) {
  Closeness c;
  auto fail = [&c](const std::string& why, std::size_t row, std::size_t column) {
    if (c.ok) c.why = "; " + why + " at row " + std::to_string(row) + " column " + std::to_string(column);
    c.ok = false;
  };
  if (width == 0 || got.size() != want.size() || got.size() % width != 0) {
    fail("sizes differ: " + std::to_string(got.size()) + " against " + std::to_string(want.size()), 0, 0);
    return c;
  }
  auto value = [](uint16_t bits) { return double{std::bit_cast<float>(uint32_t{bits} << 16)}; };
  for (std::size_t row = 0; row * width < got.size(); ++row) {
    double squares = 0;
    double errors = 0;
    double worst = 0;
    std::size_t at = 0;
    bool measured = true;
    for (std::size_t i = 0; i < width; ++i) {
      const uint16_t g = got[row * width + i];
      const double w = value(want[row * width + i]);
      if (!std::isfinite(w) || !std::isfinite(value(g))) {
        measured = false;
        if (bf16_ulps(g, want[row * width + i]) != 0) fail("not finite on one side only", row, i);
        continue;
      }
      const double error = std::abs(value(g) - w);
      squares += w * w;
      errors += error * error;
      if (error > worst) worst = error, at = i;
    }
    if (!measured) continue;
    if (squares == 0) {
      for (std::size_t i = 0; i < width; ++i)
        if (got[row * width + i] != 0) fail("a zero row is not +0 bit for bit", row, i);
      continue;
    }
    const double norm = std::sqrt(errors / squares);
    const double element = worst / std::sqrt(squares / static_cast<double>(width));
    if (norm > c.norm) c.norm = norm, c.norm_row = row;
    if (norm > kRowNorm) fail("row beyond the limit", row, at);
    if (element > kElementOfRms) fail("element beyond the limit", row, at);
    if (element > c.element) c.element = element, c.row = row, c.column = at;
  }
  return c;
}

}  // namespace moed
