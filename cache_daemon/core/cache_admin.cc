#include <algorithm>

#include "absl/container/inlined_vector.h"
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
  const uint32_t num_devices = pool_->num_devices();
  for (size_t i = 0; i < tiers_.size(); ++i) {
    const PageAllocator& pages = tiers_[i]->pages();
    if (pages.num_segments() == 0) continue;
    const Tier tier = tiers_[i]->tier();
    const uint32_t device =
        tier == Tier::kDevice ? static_cast<uint32_t>(i) : 0;
    const TierTally& tally = tally_.tiers[i];
    TierStats& out = stats.tiers.emplace_back();
    out.tier = tier;
    out.kind = pool_->kind(tier, device);
    if (pool_->on_gpu() && (tier == Tier::kDevice || num_devices == 1)) {
      out.device_uuid = pool_->device_info(device).uuid;
      out.device_name = pool_->device_info(device).name;
    }
    for (const gpu::HandleKind kind : pool_->handle_kinds(tier, device)) {
      out.handle_kinds.emplace_back(gpu::HandleKindName(kind));
    }
    out.mapped_read_only = pool_->mapped_read_only(tier, device);
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
    out.hits = tier_counters_[i].hits;
    std::ranges::copy(tier_counters_[i].evictions, out.evictions);
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
  if (const Entry* first = FirstCopy(key)) return InfoOf(*first);
  if (const ModuleInfo* known = known_.Find(key)) return *known;
  return std::nullopt;
}

ModuleInfo CacheState::InfoOf(const Entry& first_copy) const {
  absl::InlinedVector<const Entry*, 4> copies;
  for (const Entry* entry = &first_copy; entry != nullptr;
       entry = entry->next_copy.get()) {
    copies.push_back(entry);
  }
  std::sort(copies.begin(), copies.end(),
            [this](const Entry* a, const Entry* b) {
              return IndexOf(*a) < IndexOf(*b);
            });
  const auto resident = std::ranges::find_if(
      copies, [](const Entry* e) { return e->resident(); });
  const Entry* const best =
      resident == copies.end() ? copies.front() : *resident;
  ModuleInfo info = best->Info();
  for (const Entry* copy : copies) {
    info.placements.push_back(
        {copy->tier, copy->device, copy->state, copy->num_leases});
    if (copy == best) continue;
    info.pinned = info.pinned || copy->pinned;
    info.num_leases += copy->num_leases;
    info.hits += copy->hits;
    info.last_use_time = std::max(info.last_use_time, copy->last_use_time);
    if (!copy->resident()) continue;
    info.expire_time =
        std::max(info.expire_time, copy->effective_expire_time());
  }
  return info;
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
    const Entry& first = *visible_.at(*it);
    ++it;
    if (Matches(first.metadata, filter) && !fn(InfoOf(first))) return false;
  }
  return true;
}

bool CacheState::VisitKey(const ModuleKey& key, const ModuleFilter& filter,
                          bool include_absent,
                          absl::FunctionRef<bool(const ModuleInfo&)> fn) const {
  if (const Entry* first = FirstCopy(key)) {
    return !Matches(first->metadata, &filter) || fn(InfoOf(*first));
  }
  const ModuleInfo* known = include_absent ? known_.Find(key) : nullptr;
  return known == nullptr || !Matches(known->metadata, &filter) || fn(*known);
}

bool CacheState::EvictKey(const ModuleKey& key, absl::Time now,
                          EvictResult* result, Effects* effects) {
  const std::vector<Entry*> copies = ResidentCopies(key);
  if (copies.empty()) return false;
  bool deferred = false;
  for (Entry* entry : copies) {
    if (entry->num_leases + entry->num_lost > 0) {
      deferred = true;
    } else {
      result->bytes += entry->bytes();
    }
    Hide(entry, EvictReason::kRequested, now, effects);
  }
  ++(deferred ? result->num_deferred : result->num_evicted);
  result->keys.push_back(key);
  return true;
}

uint64_t CacheState::UnpinnedBytes(const std::vector<Entry*>& copies) {
  uint64_t bytes = 0;
  for (const Entry* entry : copies) bytes += entry->pinned ? 0 : entry->bytes();
  return bytes;
}

PinOutcome CacheState::PinKey(const ModuleKey& key, bool pin, absl::Time now) {
  const std::vector<Entry*> copies = ResidentCopies(key);
  if (copies.empty()) {
    ModuleInfo* const known = known_.FindMutable(key);
    if (known == nullptr || pin) return PinOutcome::kAbsent;
    if (!known->pinned) return PinOutcome::kUnchanged;
    known->pinned = false;
    return PinOutcome::kChanged;
  }
  if (std::ranges::all_of(
          copies, [&](const Entry* entry) { return entry->pinned == pin; })) {
    return PinOutcome::kUnchanged;
  }
  // All of them or none.
  if (pin &&
      pinned_bytes() + UnpinnedBytes(copies) > options_.pin_budget_bytes) {
    ++counters_.pins_refused;
    return PinOutcome::kRefused;
  }
  for (Entry* entry : copies) {
    if (entry->pinned == pin) continue;
    Update(entry, [&] {
      entry->pinned = pin;
      // Its time did not run while it was pinned.
      if (!pin) entry->Touch(now);
    });
  }
  return PinOutcome::kChanged;
}

