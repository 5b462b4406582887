#include <algorithm>
#include <iterator>

#include "cache_daemon/core/cache_state.h"

namespace promptcache::daemon {

std::optional<CacheState::Check> CacheState::BeginCheck(const ModuleKey& key,
                                                        uint64_t generation) {
  Entry* const entry = FindVisible(key);
  if (entry == nullptr || !entry->resident() ||
      entry->generation != generation) {
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
  promotions_.push_back(entry->key);
  effects->notify_mover = true;
}

bool CacheState::NeedsDemotion() const {
  if (!has_host()) return false;
  const PageAllocator& device = tier(Tier::kDevice).pages();
  uint64_t leaving_bytes = 0;
  for (const auto& [id, move] : moves_) {
    if (move.to == Tier::kHost) leaving_bytes += move.bytes;
  }
  const uint64_t free_bytes =
      device.capacity_bytes() - device.used_bytes() + leaving_bytes;
  return static_cast<double>(free_bytes) <
         options_.demote_free_fraction *
             static_cast<double>(device.capacity_bytes());
}

std::optional<MoveTicket> CacheState::BeginMove(absl::Time now,
                                                Effects* effects) {
  if (!has_host()) return std::nullopt;
  if (NeedsDemotion()) {
    Entry* const oldest = tier(Tier::kDevice).Oldest();
    if (oldest != nullptr) {
      std::optional<MoveTicket> ticket = Demote(oldest, now, effects);
      if (ticket.has_value()) return ticket;
    }
  }
  return BeginPromotion(now, effects);
}

std::optional<MoveTicket> CacheState::BeginPromotion(absl::Time now,
                                                     Effects* effects) {
  while (!promotions_.empty()) {
    const ModuleKey key = promotions_.front();
    promotions_.pop_front();
    Entry* const entry = FindVisible(key);
    if (entry == nullptr || !entry->promotion_queued) continue;
    entry->promotion_queued = false;
    if (entry->state != ModuleState::kCommitted || entry->tier != Tier::kHost ||
        entry->used()) {
      continue;
    }
    TierState& device = tier(Tier::kDevice);
    if (device.pages().FreePages(entry->shape.page_bytes) >= entry->num_pages) {
      return StartMove(entry, Tier::kDevice);
    }
    // Room is made by demoting what was used longer ago; else it is not worth
    // it until the next hit.
    Entry* const oldest = device.Oldest();
    if (oldest == nullptr || oldest->last_use_time >= entry->last_use_time) {
      continue;
    }
    entry->promotion_queued = true;
    promotions_.push_front(key);
    std::optional<MoveTicket> ticket = Demote(oldest, now, effects);
    if (ticket.has_value()) return ticket;
    promotions_.pop_front();
    if (Entry* same = FindVisible(key)) same->promotion_queued = false;
  }
  return std::nullopt;
}

std::optional<MoveTicket> CacheState::Demote(Entry* entry, absl::Time now,
                                             Effects* effects) {
  const ModuleKey key = entry->key;
  if (!MakeRoom(Tier::kHost, entry->num_pages, entry->shape.page_bytes, now,
                effects)) {
    return std::nullopt;
  }
  // Making room also lets expire what is due: perhaps this one.
  if (FindVisible(key) != entry) return std::nullopt;
  return StartMove(entry, Tier::kHost);
}

std::optional<MoveTicket> CacheState::StartMove(Entry* entry, Tier to) {
  std::optional<PageAllocator::Allocation> pages = tier(to).pages().Allocate(
      entry->num_pages, entry->shape.page_bytes, entry->domain_hash, entry);
  if (!pages.has_value()) return std::nullopt;
  Update(entry, [&] {
    entry->state = ModuleState::kMoving;
    entry->move_cancelled = false;
    ++entry->num_holds;
  });
  const uint64_t id = next_id_++;
  Move& move = moves_[id];
  move = {entry, to, std::move(pages->runs), entry->bytes()};
  tally_.tiers[static_cast<size_t>(to) - 1].moving_bytes += move.bytes;
  MoveTicket ticket;
  ticket.id = id;
  ticket.key = entry->key;
  ticket.from = entry->tier;
  ticket.to = to;
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
  tally_.tiers[static_cast<size_t>(move.to) - 1].moving_bytes -= move.bytes;

  Entry* const entry = move.entry;
  const bool good = !sums.ok() || std::ranges::equal(*sums, entry->page_sums);
  // Not copied; somebody reads the source, has read it since; or it is no
  // answer any more.
  const bool stays =
      !sums.ok() || !good || entry->hidden || entry->move_cancelled ||
      entry->num_leases + entry->num_lost > 0 || entry->num_holds > 1;
  if (!good) ++counters_.checksum_mismatches;
  if (stays) {
    tier(move.to).pages().Free(move.destination);
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
    return;
  }
  pool_->Stamp(entry->runs, 0);
  Update(entry, [&] {
    tier(entry->tier).pages().Free(entry->runs);
    entry->runs = move.destination;
    entry->tier = move.to;
    entry->generation = NextGeneration();
    pool_->Stamp(entry->runs, entry->generation);
    entry->state = ModuleState::kCommitted;
    --entry->num_holds;
  });
  ++(move.to == Tier::kDevice ? counters_.promotions : counters_.demotions);
  Emit(CacheEvent::Kind::kMoved, *entry, now, effects);
}

}  // namespace promptcache::daemon
