#pragma once

#include <cstdint>

#include "absl/status/statusor.h"
#include "common/kv_layout.h"

namespace promptcache::cli {

// How many tokens of a model with that layout a device tier of `memory_bytes`
// holds, in the daemon's usual segments. A usage error that names --memory and
// the smallest size when it holds no page. REQUIRES: a valid layout.
absl::StatusOr<uint64_t> CapacityTokens(const KvLayout& layout,
                                        uint64_t memory_bytes);

}  // namespace promptcache::cli
