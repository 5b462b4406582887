// Promotion on a hit: a module of the host tier gets device pages at once, and
// is read layer by layer while the mover fills them.
//
//   COMMITTED(host) --hit--> MOVING(device), arriving --+--> COMMITTED(device)
//                                                       +--> hidden, corrupt
//
// From the hit on the entry's pages and generation are the new ones; the host
// pages are held beside it until the copy is done. What readers must wait for
// stands in a progress word, which is used again as soon as the copy has ended:
// its values carry the generation, so that nobody takes it for another one's.
#include <algorithm>
#include <utility>

#include "cache_daemon/core/cache_state.h"
#include "common/progress_word.h"

namespace promptcache::daemon {

void CacheState::StartArrival(Entry* entry, uint32_t device, Effects* effects) {
  if (entry->tier != Tier::kHost || entry->state != ModuleState::kCommitted ||
      entry->used() || free_progress_words_.empty()) {
    return;
  }
  // Into what is free, of which the mover keeps some: to evict others outright
  // would lose what demoting them keeps.
  std::optional<PageAllocator::Allocation> pages =
      device_tier(device).pages().Allocate(
          entry->num_pages, entry->shape.page_bytes, entry->domain_hash, entry);
  if (!pages.has_value()) return;
  Arrival& arrival = arrivals_[next_id_++];
  arrival = {.entry = entry,
             .source = entry->runs,
             .must_zero = std::move(pages->must_zero),
             .bytes = entry->bytes()};
  tally_.tiers.back().moving_bytes += arrival.bytes;
  pool_->Stamp(entry->runs, 0);
  Update(entry, [&] {
    entry->state = ModuleState::kMoving;
    entry->tier = Tier::kDevice;
    entry->device = device;
    entry->runs = std::move(pages->runs);
    entry->generation = NextGeneration();
    entry->progress_word = free_progress_words_.back();
    entry->wants_promotion = false;
    ++entry->num_holds;
  });
  free_progress_words_.pop_back();
  pool_->SetProgress(entry->progress_word,
                     ProgressWord(entry->generation, /*state=*/0));
  pool_->Stamp(entry->runs, entry->generation);
  effects->notify_mover = true;
}

std::optional<ArrivalTicket> CacheState::BeginArrival(uint32_t device) {
  for (auto& [id, arrival] : arrivals_) {
    if (arrival.begun || arrival.entry->device != device) continue;
    arrival.begun = true;
    const Entry& entry = *arrival.entry;
    return ArrivalTicket{.id = id,
                         .shape = entry.shape,
                         .source = arrival.source,
                         .destination = entry.runs,
                         .progress_word = entry.progress_word,
                         .generation = entry.generation};
  }
  return std::nullopt;
}

void CacheState::EndArrival(const ArrivalTicket& ticket,
                            const absl::StatusOr<std::vector<uint64_t>>& sums,
                            absl::Time now, Effects* effects) {
  const auto it = arrivals_.find(ticket.id);
  if (it == arrivals_.end()) return;
  const Arrival arrival = std::move(it->second);
  arrivals_.erase(it);
  Entry* const entry = arrival.entry;
  tally_.tiers.back().moving_bytes -= arrival.bytes;
  tiers_.back()->pages().Free(arrival.source);
  if (!sums.ok()) TierOf(*entry).pages().ForgetDomain(arrival.must_zero);
  const bool good = sums.ok() && std::ranges::equal(*sums, entry->page_sums);
  if (good) {
    pool_->SetProgress(ticket.progress_word,
                       ProgressWord(ticket.generation, kProgressVerified));
    ++counters_.promotions;
    ++counters_.promotions_on_hit;
    if (!entry->hidden) Emit(CacheEvent::Kind::kMoved, *entry, now, effects);
  } else {
    if (sums.ok()) ++counters_.checksum_mismatches;
    FailArrival(entry, now, effects);
    // After the pages' generation: whoever sees this sees that.
    pool_->SetProgress(ticket.progress_word,
                       ProgressWord(ticket.generation, kProgressFailed));
  }
  free_progress_words_.push_back(ticket.progress_word);
  Update(entry, [&] {
    entry->progress_word = 0;
    if (!entry->hidden) entry->state = ModuleState::kCommitted;
    --entry->num_holds;
  });
}

// Its bytes must not be used by anybody who read them.
void CacheState::FailArrival(Entry* entry, absl::Time now, Effects* effects) {
  if (!entry->hidden) {
    HideCorrupt(entry, now, effects);
    return;
  }
  Update(entry, [&] {
    entry->corrupt = true;
    entry->generation = NextGeneration();
    pool_->Stamp(entry->runs, entry->generation);
  });
}

}  // namespace promptcache::daemon
