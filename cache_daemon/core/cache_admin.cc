#include <algorithm>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "cache_daemon/core/cache_state.h"

namespace promptcache::daemon {
namespace {

constexpr size_t kMinPrefixDigits = 8;
constexpr size_t kKeyDigits = 64;

bool Matches(const ModuleMetadata& metadata, const ModuleFilter* filter) {
  if (filter == nullptr) return true;
  if (!filter->schema.empty() && filter->schema != metadata.schema) {
    return false;
  }
  if (!filter->path.empty() && filter->path != metadata.path) return false;
  return filter->all || !filter->schema.empty() || !filter->keys.empty();
}

}  // namespace

CacheStats CacheState::Stats() const {
  CacheStats stats = counters_;
  for (Tier t : {Tier::kDevice, Tier::kHost}) {
    const PageAllocator& pages = tier(t).pages();
    if (pages.num_segments() == 0) continue;
    const TierTally& tally = tally_.tiers[static_cast<size_t>(t) - 1];
    TierStats& out = stats.tiers.emplace_back();
    out.tier = t;
    out.kind = pool_->kind(t);
    if (pool_->on_gpu()) {
      out.device_uuid = pool_->device_info().uuid;
      out.device_name = pool_->device_info().name;
    }
    for (const gpu::HandleKind kind : pool_->handle_kinds(t)) {
      out.handle_kinds.emplace_back(gpu::HandleKindName(kind));
    }
    out.mapped_read_only = pool_->mapped_read_only(t);
    out.capacity_bytes = pages.capacity_bytes();
    out.used_bytes = pages.used_bytes();
    out.leased_bytes = tally.leased_bytes;
    out.pinned_bytes = tally.pinned_bytes;
    out.reserved_bytes = tally.reserved_bytes + tally.moving_bytes;
    out.quarantined_bytes = tally.quarantined_bytes;
    out.largest_free_run_bytes = pages.LargestFreeRunBytes();
    std::ranges::copy(tally.modules, out.modules);
    out.num_modules =
        tally.modules[static_cast<size_t>(ModuleState::kCommitted)] +
        tally.modules[static_cast<size_t>(ModuleState::kMoving)];
    const TierCounters& counters = tier_counters_[static_cast<size_t>(t) - 1];
    out.hits = counters.hits;
    std::ranges::copy(counters.evictions, out.evictions);
    for (size_t state = 0; state < kNumModuleStates; ++state) {
      stats.modules[state] += tally.modules[state];
    }
    out.num_segments = pages.num_segments();
  }
  stats.num_sessions = sessions_.size();
  stats.num_leases = leases_.size();
  stats.num_reservations = reservations_.size();
  stats.pinned_bytes = pinned_bytes();
  stats.pin_budget_bytes = options_.pin_budget_bytes;
  return stats;
}

uint64_t CacheState::pinned_bytes() const {
  uint64_t bytes = 0;
  for (const TierTally& tier : tally_.tiers) bytes += tier.pinned_bytes;
  return bytes;
}

absl::StatusOr<ModuleKey> CacheState::ResolveKey(std::string_view key) const {
  const auto bad = [&](const char* why) {
    return absl::InvalidArgumentError(
        absl::StrCat("module key \"", std::string(key), "\" ", why));
  };
  if (key.size() < kMinPrefixDigits) return bad("has fewer than 8 digits");
  if (key.size() > kKeyDigits) return bad("has more than 64 digits");
  std::string padded = std::string(key);
  padded.resize(kKeyDigits, '0');
  const absl::StatusOr<Digest> first = Digest::FromHex(padded);
  if (!first.ok()) return bad("is not hexadecimal");
  if (key.size() == kKeyDigits) return *first;

  const auto has_prefix = [&](const ModuleKey& candidate) {
    const std::string hex = candidate.ToHex();
    return std::equal(key.begin(), key.end(), hex.begin(), [](char a, char b) {
      return absl::ascii_tolower(static_cast<unsigned char>(a)) == b;
    });
  };
  std::optional<ModuleKey> found;
  for (auto it = ordered_.lower_bound(*first);
       it != ordered_.end() && has_prefix(*it); ++it) {
    if (found.has_value()) return bad("is ambiguous");
    found = *it;
  }
  for (const ModuleInfo* known = known_.FirstFrom(*first);
       known != nullptr && has_prefix(known->key);
       known = known_.FirstAfter(known->key)) {
    if (found.has_value() && *found != known->key) return bad("is ambiguous");
    found = known->key;
  }
  if (!found.has_value()) {
    return absl::NotFoundError(
        absl::StrCat("no module's key begins with ", std::string(key)));
  }
  return *found;
}

std::optional<ModuleInfo> CacheState::Find(const ModuleKey& key) const {
  if (const Entry* entry = FindVisible(key)) return entry->Info();
  if (const ModuleInfo* known = known_.Find(key)) return *known;
  return std::nullopt;
}

bool CacheState::Walk(const ModuleFilter* filter, bool include_absent,
                      size_t budget, std::optional<ModuleKey>* cursor,
                      absl::FunctionRef<bool(const ModuleInfo&)> fn) const {
  auto it =
      cursor->has_value() ? ordered_.upper_bound(**cursor) : ordered_.begin();
  const ModuleInfo* absent = nullptr;
  if (include_absent) {
    absent = cursor->has_value() ? known_.FirstAfter(**cursor)
                                 : known_.FirstFrom(ModuleKey{});
  }
  while (it != ordered_.end() || absent != nullptr) {
    if (budget-- == 0) return false;
    if (absent != nullptr && (it == ordered_.end() || absent->key < *it)) {
      *cursor = absent->key;
      if (Matches(absent->metadata, filter) && !fn(*absent)) return false;
      absent = known_.FirstAfter(**cursor);
      continue;
    }
    // A reservation may be known from an earlier life.
    if (absent != nullptr && absent->key == *it) {
      absent = known_.FirstAfter(*it);
    }
    *cursor = *it;
    const Entry& entry = *visible_.at(*it);
    ++it;
    if (Matches(entry.metadata, filter) && !fn(entry.Info())) return false;
  }
  return true;
}

bool CacheState::VisitKey(const ModuleKey& key, const ModuleFilter& filter,
                          bool include_absent,
                          absl::FunctionRef<bool(const ModuleInfo&)> fn) const {
  if (const Entry* entry = FindVisible(key)) {
    return !Matches(entry->metadata, &filter) || fn(entry->Info());
  }
  const ModuleInfo* known = include_absent ? known_.Find(key) : nullptr;
  return known == nullptr || !Matches(known->metadata, &filter) || fn(*known);
}

bool CacheState::EvictKey(const ModuleKey& key, absl::Time now,
                          EvictResult* result, Effects* effects) {
  Entry* const entry = FindVisible(key);
  if (entry == nullptr || !entry->resident()) return false;
  if (entry->num_leases + entry->num_lost > 0) {
    ++result->num_deferred;
  } else {
    ++result->num_evicted;
    result->bytes += entry->bytes();
  }
  result->keys.push_back(key);
  Hide(entry, EvictReason::kRequested, now, effects);
  return true;
}

PinOutcome CacheState::PinKey(const ModuleKey& key, bool pin, absl::Time now) {
  Entry* const entry = FindVisible(key);
  if (entry == nullptr || !entry->resident()) {
    ModuleInfo* const known = known_.FindMutable(key);
    if (known == nullptr || pin) return PinOutcome::kAbsent;
    if (!known->pinned) return PinOutcome::kUnchanged;
    known->pinned = false;
    return PinOutcome::kChanged;
  }
  if (entry->pinned == pin) return PinOutcome::kUnchanged;
  if (pin && pinned_bytes() + entry->bytes() > options_.pin_budget_bytes) {
    ++counters_.pins_refused;
    return PinOutcome::kRefused;
  }
  Update(entry, [&] {
    entry->pinned = pin;
    // Its time did not run while it was pinned.
    if (!pin) entry->Touch(now);
  });
  return PinOutcome::kChanged;
}

void CacheState::SetPolicy(const ModuleKey& key, const CachePolicy& policy,
                           absl::Time now, PolicyResult* result) {
  Entry* const entry = FindVisible(key);
  const bool resident = entry != nullptr && entry->resident();
  ModuleInfo* const known = resident ? nullptr : known_.FindMutable(key);
  if (!resident && known == nullptr) return;
  const bool was_pinned = resident ? entry->pinned : known->pinned;
  const CachePolicy& old =
      resident ? entry->metadata.policy : known->metadata.policy;
  // Who pinned it otherwise, an operator, still wants it.
  bool pin = policy.pin || (was_pinned && !old.pin);
  if (resident && pin && !was_pinned &&
      pinned_bytes() + entry->bytes() > pin_budget_bytes()) {
    pin = false;
    result->pins_refused.push_back({key, entry->metadata.path});
    ++counters_.pins_refused;
  }
  if (policy == old && pin == was_pinned) return;
  ++result->num_changed;
  if (pin != was_pinned) {
    (pin ? result->pinned : result->unpinned).push_back(key);
  }
  if (!resident) {
    known->metadata.policy = policy;
    known->pinned = pin;
    return;
  }
  Update(entry, [&] {
    entry->metadata.policy = policy;
    entry->pinned = pin;
    entry->ttl = policy.ttl.value_or(options_.default_ttl);
    entry->expire_time = entry->commit_time + entry->ttl;
    entry->Touch(now);
  });
  ScheduleExpiry(entry);
}

void CacheState::SetPolicy(const ModuleKey& key, const SchemaPolicies& policies,
                           absl::Time now, PolicyResult* result) {
  const Entry* const entry = FindVisible(key);
  const bool resident = entry != nullptr && entry->resident();
  const ModuleInfo* const known = resident ? nullptr : known_.Find(key);
  if (!resident && known == nullptr) return;
  const auto it = policies.by_path.find(resident ? entry->metadata.path
                                                 : known->metadata.path);
  SetPolicy(key, it == policies.by_path.end() ? policies.policy : it->second,
            now, result);
}

void CacheState::AddKnown(const ModuleInfo& module,
                          const IdentityParts& parts) {
  if (FindVisible(module.key) != nullptr) return;
  ModuleInfo info = module;
  info.state = ModuleState::kNone;
  info.tier = Tier::kNone;
  info.num_leases = 0;
  info.pinned = module.pinned || module.metadata.policy.pin;
  info.absence = MissReason::kNotResident;
  known_.SetIdentity(info.isolation_domain, info.metadata.schema,
                     info.metadata.path, parts);
  known_.Add(std::move(info));
}

}  // namespace promptcache::daemon
