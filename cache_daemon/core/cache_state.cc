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
      promotions_(pool->num_devices()),
      tier_counters_(pool->num_devices() + 1),
      next_generation_(options.first_generation) {
  for (uint32_t i = 0; i < pool->num_devices(); ++i) {
    tiers_.push_back(std::make_unique<TierState>(pool, Tier::kDevice, i,
                                                 options.lru_tie_window));
  }
  tiers_.push_back(std::make_unique<TierState>(pool, Tier::kHost, /*device=*/0,
                                               options.lru_tie_window));
  tally_.tiers.resize(tiers_.size());
  // Word 0 stands for none.
  for (uint32_t word = PagePool::kNumProgressWords - 1; word > 0; --word) {
    free_progress_words_.push_back(word);
  }
}

CacheState::~CacheState() = default;

void CacheState::Count(const Entry& entry, uint64_t sign, Tally* tally) const {
  TierTally& tier = tally->tiers[IndexOf(entry)];
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
  if (entry->in_lru) TierOf(*entry).LruRemove(entry);
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
  if (entry->evictable()) TierOf(*entry).LruAdd(entry);
}

Entry* CacheState::FirstCopy(const ModuleKey& key) const {
  const auto it = visible_.find(key);
  return it == visible_.end() ? nullptr : it->second.get();
}

Entry* CacheState::FindIn(const ModuleKey& key, Tier tier,
                          uint32_t device) const {
  Entry* entry = FirstCopy(key);
  while (entry != nullptr &&
         (entry->tier != tier ||
          (tier == Tier::kDevice && entry->device != device))) {
    entry = entry->next_copy.get();
  }
  return entry;
}

Entry* CacheState::AnswerAmong(Entry* first_copy, uint32_t device) {
  Entry* in_host = nullptr;
  for (Entry* entry = first_copy; entry != nullptr;
       entry = entry->next_copy.get()) {
    if (entry->tier == Tier::kHost) {
      in_host = entry;
    } else if (entry->device == device) {
      return entry;
    }
  }
  return in_host;
}

bool CacheState::AnyResident(const ModuleKey& key) const {
  const Entry* entry = FirstCopy(key);
  while (entry != nullptr && !entry->resident()) entry = entry->next_copy.get();
  return entry != nullptr;
}

bool CacheState::AnyPinned(const ModuleKey& key) const {
  const Entry* entry = FirstCopy(key);
  while (entry != nullptr && !entry->pinned) entry = entry->next_copy.get();
  return entry != nullptr;
}

std::vector<Entry*> CacheState::ResidentCopies(const ModuleKey& key) const {
  std::vector<Entry*> copies;
  for (Entry* entry = FirstCopy(key); entry != nullptr;
       entry = entry->next_copy.get()) {
    if (entry->resident()) copies.push_back(entry);
  }
  return copies;
}

Entry* CacheState::AddReserved(std::unique_ptr<Entry> entry, absl::Time now,
                               Effects* effects) {
  Entry* const e = entry.get();
  if (!MakeRoom(Tier::kDevice, e->device, e->num_pages, e->shape.page_bytes,
                now, effects)) {
    return nullptr;
  }
  std::optional<PageAllocator::Allocation> pages =
      device_tier(e->device).pages().Allocate(e->num_pages, e->shape.page_bytes,
                                              e->domain_hash, e);
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
  std::unique_ptr<Entry>& first = visible_[e->key];
  if (first == nullptr) ordered_.insert(e->key);
  entry->next_copy = std::move(first);
  first = std::move(entry);
  ++num_visible_;
  Count(*e, 1, &tally_);
  if (NeedsDemotion(e->device)) effects->notify_mover = true;
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
  TierCounters& of_tier = tier_counters_[IndexOf(*entry)];
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
  if (!AnyResident(entry->key)) known_.Add(std::move(info));
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
  const auto first = visible_.find(entry->key);
  CHECK(first != visible_.end());
  std::unique_ptr<Entry>* link = &first->second;
  while (link->get() != entry) link = &(*link)->next_copy;
  std::unique_ptr<Entry> next = std::move(entry->next_copy);
  hidden_[entry] = std::move(*link);
  *link = std::move(next);
  --num_visible_;
  if (first->second != nullptr) return;
  visible_.erase(first);
  ordered_.erase(entry->key);
}

void CacheState::Free(Entry* entry) {
  pool_->Stamp(entry->runs, 0);
  TierOf(*entry).pages().Free(entry->runs);
  hidden_.erase(entry);
}

bool CacheState::MakeRoom(Tier tier, uint32_t device, uint64_t num_pages,
                          uint64_t page_bytes, absl::Time now,
                          Effects* effects) {
  TierState& state = *tiers_[IndexOf(tier, device)];
  if (state.pages().FreePages(page_bytes) >= num_pages) return true;
  ExpireDue(kExpireBeforeEviction, now, effects);
  return state.MakeRoom(num_pages, page_bytes, [&](Entry* entry) {
    if (tier == Tier::kDevice && DropForHostCopy(entry, now, effects)) return;
    Hide(entry, EvictReason::kCapacity, now, effects);
  });
}

void CacheState::ScheduleExpiry(Entry* entry) {
  if (entry->expire_time == absl::InfiniteFuture()) return;
  expiries_.push({entry->expire_time, entry->key, entry->serial});
  // What was evicted since still has its element: rebuild when they are most.
  if (expiries_.size() < 2 * num_visible_ + 1024) return;
  std::vector<Expiry> live;
  live.reserve(num_visible_);
  for (const auto& [key, first] : visible_) {
    for (const Entry* e = first.get(); e != nullptr; e = e->next_copy.get()) {
      if (e->resident() && e->expire_time != absl::InfiniteFuture()) {
        live.push_back({e->expire_time, key, e->serial});
      }
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
    Entry* entry = FirstCopy(due.key);
    while (entry != nullptr && entry->serial != due.serial) {
      entry = entry->next_copy.get();
    }
    if (entry == nullptr) continue;
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
  if (entry.tier == Tier::kDevice && pool_->on_gpu()) {
    event.device_uuid = pool_->device_info(entry.device).uuid;
  }
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
