#include "inference_worker/serving/module_acquisition.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "glog/logging.h"
#include "inference_worker/serving/leased_arrival.h"
#include "inference_worker/serving/plan_execution.h"

namespace promptcache::worker {
namespace {

// A cancelled request gives its lease back within this.
constexpr absl::Duration kWaitSlice = absl::Milliseconds(20);
// Pages looked at per request by sampling: well under a millisecond.
constexpr uint32_t kSampledPages = 8;

const pml::Plan& PlanOf(const GenerationRequest& request) {
  return *request.prompt->plan;
}

void SetAllPrivate(const GenerationRequest& request, ModuleSet* set) {
  const pml::Plan& plan = PlanOf(request);
  const size_t n = plan.modules.size();
  set->sources.assign(n, ModuleSource::kUnused);
  set->miss_reasons.assign(n, CacheMissReason::kNone);
  set->differing_fields.assign(n, IdentityField::kNone);
  set->committed.assign(n, false);
  const auto needed =
      NeededModules(plan, std::vector<bool>(n, false), request.warm);
  for (size_t i = 0; i < n; ++i) {
    if (needed[i]) set->sources[i] = ModuleSource::kPrivate;
  }
}

AcquirePurpose PurposeOf(const GenerationRequest& request, bool keeps_missing,
                         bool again) {
  if (request.warm) return AcquirePurpose::kKeep;
  if (again) return AcquirePurpose::kAgain;
  // A module of a schema is asked for by name, also by who only reads.
  return keeps_missing || request.prompt->chunk_tokens == 0
             ? AcquirePurpose::kRequest
             : AcquirePurpose::kProbe;
}

// Reads some or all pages of a hit against the sums that the daemon keeps.
bool PagesAreSound(const CacheLease& lease, size_t index,
                   const AcquisitionOptions& options, uint32_t* budget) {
  const AcquiredModule& module = lease.modules()[index];
  if (module.arriving) {
    // The daemon sums all of it as it comes.
    if (options.verify != VerifyMode::kAlways) return true;
    LeasedArrival(&lease, index, absl::Now() + kArrivalTimeout).AwaitVerified();
  }
  const size_t pages = module.read_pages.size();
  if (options.verify == VerifyMode::kNever || pages == 0 ||
      module.page_sums.size() != pages) {
    return true;
  }
  // Pages [first, first + count). What cannot be read is left to the pass.
  const auto sound = [&](size_t first, size_t count) {
    const auto sums =
        options.memory->Sums(std::span(module.read_pages).subspan(first, count),
                             options.layout.page_bytes(), module.on_host);
    if (!sums.ok()) LOG(ERROR) << "pages were not checked: " << sums.status();
    return !sums.ok() ||
           std::ranges::equal(
               *sums, std::span(module.page_sums).subspan(first, count));
  };
  if (options.verify == VerifyMode::kAlways) return sound(0, pages);
  if (*budget == 0) return true;
  --*budget;
  // Another page each time; which one needs no better randomness than this.
  static std::atomic<uint32_t> turn{0};
  return sound(turn.fetch_add(1, std::memory_order_relaxed) % pages, 1);
}

void SetFromOutcome(const GenerationRequest& request,
                    const AcquisitionOptions& options, size_t i,
                    uint32_t* verify_budget, ModuleSet* set) {
  const AcquiredModule& module = set->lease->modules()[i];
  set->miss_reasons[i] = module.miss_reason;
  set->differing_fields[i] = module.differing_field;
  switch (module.outcome) {
    case AcquireOutcome::kHit:
      set->sources[i] = ModuleSource::kRead;
      if (!PagesAreSound(*set->lease, i, options, verify_budget)) {
        set->lease->ReportCorruption(i);
        ++set->corrupt;
        set->sources[i] = ModuleSource::kPrivate;
        set->miss_reasons[i] = CacheMissReason::kCorrupt;
        set->AddNotice(absl::StrCat("module '", PlanOf(request).modules[i].path,
                                    "' is corrupt in the cache: recomputed"));
      }
      break;
    case AcquireOutcome::kReserved:
      set->sources[i] = ModuleSource::kCreate;
      break;
    case AcquireOutcome::kPending:
      set->sources[i] = request.pending_compute ? ModuleSource::kPrivate
                                                : ModuleSource::kPending;
      if (set->miss_reasons[i] == CacheMissReason::kNone) {
        set->miss_reasons[i] = CacheMissReason::kNotYetCommitted;
      }
      break;
    case AcquireOutcome::kMiss:
      set->sources[i] = ModuleSource::kPrivate;
      if (module.miss_reason == CacheMissReason::kNoMemory) {
        set->AddNotice("the cache has no memory for some modules");
      }
      break;
  }
}

// A module of ours whose context somebody else is encoding: the context is
// computed privately. Highest first: a context names lower modules only.
void PrivatisePendingContexts(const pml::Plan& plan, ModuleSet* set) {
  pml::ContextWalk walk;
  for (size_t i = plan.modules.size(); i-- > 0;) {
    if (set->sources[i] != ModuleSource::kCreate &&
        set->sources[i] != ModuleSource::kPrivate) {
      continue;
    }
    if (set->committed[i]) continue;
    for (const pml::ContextItem& item : walk.New(plan.modules[i].context)) {
      if (item.module < 0) continue;
      auto& source = set->sources[static_cast<size_t>(item.module)];
      if (source == ModuleSource::kPending) source = ModuleSource::kPrivate;
    }
  }
}

// Encoding ahead of use keeps nothing that is private: what is left of it are
// contexts of what we encode into the cache.
void DropUselessForWarm(const GenerationRequest& request, ModuleSet* set) {
  if (!request.warm) return;
  const pml::Plan& plan = PlanOf(request);
  std::vector<bool> used(set->sources.size(), false);
  pml::ContextWalk walk;
  for (size_t i = set->sources.size(); i-- > 0;) {
    ModuleSource& source = set->sources[i];
    if (source == ModuleSource::kPrivate && !used[i]) {
      source = ModuleSource::kUnused;
    }
    if (source != ModuleSource::kCreate && source != ModuleSource::kPrivate) {
      continue;
    }
    if (set->committed[i]) continue;
    for (const pml::ContextItem& item : walk.New(plan.modules[i].context)) {
      if (item.module >= 0) used[static_cast<size_t>(item.module)] = true;
    }
  }
}

// Reservations that no span and no missing module needs go back at once.
void DropUnneeded(const GenerationRequest& request, ModuleSet* set) {
  const size_t n = set->sources.size();
  std::vector<bool> present(n);
  for (size_t i = 0; i < n; ++i) {
    present[i] = set->sources[i] == ModuleSource::kRead;
  }
  const auto needed = NeededModules(PlanOf(request), present, request.warm);
  std::vector<uint64_t> unneeded;
  for (size_t i = 0; i < n; ++i) {
    if (needed[i]) continue;
    if (set->sources[i] == ModuleSource::kCreate) {
      unneeded.push_back(set->lease->modules()[i].reservation_id);
    }
    set->sources[i] = ModuleSource::kUnused;
  }
  if (!unneeded.empty()) set->lease->Abort(unneeded);
}

void NoteNoCache(const GenerationRequest& request, const absl::Status& why,
                 ModuleSet* set) {
  set->AddNotice(absl::StrCat(
      request.warm ? "" : "answered without the cache: ", why.message()));
}

// The daemon keeps such modules all the same, until it needs their memory.
std::string RefusedPins(const pml::Plan& plan,
                        const std::vector<size_t>& refused) {
  std::string names;
  for (const size_t i : refused) {
    const std::string& path = plan.modules[i].path;
    absl::StrAppend(&names, names.empty() ? "" : ", ",
                    path.empty() ? "the preamble" : path);
  }
  return absl::StrCat("not pinned, the daemon's pin budget has no room: ",
                      names);
}

CommitOutcome NotKept(const absl::Status& why) {
  return {.notices = {absl::StrCat("modules were not kept: ", why.message())}};
}

}  // namespace

bool ModuleSet::HasPending() const {
  return std::find(sources.begin(), sources.end(), ModuleSource::kPending) !=
         sources.end();
}

bool ModuleSet::HasUncommitted() const {
  for (size_t i = 0; i < sources.size(); ++i) {
    if (sources[i] == ModuleSource::kCreate && !committed[i]) return true;
  }
  return false;
}

bool ModuleSet::Valid() const {
  if (lease == nullptr) return true;
  for (size_t i = 0; i < sources.size(); ++i) {
    if ((sources[i] == ModuleSource::kRead ||
         sources[i] == ModuleSource::kCreate) &&
        !lease->Valid(i)) {
      return false;
    }
  }
  return true;
}

void ModuleSet::AddNotice(const std::string& notice) {
  if (std::find(notices.begin(), notices.end(), notice) == notices.end()) {
    notices.push_back(notice);
  }
}

void ModuleSet::Take(const CommitOutcome& outcome) {
  for (const size_t i : outcome.committed) committed[i] = true;
  for (const std::string& notice : outcome.notices) AddNotice(notice);
}

AcquireKey AcquireKeyOf(const CompiledPrompt& prompt, size_t module) {
  const pml::PlanModule& planned = prompt.plan->modules[module];
  const ModuleIdentity& identity = prompt.identities[module];
  return {.key = identity.key,
          .num_tokens = static_cast<uint32_t>(planned.num_tokens()),
          .path = planned.path,
          .parts = identity.parts};
}

ModuleSet PrivateModules(const GenerationRequest& request) {
  ModuleSet set;
  SetAllPrivate(request, &set);
  return set;
}

ModuleSet AcquireModules(CacheClient* client, const GenerationRequest& request,
                         const AcquisitionOptions& options,
                         const EarlierAcquires& earlier) {
  const pml::Plan& plan = PlanOf(request);
  ModuleSet set;
  SetAllPrivate(request, &set);
  if (plan.modules.empty()) return set;
  CacheClient::AcquireArgs args;
  // A prompt without schema stays only when it is told to.
  args.reserve_missing =
      request.cache_mode == CacheMode::kReadWrite &&
      (request.prompt->chunk_tokens == 0 || request.retain.has_value());
  args.want_page_sums = options.verify != VerifyMode::kNever;
  args.purpose = PurposeOf(request, args.reserve_missing, earlier.leased);
  args.no_wait = request.pending_compute || earlier.waits_no_more;
  args.schema = plan.schema;
  args.isolation_domain = request.isolation_domain;
  for (size_t i = 0; i < plan.modules.size(); ++i) {
    args.keys.push_back(AcquireKeyOf(*request.prompt, i));
  }
  auto lease = client->Acquire(args);
  if (!lease.ok()) {
    NoteNoCache(request, lease.status(), &set);
    return set;
  }
  set.lease = *std::move(lease);
  CHECK_EQ(set.lease->modules().size(), plan.modules.size());
  uint32_t verify_budget = kSampledPages;
  for (size_t i = 0; i < plan.modules.size(); ++i) {
    SetFromOutcome(request, options, i, &verify_budget, &set);
  }
  DropUnneeded(request, &set);
  PrivatisePendingContexts(plan, &set);
  DropUselessForWarm(request, &set);
  return set;
}

void ReplacePolicy(CacheClient* client, const GenerationRequest& request,
                   ModuleSet* set) {
  if (!request.warm || !request.prompt->replace_policy ||
      set->sources.back() != ModuleSource::kRead) {
    return;
  }
  const size_t last = set->sources.size() - 1;
  const ModulePolicy& policy = request.prompt->policies[last];
  const auto refused =
      client->SetPolicy({{.key = request.prompt->identities[last].key,
                          .ttl = policy.ttl,
                          .absolute_ttl = policy.absolute_ttl,
                          .pin = policy.pin}});
  if (!refused.ok()) {
    set->AddNotice(absl::StrCat("the policy of a module was not changed: ",
                                refused.status().message()));
  } else if (refused->front()) {
    set->AddNotice(RefusedPins(PlanOf(request), {last}));
  }
}

void WaitForPending(const GenerationRequest& request,
                    const AcquisitionOptions& options, const CancelFlag& cancel,
                    absl::Time deadline, ModuleSet* set) {
  uint32_t verify_budget = kSampledPages;
  for (size_t i = 0; i < set->sources.size(); ++i) {
    while (set->sources[i] == ModuleSource::kPending && !cancel.cancelled()) {
      const absl::Time now = absl::Now();
      const absl::Status status =
          set->lease->WaitPending(i, std::min(deadline, now + kWaitSlice));
      if (set->lease->modules()[i].outcome != AcquireOutcome::kPending) {
        SetFromOutcome(request, options, i, &verify_budget, set);
      } else if (!absl::IsDeadlineExceeded(status)) {
        set->sources[i] = ModuleSource::kPrivate;
        NoteNoCache(request, status, set);
      } else if (now >= deadline) {
        set->sources[i] = ModuleSource::kPrivate;
        set->gave_up = absl::StrCat(
            "did not wait longer for modules that another request encodes: ",
            status.message());
        set->AddNotice(set->gave_up);
      }
    }
    if (set->sources[i] == ModuleSource::kCreate && !set->committed[i]) break;
  }
  PrivatisePendingContexts(PlanOf(request), set);
  DropUselessForWarm(request, set);
}

CommitOutcome CommitModules(const GenerationRequest& request,
                            const AcquisitionOptions& options,
                            absl::Duration encode_time, absl::Time deadline,
                            const ModuleSet& set) {
  const pml::Plan& plan = PlanOf(request);
  std::vector<size_t> indices;
  int64_t total_tokens = 0;
  for (size_t i = 0; i < set.sources.size(); ++i) {
    if (set.sources[i] != ModuleSource::kCreate || set.committed[i]) continue;
    indices.push_back(i);
    total_tokens += plan.modules[i].num_tokens();
  }
  std::vector<CommitModule> commits;
  for (size_t i : indices) {
    const AcquiredModule& module = set.lease->modules()[i];
    const ModulePolicy& policy = request.retain.has_value()
                                     ? *request.retain
                                     : request.prompt->policies[i];
    CommitModule commit;
    commit.reservation_id = module.reservation_id;
    auto sums = options.memory->Sums(
        module.read_pages, options.layout.page_bytes(), module.on_host);
    if (!sums.ok()) return NotKept(sums.status());
    commit.page_sums = *std::move(sums);
    commit.schema = plan.schema;
    commit.path = plan.modules[i].path;
    commit.text_sha256 = plan.modules[i].text_sha256;
    commit.context_key = request.prompt->identities[i].context_key;
    commit.num_tokens = static_cast<uint32_t>(plan.modules[i].num_tokens());
    commit.compute_us = static_cast<uint64_t>(
        absl::ToInt64Microseconds(encode_time) * commit.num_tokens /
        std::max<int64_t>(total_tokens, 1));
    commit.ttl = policy.ttl;
    commit.absolute_ttl = policy.absolute_ttl;
    commit.pin = policy.pin;
    commits.push_back(std::move(commit));
  }
  auto committed = set.lease->Commit(commits, deadline);
  if (!committed.ok()) return NotKept(committed.status());
  CommitOutcome outcome;
  std::vector<size_t> refused;
  for (size_t k = 0; k < std::min(indices.size(), committed->size()); ++k) {
    if (!(*committed)[k]) continue;
    const size_t i = indices[k];
    outcome.committed.push_back(i);
    if (set.lease->modules()[i].pin_refused) refused.push_back(i);
  }
  outcome.all = outcome.committed.size() == indices.size();
  if (!outcome.all) {
    outcome.notices.emplace_back(
        "modules were not kept: the reservation was gone");
  }
  if (!refused.empty()) outcome.notices.push_back(RefusedPins(plan, refused));
  return outcome;
}

}  // namespace promptcache::worker
