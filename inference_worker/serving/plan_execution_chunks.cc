// The part of PlanExecution for prefix chains.

#include "glog/logging.h"
#include "inference_worker/serving/plan_execution.h"

namespace promptcache::worker {

// A module of a prefix chain is one piece that saw those before it.
void PlanExecution::EncodeChunk(size_t module) {
  const pml::PlanModule& m = plan_->modules[module];
  CHECK_EQ(m.context.size(), module);
  chunk_views_.reserve(plan_->modules.size());
  while (chunk_views_.size() < module) {
    PushStates(m.context[chunk_views_.size()], &chunk_views_);
  }
  const pml::Piece& piece = m.pieces.front();
  Run run;
  run.tokens = piece.tokens;
  run.position = piece.offset;
  run.embedding_position_offset = m.schema_start;
  run.visible = std::span<const KvView>(chunk_views_).first(module);
  run.own = ModuleView(module, 0, 0, 0, piece.offset);
  run.write_pages = modules_[module].write.data();
  PushRun(run);
}

// The chunk that was filled is seen by those after it as a view.
void PlanExecution::NextChunk() {
  CHECK_LT(plan_views_.size(), plan_views_.capacity());
  plan_views_.push_back(frame_.own);
  frame_.visible = plan_views_;
  frame_.own.first_token += options_.chunk_tokens;
  frame_.own.local_position += static_cast<int32_t>(options_.chunk_tokens);
  frame_.own.num_tokens = 0;
}

std::span<const std::byte* const> PlanExecution::WholeTailChunks() const {
  const uint32_t chunk = options_.chunk_tokens;
  if (chunk == 0 || chunk % layout_.page_tokens != 0) return {};
  const size_t tokens = num_fresh_tokens_ + generated_.size() - rows_left_;
  return std::span<const std::byte* const>(tail_.read)
      .first(tokens / chunk * (chunk / layout_.page_tokens));
}

}  // namespace promptcache::worker
