#include "inference_worker/engine/families/reuse.h"

#include <algorithm>

namespace promptcache::worker {
namespace {

bool DependsOnLength(const ModelConfig& config) {
  return config.positions == PositionKind::kRope &&
         (config.rope.scaling.kind == RopeScalingKind::kDynamicNtk ||
          config.rope.scaling.kind == RopeScalingKind::kLongRope);
}

}  // namespace

ReuseRule ReuseRuleOf(const ModelConfig& config) {
  if (config.positions == PositionKind::kLearned) return ReuseRule::kInPlace;
  return DependsOnLength(config) ? ReuseRule::kNever : ReuseRule::kAnywhere;
}

uint32_t UsableContext(const ModelConfig& config) {
  const uint32_t original = config.rope.scaling.original_context;
  if (!DependsOnLength(config) || original == 0) return config.context_length;
  return std::min(config.context_length, original);
}

}  // namespace promptcache::worker
