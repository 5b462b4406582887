#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/time/time.h"
#include "common/kv_layout.h"
#include "inference_worker/cache/cache_client.h"
#include "inference_worker/engine/kv_memory.h"
#include "inference_worker/serving/generation.h"

// What a request has of its modules, and the parts of its life that wait for
// the daemon. The functions block: they run on the executor, while the
// scheduler leaves the request alone.
namespace promptcache::worker {

enum class ModuleSource {
  kUnused,   // no span and no missing module needs it
  kRead,     // from the cache
  kCreate,   // into a reservation of ours
  kPrivate,  // into pages of the worker
  kPending,  // somebody else is encoding it
};

enum class VerifyMode { kNever, kSample, kAlways };

// What became of a commit.
struct CommitOutcome {
  std::vector<size_t> committed;  // indices of modules
  // False: a module's pages must not be read any more, for whatever reason.
  bool all = false;
  std::vector<std::string> notices;
};

// One request's modules; arrays are parallel to plan->modules.
struct ModuleSet {
  std::unique_ptr<CacheLease> lease;  // null: without the cache
  std::vector<ModuleSource> sources;
  std::vector<CacheMissReason> miss_reasons;
  std::vector<IdentityField> differing_fields;  // of the miss reasons
  std::vector<bool> committed;
  std::vector<std::string> notices;
  // Why what was pending when the wait was over is kPrivate; "": it is not.
  std::string gave_up;
  uint32_t corrupt = 0;  // pages whose sum was not what the daemon said

  bool HasPending() const;
  bool HasUncommitted() const;
  // Every leased module is still what it was when the lease was granted.
  bool Valid() const;
  // Says it once.
  void AddNotice(const std::string& notice);
  void Take(const CommitOutcome& outcome);
};

struct AcquisitionOptions {
  VerifyMode verify = VerifyMode::kSample;
  KvLayout layout;
  KvMemory* memory = nullptr;  // reads pages that are summed
};

// By which the cache knows module `module` of the prompt's plan.
AcquireKey AcquireKeyOf(const CompiledPrompt& prompt, size_t module);

// Everything is computed privately; `client` is not asked.
ModuleSet PrivateModules(const GenerationRequest& request);

// What is known of a request from its earlier calls.
struct EarlierAcquires {
  bool leased = false;         // one was given a lease
  bool waits_no_more = false;  // one has waited as long as it may for others
};

// One Acquire for all modules of the plan. Never fails: what the cache does not
// give is kPrivate, with a notice that says why.
ModuleSet AcquireModules(CacheClient* client, const GenerationRequest& request,
                         const AcquisitionOptions& options,
                         const EarlierAcquires& earlier = {});

// Of a warm prompt: gives its last module, when it was read, the prompt's
// policy. A pin that was refused is a notice.
void ReplacePolicy(CacheClient* client, const GenerationRequest& request,
                   ModuleSet* set);

// Waits until nothing is pending, or a reservation has passed on to us (ours
// are committed before we wait for others), until the deadline or the flag.
// What is still pending at `deadline` becomes kPrivate (`gave_up`).
void WaitForPending(const GenerationRequest& request,
                    const AcquisitionOptions& options, const CancelFlag& cancel,
                    absl::Time deadline, ModuleSet* set);

// Sums and commits what was encoded (kCreate, not committed). Of `set` it uses
// the lease and changes nothing: others may read the rest meanwhile.
CommitOutcome CommitModules(const GenerationRequest& request,
                            const AcquisitionOptions& options,
                            absl::Duration encode_time, absl::Time deadline,
                            const ModuleSet& set);

}  // namespace promptcache::worker
