#include "inference_worker/engine/cuda_model.h"

#include <algorithm>
#include <bit>
#include <memory>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/status_macros.h"
#include "cuda/kernels/attention.h"
#include "inference_worker/cpu/rope_table.h"
#include "inference_worker/engine/families/positions.h"
#include "inference_worker/engine/families/reuse.h"

namespace promptcache::worker {
namespace {

absl::StatusOr<gpu::RopeView> MakeRope(const ModelConfig& config, bool local,
                                       gpu::Device& device,
                                       CudaPositions* positions) {
  PC_ASSIGN_OR_RETURN(Rotation rotation, RotationOf(config, local));
  if (!local) positions->factor = static_cast<float>(rotation.factor);
  const bool interleaved = config.rope.pairing == RopePairing::kInterleaved;
  PC_ASSIGN_OR_RETURN(
      const cpu::RopeTable table,
      cpu::RopeTable::Create({
          .inv_freq = std::move(rotation.inv_freq),
          .factor = rotation.factor,
          .max_position = static_cast<int32_t>(UsableContext(config)) - 1,
      }));
  const size_t rows = static_cast<size_t>(table.max_position()) + 1;
  PC_ASSIGN_OR_RETURN(gpu::DeviceBuffer buffer,
                      ToDevice(device, table.Cos(0), rows * table.dims()));
  const gpu::RopeView view = {
      .table = reinterpret_cast<const float*>(buffer.data()),
      .num_pairs = static_cast<int32_t>(table.num_pairs()),
      .interleaved = interleaved};
  positions->memory.push_back(std::move(buffer));
  return view;
}

}  // namespace

absl::Status CheckCudaModel(const ModelConfig& config,
                            const CudaBackendOptions& options) {
  if (!gpu::HasAttention(config.head_dim)) {
    return absl::InvalidArgumentError(
        absl::StrCat("head_dim ", config.head_dim,
                     ": the GPU kernels have 64, 80, 96, 128 and 256"));
  }
  if (config.positions == PositionKind::kRope && config.rope.dims % 4 != 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("RoPE over ", config.rope.dims,
                     " elements of a head: the GPU kernels take multiples of "
                     "4"));
  }
  if (!std::has_single_bit(options.page_tokens)) {
    return absl::InvalidArgumentError(
        absl::StrCat("pages of ", options.page_tokens,
                     " tokens: the GPU kernels take powers of two"));
  }
  if (options.numerics == Numerics::kFast) {
    return absl::InvalidArgumentError(
        "numerics \"fast\": a GPU multiplies bf16; use exact");
  }
  return absl::OkStatus();
}

std::string CudaNumerics(const CudaBackendOptions& options) {
  return absl::StrCat("exact/cuda-sm",
                      options.device->info().compute_capability,
                      options.batch_invariant ? "-invariant" : "");
}

gpu::AttentionPlan::Options PlanOptions(const ModelConfig& config,
                                        const CudaBackendOptions& options,
                                        uint32_t page_tokens) {
  const int multiprocessors = options.device->info().num_multiprocessors;
  return {.head_dim = config.head_dim,
          .num_heads = config.num_heads,
          .num_kv_heads = config.num_kv_heads,
          .page_tokens = page_tokens,
          .num_multiprocessors =
              static_cast<uint32_t>(std::max(multiprocessors, 1)),
          .batch_invariant = options.batch_invariant,
          .rotate_keys = options.rotate_keys};
}

absl::StatusOr<CudaPositions> MakeCudaPositions(const ModelConfig& config,
                                                gpu::Device& device) {
  CudaPositions positions;
  if (config.positions == PositionKind::kAlibi) {
    const std::vector<float> slopes = AlibiSlopes(config);
    PC_ASSIGN_OR_RETURN(gpu::DeviceBuffer buffer,
                        ToDevice(device, slopes.data(), slopes.size()));
    positions.alibi_slopes = reinterpret_cast<const float*>(buffer.data());
    positions.memory.push_back(std::move(buffer));
  }
  if (config.positions != PositionKind::kRope) return positions;
  PC_ASSIGN_OR_RETURN(positions.rope,
                      MakeRope(config, /*local=*/false, device, &positions));
  if (config.local_rope_theta > 0 && !config.layer_windows.empty()) {
    PC_ASSIGN_OR_RETURN(positions.local_rope,
                        MakeRope(config, /*local=*/true, device, &positions));
  }
  return positions;
}

absl::StatusOr<gpu::DeviceBuffer> ToDevice(gpu::Device& device,
                                           const float* values, size_t count) {
  const size_t num_bytes = count * sizeof(float);
  PC_ASSIGN_OR_RETURN(gpu::DeviceBuffer buffer, device.Allocate(num_bytes));
  PC_ASSIGN_OR_RETURN(const std::unique_ptr<gpu::Stream> stream,
                      device.NewStream());
  PC_RETURN_IF_ERROR(
      stream->Copy(buffer.data(), values, num_bytes, gpu::CopyKind::kToDevice));
  PC_RETURN_IF_ERROR(stream->Synchronize());
  return buffer;
}

void AppendSlots(const RowGroup& group, const KvView& own,
                 std::byte* const* write_pages, uint32_t page_tokens,
                 std::vector<gpu::KvSlot>* slots) {
  const auto num_rows = static_cast<uint32_t>(group.tokens.size());
  const uint32_t first = own.first_token + own.num_tokens - num_rows;
  for (uint32_t row = 0; row < num_rows; ++row) {
    const uint32_t token = first + row;
    slots->push_back({.page = write_pages[token / page_tokens],
                      .slot = static_cast<int32_t>(token % page_tokens),
                      .rotation = group.position + static_cast<int32_t>(row) -
                                  own.position_offset});
  }
}

}  // namespace promptcache::worker
