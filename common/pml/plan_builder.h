#pragma once

// Inside common/pml: lays a judged prompt out.

#include <vector>

#include "absl/status/statusor.h"
#include "common/pml/compiler.h"
#include "common/pml/plan.h"
#include "common/pml/plan_order.h"
#include "common/pml/prompt_judge.h"
#include "common/pml/schema.h"

namespace promptcache::pml {

absl::StatusOr<Plan> BuildPlan(const Schema& schema, const JudgedPrompt& prompt,
                               const CompileOptions& options);

// The preamble, then the items. REQUIRES: no module of them has params or
// modules in it.
absl::StatusOr<Plan> BuildPlan(const Schema& schema, const SchemaTree& tree,
                               std::vector<PlanItem> items,
                               const CompileOptions& options);

// PML_CONTEXT_OVERFLOW when the plan is longer than the model's context.
absl::Status CheckContext(const Plan& plan, int32_t context_length);

// Appends a span after the others; one without tokens is none.
void AppendSpan(PlanSpan span, Plan* plan);

}  // namespace promptcache::pml
