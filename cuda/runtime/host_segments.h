#pragma once

#include <cstdint>
#include <memory>

#include "absl/status/statusor.h"
#include "cuda/runtime/shared_segment.h"

// Segments of host memory (segment.h) behind the interfaces that device memory
// has too.
namespace promptcache::gpu {

absl::StatusOr<std::unique_ptr<SharedSegment>> NewMemfdSegment(
    const char* name, uint64_t num_bytes);
// REQUIRES: handle.kind is kMemfd.
absl::StatusOr<std::unique_ptr<ImportedSegment>> ImportMemfd(
    SegmentHandle handle);

}  // namespace promptcache::gpu
