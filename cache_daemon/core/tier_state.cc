#include "cache_daemon/core/tier_state.h"

#include <algorithm>

#include "glog/logging.h"

namespace promptcache::daemon {
namespace {

constexpr int kVictimsLookedAt = 8;

}  // namespace

TierState::TierState(const PagePool* pool, Tier tier, uint32_t device,
                     absl::Duration tie_window)
    : pool_(pool),
      tier_(tier),
      device_(device),
      tie_window_(tie_window),
      pages_(pool, tier, device) {}

void TierState::LruAdd(Entry* entry) {
  lru_[entry->shape.page_bytes].PushBack(entry);
}

void TierState::LruRemove(Entry* entry) {
  const auto it = lru_.find(entry->shape.page_bytes);
  it->second.Remove(entry);
  if (it->second.front() == nullptr) lru_.erase(it);
}

bool TierState::MakeRoom(uint64_t num_pages, uint64_t page_bytes,
                         absl::FunctionRef<void(Entry*)> evict) {
  if (pages_.FreePages(page_bytes) >= num_pages) return true;
  std::vector<Segment> segments = Stealable(page_bytes);
  uint64_t possible = pages_.FreePages(page_bytes) + EvictablePages(page_bytes);
  for (const Segment& segment : segments) possible += segment.num_pages;
  if (possible < num_pages) return false;

  auto segment = segments.begin();
  while (pages_.FreePages(page_bytes) < num_pages) {
    Entry* victim = Victim(page_bytes);
    if (segment != segments.end() &&
        (victim == nullptr || segment->newest_use < victim->last_use_time)) {
      // Asked for anew each time: an entry has pages in several segments, and
      // owns several pages of this one.
      while (true) {
        const std::vector<PageOwner*> owners = pages_.Owners(segment->id);
        if (owners.empty()) break;
        evict(static_cast<Entry*>(owners.front()));
      }
      ++segment;
      continue;
    }
    CHECK(victim != nullptr);
    evict(victim);
  }
  return true;
}

Entry* TierState::Oldest() const {
  Entry* oldest = nullptr;
  for (const auto& [page_bytes, list] : lru_) {
    Entry* victim = list.Victim(tie_window_, kVictimsLookedAt);
    if (oldest == nullptr || victim->last_use_time < oldest->last_use_time) {
      oldest = victim;
    }
  }
  return oldest;
}

uint64_t TierState::lru_entries() const {
  uint64_t entries = 0;
  for (const auto& [page_bytes, list] : lru_) entries += list.num_entries();
  return entries;
}

std::vector<TierState::Segment> TierState::Stealable(
    uint64_t page_bytes) const {
  std::vector<Segment> out;
  for (uint32_t i = 0; i < pages_.num_segments(); ++i) {
    Segment segment{.id = pages_.first_segment() + i};
    const uint64_t carved_for = pages_.page_bytes(segment.id);
    if (carved_for == 0 || carved_for == page_bytes) continue;
    const std::vector<PageOwner*> owners = pages_.Owners(segment.id);
    const bool all =
        std::all_of(owners.begin(), owners.end(), [&](const PageOwner* owner) {
          const Entry* entry = static_cast<const Entry*>(owner);
          segment.newest_use =
              std::max(segment.newest_use, entry->last_use_time);
          return entry->evictable() && entry->tier == tier_ &&
                 entry->device == device_;
        });
    if (!all) continue;
    segment.num_pages = pool_->PagesIn(segment.id, page_bytes);
    if (segment.num_pages > 0) out.push_back(segment);
  }
  std::sort(out.begin(), out.end(), [](const Segment& a, const Segment& b) {
    return a.newest_use < b.newest_use;
  });
  return out;
}

Entry* TierState::Victim(uint64_t page_bytes) const {
  const auto it = lru_.find(page_bytes);
  return it == lru_.end() ? nullptr
                          : it->second.Victim(tie_window_, kVictimsLookedAt);
}

uint64_t TierState::EvictablePages(uint64_t page_bytes) const {
  const auto it = lru_.find(page_bytes);
  return it == lru_.end() ? 0 : it->second.num_pages();
}

}  // namespace promptcache::daemon
