#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "cache_daemon/core/page_allocator.h"
#include "cache_daemon/core/requests.h"
#include "cache_daemon/core/types.h"

namespace promptcache::daemon {

// Somebody who was told PENDING.
struct Waiter {
  SessionId session{};
  uint64_t request_id = 0;
  uint32_t index = 0;
  AcquirePurpose purpose = AcquirePurpose::kRequest;
  bool want_page_sums = false;
  bool reserve = false;  // takes the reservation over if it is free
};

// The right to write one module once.
struct Reservation {
  ReservationId id{};
  SessionId session{};
  LeaseId lease{};
  // Why the module was missing, for those who will not get it.
  MissReason reason = MissReason::kNone;
  IdentityField differing_field = IdentityField::kNone;
  IdentityParts parts{};
  std::vector<Waiter> waiters;  // first come, first served
};

// One module's KV in one tier: ModuleCache has the states. Changed only inside
// CacheState::Update, which keeps counters and lists true.
struct Entry : PageOwner {
  ModuleKey key;
  ModuleMetadata metadata;
  std::string isolation_domain;
  uint64_t domain_hash = 0;
  PageShape shape;
  uint64_t serial = 0;  // tells this entry from others of the same key

  ModuleState state = ModuleState::kNone;
  bool hidden = false;
  bool corrupt = false;
  bool pinned = false;
  Tier tier = Tier::kNone;
  uint32_t device = 0;  // whose tier it is; 0 in the host tier
  uint64_t generation = 0;
  uint64_t num_pages = 0;
  PageRuns runs;
  std::vector<uint64_t> page_sums;
  std::unique_ptr<Reservation> reservation;  // iff RESERVED

  // Users.
  uint32_t num_leases = 0;
  uint32_t num_lost = 0;         // of ended sessions of processes that may live
  uint32_t num_holds = 0;        // a move, a check, zeroing: our own threads
  bool move_cancelled = false;   // hit while MOVING
  bool wants_promotion = false;  // hit in the host tier
  bool promotion_queued = false;
  uint32_t promote_to = 0;  // the device that hit it last
  // Of a module whose pages are being filled from the host tier (cache_
  // promotion.cc) while its readers wait for its layers; 0: it is whole.
  uint32_t progress_word = 0;

  absl::Time commit_time = absl::InfinitePast();
  absl::Time last_use_time = absl::InfinitePast();
  absl::Time expire_time = absl::InfiniteFuture();
  absl::Duration ttl = absl::InfiniteDuration();
  uint64_t hits = 0;

  // The next copy of the same key, of those that are visible.
  std::unique_ptr<Entry> next_copy;

  // LruList's.
  Entry* lru_prev = nullptr;
  Entry* lru_next = nullptr;
  bool in_lru = false;

  uint64_t bytes() const { return num_pages * shape.page_bytes; }
  bool used() const { return num_leases + num_lost + num_holds > 0; }
  // What eviction may take at once.
  bool evictable() const {
    return state == ModuleState::kCommitted && !hidden && !pinned && !used();
  }
  bool resident() const {
    return !hidden &&
           (state == ModuleState::kCommitted || state == ModuleState::kMoving);
  }
  // A pin keeps a module that nobody uses; an absolute time ends it anyway.
  absl::Time effective_expire_time() const {
    return pinned && !metadata.policy.absolute_ttl ? absl::InfiniteFuture()
                                                   : expire_time;
  }
  void Touch(absl::Time now) {
    last_use_time = now;
    if (!metadata.policy.absolute_ttl) expire_time = now + ttl;
  }
  ModuleInfo Info() const;
};

// Entries of one tier and page size that may be evicted, least recently used
// first. Intrusive: adding and removing are a few pointer writes.
// Thread-compatible.
class LruList {
 public:
  void PushBack(Entry* entry);
  void Remove(Entry* entry);
  Entry* front() const { return front_; }
  uint64_t num_pages() const { return num_pages_; }
  uint64_t num_entries() const { return num_entries_; }
  // The next to go: of the first `max_looked_at` that were used within
  // `tie_window` of the very first, the one whose loss costs least computing
  // per byte. nullptr when the list is empty.
  Entry* Victim(absl::Duration tie_window, int max_looked_at) const;

 private:
  Entry* front_ = nullptr;
  Entry* back_ = nullptr;
  uint64_t num_pages_ = 0;
  uint64_t num_entries_ = 0;
};

}  // namespace promptcache::daemon