void CacheState::SetPolicy(const PolicyChange& change, absl::Time now,
                           PolicyResult* result) {
  SetPolicy(change.key,
            change.only_longer ? LongerPolicy(change.key, change.policy)
                               : change.policy,
            now, result);
}

CachePolicy CacheState::LongerPolicy(const ModuleKey& key,
                                     const CachePolicy& policy) const {
  const std::vector<Entry*> copies = ResidentCopies(key);
  const ModuleInfo* const known = copies.empty() ? known_.Find(key) : nullptr;
  if (copies.empty() && known == nullptr) return policy;  // ignored
  const CachePolicy& old =
      copies.empty() ? known->metadata.policy : copies.front()->metadata.policy;
  const bool pinned =
      copies.empty() ? known->pinned
                     : std::ranges::any_of(
                           copies, [](const Entry* e) { return e->pinned; });
  const auto ttl_of = [&](const CachePolicy& p) {
    return p.ttl.value_or(options_.default_ttl);
  };
  CachePolicy longer = ttl_of(policy) > ttl_of(old) ? policy : old;
  longer.absolute_ttl = policy.absolute_ttl && old.absolute_ttl;
  // A pin that was refused, or that an operator took, is not asked for again.
  longer.pin = policy.pin || (old.pin && pinned);
  return longer;
}

void CacheState::SetPolicy(const ModuleKey& key, const CachePolicy& policy,
                           absl::Time now, PolicyResult* result) {
  const std::vector<Entry*> copies = ResidentCopies(key);
  if (copies.empty()) {
    SetKnownPolicy(key, policy, result);
    return;
  }
  const auto any = [&](auto fn) { return std::ranges::any_of(copies, fn); };
  const bool was_pinned = any([](const Entry* e) { return e->pinned; });
  // Who pinned it otherwise, an operator, still wants it.
  const bool pin = policy.pin || any([](const Entry* e) {
                     return e->pinned && !e->metadata.policy.pin;
                   });
  // All copies or none more than there are.
  const uint64_t more_bytes = pin ? UnpinnedBytes(copies) : 0;
  const bool refused =
      more_bytes > 0 && pinned_bytes() + more_bytes > pin_budget_bytes();
  if (refused) {
    result->pins_refused.push_back({key, copies.front()->metadata.path});
    ++counters_.pins_refused;
  }
  const auto pin_of = [&](const Entry& entry) {
    return refused ? entry.pinned : pin;
  };
  if (!any([&](const Entry* e) {
        return policy != e->metadata.policy || pin_of(*e) != e->pinned;
      })) {
    return;
  }
  ++result->num_changed;
  for (Entry* entry : copies) {
    const bool pinned = pin_of(*entry);
    Update(entry, [&] {
      entry->metadata.policy = policy;
      entry->pinned = pinned;
      entry->ttl = policy.ttl.value_or(options_.default_ttl);
      entry->expire_time = entry->commit_time + entry->ttl;
      entry->Touch(now);
    });
    ScheduleExpiry(entry);
  }
  const bool is_pinned = any([](const Entry* e) { return e->pinned; });
  if (is_pinned == was_pinned) return;
  (is_pinned ? result->pinned : result->unpinned).push_back(key);
}

void CacheState::SetKnownPolicy(const ModuleKey& key, const CachePolicy& policy,
                                PolicyResult* result) {
  ModuleInfo* const known = known_.FindMutable(key);
  if (known == nullptr) return;
  const CachePolicy old = known->metadata.policy;
  const bool pin = policy.pin || (known->pinned && !old.pin);
  if (policy == old && pin == known->pinned) return;
  ++result->num_changed;
  if (pin != known->pinned) {
    (pin ? result->pinned : result->unpinned).push_back(key);
  }
  known->metadata.policy = policy;
  known->pinned = pin;
}

void CacheState::SetPolicy(const ModuleKey& key, const SchemaPolicies& policies,
                           absl::Time now, PolicyResult* result) {
  const std::vector<Entry*> copies = ResidentCopies(key);
  const ModuleInfo* const known = copies.empty() ? known_.Find(key) : nullptr;
  if (copies.empty() && known == nullptr) return;
  const auto it = policies.by_path.find(
      copies.empty() ? known->metadata.path : copies.front()->metadata.path);
  SetPolicy(key, it == policies.by_path.end() ? policies.policy : it->second,
            now, result);
}

void CacheState::AddKnown(const ModuleInfo& module,
                          const IdentityParts& parts) {
  if (FirstCopy(module.key) != nullptr) return;
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
