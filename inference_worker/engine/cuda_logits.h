#pragma once

#include <bit>
#include <cstddef>
#include <cstring>

#include "absl/status/status.h"
#include "common/status_macros.h"
#include "cuda/runtime/device.h"

namespace promptcache::worker {

// Floats back from the device, through pinned memory. Thread-compatible. Must
// not outlive the device.
class CudaLogits {
 public:
  explicit CudaLogits(gpu::Device& device) : device_(device) {}

  // Waits for the stream.
  absl::Status Read(const float* from, size_t count, gpu::Stream& stream,
                    float* to) {
    const size_t num_bytes = count * sizeof(float);
    if (num_bytes > pinned_.num_bytes()) {
      pinned_.Reset();
      PC_ASSIGN_OR_RETURN(pinned_,
                          device_.AllocatePinned(std::bit_ceil(num_bytes)));
    }
    if (num_bytes == 0) return stream.Synchronize();
    PC_RETURN_IF_ERROR(
        stream.Copy(pinned_.data(), from, num_bytes, gpu::CopyKind::kToHost));
    PC_RETURN_IF_ERROR(stream.Synchronize());
    std::memcpy(to, pinned_.data(), num_bytes);
    return absl::OkStatus();
  }

 private:
  gpu::Device& device_;
  gpu::PinnedBuffer pinned_;
};

}  // namespace promptcache::worker
