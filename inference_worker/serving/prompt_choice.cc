#include "inference_worker/serving/prompt_choice.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "absl/time/clock.h"
#include "inference_worker/serving/module_acquisition.h"

namespace promptcache::worker {
namespace {

bool IsHit(const AcquiredModule& module) {
  return module.outcome == AcquireOutcome::kHit;
}

// Of the plan's spans: a module may stand for less than all its tokens.
int32_t TokensThere(const pml::Plan& plan,
                    std::span<const AcquiredModule> modules) {
  int32_t tokens = 0;
  for (const pml::PlanSpan& span : plan.spans) {
    if (span.kind == pml::SpanKind::kCached &&
        IsHit(modules[static_cast<size_t>(span.module)])) {
      tokens += span.num_tokens();
    }
  }
  return tokens;
}

}  // namespace

std::shared_ptr<const CompiledPrompt> PromptChooser::Choose(
    std::shared_ptr<const CompiledPrompt> prompt, CacheMode mode,
    const std::string& isolation_domain) {
  if (prompt->as_prefix == nullptr || client_ == nullptr ||
      !PrefixHasMore(*prompt, mode, isolation_domain)) {
    return prompt;
  }
  return prompt->as_prefix;
}

bool PromptChooser::PrefixHasMore(const CompiledPrompt& prompt, CacheMode mode,
                                  const std::string& isolation_domain) {
  const CompiledPrompt& prefix = *prompt.as_prefix;
  const int32_t of_modules = prompt.plan->num_cached_tokens;
  const bool keeps_modules = mode != CacheMode::kReadOnly;
  if (prefix.plan->modules.empty() ||
      (keeps_modules && prefix.plan->num_cached_tokens < of_modules)) {
    return false;
  }
  {
    MutexLock lock(&mu_);
    if (absl::Now() < look_again_) return false;
  }
  // No more of the chain than decides it: to ask for a module is to use it, and
  // what is found is held until we have its answer.
  const size_t chunks =
      std::min(prefix.plan->modules.size(),
               static_cast<size_t>((of_modules + prefix.chunk_tokens - 1) /
                                   prefix.chunk_tokens));
  CacheClient::AcquireArgs args;
  args.reserve_missing = false;
  args.no_wait = true;
  args.purpose = AcquirePurpose::kKeep;  // the request asks, and counts, itself
  args.schema = prefix.plan->schema;
  args.isolation_domain = isolation_domain;
  for (size_t i = 0; i < chunks; ++i) {
    args.keys.push_back(AcquireKeyOf(prefix, i));
  }
  for (size_t i = 0; !keeps_modules && i < prompt.plan->modules.size(); ++i) {
    args.keys.push_back(AcquireKeyOf(prompt, i));
  }
  const auto lease = client_->Acquire(args);
  if (!lease.ok()) {
    if (absl::IsDeadlineExceeded(lease.status())) {
      MutexLock lock(&mu_);
      look_again_ = absl::Now() + kLookAgainAfter;
    }
    return false;
  }
  const std::span<const AcquiredModule> answers = (*lease)->modules();
  const auto of_chain = answers.first(chunks);
  const auto found = static_cast<int32_t>(
      std::ranges::find_if_not(of_chain, IsHit) - of_chain.begin());
  const int32_t wanted =
      keeps_modules ? of_modules
                    : TokensThere(*prompt.plan, answers.subspan(chunks));
  return found * prefix.chunk_tokens >= wanted;
}

}  // namespace promptcache::worker
