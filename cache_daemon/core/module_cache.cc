#include "cache_daemon/core/module_cache.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "cache_daemon/core/cache_state.h"
#include "common/byte_size.h"
#include "common/status_macros.h"
#include "glog/logging.h"

namespace promptcache::daemon {
namespace {

// What one hold of the lock may look at: about 0.3 ms.
constexpr size_t kWalkBudget = 1024;
constexpr size_t kExpireBudget = 256;

absl::Status ValidateFilter(const ModuleFilter& filter) {
  if (!filter.path.empty() && filter.schema.empty()) {
    return absl::InvalidArgumentError(
        absl::StrCat("path \"", filter.path, "\" without a schema"));
  }
  return absl::OkStatus();
}

// What is pinned is not evicted: the rest must have room to work in.
uint64_t MostPinnedBytes(const PagePool& pool) {
  uint64_t bytes = 0;
  for (uint32_t i = 0; i < pool.num_segments(); ++i) {
    bytes += pool.segment_bytes(i);
  }
  return bytes / 2;
}

}  // namespace

absl::StatusOr<std::unique_ptr<ModuleCache>> ModuleCache::Create(
    const Options& options, const PagePool* pool, const Clock* clock,
    WorkSignal* signal, EventHub* events) {
  if (options.demote_free_fraction < 0 || options.demote_free_fraction > 1) {
    return absl::InvalidArgumentError(absl::StrCat("demote_free_fraction ",
                                                   options.demote_free_fraction,
                                                   " is not between 0 and 1"));
  }
  if (options.default_ttl <= absl::ZeroDuration()) {
    return absl::InvalidArgumentError("default_ttl is not positive");
  }
  if (options.first_generation == 0) {
    return absl::InvalidArgumentError("generation 0 is nobody's");
  }
  Options limited = options;
  limited.pin_budget_bytes =
      std::min(options.pin_budget_bytes, MostPinnedBytes(*pool));
  if (limited.pin_budget_bytes < options.pin_budget_bytes) {
    LOG(INFO) << "pins may hold " << RoundedByteSize(limited.pin_budget_bytes)
              << ", half of all tiers, not the "
              << RoundedByteSize(options.pin_budget_bytes)
              << " of --pin_budget_bytes";
  }
  return std::unique_ptr<ModuleCache>(
      new ModuleCache(pool, clock, signal, events,
                      std::make_unique<CacheState>(limited, pool)));
}

ModuleCache::ModuleCache(const PagePool* pool, const Clock* clock,
                         WorkSignal* signal, EventHub* events,
                         std::unique_ptr<CacheState> state)
    : pool_(pool),
      clock_(clock),
      signal_(signal),
      events_(events),
      state_(std::move(state)) {}

ModuleCache::~ModuleCache() = default;

Effects ModuleCache::NewEffects() const {
  Effects effects;
  effects.want_events = events_ != nullptr && events_->has_watchers();
  return effects;
}

void ModuleCache::Perform(Effects effects) {
  for (const Effects::Zero& zero : effects.zero) {
    const absl::Status zeroed = pool_->Zero(zero.runs, zero.page_bytes);
    // The GPU is lost to this process for good. Going on would show pages to
    // another isolation domain; a new process starts with an empty tier.
    if (!zeroed.ok()) LOG(FATAL) << "cannot zero pages: " << zeroed;
  }
  if (!effects.zero_holds.empty()) {
    MutexLock lock(&mu_);
    state_->EndHolds(effects.zero_holds);
  }
  for (const Effects::Delivery& delivery : effects.deliveries) {
    if (*delivery.to) (*delivery.to)(delivery.resolved);
  }
  for (const CacheEvent& event : effects.events) events_->Emit(event);
  if (effects.notify_mover && signal_ != nullptr) signal_->Notify();
}

absl::StatusOr<SessionId> ModuleCache::OpenSession(SessionArgs args) {
  Effects effects = NewEffects();
  const absl::Time now = clock_->Now();
  absl::StatusOr<SessionId> session = absl::InternalError("not opened");
  {
    MutexLock lock(&mu_);
    session = state_->OpenSession(std::move(args), now, &effects);
  }
  Perform(std::move(effects));
  return session;
}

void ModuleCache::CloseSession(SessionId session, std::string_view why) {
  Effects effects = NewEffects();
  const absl::Time now = clock_->Now();
  {
    MutexLock lock(&mu_);
    state_->CloseSession(session, why, now, &effects);
  }
  Perform(std::move(effects));
}

void ModuleCache::OnProcessDeath(ProcessId process) {
  Effects effects = NewEffects();
  const absl::Time now = clock_->Now();
  {
    MutexLock lock(&mu_);
    state_->OnProcessDeath(process, now, &effects);
  }
  Perform(std::move(effects));
}

absl::StatusOr<AcquireResult> ModuleCache::Acquire(
    SessionId session, const AcquireRequest& request) {
  Effects effects = NewEffects();
  const absl::Time now = clock_->Now();
  absl::StatusOr<AcquireResult> result;
  {
    MutexLock lock(&mu_);
    result = state_->Acquire(session, request, now, &effects);
  }
  Perform(std::move(effects));
  return result;
}

absl::StatusOr<std::vector<CommitResult>> ModuleCache::Commit(
    SessionId session, std::span<const CommitModule> modules) {
  Effects effects = NewEffects();
  const absl::Time now = clock_->Now();
  absl::StatusOr<std::vector<CommitResult>> results =
      absl::InternalError("not committed");
  {
    MutexLock lock(&mu_);
    results = state_->Commit(session, modules, now, &effects);
  }
  Perform(std::move(effects));
  return results;
}

absl::Status ModuleCache::Abort(SessionId session,
                                std::span<const ReservationId> reservations) {
  Effects effects = NewEffects();
  const absl::Time now = clock_->Now();
  absl::Status status;
  {
    MutexLock lock(&mu_);
    status = state_->Abort(session, reservations, now, &effects);
  }
  Perform(std::move(effects));
  return status;
}

absl::Status ModuleCache::Release(SessionId session, LeaseId lease) {
  Effects effects = NewEffects();
  const absl::Time now = clock_->Now();
  absl::Status status;
  {
    MutexLock lock(&mu_);
    status = state_->Release(session, lease, now, &effects);
  }
  Perform(std::move(effects));
  return status;
}

bool ModuleCache::ReportCorruption(const ModuleKey& key, uint64_t generation) {
  std::optional<CacheState::Check> check;
  {
    MutexLock lock(&mu_);
    check = state_->BeginCheck(key, generation);
  }
  if (!check.has_value()) return false;
  const absl::StatusOr<std::vector<uint64_t>> sums =
      pool_->Sums(check->runs, check->page_bytes);
  if (!sums.ok()) LOG(ERROR) << "a check was not made: " << sums.status();
  Effects effects = NewEffects();
  const absl::Time now = clock_->Now();
  bool corrupt;
  {
    MutexLock lock(&mu_);
    corrupt = state_->EndCheck(*check, sums, now, &effects);
  }
  Perform(std::move(effects));
  return corrupt;
}

void ModuleCache::ReportUse(const RequestUse& use) {
  MutexLock lock(&mu_);
  state_->ReportUse(use);
}

CacheStats ModuleCache::Stats() const {
  MutexLock lock(&mu_);
  return state_->Stats();
}

absl::StatusOr<std::vector<ModuleKey>> ModuleCache::ResolveKeys(
    const ModuleFilter& filter) const {
  std::vector<ModuleKey> keys;
  MutexLock lock(&mu_);
  for (const std::string& text : filter.keys) {
    const absl::StatusOr<ModuleKey> key = state_->ResolveKey(text);
    if (key.ok()) {
      keys.push_back(*key);
    } else if (!absl::IsNotFound(key.status())) {
      return key.status();
    }
  }
  std::sort(keys.begin(), keys.end());
  keys.erase(std::unique(keys.begin(), keys.end()), keys.end());
  return keys;
}

absl::StatusOr<ListResult> ModuleCache::List(const ListArgs& args) const {
  std::optional<std::vector<ModuleKey>> keys;
  const ModuleFilter* const filter =
      args.filter.has_value() ? &*args.filter : nullptr;
  if (filter != nullptr) {
    PC_RETURN_IF_ERROR(ValidateFilter(*filter));
    if (!filter->keys.empty()) {
      PC_ASSIGN_OR_RETURN(keys, ResolveKeys(*filter));
    }
  }
  ListResult result;
  const auto add = [&](const ModuleInfo& info) {
    if (result.modules.size() == args.page_size) {
      result.more = true;
      return false;
    }
    result.modules.push_back(info);
    return true;
  };
  if (keys.has_value()) {
    MutexLock lock(&mu_);
    for (const ModuleKey& key : *keys) {
      if (args.after.has_value() && key <= *args.after) continue;
      if (!state_->VisitKey(key, *filter, args.include_absent, add)) break;
    }
    return result;
  }
  std::optional<ModuleKey> cursor = args.after;
  while (!result.more) {
    MutexLock lock(&mu_);
    if (state_->Walk(filter, args.include_absent, kWalkBudget, &cursor, add)) {
      break;
    }
  }
  return result;
}

absl::StatusOr<ModuleInfo> ModuleCache::Get(std::string_view key) const {
  MutexLock lock(&mu_);
  PC_ASSIGN_OR_RETURN(const ModuleKey resolved, state_->ResolveKey(key));
  std::optional<ModuleInfo> info = state_->Find(resolved);
  if (!info.has_value()) {
    return absl::NotFoundError(
        absl::StrCat("module ", resolved.ToHex(), " is not known"));
  }
  return *std::move(info);
}

absl::Status ModuleCache::ForEach(
    const ModuleFilter& filter, bool include_absent,
    absl::FunctionRef<void(const ModuleKey&)> fn) {
  PC_RETURN_IF_ERROR(ValidateFilter(filter));
  std::vector<ModuleKey> keys;
  const auto collect = [&](const ModuleInfo& info) {
    keys.push_back(info.key);
    return true;
  };
  if (!filter.keys.empty()) {
    PC_ASSIGN_OR_RETURN(const std::vector<ModuleKey> named,
                        ResolveKeys(filter));
    MutexLock lock(&mu_);
    for (const ModuleKey& key : named) {
      state_->VisitKey(key, filter, include_absent, collect);
    }
    for (const ModuleKey& key : keys) fn(key);
    return absl::OkStatus();
  }
  std::optional<ModuleKey> cursor;
  bool done = false;
  while (!done) {
    keys.clear();
    MutexLock lock(&mu_);
    done = state_->Walk(&filter, include_absent, kWalkBudget, &cursor, collect);
    for (const ModuleKey& key : keys) fn(key);
  }
  return absl::OkStatus();
}

absl::StatusOr<EvictResult> ModuleCache::Evict(const ModuleFilter& filter) {
  Effects effects = NewEffects();
  const absl::Time now = clock_->Now();
  EvictResult result;
  const absl::Status status =
      ForEach(filter, /*include_absent=*/false, [&](const ModuleKey& key) {
        mu_.AssertHeld();
        state_->EvictKey(key, now, &result, &effects);
      });
  Perform(std::move(effects));
  PC_RETURN_IF_ERROR(status);
  return result;
}

absl::StatusOr<PinResult> ModuleCache::Pin(const ModuleFilter& filter,
                                           bool pin) {
  const absl::Time now = clock_->Now();
  PinResult result;
  PC_RETURN_IF_ERROR(
      ForEach(filter, /*include_absent=*/!pin, [&](const ModuleKey& key) {
        mu_.AssertHeld();
        switch (state_->PinKey(key, pin, now)) {
          case PinOutcome::kAbsent:
            break;
          case PinOutcome::kChanged:
            result.keys.push_back(key);
            break;
          case PinOutcome::kUnchanged:
            ++result.num_unchanged;
            break;
          case PinOutcome::kRefused:
            ++result.num_refused;
            break;
        }
      }));
  MutexLock lock(&mu_);
  result.num_changed = result.keys.size();
  result.pinned_bytes = state_->pinned_bytes();
  result.pin_budget_bytes = state_->pin_budget_bytes();
  return result;
}

PolicyResult ModuleCache::SetPolicy(std::span<const PolicyChange> changes) {
  const absl::Time now = clock_->Now();
  PolicyResult result;
  MutexLock lock(&mu_);
  for (const PolicyChange& change : changes) {
    state_->SetPolicy(change, now, &result);
  }
  return result;
}

absl::StatusOr<PolicyResult> ModuleCache::SetPolicy(
    const std::string& schema, const SchemaPolicies& policies) {
  const absl::Time now = clock_->Now();
  PolicyResult result;
  PC_RETURN_IF_ERROR(ForEach({.schema = schema}, /*include_absent=*/true,
                             [&](const ModuleKey& key) {
                               mu_.AssertHeld();
                               state_->SetPolicy(key, policies, now, &result);
                             }));
  return result;
}

void ModuleCache::AddKnown(const ModuleInfo& module,
                           const IdentityParts& parts) {
  MutexLock lock(&mu_);
  state_->AddKnown(module, parts);
}

std::optional<MoveTicket> ModuleCache::BeginMove(uint32_t device) {
  Effects effects = NewEffects();
  const absl::Time now = clock_->Now();
  std::optional<MoveTicket> ticket;
  {
    MutexLock lock(&mu_);
    ticket = state_->BeginMove(device, now, &effects);
  }
  Perform(std::move(effects));
  return ticket;
}

void ModuleCache::EndMove(
    const MoveTicket& ticket,
    const absl::StatusOr<std::vector<uint64_t>>& copied_sums) {
  Effects effects = NewEffects();
  const absl::Time now = clock_->Now();
  {
    MutexLock lock(&mu_);
    state_->EndMove(ticket, copied_sums, now, &effects);
  }
  Perform(std::move(effects));
}

std::optional<ArrivalTicket> ModuleCache::BeginArrival(uint32_t device) {
  MutexLock lock(&mu_);
  return state_->BeginArrival(device);
}

void ModuleCache::EndArrival(
    const ArrivalTicket& ticket,
    const absl::StatusOr<std::vector<uint64_t>>& copied_sums) {
  Effects effects = NewEffects();
  const absl::Time now = clock_->Now();
  {
    MutexLock lock(&mu_);
    state_->EndArrival(ticket, copied_sums, now, &effects);
  }
  Perform(std::move(effects));
}

void ModuleCache::ExpireDue() {
  const absl::Time now = clock_->Now();
  bool more = true;
  while (more) {
    Effects effects = NewEffects();
    {
      MutexLock lock(&mu_);
      more = state_->ExpireDue(kExpireBudget, now, &effects);
    }
    Perform(std::move(effects));
  }
}

absl::Status ModuleCache::CheckInvariants() const {
  MutexLock lock(&mu_);
  return state_->CheckInvariants();
}

}  // namespace promptcache::daemon
