#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <type_traits>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "cuda/runtime/device.h"

namespace promptcache::worker {

// What one pass tells a device, in one copy: arrays that are added one after
// the other and then uploaded together. Where an array lies follows from the
// room that was asked for the arrays before it and not from what is in them,
// so that a recorded graph finds the next pass's arrays where it found this
// one's, as long as layout() is the same and Upload did not move the memory.
// Thread-compatible. Must not outlive the device.
class PassInput {
 public:
  explicit PassInput(gpu::Device& device) : device_(device) {}

  // Begins a pass. The last upload must be done.
  void Clear() {
    host_.clear();
    layout_.clear();
  }
  // Offset of `values`, which get room for `capacity` of their kind (at least
  // their own number; what is not used holds zeros).
  template <typename T>
  size_t Add(std::span<const T> values, size_t capacity = 0) {
    static_assert(std::is_trivially_copyable_v<T>);
    const size_t offset = host_.size();
    const size_t room = std::max(values.size(), capacity) * sizeof(T);
    host_.resize(offset + (room + kAlignment - 1) / kAlignment * kAlignment);
    if (!values.empty()) {
      std::memcpy(host_.data() + offset, values.data(), values.size_bytes());
    }
    layout_.push_back(host_.size());
    return offset;
  }
  template <typename T>
  size_t Add(const std::vector<T>& values, size_t capacity = 0) {
    return Add(std::span<const T>(values), capacity);
  }

  // Makes room on the device for what was added; true when addresses changed.
  absl::StatusOr<bool> Reserve();
  // Queues the copy. REQUIRES: Reserve was called after the last Add.
  absl::Status Upload(gpu::Stream& stream);

  // Device address of what was added at `offset`. REQUIRES: Reserve.
  template <typename T>
  T* At(size_t offset) const {
    return reinterpret_cast<T*>(device_memory_.data() + offset);
  }
  // Where every array of this pass ends.
  const std::vector<size_t>& layout() const { return layout_; }

 private:
  static constexpr size_t kAlignment = 256;

  gpu::Device& device_;
  std::vector<std::byte> host_;
  std::vector<size_t> layout_;
  gpu::PinnedBuffer pinned_;
  gpu::DeviceBuffer device_memory_;
};

}  // namespace promptcache::worker
