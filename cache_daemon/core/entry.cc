#include "cache_daemon/core/entry.h"

namespace promptcache::daemon {

ModuleInfo Entry::Info() const {
  ModuleInfo info;
  info.key = key;
  info.metadata = metadata;
  info.isolation_domain = isolation_domain;
  info.bytes = bytes();
  info.state = state;
  info.tier = tier;
  info.pinned = pinned;
  info.num_leases = num_leases;
  info.commit_time = commit_time;
  info.last_use_time = last_use_time;
  info.expire_time = effective_expire_time();
  info.hits = hits;
  return info;
}

void LruList::PushBack(Entry* entry) {
  entry->lru_prev = back_;
  entry->lru_next = nullptr;
  (back_ != nullptr ? back_->lru_next : front_) = entry;
  back_ = entry;
  entry->in_lru = true;
  num_pages_ += entry->num_pages;
  ++num_entries_;
}

void LruList::Remove(Entry* entry) {
  (entry->lru_prev != nullptr ? entry->lru_prev->lru_next : front_) =
      entry->lru_next;
  (entry->lru_next != nullptr ? entry->lru_next->lru_prev : back_) =
      entry->lru_prev;
  entry->lru_prev = nullptr;
  entry->lru_next = nullptr;
  entry->in_lru = false;
  num_pages_ -= entry->num_pages;
  --num_entries_;
}

Entry* LruList::Victim(absl::Duration tie_window, int max_looked_at) const {
  if (front_ == nullptr) return nullptr;
  const auto cost = [](const Entry* e) {
    return static_cast<double>(e->metadata.compute_us) /
           static_cast<double>(e->bytes());
  };
  const absl::Time limit = front_->last_use_time + tie_window;
  Entry* victim = front_;
  Entry* entry = front_->lru_next;
  for (int i = 1; i < max_looked_at && entry != nullptr;
       ++i, entry = entry->lru_next) {
    if (entry->last_use_time > limit) break;
    if (cost(entry) < cost(victim)) victim = entry;
  }
  return victim;
}

}  // namespace promptcache::daemon
