// Reads and checks the header of a safetensors file. Nothing in it is trusted: it may come from a broken download.
#include "daemon/weights/safetensors.h"

#include <fcntl.h>
#include <sys/stat.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstring>
#include <nlohmann/json.hpp>
#include <system_error>

namespace moed {

namespace {

using nlohmann::json;

static_assert(std::endian::native == std::endian::little, "tensors are little-endian and used as they lie");

constexpr uint64_t kMaxHeaderBytes = 100ULL << 20;  // the limit of the reference implementation
constexpr std::size_t kMaxDepth = 32;

/// Bytes of one element; 0: a dtype not known here, or one of less than a byte.
uint64_t element_bytes(std::string_view dtype) {
  struct Known {
    std::string_view name;
    uint64_t bytes;
  };
  static constexpr Known kKnown[] = {{"BOOL", 1},    {"U8", 1},  {"I8", 1},  {"F8_E5M2", 1}, {"F8_E4M3", 1},
                                     {"F8_E8M0", 1}, {"U16", 2}, {"I16", 2}, {"F16", 2},     {"BF16", 2},
                                     {"U32", 4},     {"I32", 4}, {"F32", 4}, {"U64", 8},     {"I64", 8},
                                     {"F64", 8},     {"C64", 8}};
  for (const Known& k : kKnown)
    if (k.name == dtype) return k.bytes;
  return 0;
}

template <class Shape>
std::string spelled(const Shape& shape) {
  std::string text = "[";
  for (const uint64_t n : shape) text += (text.size() > 1 ? ", " : "") + std::to_string(n);
  return shown(text + "]");
}

/// An array of unsigned integers; false when it is anything else.
bool read_unsigned(const json& entry, const char* key, std::vector<uint64_t>& out) {
  const auto at = entry.find(key);
  if (at == entry.end() || !at->is_array()) return false;
  for (const json& n : *at) {
    if (!n.is_number_unsigned()) return false;
    out.push_back(n.get<uint64_t>());
  }
  return true;
}

/// Builds a json value event by event. The library's parser keeps the last of two equal keys without a word, and its
/// callbacks, which would see both, take time quadratic in the members of an object.
class StrictParser : public nlohmann::json_sax<json> {
 public:
  StrictParser(const std::string& file, uint64_t bytes) : file_(file), bytes_(bytes) {}
  json take() { return std::move(root_); }

  bool null() override { return put(nullptr) != nullptr; }
  bool boolean(bool v) override { return put(v) != nullptr; }
  bool number_integer(int64_t v) override { return put(v) != nullptr; }
  bool number_unsigned(uint64_t v) override { return put(v) != nullptr; }
  bool number_float(double v, const std::string&) override { return put(v) != nullptr; }
  bool string(std::string& v) override { return put(std::move(v)) != nullptr; }
  bool binary(json::binary_t& v) override { return put(std::move(v)) != nullptr; }
  bool start_object(std::size_t) override { return open(json::object()); }
  bool start_array(std::size_t) override { return open(json::array()); }
  bool end_object() override { return close(); }
  bool end_array() override { return close(); }
  bool key(std::string& v) override {
    const auto [member, added] = open_.back()->get_ref<json::object_t&>().try_emplace(v);
    if (!added) refuse(file_, ": key ", shown(v), " appears twice in one object: keep one of the two");
    member_ = &member->second;
    return true;
  }
  bool parse_error(std::size_t byte, const std::string&, const json::exception& error) override {
    if (dynamic_cast<const json::out_of_range*>(&error) != nullptr)
      refuse(file_, ": a number before byte ", byte, " is beyond the range of a double: copy the file again");
    refuse(file_, ": not JSON at byte ", byte, " of ", bytes_, ": copy the file again");
  }

 private:
  json* put(json value) {
    json& parent = open_.empty() ? root_ : *open_.back();
    if (!open_.empty() && parent.is_array()) {
      parent.push_back(std::move(value));
      return &parent.back();
    }
    json& place = open_.empty() ? root_ : *member_;
    place = std::move(value);
    return &place;
  }
  bool open(json empty) {
    if (open_.size() >= kMaxDepth)
      refuse(file_, ": JSON nested deeper than ", kMaxDepth, ": not a file of a checkpoint");
    open_.push_back(put(std::move(empty)));
    return true;
  }
  bool close() {
    open_.pop_back();
    return true;
  }

