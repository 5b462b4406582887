#include "inference_worker/serving/prefix_retention.h"

#include <algorithm>
#include <memory>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "common/module_key.h"
#include "common/status_macros.h"
#include "inference_worker/serving/prefix_plan.h"

namespace promptcache::worker {
namespace {

// For what another request is putting into the cache: a copy of an answer like
// this one is there at once, a long prompt is not worth holding up the end of
// an answer.
constexpr absl::Duration kPendingPatience = absl::Seconds(1);

struct Chunks {
  pml::Plan plan;
  std::vector<ModuleIdentity> identities;
};

CacheClient::AcquireArgs ArgsOf(const std::string& domain) {
  CacheClient::AcquireArgs args;
  args.purpose = AcquirePurpose::kKeep;
  args.schema = kPrefixSchema;
  args.isolation_domain = domain;
  return args;
}

AcquireKey KeyOf(const Chunks& chunks, size_t i) {
  return {.key = chunks.identities[i].key,
          .num_tokens = kPrefixChunkTokens,
          .path = chunks.plan.modules[i].path,
          .parts = chunks.identities[i].parts};
}

// What the request computed for itself may have come into the cache by
// another's doing. A lease over it; null: some of it is not there. Nobody could
// read a tail behind such a hole.
absl::StatusOr<std::unique_ptr<CacheLease>> FindRestOfPrompt(
    CacheClient* client, const Chunks& chunks, const FinishedTail& finished,
    const std::string& domain) {
  CacheClient::AcquireArgs args = ArgsOf(domain);
  args.reserve_missing = false;
  args.no_wait = true;
  for (size_t i = 0; i < finished.first_chunk; ++i) {
    if (!finished.cached[i]) args.keys.push_back(KeyOf(chunks, i));
  }
  PC_ASSIGN_OR_RETURN(std::unique_ptr<CacheLease> lease, client->Acquire(args));
  const bool all =
      std::ranges::all_of(lease->modules(), [](const AcquiredModule& module) {
        return module.outcome == AcquireOutcome::kHit;
      });
  if (!all) lease.reset();
  return lease;
}

// The tail's chunks on their way into the cache.
struct Tail {
  const Chunks& chunks;
  size_t first_chunk = 0;
  std::span<const std::byte* const> pages;
  ModulePolicy policy;
  CacheLease* lease = nullptr;
  std::vector<bool> kept;
  std::vector<bool> found;  // of those: another request had kept it
  bool pin_refused = false;
};

absl::StatusOr<CommitModule> CopyInto(const AcquiredModule& module,
                                      const Chunks& chunks, size_t index,
                                      const ModulePolicy& policy,
                                      std::span<const std::byte* const> pages,
                                      const AcquisitionOptions& options) {
  CommitModule commit;
  commit.reservation_id = module.reservation_id;
  const size_t page_bytes = options.layout.page_bytes();
  PC_RETURN_IF_ERROR(
      options.memory->Copy(pages, module.write_pages, page_bytes));
  PC_ASSIGN_OR_RETURN(
      commit.page_sums,
      options.memory->Sums(module.read_pages, page_bytes, module.on_host));
  commit.schema = kPrefixSchema;
  commit.path = chunks.plan.modules[index].path;
  commit.text_sha256 = chunks.plan.modules[index].text_sha256;
  commit.context_key = chunks.identities[index].context_key;
  commit.num_tokens = kPrefixChunkTokens;
  commit.ttl = policy.ttl;
  commit.absolute_ttl = policy.absolute_ttl;
  commit.pin = policy.pin;
  return commit;
}

// Fills what is reserved for us now, and not kept yet.
absl::Status CopyReserved(const AcquisitionOptions& options,
                          absl::Time deadline, Tail* tail) {
  const size_t chunk_pages = options.layout.PagesFor(kPrefixChunkTokens);
  std::vector<size_t> copied;
  std::vector<CommitModule> commits;
  for (size_t i = 0; i < tail->kept.size(); ++i) {
    const AcquiredModule& module = tail->lease->modules()[i];
    if (module.outcome != AcquireOutcome::kReserved || tail->kept[i]) continue;
    if (module.write_pages.empty()) continue;  // its reservation was gone
    PC_ASSIGN_OR_RETURN(
        CommitModule commit,
        CopyInto(module, tail->chunks, tail->first_chunk + i, tail->policy,
                 tail->pages.subspan(i * chunk_pages, chunk_pages), options));
    commits.push_back(std::move(commit));
    copied.push_back(i);
  }
  if (commits.empty()) return absl::OkStatus();
  PC_ASSIGN_OR_RETURN(const std::vector<bool> committed,
                      tail->lease->Commit(commits, deadline));
  for (size_t k = 0; k < std::min(copied.size(), committed.size()); ++k) {
    tail->kept[copied[k]] = committed[k];
    tail->pin_refused =
        tail->pin_refused || tail->lease->modules()[copied[k]].pin_refused;
  }
  return absl::OkStatus();
}

// Ours are committed before we wait for others'.
absl::Status AwaitOthers(const AcquisitionOptions& options, absl::Time deadline,
                         Tail* tail) {
  const absl::Time patience =
      std::min(deadline, absl::Now() + kPendingPatience);
  bool waited = false;
  for (size_t i = 0; i < tail->kept.size(); ++i) {
    if (tail->lease->modules()[i].outcome != AcquireOutcome::kPending) continue;
    waited = true;
    const absl::Status status = tail->lease->WaitPending(i, patience);
    // What is pending still is told by its outcome.
    if (!status.ok() && !absl::IsDeadlineExceeded(status)) return status;
  }
  return waited ? CopyReserved(options, deadline, tail) : absl::OkStatus();
}

absl::string_view WhyNotKept(const AcquiredModule& module) {
  if (module.outcome == AcquireOutcome::kPending) {
    return "another request is encoding some of it";
  }
  if (module.outcome == AcquireOutcome::kReserved) {
    return "the reservation was gone";
  }
  return module.miss_reason == CacheMissReason::kNoMemory
             ? "the cache has no memory"
             : "the cache did not take it";
}

// What was there before stays as long as this request says, too.
absl::Status ExtendPolicies(CacheClient* client, const FinishedTail& finished,
                            Tail* tail) {
  const std::vector<ModuleIdentity>& identities = tail->chunks.identities;
  std::vector<PolicyChange> changes;
  for (size_t i = 0; i < identities.size(); ++i) {
    // What another request put there meanwhile as well.
    const bool was_there = i < finished.first_chunk
                               ? finished.read[i] || !finished.cached[i]
                               : tail->found[i - finished.first_chunk];
    if (!was_there) continue;
    changes.push_back({.key = identities[i].key,
                       .ttl = tail->policy.ttl,
                       .absolute_ttl = tail->policy.absolute_ttl,
                       .pin = tail->policy.pin,
                       .only_longer = true});
  }
  if (changes.empty()) return absl::OkStatus();
  PC_ASSIGN_OR_RETURN(const std::vector<bool> refused,
                      client->SetPolicy(changes));
  tail->pin_refused =
      tail->pin_refused || std::ranges::find(refused, true) != refused.end();
  return absl::OkStatus();
}

// Empty: all is kept.
std::string KeepTail(CacheClient* client, const GenerationRequest& request,
                     const AcquisitionOptions& options, absl::Time deadline,
                     Tail* tail) {
  CacheClient::AcquireArgs args = ArgsOf(request.isolation_domain);
  for (size_t i = 0; i < tail->kept.size(); ++i) {
    args.keys.push_back(KeyOf(tail->chunks, tail->first_chunk + i));
  }
  const auto lease = client->Acquire(args);
  if (!lease.ok()) {
    return absl::StrCat("the answer was not kept: ", lease.status().message());
  }
  tail->lease = lease->get();
  absl::Status status = CopyReserved(options, deadline, tail);
  if (status.ok()) status = AwaitOthers(options, deadline, tail);
  const std::vector<AcquiredModule>& modules = tail->lease->modules();
  for (size_t i = 0; i < modules.size(); ++i) {
    if (modules[i].outcome != AcquireOutcome::kHit) continue;
    tail->kept[i] = tail->found[i] = true;
  }
  const auto first_not = std::ranges::find(tail->kept, false);
  if (first_not == tail->kept.end()) return "";
  const bool none = std::ranges::find(tail->kept, true) == tail->kept.end();
  const auto index = static_cast<size_t>(first_not - tail->kept.begin());
  return absl::StrCat(
      none ? "the answer was not kept: " : "not all of the answer was kept: ",
      status.ok() ? WhyNotKept(modules[index]) : status.message());
}

}  // namespace

RetainedTail RetainTail(CacheClient* client, const GenerationRequest& request,
                        const AcquisitionOptions& options,
                        const FinishedTail& finished, absl::Time deadline) {
  RetainedTail result;
  Chunks chunks;
  chunks.plan.modules = PrefixModules(
      finished.tokens, finished.tokens.size() / kPrefixChunkTokens);
  chunks.identities =
      ModuleIdentities(chunks.plan, *request.prompt->identity_base);
  std::unique_ptr<CacheLease> rest_of_prompt;  // until the tail is there, too
  if (std::ranges::find(finished.cached, false) != finished.cached.end()) {
    auto found =
        FindRestOfPrompt(client, chunks, finished, request.isolation_domain);
    if (!found.ok() || *found == nullptr) {
      result.notice = absl::StrCat(
          "the answer was not kept: ",
          found.ok() ? absl::string_view("its prompt is not in the cache")
                     : found.status().message());
      return result;
    }
    rest_of_prompt = *std::move(found);
  }
  result.has_prompt = true;
  const size_t count = chunks.plan.modules.size() - finished.first_chunk;
  Tail tail{.chunks = chunks,
            .first_chunk = finished.first_chunk,
            .pages = finished.pages,
            .policy = request.retain.value_or(ModulePolicy{}),
            .kept = std::vector<bool>(count),
            .found = std::vector<bool>(count)};
  if (count > 0) {
    result.notice = KeepTail(client, request, options, deadline, &tail);
  }
  const auto end = std::ranges::find(tail.kept, false);
  result.chunks = static_cast<uint32_t>(end - tail.kept.begin());
  const absl::Status extended = ExtendPolicies(client, finished, &tail);
  if (!result.notice.empty()) return result;
  if (!extended.ok()) {
    result.notice =
        absl::StrCat("what was there before is not kept longer for this: ",
                     extended.message());
  } else if (tail.pin_refused) {
    result.notice =
        "not all is pinned, the daemon's pin budget has no room for it";
  }
  return result;
}

}  // namespace promptcache::worker
