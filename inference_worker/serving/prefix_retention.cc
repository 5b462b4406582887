#include "inference_worker/serving/prefix_retention.h"

#include <memory>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/module_key.h"
#include "common/status_macros.h"
#include "inference_worker/serving/prefix_plan.h"

namespace promptcache::worker {
namespace {

struct Chunks {
  pml::Plan plan;
  std::vector<ModuleIdentity> identities;
};

CacheClient::AcquireArgs ArgsOf(const Chunks& chunks, size_t first,
                                const std::string& domain) {
  CacheClient::AcquireArgs args;
  args.purpose = AcquirePurpose::kKeep;
  args.schema = kPrefixSchema;
  args.isolation_domain = domain;
  for (size_t i = first; i < chunks.plan.modules.size(); ++i) {
    args.keys.push_back({.key = chunks.identities[i].key,
                         .num_tokens = kPrefixChunkTokens,
                         .path = chunks.plan.modules[i].path,
                         .parts = chunks.identities[i].parts});
  }
  return args;
}

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

}  // namespace

RetainedTail RetainTail(CacheClient* client, const GenerationRequest& request,
                        const AcquisitionOptions& options,
                        std::span<const int32_t> tokens, size_t first_chunk,
                        std::span<const std::byte* const> pages,
                        absl::Time deadline) {
  RetainedTail result;
  Chunks chunks;
  chunks.plan.modules =
      PrefixModules(tokens, tokens.size() / kPrefixChunkTokens);
  const size_t count = chunks.plan.modules.size() - first_chunk;
  if (count == 0) return result;
  chunks.identities =
      ModuleIdentities(chunks.plan, *request.prompt->identity_base);
  const auto lease =
      client->Acquire(ArgsOf(chunks, first_chunk, request.isolation_domain));
  if (!lease.ok()) {
    result.notice =
        absl::StrCat("the answer was not kept: ", lease.status().message());
    return result;
  }
  const size_t chunk_pages = options.layout.PagesFor(kPrefixChunkTokens);
  std::vector<bool> kept(count, false);
  std::vector<size_t> copied;
  std::vector<CommitModule> commits;
  for (size_t i = 0; i < count; ++i) {
    const AcquiredModule& module = (*lease)->modules()[i];
    kept[i] = module.outcome == AcquireOutcome::kHit;
    if (module.outcome != AcquireOutcome::kReserved) continue;
    auto commit =
        CopyInto(module, chunks, first_chunk + i,
                 request.retain.value_or(ModulePolicy{}),
                 pages.subspan(i * chunk_pages, chunk_pages), options);
    if (!commit.ok()) {
      result.notice =
          absl::StrCat("the answer was not kept: ", commit.status().message());
      return result;
    }
    commits.push_back(*std::move(commit));
    copied.push_back(i);
  }
  if (!commits.empty()) {
    const auto committed = (*lease)->Commit(commits, deadline);
    if (!committed.ok()) {
      result.notice = absl::StrCat("the answer was not kept: ",
                                   committed.status().message());
      return result;
    }
    for (size_t k = 0; k < std::min(copied.size(), committed->size()); ++k) {
      kept[copied[k]] = (*committed)[k];
    }
  }
  while (result.chunks < count && kept[result.chunks]) ++result.chunks;
  if (result.chunks < count) {
    result.notice = "not all of the answer was kept: the cache has no memory";
  }
  return result;
}

}  // namespace promptcache::worker
