#include "inference_worker/serving/prefix_plan.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "glog/logging.h"

namespace promptcache::worker {

std::vector<pml::PlanModule> PrefixModules(std::span<const int32_t> tokens,
                                           size_t count) {
  constexpr size_t kChunk = kPrefixChunkTokens;
  CHECK_LE(count * kChunk, tokens.size());
  std::vector<pml::PlanModule> modules;
  modules.reserve(count);
  // Each saw the first ones of this.
  std::vector<pml::ContextItem> all;
  all.reserve(count);
  for (size_t i = 0; i < count; ++i) {
    all.push_back(
        {.module = static_cast<int32_t>(i), .num_tokens = kPrefixChunkTokens});
  }
  const pml::ContextList context = std::move(all);
  Digest before;
  for (size_t i = 0; i < count; ++i) {
    const auto chunk = tokens.subspan(i * kChunk, kChunk);
    const auto offset = static_cast<int32_t>(i * kChunk);
    before = Sha256().Add("before", before).Add("tokens", chunk).Finish();
    pml::PlanModule module;
    module.path = absl::StrCat("~", before.ToHex().substr(0, 16));
    module.text_sha256 = before;
    module.pieces = {{offset, {chunk.begin(), chunk.end()}}};
    module.length = offset + kPrefixChunkTokens;
    module.context = context.First(i);
    modules.push_back(std::move(module));
  }
  return modules;
}

bool CutPrefix(pml::Plan* plan) {
  if (plan->spans.size() != 1 || !plan->modules.empty() ||
      plan->spans[0].kind != pml::SpanKind::kFresh ||
      plan->spans[0].start != 0) {
    return false;
  }
  const std::vector<int32_t> tokens = std::move(plan->spans[0].tokens);
  plan->spans.clear();
  const size_t count = (tokens.size() - 1) / kPrefixChunkTokens;
  plan->modules = PrefixModules(tokens, count);
  for (size_t i = 0; i < count; ++i) {
    const pml::Piece& piece = plan->modules[i].pieces[0];
    plan->spans.push_back({.kind = pml::SpanKind::kCached,
                           .name = plan->modules[i].path,
                           .module = static_cast<int32_t>(i),
                           .piece = 0,
                           .start = piece.offset,
                           .tokens = piece.tokens});
  }
  const auto cached = static_cast<int32_t>(count) * kPrefixChunkTokens;
  plan->spans.push_back(
      {.start = cached, .tokens = {tokens.begin() + cached, tokens.end()}});
  plan->num_cached_tokens = cached;
  plan->schema = kPrefixSchema;
  return true;
}

}  // namespace promptcache::worker
