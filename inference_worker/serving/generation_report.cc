// The part of GenerationJob that says what became of its plan.

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "inference_worker/serving/generation_job.h"

namespace promptcache::worker {

bool GenerationJob::IsCached(size_t module) const {
  const StateSource source = SourceNow(module);
  return source == StateSource::kRead || source == StateSource::kCreated;
}

uint32_t GenerationJob::CountRetained() const {
  if (!request.retain.has_value()) return 0;
  // Where the tail was not looked at: as far as the prompt is there.
  uint32_t count = 0;
  while (count < modules.sources.size() && IsCached(count)) ++count;
  return std::max(count, retained_chunks_) *
         static_cast<uint32_t>(request.prompt->chunk_tokens);
}

StateSource GenerationJob::SourceNow(size_t module) const {
  if (modules.sources[module] == ModuleSource::kUnused) {
    return StateSource::kFresh;
  }
  if (modules.sources[module] == ModuleSource::kRead) return StateSource::kRead;
  return modules.committed[module] ? StateSource::kCreated
                                   : StateSource::kComputed;
}

StateSource GenerationJob::SourceOf(size_t module) const {
  const StateSource now = SourceNow(module);
  const StateSource before = earlier_[module];
  const bool computed =
      before == StateSource::kCreated || before == StateSource::kComputed;
  // Read now, because it was computed before; or needed only then.
  if (now == StateSource::kFresh || (now == StateSource::kRead && computed)) {
    return before;
  }
  return now;
}

std::vector<std::string> GenerationJob::Notices() const {
  std::vector<std::string> notices = notices_;
  notices.insert(notices.end(), modules.notices.begin(), modules.notices.end());
  const auto add = [&](const Pauses& pauses, const char* why,
                       const char* advice) {
    if (pauses.count == 0) return;
    notices.push_back(absl::StrCat(
        "paused ", pauses.count, pauses.count == 1 ? " time" : " times", why,
        ", ", pauses.recomputed_tokens, " tokens computed again", advice));
  };
  add(page_pauses, " for others' pages",
      ": --tail_bytes is small for this load");
  add(reader_pauses, " for others while its reader was behind", "");
  return notices;
}

std::vector<SpanReport> GenerationJob::Spans() const {
  const pml::Plan& plan = *request.prompt->plan;
  std::vector<SpanReport> spans(plan.spans.size());
  if (request.full_attention || modules.sources.empty()) return spans;
  for (size_t i = 0; i < spans.size(); ++i) {
    const pml::PlanSpan& span = plan.spans[i];
    if (span.kind == pml::SpanKind::kFresh) continue;
    const auto m = static_cast<size_t>(span.module);
    spans[i].miss_reason = modules.miss_reasons[m];
    spans[i].differing_field = modules.differing_fields[m];
    spans[i].source = SourceOf(m);
  }
  return spans;
}

std::vector<MissReport> GenerationJob::Misses() const {
  std::vector<MissReport> misses;
  // Nobody said that a prompt without schema is there.
  if (request.prompt->chunk_tokens > 0) return misses;
  for (size_t i = 0; i < modules.sources.size(); ++i) {
    if (modules.sources[i] == ModuleSource::kUnused ||
        modules.sources[i] == ModuleSource::kRead ||
        modules.miss_reasons[i] == CacheMissReason::kNone) {
      continue;
    }
    misses.push_back({.module = i,
                      .reason = modules.miss_reasons[i],
                      .differing_field = modules.differing_fields[i]});
  }
  return misses;
}

Usage GenerationJob::CurrentUsage() const {
  const pml::Plan& plan = *request.prompt->plan;
  Usage result;
  result.completion_tokens = static_cast<uint32_t>(tokens_.generated().size());
  if (request.warm) {
    for (size_t i = 0; i < modules.sources.size(); ++i) {
      const auto n = static_cast<uint32_t>(plan.modules[i].num_tokens());
      const StateSource source = SourceOf(i);
      if (source == StateSource::kFresh) continue;
      result.prompt_tokens += n;
      if (source == StateSource::kRead) result.cached_tokens += n;
      if (source == StateSource::kCreated) result.created_tokens += n;
      if (source == StateSource::kComputed) result.fresh_tokens += n;
    }
    return result;
  }
  result.prompt_tokens = static_cast<uint32_t>(plan.num_tokens);
  result.retained_tokens = CountRetained();
  const std::vector<SpanReport> spans = Spans();
  std::vector<uint32_t> linked(spans.size(), 0);
  for (const SpanPart& part : execution_->parts()) {
    // A linked beginning is fresh; a last token computed anew counts as read.
    if (part.linked) linked[part.span] = part.count;
  }
  for (size_t i = 0; i < spans.size(); ++i) {
    const auto n = static_cast<uint32_t>(plan.spans[i].num_tokens());
    if (spans[i].source == StateSource::kRead) {
      result.cached_tokens += n - linked[i];
    } else if (spans[i].source == StateSource::kCreated) {
      result.created_tokens += n - linked[i];
    }
  }
  result.fresh_tokens =
      result.prompt_tokens - result.cached_tokens - result.created_tokens;
  return result;
}

}  // namespace promptcache::worker
