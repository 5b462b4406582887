#include "cache_daemon/core/cache_state.h"

#include <algorithm>

#include "glog/logging.h"

namespace promptcache::daemon {
namespace {

// As many expired modules as an allocation looks at before it evicts others.
constexpr size_t kExpireBeforeEviction = 64;

}  // namespace

CacheState::CacheState(const ModuleCache::Options& options,
                       const PagePool* pool)
    : options_(options),
      pool_(pool),
      known_(options.max_known_modules),
      next_generation_(options.first_generation) {
  for (Tier t : {Tier::kDevice, Tier::kHost}) {
    tiers_[static_cast<size_t>(t) - 1] =
        std::make_unique<TierState>(pool, t, options.lru_tie_window);
  }
}

CacheState::~CacheState() = default;

void CacheState::Count(const Entry& entry, uint64_t sign, Tally* tally) {
  TierTally& tier = tally->tiers[static_cast<size_t>(entry.tier) - 1];
  tier.modules[static_cast<size_t>(entry.state)] += sign;
  const uint64_t bytes = sign * entry.bytes();
  switch (entry.state) {
    case ModuleState::kReserved:
      tier.reserved_bytes += bytes;
      break;
    case ModuleState::kCommitted:
    case ModuleState::kMoving:
      if (entry.num_leases + entry.num_lost > 0) tier.leased_bytes += bytes;
      if (entry.pinned) tier.pinned_bytes += bytes;
      break;
    case ModuleState::kEvicted:
      tier.leased_bytes += bytes;
      break;
    case ModuleState::kQuarantined:
      tier.quarantined_bytes += bytes;
      break;
    case ModuleState::kNone:
      break;
  }
}

void CacheState::Update(Entry* entry, absl::FunctionRef<void()> fn) {
  Count(*entry, ~uint64_t{0}, &tally_);
  if (entry->in_lru) tier(entry->tier).LruRemove(entry);
  fn();
  if (entry->hidden) {
    if (!entry->used()) {
      Free(entry);
      return;
    }
    entry->state = entry->corrupt || entry->num_leases == 0
                       ? ModuleState::kQuarantined
                       : ModuleState::kEvicted;
  }
  Count(*entry, 1, &tally_);
  if (entry->evictable()) tier(entry->tier).LruAdd(entry);
}

Entry* CacheState::FindVisible(const ModuleKey& key) const {
  const auto it = visible_.find(key);
  return it == visible_.end() ? nullptr : it->second.get();
}

Entry* CacheState::AddReserved(std::unique_ptr<Entry> entry, absl::Time now,
                               Effects* effects) {
  Entry* const e = entry.get();
  if (!MakeRoom(Tier::kDevice, e->num_pages, e->shape.page_bytes, now,
                effects)) {
    return nullptr;
  }
  std::optional<PageAllocator::Allocation> pages =
      tier(Tier::kDevice)
          .pages()
          .Allocate(e->num_pages, e->shape.page_bytes, e->domain_hash, e);
  CHECK(pages.has_value());
  e->runs = std::move(pages->runs);
  e->tier = Tier::kDevice;
  e->state = ModuleState::kReserved;
  e->serial = next_id_++;
  e->generation = NextGeneration();
  pool_->Stamp(e->runs, e->generation);
  if (!pages->must_zero.empty()) {
    effects->zero.push_back({std::move(pages->must_zero), e->shape.page_bytes});
    effects->zero_holds.push_back(e);
    ++e->num_holds;
  }
  ordered_.insert(e->key);
  visible_[e->key] = std::move(entry);
  Count(*e, 1, &tally_);
  if (NeedsDemotion()) effects->notify_mover = true;
  return e;
}

void CacheState::Hide(Entry* entry, EvictReason reason, absl::Time now,
                      Effects* effects) {
  ModuleInfo info = entry->Info();
  info.state = ModuleState::kNone;
  info.tier = Tier::kNone;
  info.num_leases = 0;
  // Whoever pinned it still wants it, unless this is what they ask for.
  info.pinned = entry->pinned && reason != EvictReason::kRequested;
  info.absence = reason == EvictReason::kExpired   ? MissReason::kExpired
                 : reason == EvictReason::kCorrupt ? MissReason::kCorrupt
                                                   : MissReason::kEvicted;
  known_.Add(std::move(info));
  TierCounters& of_tier = tier_counters_[static_cast<size_t>(entry->tier) - 1];
  for (Counted* counted : {&counters_.evictions[static_cast<size_t>(reason)],
                           &of_tier.evictions[static_cast<size_t>(reason)]}) {
    ++counted->count;
    counted->volume += entry->bytes();
  }
  if (effects->want_events) {
    CacheEvent event = MakeEvent(reason == EvictReason::kCorrupt
                                     ? CacheEvent::Kind::kQuarantined
                                     : CacheEvent::Kind::kEvicted,
                                 *entry, now);
    event.evict_reason = reason;
    effects->events.push_back(std::move(event));
  }
  MoveToHidden(entry);
  Update(entry, [&] {
    entry->hidden = true;
    entry->pinned = false;
    if (reason == EvictReason::kCorrupt) {
      // Readers notice: they check generations after the step.
      entry->corrupt = true;
      entry->generation = NextGeneration();
      pool_->Stamp(entry->runs, entry->generation);
    }
  });
}

void CacheState::HideReserved(Entry* entry, bool lost) {
  reservations_.erase(entry->reservation->id);
  MoveToHidden(entry);
  Update(entry, [&] {
    entry->reservation.reset();
    entry->hidden = true;
    if (lost) ++entry->num_lost;
    entry->generation = NextGeneration();
    pool_->Stamp(entry->runs, entry->generation);
  });
}

void CacheState::MoveToHidden(Entry* entry) {
  const auto it = visible_.find(entry->key);
  CHECK(it != visible_.end() && it->second.get() == entry);
  hidden_[entry] = std::move(it->second);
  visible_.erase(it);
  ordered_.erase(entry->key);
}

void CacheState::Free(Entry* entry) {
  pool_->Stamp(entry->runs, 0);
  tier(entry->tier).pages().Free(entry->runs);
  hidden_.erase(entry);
}

bool CacheState::MakeRoom(Tier t, uint64_t num_pages, uint64_t page_bytes,
                          absl::Time now, Effects* effects) {
  TierState& state = tier(t);
  if (state.pages().FreePages(page_bytes) >= num_pages) return true;
  ExpireDue(kExpireBeforeEviction, now, effects);
  return state.MakeRoom(num_pages, page_bytes, [&](Entry* entry) {
    Hide(entry, EvictReason::kCapacity, now, effects);
  });
}

void CacheState::ScheduleExpiry(Entry* entry) {
  if (entry->expire_time == absl::InfiniteFuture()) return;
  expiries_.push({entry->expire_time, entry->key, entry->serial});
  // What was evicted since still has its element: rebuild when they are most.
  if (expiries_.size() < 2 * visible_.size() + 1024) return;
  std::vector<Expiry> live;
  live.reserve(visible_.size());
  for (const auto& [key, e] : visible_) {
    if (e->resident() && e->expire_time != absl::InfiniteFuture()) {
      live.push_back({e->expire_time, key, e->serial});
    }
  }
  expiries_ = decltype(expiries_)(std::greater<>(), std::move(live));
}

bool CacheState::ExpiredNow(const Entry& entry, absl::Time now) const {
  if (!entry.resident() || entry.effective_expire_time() > now) return false;
  // A module in use is used until its last lease ends.
  return entry.metadata.policy.absolute_ttl || entry.num_leases == 0;
}

bool CacheState::ExpireDue(size_t max, absl::Time now, Effects* effects) {
  for (size_t i = 0; i < max; ++i) {
    if (expiries_.empty() || expiries_.top().time > now) return false;
    const Expiry due = expiries_.top();
    expiries_.pop();
    Entry* entry = FindVisible(due.key);
    if (entry == nullptr || entry->serial != due.serial) continue;
    if (ExpiredNow(*entry, now)) {
      Hide(entry, EvictReason::kExpired, now, effects);
      continue;
    }
    // Used since, in use, or pinned: look again when it could be due.
    const absl::Time next = entry->expire_time > now
                                ? entry->expire_time
                                : now + std::max(entry->ttl, absl::Seconds(1));
    expiries_.push({next, due.key, due.serial});
  }
  return true;
}

CacheEvent CacheState::MakeEvent(CacheEvent::Kind kind, const Entry& entry,
                                 absl::Time now) const {
  CacheEvent event;
  event.kind = kind;
  event.time = now;
  event.key = entry.key;
  event.schema = entry.metadata.schema;
  event.path = entry.metadata.path;
  event.tier = entry.tier;
  event.bytes = entry.bytes();
  return event;
}

void CacheState::Emit(CacheEvent::Kind kind, const Entry& entry, absl::Time now,
                      Effects* effects) const {
  if (effects->want_events) {
    effects->events.push_back(MakeEvent(kind, entry, now));
  }
}

}  // namespace promptcache::daemon
