#include "inference_worker/engine/pass_buffers.h"

#include <algorithm>
#include <bit>
#include <utility>

#include "common/status_macros.h"

namespace promptcache::worker {

// Grows by doubling: a server's passes settle at its largest one.
absl::Status PassBuffers::Reserve(size_t num_rows, const RowWidths& widths) {
  if (num_rows <= capacity_rows) return absl::OkStatus();
  const size_t capacity = std::bit_ceil(std::max<size_t>(num_rows, 16));
  const size_t block = std::min(capacity, kBlockRows);
  *this = {};  // the old ones go first: never both at once
  float* kv = nullptr;
  const std::pair<float**, size_t> parts[] = {
      {&residual, capacity * widths.hidden},
      {&qkv, capacity * widths.qkv},
      {&attention, capacity * widths.query},
      // Keys and values: two bf16 to a float.
      {&kv, capacity * widths.encoder_kv},
      {&normed, block * widths.hidden},
      {&gate_up, block * GateUpStride(2 * widths.ffn)},
      {&gated, block * widths.ffn},
  };
  constexpr size_t kAlignFloats = 16;
  const auto aligned = [](size_t count) {
    return (count + kAlignFloats - 1) / kAlignFloats * kAlignFloats;
  };
  size_t total = 0;
  for (const auto& [pointer, count] : parts) total += aligned(count);
  PC_ASSIGN_OR_RETURN(memory,
                      cpu::PopulatedMemory::Allocate(total * sizeof(float)));
  auto* next = reinterpret_cast<float*>(memory.data());
  for (const auto& [pointer, count] : parts) {
    *pointer = next;
    next += aligned(count);
  }
  encoder_kv = reinterpret_cast<std::byte*>(kv);
  capacity_rows = capacity;
  return absl::OkStatus();
}

}  // namespace promptcache::worker
