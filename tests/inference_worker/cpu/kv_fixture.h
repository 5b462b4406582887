#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "common/kv_layout.h"
#include "common/kv_view.h"
#include "inference_worker/cpu/kernels.h"

namespace promptcache::worker::cpu {

// A span's KV in pages that lie anywhere, every byte that is not one of its
// tokens' a NaN.
struct KvSpan {
  std::vector<std::vector<std::byte>> pages;
  std::vector<const std::byte*> table;
  std::vector<std::byte*> write_table;
  KvView view;
};

struct SpanSpec {
  uint32_t first_token = 0;
  uint32_t num_tokens = 0;
  int32_t position_offset = 0;
  int32_t local_position = 0;
  uint32_t seed = 1;
};

// Keys and values of all layers depend on the seed and the token alone, not on
// where they lie.
KvSpan MakeSpan(const KvLayout& layout, const SpanSpec& spec);
// The same without any token's values.
KvSpan MakeEmptySpan(const KvLayout& layout, const SpanSpec& spec);

// Address of a token's key (or value) of one head.
uint16_t* KeyOf(const KvLayout& layout, const KvSpan& span, uint32_t layer,
                uint32_t kv_head, uint32_t token);
uint16_t* ValueOf(const KvLayout& layout, const KvSpan& span, uint32_t layer,
                  uint32_t kv_head, uint32_t token);

// A head turned to `position` in double precision, by the definition.
std::vector<double> RotateReference(std::span<const float> x,
                                    const RopeTable::Options* rope,
                                    int32_t position);

// A bias by distance (DistanceBias) that is irregular, and far from zero where
// its table ends.
float TestBias(uint32_t head, int32_t distance);

// What row `row` of the group gives, all heads, in double precision. The spans
// behind the group's views, in order, own last. A bias by table is TestBias.
std::vector<double> AttendReference(const AttentionShape& shape,
                                    const RopeTable::Options* rope,
                                    const AttentionGroup& group,
                                    std::span<const KvSpan* const> spans,
                                    uint32_t row);

}  // namespace promptcache::worker::cpu