  const std::string& file_;
  uint64_t bytes_;
  json root_;
  std::vector<json*> open_;  // containers that are not closed; a parent does not grow while its child is open
  json* member_ = nullptr;   // value of the key read last
};

}  // namespace

std::string shown(std::string_view text) {
  std::string out(text.substr(0, 200));
  for (char& c : out)
    if (static_cast<unsigned char>(c) < 0x20 || c == 0x7F) c = '?';
  return text.size() > 200 ? out + "..." : out;
}

nlohmann::json parse_object(std::span<const uint8_t> text, const std::string& file) {
  StrictParser parser(file, text.size());
  json::sax_parse(text.begin(), text.end(), &parser);
  json root = parser.take();
  if (!root.is_object()) refuse(file, ": the JSON is of type ", root.type_name(), ", an object is needed");
  return root;
}

SafetensorsFile::SafetensorsFile(std::string path) : path_(std::move(path)) {
  map();
  const json root = parse_object(header().subspan(8), path_);
  for (const auto& [name, entry] : root.items()) {
    if (name == "__metadata__") {
      if (!entry.is_object()) refuse(path_, ": __metadata__ is of type ", entry.type_name(), ", an object is needed");
      continue;
    }
    tensors_.emplace(name, read_entry(name, entry));
  }
  check_layout();
}

void SafetensorsFile::map() {
  // O_NONBLOCK: opening a FIFO without a writer would otherwise never return.
  const Fd fd(::open(path_.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  if (!fd) refuse(path_, ": cannot be opened: ", std::generic_category().message(errno));
  struct stat status {};
  if (::fstat(fd.get(), &status) != 0) refuse(path_, ": fstat: ", std::generic_category().message(errno));
  if (!S_ISREG(status.st_mode)) refuse(path_, ": not a regular file");
  const auto bytes = static_cast<uint64_t>(status.st_size);
  if (bytes < 8) refuse(path_, ": ", bytes, " bytes, at least 8 are needed: truncated, copy it again");
  file_ = Mapping(fd, bytes, PROT_READ);
  if (!file_) refuse(path_, ": mmap of ", bytes, " bytes: ", std::generic_category().message(errno));
  uint64_t header_bytes = 0;
  std::memcpy(&header_bytes, file_.data(), 8);
  if (header_bytes > bytes - 8)
    refuse(path_, ": a header of ", header_bytes, " bytes, the file has ", bytes - 8,
           " after the length: truncated or no safetensors file");
  if (header_bytes > kMaxHeaderBytes)
    refuse(path_, ": a header of ", header_bytes, " bytes, at most ", kMaxHeaderBytes, " are read");
  data_at_ = 8 + header_bytes;
}

Tensor SafetensorsFile::read_entry(const std::string& name, const json& entry) const {
  const std::string where = path_ + ": tensor " + shown(name);
  if (!entry.is_object()) refuse(where, " is of JSON type ", entry.type_name(), ", an object is needed");
  const auto dtype = entry.find("dtype");
  if (dtype == entry.end() || !dtype->is_string()) refuse(where, " has no dtype that is a string");
  Tensor tensor{dtype->get<std::string>(), {}, {}};
  std::vector<uint64_t> offsets;
  if (!read_unsigned(entry, "shape", tensor.shape)) refuse(where, " has no shape that is a list of unsigned integers");
  if (!read_unsigned(entry, "data_offsets", offsets) || offsets.size() != 2)
    refuse(where, " has no data_offsets that are two unsigned integers");
  const uint64_t begin = offsets[0], end = offsets[1];
  if (begin > end) refuse(where, " begins at byte ", begin, " of the data and ends before it, at ", end);
  if (end > data().size())
    refuse(where, " ends at byte ", end, " of the data, the file has ", data().size(), ": truncated, copy it again");

  uint64_t bytes = 1;
  const uint64_t element = element_bytes(tensor.dtype);
  bool overflow = false;
  for (const uint64_t n : tensor.shape) overflow |= __builtin_mul_overflow(bytes, n, &bytes);
  if (element != 0) overflow |= __builtin_mul_overflow(bytes, element, &bytes);
  if (overflow) refuse(where, ": the bytes of shape ", spelled(tensor.shape), " exceed 64 bits");
  if (element != 0 && bytes != end - begin)
    refuse(where, " has ", end - begin, " bytes, ", tensor.dtype, ' ', spelled(tensor.shape), " takes ", bytes);
  tensor.bytes = data().subspan(begin, end - begin);
  return tensor;
}

void SafetensorsFile::check_layout() const {
  std::vector<const std::pair<const std::string, Tensor>*> order;
  order.reserve(tensors_.size());
  for (const auto& t : tensors_) order.push_back(&t);
  std::sort(order.begin(), order.end(), [](const auto* a, const auto* b) {
    const auto &x = a->second.bytes, &y = b->second.bytes;
    return x.data() != y.data() ? x.data() < y.data() : x.size() < y.size();
  });
  uint64_t covered = 0;
  for (const auto* t : order) {
    const auto begin = static_cast<uint64_t>(t->second.bytes.data() - data().data());
    if (begin < covered)
      refuse(path_, ": tensor ", shown(t->first), " begins at byte ", begin,
             " of the data, the tensor before it ends at ", covered, ": they overlap");
    if (begin > covered)
      refuse(path_, ": tensor ", shown(t->first), " begins at byte ", begin,
             " of the data, the tensor before it ends at ", covered, ": bytes of no tensor");
    covered += t->second.bytes.size();
  }
  if (covered != data().size())
    refuse(path_, ": the last tensor, ", order.empty() ? "none" : shown(order.back()->first), ", ends at byte ",
           covered, " of the data, the file has ", data().size(), ": bytes of no tensor");
}

const Tensor& SafetensorsFile::tensor(const std::string& name) const {
  const auto at = tensors_.find(name);
  if (at == tensors_.end())
    refuse(path_, ": tensor ", shown(name), " is missing among ", tensors_.size(), ": copy the file again");
  if (element_bytes(at->second.dtype) == 0)
    refuse(path_, ": tensor ", shown(name), " has dtype ", shown(at->second.dtype), ", which is not known here");
  return at->second;
}

std::span<const uint8_t> SafetensorsFile::bytes(const std::string& name, std::initializer_list<std::string_view> dtypes,
                                                std::initializer_list<uint64_t> shape) const {
  const Tensor& found = tensor(name);
  const bool known = std::find(dtypes.begin(), dtypes.end(), found.dtype) != dtypes.end();
  if (!known || !std::equal(found.shape.begin(), found.shape.end(), shape.begin(), shape.end())) {
    std::string needed;
    for (const std::string_view d : dtypes) needed += (needed.empty() ? "" : " or ") + std::string(d);
    refuse(path_, ": tensor ", shown(name), " is ", found.dtype, ' ', spelled(found.shape), ", ", needed, ' ',
           spelled(shape), " is needed");
  }
  return found.bytes;
}

}  // namespace moed
