#pragma once

#include <memory>
#include <string>

#include "absl/time/time.h"
#include "common/mutex.h"
#include "inference_worker/cache/cache_client.h"
#include "inference_worker/serving/generation.h"

namespace promptcache::worker {

// Of a prompt in which registered modules were found: whether it is answered
// with those or, as its own beginning, with what some request retained of it
// (CompiledPrompt::as_prefix). Whichever has more tokens there; as many: the
// beginning, which is EXACT. Modules that are not in the cache count, too,
// where the request puts them there: a few retained tokens would else keep them
// out of it for good. They are what is taken while the cache does not answer.
//
// Asks the cache, which is a round trip, only where the beginning could be the
// longer one. Thread-safe.
class PromptChooser {
 public:
  // After a daemon that did not answer in time: it holds up one prompt in this
  // time, not each.
  static constexpr absl::Duration kLookAgainAfter = absl::Seconds(1);

  // Null: without a cache, modules are what is taken. Must outlive this.
  explicit PromptChooser(CacheClient* client) : client_(client) {}
  PromptChooser(const PromptChooser&) = delete;
  PromptChooser& operator=(const PromptChooser&) = delete;

  // Either `prompt` or its `as_prefix`. With kBypass as with kReadWrite: the
  // same plan.
  std::shared_ptr<const CompiledPrompt> Choose(
      std::shared_ptr<const CompiledPrompt> prompt, CacheMode mode,
      const std::string& isolation_domain) ABSL_LOCKS_EXCLUDED(mu_);

 private:
  bool PrefixHasMore(const CompiledPrompt& prompt, CacheMode mode,
                     const std::string& isolation_domain)
      ABSL_LOCKS_EXCLUDED(mu_);

  CacheClient* const client_;
  Mutex mu_;
  absl::Time look_again_ ABSL_GUARDED_BY(mu_) = absl::InfinitePast();
};

}  // namespace promptcache::worker
