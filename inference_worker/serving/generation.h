#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "common/module_key.h"
#include "common/pml/plan.h"
#include "inference_worker/cache/cache_client.h"
#include "inference_worker/engine/sampler.h"

// What goes into and comes out of the scheduler: plain values, no gRPC.
namespace promptcache::worker {

enum class CacheMode { kReadWrite, kReadOnly, kBypass };
enum class FinishReason { kNone, kStop, kStopString, kMaxTokens, kContext };
// Where a plan span's states came from.
enum class StateSource { kRead, kCreated, kComputed, kFresh };

// How long a committed module stays; a negative ttl is the daemon's default.
struct ModulePolicy {
  absl::Duration ttl = absl::Seconds(-1);
  bool absolute_ttl = false;
  bool pin = false;
};

// A plan with what the cache needs to know of it. Immutable, shared between
// the cache of compiled prompts and the requests that use it.
struct CompiledPrompt {
  std::shared_ptr<const pml::Plan> plan;
  // A prompt without schema, cut into anonymous modules of so many tokens
  // (prefix_plan.h); 0: another one.
  int32_t chunk_tokens = 0;
  // What the keys of more modules of the sequence are made with.
  std::shared_ptr<const IdentityBase> identity_base;
  // Parallel to plan->modules.
  std::vector<ModuleIdentity> identities;
  std::vector<ModulePolicy> policies;
  // To warm: the last module's policy replaces the one that it has in the cache
  // already. (A commit brings the policies of what it creates.)
  bool replace_policy = false;
  // Of a prompt in which modules were found (MatchMode::kAuto): the same one
  // without them, cut into chunks. Null: it has no chunk.
  std::shared_ptr<const CompiledPrompt> as_prefix;
};

struct GenerationRequest {
  std::shared_ptr<const CompiledPrompt> prompt;
  // Whose request this is; its modules' keys are made for it.
  std::string isolation_domain = "default";
  uint32_t max_tokens = 256;  // at least 1
  SamplingOptions sampling;
  std::vector<std::string> stop;  // none empty
  CacheMode cache_mode = CacheMode::kReadWrite;
  bool full_attention = false;
  // A text, or messages, in which modules of the plan's schema were found.
  bool matched = false;
  uint32_t top_logprobs = 0;
  bool ignore_eos = false;
  // Compute what others are encoding instead of waiting for it.
  bool pending_compute = false;
  uint32_t link_tokens = 0;
  // Leave the prompt, and the answer when there is one, in the cache as
  // anonymous modules with this policy. Only with chunk_tokens.
  std::optional<ModulePolicy> retain;
  // Encode all modules of the plan into the cache and stop there.
  bool warm = false;
  absl::Time arrival = absl::Now();
  absl::Time deadline = absl::InfiniteFuture();
  absl::Duration compile_time;
};

// Linked tokens are fresh; the last token of a plan that ends in a module,
// computed anew for its logits, counts as its module does.
struct Usage {
  uint32_t prompt_tokens = 0;  // cached + created + fresh
  uint32_t cached_tokens = 0;
  uint32_t created_tokens = 0;
  uint32_t fresh_tokens = 0;
  uint32_t completion_tokens = 0;  // sampled, an end token included
  // With `retain`: of prompt and answer, from the first token on, in the cache.
  uint32_t retained_tokens = 0;
};

struct Timings {
  absl::Duration queue;
  absl::Duration compile;
  absl::Duration acquire;
  absl::Duration wait_pending;
  absl::Duration prefill;
  absl::Duration arrival;  // of that: waiting for modules on their way
  absl::Duration ttft;
  absl::Duration decode;
  absl::Duration total;
};

struct SpanReport {
  StateSource source = StateSource::kFresh;
  CacheMissReason miss_reason = CacheMissReason::kNone;
  IdentityField differing_field = IdentityField::kNone;
};

// A module of the plan that was needed and was not in the cache.
struct MissReport {
  size_t module = 0;
  CacheMissReason reason = CacheMissReason::kNone;
  IdentityField differing_field = IdentityField::kNone;
};

struct StartedEvent {
  Usage usage;
  std::vector<SpanReport> spans;  // parallel to plan->spans
  std::vector<MissReport> misses;
  std::vector<std::string> notices;
  absl::Duration ttft;
};

struct TokenEvent {
  int32_t id = 0;
  std::string text;  // whole characters; what may be part of a stop string
                     // is held back
  // When asked for.
  float logprob = 0;
  float margin = 0;
  std::vector<std::pair<int32_t, float>> top;
};

struct CompletedEvent {
  Usage usage;
  Timings timings;
  FinishReason finish_reason = FinishReason::kNone;
  std::string stop_string;
  std::vector<std::string> notices;
  std::string logits_sha256;
  // Where each module of the plan came from; kFresh: it was not needed.
  std::vector<StateSource> modules;
};

// Receives a request's events, in order, from the scheduler's thread: must not
// block. OnDone comes exactly once and last.
class GenerationSink {
 public:
  virtual ~GenerationSink() = default;
  virtual void OnStarted(const StartedEvent& event) = 0;
  virtual void OnToken(TokenEvent event) = 0;
  virtual void OnDone(const absl::Status& status,
                      const CompletedEvent& event) = 0;
  // False while the reader is behind: the request pauses. Whoever makes it
  // true again calls Scheduler::Wake.
  virtual bool Ready() { return true; }
  // The reader has read so much of what it was sent that a request which gave
  // its place up because of it is worth computing again. Not without Ready.
  virtual bool CaughtUp() { return Ready(); }
};

// Ends a request early. Shared by the scheduler and the caller, since either
// may be done first. Thread-safe.
class CancelFlag {
 public:
  void Cancel() { cancelled_.store(true, std::memory_order_relaxed); }
  bool cancelled() const { return cancelled_.load(std::memory_order_relaxed); }

 private:
  std::atomic<bool> cancelled_{false};
};

}  // namespace promptcache::worker
