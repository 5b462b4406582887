#pragma once

#include <bit>
#include <cstddef>
#include <cstring>
#include <type_traits>

#include "absl/status/status.h"
#include "common/status_macros.h"
#include "cuda/runtime/device.h"

namespace promptcache::worker {

// Values back from the device, through pinned memory. Thread-compatible. Must
// not outlive the device.
class CudaReadback {
 public:
  explicit CudaReadback(gpu::Device& device) : device_(device) {}

  // Waits for the stream.
  template <typename T>
  absl::Status Read(const T* from, size_t count, gpu::Stream& stream, T* to) {
    static_assert(std::is_trivially_copyable_v<T>);
    const size_t num_bytes = count * sizeof(T);
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
