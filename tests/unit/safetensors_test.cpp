// What a safetensors file may hold and what is refused. Files are written here byte by byte.
#include "daemon/weights/safetensors.h"

#include <gtest/gtest.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <numeric>
#include <random>

namespace moed {
namespace {

class Safetensors : public ::testing::Test {
 protected:
  void SetUp() override {
    char name[] = "/tmp/moed_safetensors_XXXXXX";
    ASSERT_NE(mkdtemp(name), nullptr);
    directory_ = name;
  }
  void TearDown() override { std::filesystem::remove_all(directory_); }

  std::string path() const { return directory_ + "/model.safetensors"; }
  std::string write_bytes(const std::string& bytes) const {
    std::ofstream(path(), std::ios::binary | std::ios::trunc)
        .write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
    return path();
  }
  static std::string length(uint64_t n) {
    std::string out(8, '\0');
    for (size_t i = 0; i < 8; ++i) out[i] = static_cast<char>(n >> (8 * i));
    return out;
  }
  /// A file of this header and `data_bytes` bytes 0, 1, 2, ...
  std::string write(const std::string& header, size_t data_bytes) const {
    std::string data(data_bytes, '\0');
    std::iota(data.begin(), data.end(), '\0');
    return write_bytes(length(header.size()) + header + data);
  }
  /// Expects a refusal whose sentence has the file and every one of `parts`.
  template <class Action>
  void expect_refused(Action action, std::initializer_list<const char*> parts) const {
    try {
      action();
      ADD_FAILURE() << "not refused";
    } catch (const WeightsError& error) {
      const std::string text = error.what();
      EXPECT_NE(text.find(path()), std::string::npos) << text;
      for (const char* part : parts) EXPECT_NE(text.find(part), std::string::npos) << part << " is not in: " << text;
      EXPECT_EQ(text.find('\n'), std::string::npos) << text;
    }
  }
  void expect_header_refused(const std::string& header, size_t data_bytes,
                             std::initializer_list<const char*> parts) const {
    SCOPED_TRACE(header.substr(0, 200));
    write(header, data_bytes);
    expect_refused([&] { SafetensorsFile file(path()); }, parts);
  }

