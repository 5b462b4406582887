#include <algorithm>
#include <iterator>

#include "cache_daemon/core/cache_state.h"

namespace promptcache::daemon {
namespace {

// What one hold of the lock may drop for copies in the host tier.
constexpr int kMaxDropsPerMove = 256;

}  // namespace

std::optional<CacheState::Check> CacheState::BeginCheck(const ModuleKey& key,
                                                        uint64_t generation) {
  Entry* entry = FirstCopy(key);
  while (entry != nullptr && entry->generation != generation) {
    entry = entry->next_copy.get();
  }
  // What is arriving is checked at its end.
  if (entry == nullptr || !entry->resident() || entry->progress_word != 0) {
    return std::nullopt;
  }
  Update(entry, [&] { ++entry->num_holds; });
  return Check{entry, entry->runs, entry->shape.page_bytes};
}

bool CacheState::EndCheck(const Check& check,
                          const absl::StatusOr<std::vector<uint64_t>>& sums,
                          absl::Time now, Effects* effects) {
  Entry* const entry = check.entry;
  const bool good = !sums.ok() || std::ranges::equal(*sums, entry->page_sums);
  const bool visible = !entry->hidden;
  if (!good) ++counters_.checksum_mismatches;
  if (!good && visible) HideCorrupt(entry, now, effects);
  Update(entry, [&] { --entry->num_holds; });
  return !good;
}

void CacheState::HideCorrupt(Entry* entry, absl::Time now, Effects* effects) {
  Hide(entry, EvictReason::kCorrupt, now, effects);
}

void CacheState::EndHolds(std::span<Entry* const> entries) {
  for (Entry* entry : entries) {
    Update(entry, [&] { --entry->num_holds; });
  }
}

void CacheState::QueuePromotion(Entry* entry, Effects* effects) {
  if (!entry->wants_promotion || entry->tier != Tier::kHost ||
      entry->num_leases > 0 || entry->promotion_queued) {
    return;
  }
  entry->wants_promotion = false;
  entry->promotion_queued = true;
  promotions_[entry->promote_to].push_back(entry->key);
  effects->notify_mover = true;
}

bool CacheState::NeedsDemotion(uint32_t device) const {
  if (!has_host()) return false;
  const PageAllocator& pages = device_tier(device).pages();
  uint64_t leaving_bytes = 0;
  for (const auto& [id, move] : moves_) {
    if (move.to == Tier::kHost && move.device == device) {
      leaving_bytes += move.bytes;
    }
  }
  const uint64_t free_bytes =
      pages.capacity_bytes() - pages.used_bytes() + leaving_bytes;
  return static_cast<double>(free_bytes) <
         options_.demote_free_fraction *
             static_cast<double>(pages.capacity_bytes());
}

std::optional<MoveTicket> CacheState::BeginMove(uint32_t device, absl::Time now,
                                                Effects* effects) {
  if (!has_host()) return std::nullopt;
  for (int drops = 0; NeedsDemotion(device); ++drops) {
    if (drops == kMaxDropsPerMove) {
      effects->notify_mover = true;
      return std::nullopt;
    }
    Entry* const oldest = device_tier(device).Oldest();
    if (oldest == nullptr) break;
    if (DropForHostCopy(oldest, now, effects)) continue;
    std::optional<MoveTicket> ticket = Demote(oldest, now, effects);
    if (ticket.has_value()) return ticket;
    break;
  }
  return BeginPromotion(device, now, effects);
}

std::optional<MoveTicket> CacheState::BeginPromotion(uint32_t device,
                                                     absl::Time now,
                                                     Effects* effects) {
  std::deque<ModuleKey>& promotions = promotions_[device];
  while (!promotions.empty()) {
    const ModuleKey key = promotions.front();
    promotions.pop_front();
    Entry* const entry = FindIn(key, Tier::kHost, 0);
    if (entry == nullptr || !entry->promotion_queued) continue;
    entry->promotion_queued = false;
    if (entry->state != ModuleState::kCommitted || entry->used() ||
        FindIn(key, Tier::kDevice, device) != nullptr) {
      continue;
    }
    TierState& tier = device_tier(device);
    if (tier.pages().FreePages(entry->shape.page_bytes) >= entry->num_pages) {
      return StartMove(entry, Tier::kDevice, device);
    }
    // Room is made by demoting what was used longer ago; else it is not worth
    // it until the next hit.
    Entry* const oldest = tier.Oldest();
    if (oldest == nullptr || oldest->last_use_time >= entry->last_use_time) {
      continue;
    }
    entry->promotion_queued = true;
    promotions.push_front(key);
    if (DropForHostCopy(oldest, now, effects)) continue;
    std::optional<MoveTicket> ticket = Demote(oldest, now, effects);
    if (ticket.has_value()) return ticket;
    promotions.pop_front();
    if (Entry* same = FindIn(key, Tier::kHost, 0)) {
      same->promotion_queued = false;
    }
  }
  return std::nullopt;
}

std::optional<MoveTicket> CacheState::Demote(Entry* entry, absl::Time now,
                                             Effects* effects) {
  const ModuleKey key = entry->key;
  const uint32_t device = entry->device;
  if (!MakeRoom(Tier::kHost, /*device=*/0, entry->num_pages,
                entry->shape.page_bytes, now, effects)) {
    return std::nullopt;
  }
  // Making room also lets expire what is due: perhaps this one.
  if (FindIn(key, Tier::kDevice, device) != entry) return std::nullopt;
  return StartMove(entry, Tier::kHost, device);
}

bool CacheState::DropForHostCopy(Entry* entry, absl::Time now,
                                 Effects* effects) {
  Entry* const in_host = FindIn(entry->key, Tier::kHost, 0);
  if (in_host == nullptr) return false;
  // It stays there for all, whoever was to have it.
  if (in_host->state == ModuleState::kMoving) in_host->move_cancelled = true;
  Update(in_host, [&] {
    in_host->pinned = in_host->pinned || entry->pinned;
    in_host->hits += entry->hits;
    in_host->last_use_time =
        std::max(in_host->last_use_time, entry->last_use_time);
    in_host->expire_time = std::max(in_host->expire_time, entry->expire_time);
  });
  ++counters_.demotions;
  Emit(CacheEvent::Kind::kMoved, *in_host, now, effects);
  MoveToHidden(entry);
  Update(entry, [&] { entry->hidden = true; });
  return true;
}

std::optional<MoveTicket> CacheState::StartMove(Entry* entry, Tier to,
                                                uint32_t device) {
  std::optional<PageAllocator::Allocation> pages =
      tiers_[IndexOf(to, device)]->pages().Allocate(
          entry->num_pages, entry->shape.page_bytes, entry->domain_hash, entry);
  if (!pages.has_value()) return std::nullopt;
  Update(entry, [&] {
    entry->state = ModuleState::kMoving;
    entry->move_cancelled = false;
    ++entry->num_holds;
  });
  const uint64_t id = next_id_++;
  Move& move = moves_[id];
  move = {.entry = entry,
          .to = to,
          .device = device,
          .destination = std::move(pages->runs),
          .must_zero = std::move(pages->must_zero),
          .bytes = entry->bytes()};
  tally_.tiers[IndexOf(to, device)].moving_bytes += move.bytes;
  MoveTicket ticket;
  ticket.id = id;
  ticket.key = entry->key;
  ticket.from = entry->tier;
  ticket.to = to;
  ticket.device = device;
  ticket.page_bytes = entry->shape.page_bytes;
  ticket.source = entry->runs;
  ticket.destination = move.destination;
  ticket.page_sums = entry->page_sums;
  return ticket;
}

void CacheState::EndMove(const MoveTicket& ticket,
                         const absl::StatusOr<std::vector<uint64_t>>& sums,
                         absl::Time now, Effects* effects) {
  const auto it = moves_.find(ticket.id);
  if (it == moves_.end()) return;
  const Move move = std::move(it->second);
  moves_.erase(it);
  const size_t to = IndexOf(move.to, move.device);
  tally_.tiers[to].moving_bytes -= move.bytes;

  Entry* const entry = move.entry;
  Entry* const same = FindIn(entry->key, move.to, move.device);
  const bool good = !sums.ok() || std::ranges::equal(*sums, entry->page_sums);
  // Not copied; somebody reads the source, has read it since; or it is no
  // answer any more.
  const bool stays =
      !sums.ok() || !good || entry->hidden || entry->move_cancelled ||
      entry->num_leases + entry->num_lost > 0 || entry->num_holds > 1;
  if (!good) ++counters_.checksum_mismatches;
  if (stays || same != nullptr) {
    if (!sums.ok()) tiers_[to]->pages().ForgetDomain(move.must_zero);
    tiers_[to]->pages().Free(move.destination);
    if (!good && !entry->hidden) {
      Update(entry, [&] { entry->state = ModuleState::kCommitted; });
      HideCorrupt(entry, now, effects);
      Update(entry, [&] { --entry->num_holds; });
      return;
    }
    Update(entry, [&] {
      entry->state = ModuleState::kCommitted;
      --entry->num_holds;
    });
    // Another device's copy was sooner.
    if (!stays && move.to == Tier::kHost) DropForHostCopy(entry, now, effects);
    return;
  }
  pool_->Stamp(entry->runs, 0);
  Update(entry, [&] {
    TierOf(*entry).pages().Free(entry->runs);
    entry->runs = move.destination;
    entry->tier = move.to;
    entry->device = move.to == Tier::kDevice ? move.device : 0;
    entry->generation = NextGeneration();
    pool_->Stamp(entry->runs, entry->generation);
    entry->state = ModuleState::kCommitted;
    --entry->num_holds;
  });
  ++(move.to == Tier::kDevice ? counters_.promotions : counters_.demotions);
  Emit(CacheEvent::Kind::kMoved, *entry, now, effects);
}

}  // namespace promptcache::daemon
