#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"

namespace promptcache::worker {

enum class GgufType : uint32_t {
  kUint8 = 0,
  kInt8 = 1,
  kUint16 = 2,
  kInt16 = 3,
  kUint32 = 4,
  kInt32 = 5,
  kFloat32 = 6,
  kBool = 7,
  kString = 8,
  kArray = 9,
  kUint64 = 10,
  kInt64 = 11,
  kFloat64 = 12,
};

// One metadata value as it lies in the file, whole and checked.
struct GgufValue {
  GgufType type = GgufType::kUint8;
  GgufType element = GgufType::kUint8;  // of an array
  uint64_t count = 0;                   // of an array
  // A scalar's bytes, a string's characters, an array's elements (strings with
  // their lengths before them).
  std::span<const std::byte> raw;
};

struct GgufTensor {
  std::string_view name;
  uint32_t type = 0;                            // the format's number
  std::array<uint64_t, 4> dims = {1, 1, 1, 1};  // dims[0] is contiguous
  uint32_t num_dims = 0;
  uint64_t offset = 0;  // from the beginning of the data
};

// The structure of a GGUF file, version 2 or 3: what every architecture has in
// common. A view of the bytes it was parsed from, which must outlive it.
// Immutable and thread-safe. Keys and names are unique; values lie whole in
// the file; where tensors end is not known here, since that needs their types.
class GgufFile {
 public:
  // InvalidArgument, with the key, tensor or field and the numbers, for
  // anything that is not as the format says. Never reads outside `bytes`.
  static absl::StatusOr<GgufFile> Parse(std::span<const std::byte> bytes);

  // Null when there is no such key.
  const GgufValue* Find(std::string_view key) const;
  const std::map<std::string_view, GgufValue>& metadata() const {
    return values_;
  }
  const std::vector<GgufTensor>& tensors() const { return tensors_; }
  // The tensors' data: from the aligned end of the structure to the file's.
  std::span<const std::byte> data() const { return data_; }
  uint64_t alignment() const { return alignment_; }

  // Typed access. InvalidArgument, with the key, when it is missing, has
  // another type or does not fit. Integers of any width serve as integers.
  absl::StatusOr<uint32_t> Uint32(std::string_view key) const;
  absl::StatusOr<float> Float(std::string_view key) const;
  absl::StatusOr<bool> Bool(std::string_view key) const;
  absl::StatusOr<std::string> String(std::string_view key) const;
  absl::StatusOr<std::vector<std::string>> Strings(std::string_view key) const;
  absl::StatusOr<std::vector<int32_t>> Int32s(std::string_view key) const;
  absl::StatusOr<std::vector<float>> Floats(std::string_view key) const;

 private:
  friend class GgufParser;
  GgufFile() = default;

  std::map<std::string_view, GgufValue> values_;
  std::vector<GgufTensor> tensors_;
  std::span<const std::byte> data_;
  uint64_t alignment_ = 32;
};

// The value in words, shortened, for messages: `"linear"`, `0.25`,
// `array of 32 strings`.
std::string DescribeGgufValue(const GgufValue& value);
// A name from a file as it may stand in a message: escaped and shortened.
std::string QuoteGgufName(std::string_view name);

}  // namespace promptcache::worker
