// One safetensors file, mapped read-only: tensor name -> dtype, shape, bytes. Refuses what is malformed.
//
//   byte 0      u64, little-endian: header bytes n, at most 100 MiB
//        8      n bytes: a JSON object {name: {"dtype", "shape", "data_offsets": [begin, end]}}, offsets into the data
//        8 + n  the data: every byte belongs to exactly one tensor
//
// A file that is changed or shortened while it is open is out of scope: a read beyond its new end is a SIGBUS.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <nlohmann/json_fwd.hpp>
#include <span>
#include <sstream>
#include <stdexcept>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "daemon/abi/fd.h"

namespace moed {

/// Why weights cannot be served: one sentence with the file, the tensor or key, the value found and what is needed.
struct WeightsError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

/// Throws a WeightsError of the parts one after the other.
template <class... Parts>
[[noreturn]] void refuse(const Parts&... parts) {
  std::ostringstream text;
  (text << ... << parts);
  throw WeightsError(text.str());
}

/// A name or value out of a file, fit for one line of log: control characters become '?', 200 bytes at most.
std::string shown(std::string_view text);

/// Parses a JSON object. Refuses, naming `file`, what is no JSON or no object, a key that appears twice in one object,
/// and nesting deeper than 32.
nlohmann::json parse_object(std::span<const uint8_t> text, const std::string& file);

/// One tensor as the file describes it.
struct Tensor {
  std::string dtype;               ///< as spelled in the file: U8, BF16, F32, ...
  std::vector<uint64_t> shape;     ///< row-major; empty: a scalar
  std::span<const uint8_t> bytes;  ///< in the mapping, at any alignment; alive as long as the file
};

/// A whole file. Immovable, so spans stay valid; after construction const and safe to read from any thread.
class SafetensorsFile {
 public:
  /// Maps and checks the file. Throws WeightsError.
  explicit SafetensorsFile(std::string path);
  SafetensorsFile(const SafetensorsFile&) = delete;
  SafetensorsFile& operator=(const SafetensorsFile&) = delete;

  const std::string& path() const { return path_; }
  uint64_t size() const { return file_.bytes(); }
  /// The length field and the JSON.
  std::span<const uint8_t> header() const { return all().first(data_at_); }
  std::span<const uint8_t> data() const { return all().subspan(data_at_); }
  const std::unordered_map<std::string, Tensor>& tensors() const { return tensors_; }

  /// The tensor of that name. Throws WeightsError when it is missing or of an unknown dtype.
  const Tensor& tensor(const std::string& name) const;
  /// The bytes of a tensor that must have one of `dtypes` and exactly `shape`. Throws WeightsError.
  std::span<const uint8_t> bytes(const std::string& name, std::initializer_list<std::string_view> dtypes,
                                 std::initializer_list<uint64_t> shape) const;

 private:
  std::span<const uint8_t> all() const { return {reinterpret_cast<const uint8_t*>(file_.data()), file_.bytes()}; }
  void map();
  Tensor read_entry(const std::string& name, const nlohmann::json& entry) const;
  void check_layout() const;

  std::string path_;
  Mapping file_;
  uint64_t data_at_ = 0;
  std::unordered_map<std::string, Tensor> tensors_;
};

}  // namespace moed