  std::string directory_;
};

constexpr const char* kTwo =
    R"({"__metadata__":{"format":"pt"},"a.b":{"dtype":"U8","shape":[2,3],"data_offsets":[0,6]},)"
    R"("c":{"dtype":"F32","shape":[],"data_offsets":[6,10]},"none":{"dtype":"BF16","shape":[0,7],"data_offsets":[6,6]}}   )";

TEST_F(Safetensors, GivesTensorsOfAWellFormedFile) {
  const SafetensorsFile file(write(kTwo, 10));
  EXPECT_EQ(file.tensors().size(), 3U);
  EXPECT_EQ(file.size(), 8 + std::strlen(kTwo) + 10);
  EXPECT_EQ(file.header().size(), 8 + std::strlen(kTwo));
  EXPECT_EQ(std::memcmp(file.header().data() + 8, kTwo, std::strlen(kTwo)), 0);
  ASSERT_EQ(file.data().size(), 10U);
  const Tensor& a = file.tensor("a.b");
  EXPECT_EQ(a.dtype, "U8");
  EXPECT_EQ(a.shape, (std::vector<uint64_t>{2, 3}));
  EXPECT_EQ(std::vector<uint8_t>(a.bytes.begin(), a.bytes.end()), (std::vector<uint8_t>{0, 1, 2, 3, 4, 5}));
  const auto c = file.bytes("c", {"BF16", "F32"}, {});
  EXPECT_EQ(std::vector<uint8_t>(c.begin(), c.end()), (std::vector<uint8_t>{6, 7, 8, 9}));
  EXPECT_TRUE(file.tensor("none").bytes.empty());
}

TEST_F(Safetensors, TakesAFileWithoutTensors) {
  const SafetensorsFile file(write("{}", 0));
  EXPECT_TRUE(file.tensors().empty());
  EXPECT_TRUE(file.data().empty());
}

TEST_F(Safetensors, RefusesATensorThatIsNotAsAskedFor) {
  const SafetensorsFile file(write(kTwo, 10));
  expect_refused([&] { file.tensor("gone"); }, {"tensor gone is missing"});
  expect_refused([&] { file.bytes("a.b", {"U8"}, {3, 2}); }, {"tensor a.b is U8 [2, 3]", "U8 [3, 2] is needed"});
  expect_refused([&] { file.bytes("a.b", {"U8"}, {6}); }, {"[2, 3]", "[6]"});
  expect_refused([&] { file.bytes("a.b", {"U8"}, {2, 3, 1}); }, {"[2, 3]", "[2, 3, 1]"});
  expect_refused([&] { file.bytes("c", {"U8", "BF16"}, {}); }, {"tensor c is F32 []", "U8 or BF16 [] is needed"});
}

TEST_F(Safetensors, RefusesAnUnknownDtypeOnlyWhenAskedFor) {
  const SafetensorsFile file(write(R"({"odd":{"dtype":"F4","shape":[6],"data_offsets":[0,3]},)"
                                   R"("good":{"dtype":"I8","shape":[1],"data_offsets":[3,4]}})",
                                   4));
  EXPECT_EQ(file.tensor("good").bytes[0], 3);
  expect_refused([&] { file.tensor("odd"); }, {"tensor odd", "F4"});
  expect_refused([&] { file.bytes("odd", {"U8"}, {6}); }, {"tensor odd", "F4"});
}

TEST_F(Safetensors, RefusesWhatIsNoFile) {
  expect_refused([&] { SafetensorsFile file(path()); }, {"cannot be opened"});
  ASSERT_EQ(::mkfifo(path().c_str(), 0600), 0);
  expect_refused([&] { SafetensorsFile file(path()); }, {"not a regular file"});
  std::filesystem::remove(path());
  std::filesystem::create_directory(path());
  expect_refused([&] { SafetensorsFile file(path()); }, {"not a regular file"});
}

TEST_F(Safetensors, RefusesABadHeaderLength) {
  const auto refused = [&](const std::string& bytes, std::initializer_list<const char*> parts) {
    write_bytes(bytes);
    expect_refused([&] { SafetensorsFile file(path()); }, parts);
  };
  refused("", {"0 bytes", "at least 8"});
  refused("1234567", {"7 bytes", "at least 8"});
  refused(length(3) + "{}", {"header of 3 bytes", "has 2"});
  refused(length(~uint64_t{0}) + "{}", {"header of 18446744073709551615 bytes", "has 2"});
  refused(length(0), {"not JSON"});
  const uint64_t limit = 100ULL << 20;
  write_bytes(length(limit + 1));
  ASSERT_EQ(::truncate(path().c_str(), static_cast<off_t>(limit + 100)), 0);  // sparse
  expect_refused([&] { SafetensorsFile file(path()); }, {"104857601", "at most 104857600"});
}

TEST_F(Safetensors, RefusesAHeaderThatIsNoObject) {
  expect_header_refused("not json", 0, {"not JSON"});
  expect_header_refused("{\"a\":", 0, {"not JSON"});
  expect_header_refused("{} x", 0, {"not JSON"});
  expect_header_refused("{\"\xff\":1}", 0, {"not JSON"});
  expect_header_refused("[]", 0, {"array", "object is needed"});
  expect_header_refused("12", 0, {"number", "object is needed"});
  expect_header_refused(R"({"a":1e999})", 0, {"range"});
  expect_header_refused(R"({"__metadata__":7})", 0, {"__metadata__", "number"});
  expect_header_refused("{\"a\":" + std::string(100000, '['), 0, {"nested deeper than 32"});
}

TEST_F(Safetensors, RefusesKeysThatAppearTwice) {
  expect_header_refused(
      R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}})", 1,
      {"key a appears twice"});
  expect_header_refused(R"({"a":{"dtype":"U8","shape":[1],"shape":[2],"data_offsets":[0,1]}})", 1,
                        {"key shape appears twice"});
}

TEST_F(Safetensors, RefusesAMalformedEntry) {
  expect_header_refused(R"({"t":3})", 0, {"tensor t", "number", "object is needed"});
  expect_header_refused(R"({"t":{"shape":[1],"data_offsets":[0,1]}})", 1, {"tensor t", "dtype"});
  expect_header_refused(R"({"t":{"dtype":8,"shape":[1],"data_offsets":[0,1]}})", 1, {"tensor t", "dtype"});
  expect_header_refused(R"({"t":{"dtype":"U8","data_offsets":[0,1]}})", 1, {"tensor t", "shape"});
  for (const char* shape : {"1", "[-1]", "[1.0]", "[\"1\"]", "[18446744073709551616]", "null"})
    expect_header_refused(std::string(R"({"t":{"dtype":"U8","shape":)") + shape + R"(,"data_offsets":[0,1]}})", 1,
                          {"tensor t", "shape"});
  for (const char* offsets : {"1", "[0]", "[0,1,1]", "[-1,0]", "[0,1.5]", "[0,18446744073709551616]", "{}"})
    expect_header_refused(std::string(R"({"t":{"dtype":"U8","shape":[1],"data_offsets":)") + offsets + "}}", 1,
                          {"tensor t", "data_offsets"});
  const std::string control = R"({"a\nb)" + std::string(1000, 'x') + R"(":1})";
  expect_header_refused(control, 0, {"tensor a?bxxx", "..."});
}

