// Fixed-size fields of records as text for a sentence.
#pragma once

#include <array>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>

namespace moed {

/// A zero-padded character field, which need not be terminated.
template <std::size_t N>
std::string field_text(const char (&field)[N]) {
  return {field, ::strnlen(field, N)};
}

/// What a stranger wrote, fit for a log: '?' for every byte that is not printable ASCII.
inline std::string printable(std::string text) {
  for (char& c : text)
    if (c < 0x20 || c > 0x7e) c = '?';
  return text;
}

/// Lower-case hexadecimal, two digits a byte.
inline std::string hex(std::span<const uint8_t> bytes) {
  constexpr const char* digits = "0123456789abcdef";
  std::string text;
  for (const uint8_t byte : bytes) {
    text += digits[byte >> 4];
    text += digits[byte & 15];
  }
  return text;
}

}  // namespace moed
