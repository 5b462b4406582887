#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "common/pml/plan.h"
#include "tests/support/reference_model.h"

namespace promptcache::worker {

// tests/data/smollm2/README.md: a segment is encoded once at encode_start,
// seeing the segments of `context` where they were encoded.
struct ReferenceSegment {
  std::vector<int32_t> tokens;
  int32_t encode_start = 0;
  std::vector<size_t> context;  // lower indices
};
// A placed segment, or (segment < 0) fresh tokens.
struct ReferenceItem {
  int32_t segment = -1;
  std::vector<int32_t> tokens;
  int32_t start = 0;
};
// Logits of all fresh tokens, in plan order: each sees every item before its
// own in full.
std::vector<std::vector<double>> RunReferencePlan(
    const ReferenceModel& model, std::span<const ReferenceSegment> segments,
    std::span<const ReferenceItem> items);

// The same for a compiled prompt (common/pml/plan.h). When the plan ends in a
// cached span, that span's last token counts as a fresh one.
std::vector<std::vector<double>> RunReferencePlan(const ReferenceModel& model,
                                                  const pml::Plan& plan);

}  // namespace promptcache::worker
