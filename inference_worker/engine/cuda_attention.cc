#include "inference_worker/engine/cuda_attention.h"

#include <bit>

#include "common/status_macros.h"
#include "cuda/runtime/cuda_status.h"

namespace promptcache::worker {
namespace {

// Blocks beyond a plan's own end at once; few sizes mean few graphs.
uint32_t Rounded(uint32_t count) {
  constexpr uint32_t kLarge = 1024;
  if (count == 0) return 0;
  if (count < kLarge) return std::bit_ceil(count);
  return (count + kLarge - 1) / kLarge * kLarge;
}

}  // namespace

void CudaAttention::Plan(std::span<const gpu::AttentionGroup> groups,
                         PassInput& input) {
  plan_.Build(options_, groups);
  grid_ = {.large_items = Rounded(plan_.grid().large_items),
           .small_items = Rounded(plan_.grid().small_items),
           .merged_rows = Rounded(plan_.grid().merged_rows)};
  offset_ = input.Add(plan_.bytes(), std::bit_ceil(plan_.bytes().size()));
}

absl::StatusOr<bool> CudaAttention::Reserve() {
  const size_t needed = plan_.StateBytes();
  if (needed <= states_.num_bytes()) return false;
  states_.Reset();
  PC_ASSIGN_OR_RETURN(states_, device_.Allocate(std::bit_ceil(needed)));
  return true;
}

absl::Status CudaAttention::Launch(gpu::AttentionParams params,
                                   const PassInput& input,
                                   gpu::Stream& stream) const {
  params.head_dim = options_.head_dim;
  params.num_heads = options_.num_heads;
  params.num_kv_heads = options_.num_kv_heads;
  params.page_tokens = options_.page_tokens;
  params.rotate_keys = options_.rotate_keys;
  params.plan = input.At<std::byte>(offset_);
  params.grid = grid_;
  params.states = reinterpret_cast<float*>(states_.data());
  return gpu::ToStatus(gpu::LaunchAttention(params, stream.native()),
                       "LaunchAttention");
}

}  // namespace promptcache::worker
