#include "inference_worker/engine/pass_input.h"

#include <bit>

#include "common/status_macros.h"

namespace promptcache::worker {

absl::StatusOr<bool> PassInput::Reserve() {
  if (host_.size() <= pinned_.num_bytes()) return false;
  const size_t num_bytes = std::bit_ceil(host_.size());
  pinned_.Reset();
  device_memory_.Reset();
  PC_ASSIGN_OR_RETURN(device_memory_, device_.Allocate(num_bytes));
  PC_ASSIGN_OR_RETURN(pinned_, device_.AllocatePinned(num_bytes));
  return true;
}

absl::Status PassInput::Upload(gpu::Stream& stream) {
  std::memcpy(pinned_.data(), host_.data(), host_.size());
  return stream.Copy(device_memory_.data(), pinned_.data(), host_.size(),
                     gpu::CopyKind::kToDevice);
}

}  // namespace promptcache::worker
