#pragma once

// Inside common/pml: in which order a plan's parts stand.

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "common/chat_template.h"
#include "common/pml/marked_text.h"
#include "common/pml/prompt_judge.h"

namespace promptcache::pml {

// Fresh text (module -1), or a block or anonymous module of the schema.
struct PlanItem {
  int32_t module = -1;
  MarkedText text;
};

// Everything after the preamble, in plan order, with the markers where the
// message changes. A PmlError where the chat template has none.
absl::StatusOr<std::vector<PlanItem>> OrderPlan(
    const JudgedPrompt& prompt, const ChatTemplate& chat_template);

}  // namespace promptcache::pml
