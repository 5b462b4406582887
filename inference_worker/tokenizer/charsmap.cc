#include "inference_worker/tokenizer/charsmap.h"

#include <cstring>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"

namespace promptcache::worker {
namespace {

// The double array's 32-bit units, as the library Darts lays them out.
uint32_t OffsetOf(uint32_t unit) {
  return (unit >> 10) << ((unit & (1u << 9)) >> 6);
}
bool HasLeaf(uint32_t unit) { return (unit & (1u << 8)) != 0; }
uint32_t ValueOf(uint32_t unit) { return unit & 0x7FFFFFFFu; }
// Of an inner unit its byte; of a leaf none that is one.
uint32_t LabelOf(uint32_t unit) { return unit & 0x800000FFu; }

}  // namespace

absl::StatusOr<Charsmap> Charsmap::Create(std::string_view bytes) {
  Charsmap map;
  if (bytes.empty()) return map;
  uint32_t num_bytes = 0;
  if (bytes.size() < sizeof(num_bytes)) {
    return absl::InvalidArgumentError(absl::StrCat(
        "precompiled_charsmap: ", bytes.size(), " bytes are too few"));
  }
  std::memcpy(&num_bytes, bytes.data(), sizeof(num_bytes));
  bytes.remove_prefix(sizeof(num_bytes));
  if (num_bytes == 0 || num_bytes % sizeof(uint32_t) != 0 ||
      num_bytes > bytes.size()) {
    return absl::InvalidArgumentError(
        absl::StrCat("precompiled_charsmap: a table of ", num_bytes,
                     " bytes in ", bytes.size()));
  }
  map.units_.resize(num_bytes / sizeof(uint32_t));
  std::memcpy(map.units_.data(), bytes.data(), num_bytes);
  map.replacements_ = bytes.substr(num_bytes);
  if (map.replacements_.empty() || map.replacements_.back() != '\0') {
    return absl::InvalidArgumentError(
        "precompiled_charsmap: its last text does not end");
  }
  return map;
}

Charsmap::Step Charsmap::Match(std::string_view text) const {
  Step longest;
  if (units_.empty()) return longest;
  size_t at = OffsetOf(units_[0]);
  for (size_t i = 0; i < text.size(); ++i) {
    const auto byte = static_cast<uint8_t>(text[i]);
    at ^= byte;
    if (at >= units_.size() || LabelOf(units_[at]) != byte) break;
    const uint32_t unit = units_[at];
    at ^= OffsetOf(unit);
    if (at >= units_.size()) break;
    if (!HasLeaf(unit)) continue;
    const uint32_t value = ValueOf(units_[at]);
    if (value >= replacements_.size()) break;
    // A C string: the NUL is there.
    longest = {.num_bytes = i + 1, .replacement = &replacements_[value]};
  }
  return longest;
}

}  // namespace promptcache::worker
