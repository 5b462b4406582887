// The part of PlanExecution for encoder-decoders.

#include <utility>

#include "inference_worker/serving/plan_execution.h"

namespace promptcache::worker {

// The next tokens of a segment, of which `in_segment` came before these.
void PlanExecution::PushSegmentRun(std::span<const int32_t> tokens,
                                   uint32_t in_segment, uint32_t* tail_used) {
  const auto count = static_cast<uint32_t>(tokens.size());
  const auto position = static_cast<int32_t>(in_segment);
  plan_views_.push_back({tail_.read.data(), *tail_used, count, position, 0});
  Run run;
  run.tokens = tokens;
  run.position = position;
  run.own = plan_views_.back();
  run.own.num_tokens = 0;
  run.write_pages = tail_.write.data();
  run.part = in_segment == 0 ? RowPart::kEncoder : RowPart::kEncoderContinued;
  PushRun(run);
  *tail_used += count;
}

void PlanExecution::ComputeSegments() {
  uint32_t tail_used = 0;
  uint32_t in_segment = 0;
  plan_views_.clear();
  if (options_.full_attention) PushSegmentRun(flat_tokens_, 0, &tail_used);
  for (const SpanPart& part : parts_) {
    if (part.kind == pml::SpanKind::kCached) {
      plan_views_.push_back(CachedPartView(part));
      in_segment = 0;
      continue;
    }
    PushSegmentRun(plan_->spans[part.span].tokens, in_segment, &tail_used);
    in_segment += part.count;
  }
  frame_ = Run{};
  frame_.visible = plan_views_;
  frame_.own = {tail_.read.data(), tail_used, 0, 0, 0};
  frame_.write_pages = tail_.write.data();
  Run start = frame_;
  start.tokens = {&start_token_, 1};
  start.logits = true;
  PushRun(start);
  frame_.own.num_tokens = 1;
}

}  // namespace promptcache::worker
