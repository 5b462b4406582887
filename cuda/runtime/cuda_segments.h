#pragma once

#include <cstdint>
#include <memory>

#include "absl/status/statusor.h"
#include "cuda/runtime/cuda_driver.h"
#include "cuda/runtime/shared_segment.h"

// The two ways in which GPU memory reaches another process. All calls need the
// device to be the thread's current one.
namespace promptcache::gpu {

absl::StatusOr<std::unique_ptr<SharedSegment>> NewIpcSegment(
    int ordinal, uint64_t num_bytes);
absl::StatusOr<std::unique_ptr<ImportedSegment>> ImportIpc(
    int ordinal, SegmentHandle handle);

// InvalidArgument when the size is no multiple of the driver's granularity.
absl::StatusOr<std::unique_ptr<SharedSegment>> NewVmmSegment(
    const CudaDriver& driver, int ordinal, uint64_t num_bytes);
// Mapped twice, read-only and writable, where the driver grants read-only
// access; else once.
absl::StatusOr<std::unique_ptr<ImportedSegment>> ImportVmm(
    const CudaDriver& driver, int ordinal, SegmentHandle handle);

}  // namespace promptcache::gpu
