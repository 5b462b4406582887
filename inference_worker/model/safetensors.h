#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"

namespace promptcache::worker {

struct SafetensorsEntry {
  std::string dtype;  // "BF16"; one that the format knows
  std::vector<uint64_t> shape;
  std::span<const std::byte> data;
};

// The structure of a safetensors file: a header in JSON and, after it, the
// tensors without holes. Returns a view of `bytes`, which must outlive it.
// InvalidArgument, with the tensor or field and the numbers, for anything that
// is not as the format says: lengths, offsets, sizes that are not those of
// dtype and shape, overlaps, holes, names twice. Never reads outside `bytes`.
absl::StatusOr<std::map<std::string, SafetensorsEntry>> ParseSafetensors(
    std::span<const std::byte> bytes);

// "[2, 3]".
std::string DescribeShape(std::span<const uint64_t> shape);

}  // namespace promptcache::worker
