#include "inference_worker/serving/segment_plan.h"

#include <algorithm>
#include <cstddef>
#include <utility>
#include <vector>

namespace promptcache::worker {
namespace {

void DropUnnamedModules(pml::Plan* plan) {
  std::vector<int32_t> index(plan->modules.size(), -1);
  for (const pml::PlanSpan& span : plan->spans) {
    if (span.module >= 0) index[static_cast<size_t>(span.module)] = 0;
  }
  std::vector<pml::PlanModule> kept;
  for (size_t i = 0; i < index.size(); ++i) {
    if (index[i] < 0) continue;
    index[i] = static_cast<int32_t>(kept.size());
    kept.push_back(std::move(plan->modules[i]));
  }
  plan->modules = std::move(kept);
  for (pml::PlanSpan& span : plan->spans) {
    if (span.module >= 0) span.module = index[static_cast<size_t>(span.module)];
  }
}

size_t NumTexts(const std::vector<pml::Piece>& pieces) {
  return static_cast<size_t>(std::count_if(
      pieces.begin(), pieces.end(),
      [](const pml::Piece& piece) { return !piece.tokens.empty(); }));
}

bool IsOneSegment(const pml::Plan& plan) {
  const bool all_fresh = std::all_of(
      plan.spans.begin(), plan.spans.end(), [](const pml::PlanSpan& span) {
        return span.kind == pml::SpanKind::kFresh;
      });
  if (all_fresh) return true;
  if (plan.spans.size() != 1) return false;
  const pml::PlanModule& module =
      plan.modules[static_cast<size_t>(plan.spans.front().module)];
  return NumTexts(module.pieces) == 1 && NumTexts(module.placeholders) == 0;
}

void AddEnd(int32_t end_id, pml::Plan* plan) {
  if (plan->spans.back().kind == pml::SpanKind::kCached) {
    plan->spans.push_back({.start = plan->next_position});
  }
  plan->spans.back().tokens.push_back(end_id);
  ++plan->num_tokens;
  ++plan->next_position;
}

}  // namespace

void SeparateSegments(int32_t end_id, pml::Plan* plan) {
  for (pml::PlanModule& module : plan->modules) module.context.clear();
  if (!plan->spans.empty()) {
    DropUnnamedModules(plan);
    if (end_id >= 0) AddEnd(end_id, plan);
  }
  plan->exactness =
      IsOneSegment(*plan) ? pml::Exactness::kExact : pml::Exactness::kModular;
}

}  // namespace promptcache::worker
