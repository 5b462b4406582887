// The part of Kernels that touches KV pages.

#include <algorithm>
#include <cstdlib>

#include "glog/logging.h"
#include "inference_worker/cpu/attention_plan.h"
#include "inference_worker/cpu/isa_kernels.h"
#include "inference_worker/cpu/kernels.h"

namespace promptcache::worker::cpu {
namespace {

void CheckShape(const AttentionShape& shape) {
  const KvLayout& layout = shape.layout;
  CHECK(layout.type == KvType::kBf16) << layout.ToString();
  CHECK(layout.head_dim % 16 == 0 && layout.head_dim <= kMaxHeadDim)
      << layout.ToString();
  CHECK_EQ(shape.num_heads % layout.num_kv_heads, 0u);
  CHECK_LE(shape.num_heads / layout.num_kv_heads, kMaxPackedRows);
  if (shape.rope != nullptr) CHECK_LE(shape.rope->dims(), layout.head_dim);
  if (shape.distance_bias != nullptr) {
    CHECK_EQ(shape.distance_bias->num_heads(), shape.num_heads);
  }
}

// Positions [position, position + num_rows) lie in the table from `view`.
void CheckRotation(const AttentionShape& shape, int32_t position,
                   uint32_t num_rows, const KvView& view) {
  if (shape.rope == nullptr || num_rows == 0) return;
  const int64_t first = int64_t{position} - view.position_offset;
  const int64_t last = first + num_rows - 1;
  CHECK_LE(std::max(std::abs(first), std::abs(last)),
           int64_t{shape.rope->max_position()})
      << "position " << position << ", offset " << view.position_offset;
}

void WriteRow(const IsaKernels& isa, const AttentionShape& shape,
              const KvWrite& write, uint32_t row) {
  const KvLayout& layout = shape.layout;
  const RopeView rope = ViewOf(shape.rope);
  const uint32_t token =
      write.own.first_token + write.own.num_tokens - write.num_rows + row;
  std::byte* const page = write.write_pages[token / layout.page_tokens];
  const size_t slot =
      (token % layout.page_tokens) * layout.token_stride_bytes();
  const int32_t position =
      write.position + static_cast<int32_t>(row) - write.own.position_offset;
  for (uint32_t head = 0; head < layout.num_kv_heads; ++head) {
    const size_t in = row * write.row_stride + head * size_t{layout.head_dim};
    const size_t at = head * layout.head_stride_bytes() + slot;
    isa.rotate_to_bf16(write.keys + in, rope, position, layout.head_dim,
                       reinterpret_cast<uint16_t*>(
                           page + layout.key_offset_bytes(shape.layer) + at));
    isa.to_bf16(write.values + in, layout.head_dim,
                reinterpret_cast<uint16_t*>(
                    page + layout.value_offset_bytes(shape.layer) + at));
  }
}

}  // namespace

void Kernels::WriteKv(const AttentionShape& shape,
                      std::span<const KvWrite> writes) {
  CheckShape(shape);
  size_t num_rows = 0;
  for (const KvWrite& write : writes) {
    CHECK_GE(write.own.num_tokens, write.num_rows);
    CheckRotation(shape, write.position, write.num_rows, write.own);
    num_rows += write.num_rows;
  }
  const size_t row_elements =
      size_t{2} * shape.layout.num_kv_heads * shape.layout.head_dim;
  ForRows(num_rows, row_elements, [&](size_t first, size_t last) {
    size_t row = 0;  // of writes[i]'s first
    for (const KvWrite& write : writes) {
      const size_t end = row + write.num_rows;
      for (size_t r = std::max(row, first); r < std::min(end, last); ++r) {
        WriteRow(*isa_, shape, write, static_cast<uint32_t>(r - row));
      }
      row = end;
    }
  });
}

AttentionReads Kernels::Attend(const AttentionShape& shape,
                               std::span<const AttentionGroup> groups) {
  CheckShape(shape);
  for (const AttentionGroup& group : groups) {
    if (group.own.num_tokens > 0) {
      CHECK_GE(group.own.num_tokens, group.num_rows);
      CheckRotation(shape, group.position, group.num_rows, group.own);
    }
    for (const KvView& view : group.visible) {
      CheckRotation(shape, group.position, group.num_rows, view);
    }
  }
  plan_->Build(shape, groups, num_threads());
  pool_.ParallelFor(plan_->num_tasks(), [&](size_t task, uint32_t thread) {
    plan_->RunTask(*isa_, task, ScratchOf(thread));
  });
  return plan_->reads();
}

}  // namespace promptcache::worker::cpu
