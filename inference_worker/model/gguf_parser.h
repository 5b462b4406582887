#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "inference_worker/model/gguf.h"

namespace promptcache::worker {

// 0 for strings, arrays and what is no type.
uint64_t GgufScalarBytes(GgufType type);
// "uint32"; for messages.
std::string GgufTypeName(GgufType type);

// One pass over the structure of a GGUF file. Each step checks against what is
// left before it reads: damaged counts and lengths fail, whatever they say.
class GgufParser {
 public:
  explicit GgufParser(std::span<const std::byte> bytes) : bytes_(bytes) {}
  absl::StatusOr<GgufFile> Parse();

 private:
  // `what` names the field in errors.
  absl::StatusOr<std::span<const std::byte>> Take(uint64_t num_bytes,
                                                  std::string_view what);
  template <typename T>
  absl::StatusOr<T> Number(std::string_view what);
  absl::StatusOr<std::string_view> Text(std::string_view what);
  absl::StatusOr<std::string_view> Name(std::string_view what,
                                        uint64_t max_bytes);

  absl::Status ParseHeader();
  absl::Status ParseMetadata(uint64_t index, GgufFile* file);
  absl::StatusOr<GgufValue> Value(std::string_view key);
  absl::StatusOr<GgufValue> Array(std::string_view key, int depth);
  absl::Status ParseTensor(uint64_t index, GgufFile* file);
  absl::Status ReadAlignment(GgufFile* file);

  std::span<const std::byte> bytes_;
  uint64_t position_ = 0;
  uint64_t num_tensors_ = 0;
  uint64_t num_keys_ = 0;
};

}  // namespace promptcache::worker