TEST_F(Safetensors, RefusesBytesThatDoNotFitTheShape) {
  expect_header_refused(R"({"t":{"dtype":"U8","shape":[2,2],"data_offsets":[0,5]}})", 5,
                        {"tensor t", "5 bytes", "[2, 2]", "takes 4"});
  expect_header_refused(R"({"t":{"dtype":"F32","shape":[2],"data_offsets":[0,4]}})", 4,
                        {"tensor t", "4 bytes", "takes 8"});
  expect_header_refused(R"({"t":{"dtype":"BF16","shape":[],"data_offsets":[0,4]}})", 4, {"tensor t", "takes 2"});
  expect_header_refused(R"({"t":{"dtype":"U8","shape":[4294967296,4294967296],"data_offsets":[0,0]}})", 0,
                        {"tensor t", "[4294967296, 4294967296]", "64 bits"});
  expect_header_refused(R"({"t":{"dtype":"F32","shape":[4611686018427387904],"data_offsets":[0,0]}})", 0,
                        {"tensor t", "64 bits"});
  expect_header_refused(R"({"t":{"dtype":"F4","shape":[4294967296,4294967297],"data_offsets":[0,0]}})", 0,
                        {"tensor t", "64 bits"});
}

TEST_F(Safetensors, RefusesOffsetsThatDoNotTileTheData) {
  const auto two = [](const char* first, const char* second) {
    return std::string(R"({"one":{"dtype":"U8","shape":[4],"data_offsets":)") + first +
           R"(},"two":{"dtype":"U8","shape":[4],"data_offsets":)" + second + "}}";
  };
  EXPECT_NO_THROW(SafetensorsFile{write(two("[4,8]", "[0,4]"), 8)});
  expect_header_refused(two("[0,4]", "[3,7]"), 7, {"tensor two begins at byte 3", "ends at 4", "overlap"});
  expect_header_refused(two("[0,4]", "[0,4]"), 4, {"begins at byte 0", "ends at 4", "overlap"});
  expect_header_refused(two("[0,4]", "[5,9]"), 9, {"tensor two begins at byte 5", "ends at 4", "no tensor"});
  expect_header_refused(two("[1,5]", "[5,9]"), 9, {"tensor one begins at byte 1", "ends at 0", "no tensor"});
  expect_header_refused(two("[0,4]", "[4,8]"), 9, {"last tensor, two, ends at byte 8", "has 9"});
  expect_header_refused(two("[0,4]", "[4,8]"), 7, {"tensor two ends at byte 8", "has 7", "truncated"});
  expect_header_refused(two("[4,0]", "[4,8]"), 8, {"tensor one begins at byte 4", "at 0"});
  expect_header_refused(two("[0,4]", "[18446744073709551611,18446744073709551615]"), 8,
                        {"tensor two ends at byte 18446744073709551615", "has 8"});
  expect_header_refused("{}", 1, {"none", "has 1"});
  expect_header_refused(
      R"({"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},"e":{"dtype":"U8","shape":[0],"data_offsets":[2,2]}})", 4,
      {"tensor e begins at byte 2", "overlap"});
}

TEST_F(Safetensors, EveryTruncationIsRefused) {
  write(kTwo, 10);
  const auto full = static_cast<size_t>(std::filesystem::file_size(path()));
  for (size_t bytes = full; bytes-- > 0;) {
    std::filesystem::resize_file(path(), bytes);
    EXPECT_THROW(SafetensorsFile{path()}, WeightsError) << bytes;
  }
}

TEST_F(Safetensors, ADamagedHeaderIsRefusedOrConsistent) {
  std::mt19937 random(7);
  std::string whole = length(std::strlen(kTwo)) + kTwo + "0123456789";
  int refused = 0;
  for (int i = 0; i < 400; ++i) {
    std::string damaged = whole;
    for (uint64_t n = random() % 3 + 1; n > 0; --n)
      damaged[random() % (damaged.size() - 10)] = static_cast<char>(random());
    write_bytes(damaged);
    try {
      const SafetensorsFile file(path());
      uint64_t sum = 0;
      for (const auto& [name, tensor] : file.tensors())
        sum += std::accumulate(tensor.bytes.begin(), tensor.bytes.end(), uint64_t{0});
      const auto data = file.data();
      EXPECT_EQ(sum, std::accumulate(data.begin(), data.end(), uint64_t{0}));  // each byte in one tensor
    } catch (const WeightsError&) {
      ++refused;
    }
  }
  EXPECT_GT(refused, 200);
}

}  // namespace
}  // namespace moed
