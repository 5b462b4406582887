#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace promptcache {

// "4096", "64KiB", "256MiB", "8GiB", "1TiB" (B, K, M, G, T alone and any case
// are accepted, powers of 1024 all of them). InvalidArgument for anything else
// and for what does not fit.
absl::StatusOr<uint64_t> ParseByteSize(std::string_view text);
// The shortest exact form that ParseByteSize reads back.
std::string FormatByteSize(uint64_t num_bytes);
// For people: "1.5 GiB", "640 KiB", "12 B".
std::string RoundedByteSize(uint64_t num_bytes);

// For ABSL_FLAG.
struct ByteSize {
  uint64_t num_bytes = 0;
};
bool AbslParseFlag(absl::string_view text, ByteSize* size, std::string* error);
std::string AbslUnparseFlag(ByteSize size);

}  // namespace promptcache
