#pragma once

#include <array>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <queue>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/container/btree_map.h"
#include "absl/container/btree_set.h"
#include "absl/container/flat_hash_map.h"
#include "absl/container/flat_hash_set.h"
#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "cache_daemon/core/entry.h"
#include "cache_daemon/core/known_modules.h"
#include "cache_daemon/core/module_cache.h"
#include "cache_daemon/core/tier_state.h"

namespace promptcache::daemon {

// What a decision leaves to be done without the lock, in this order: zeroing
// (then CacheState::EndHolds), answers to those who waited, events, waking the
// mover.
struct Effects {
  struct Zero {
    PageRuns runs;
    uint64_t page_bytes = 0;
  };
  struct Delivery {
    std::shared_ptr<const ModuleCache::ResolvedFn> to;
    PendingResolved resolved;
  };
  bool want_events = false;  // set by the caller
  std::vector<Zero> zero;
  std::vector<Entry*> zero_holds;
  std::vector<Delivery> deliveries;
  std::vector<CacheEvent> events;
  bool notify_mover = false;  // also of arrivals
};

// ModuleCache's decisions, without its lock: every method runs under it, takes
// the time as an argument, touches no page's bytes and calls nobody back.
// Thread-compatible. The methods that ModuleCache exposes have its contract.
class CacheState {
 public:
  CacheState(const ModuleCache::Options& options, const PagePool* pool);
  ~CacheState();
  CacheState(const CacheState&) = delete;
  CacheState& operator=(const CacheState&) = delete;

  // cache_sessions.cc
  absl::StatusOr<SessionId> OpenSession(ModuleCache::SessionArgs args,
                                        absl::Time now, Effects* effects);
  void CloseSession(SessionId id, std::string_view why, absl::Time now,
                    Effects* effects);
  void OnProcessDeath(ProcessId process, absl::Time now, Effects* effects);

  // cache_acquire.cc
  absl::StatusOr<AcquireResult> Acquire(SessionId session,
                                        const AcquireRequest& request,
                                        absl::Time now, Effects* effects);
  absl::Status Release(SessionId session, LeaseId lease, absl::Time now,
                       Effects* effects);
  void ReportUse(const RequestUse& use);

  // cache_reservations.cc
  absl::StatusOr<std::vector<CommitResult>> Commit(
      SessionId session, std::span<const CommitModule> modules, absl::Time now,
      Effects* effects);
  absl::Status Abort(SessionId session,
                     std::span<const ReservationId> reservations,
                     absl::Time now, Effects* effects);

  // cache_moves.cc
  struct Check {
    Entry* entry = nullptr;
    PageRuns runs;
    uint64_t page_bytes = 0;
  };
  // Holds the module; nullopt when it is not there in that generation.
  std::optional<Check> BeginCheck(const ModuleKey& key, uint64_t generation);
  // Pages that could not be read are no evidence against them.
  bool EndCheck(const Check& check,
                const absl::StatusOr<std::vector<uint64_t>>& sums,
                absl::Time now, Effects* effects);
  std::optional<MoveTicket> BeginMove(uint32_t device, absl::Time now,
                                      Effects* effects);
  void EndMove(const MoveTicket& ticket,
               const absl::StatusOr<std::vector<uint64_t>>& sums,
               absl::Time now, Effects* effects);

  // cache_promotion.cc
  std::optional<ArrivalTicket> BeginArrival(uint32_t device);
  void EndArrival(const ArrivalTicket& ticket,
                  const absl::StatusOr<std::vector<uint64_t>>& sums,
                  absl::Time now, Effects* effects);

  // At most `max` modules; true when there may be more.
  bool ExpireDue(size_t max, absl::Time now, Effects* effects);
  void EndHolds(std::span<Entry* const> entries);

  // cache_admin.cc
  CacheStats Stats() const;
  absl::StatusOr<ModuleKey> ResolveKey(std::string_view key) const;
  std::optional<ModuleInfo> Find(const ModuleKey& key) const;
  // Calls `fn` for modules that match, in the order of keys, beginning after
  // `*cursor`, until it returns false or `budget` modules were looked at; moves
  // the cursor. True when the end was reached.
  bool Walk(const ModuleFilter* filter, bool include_absent, size_t budget,
            std::optional<ModuleKey>* cursor,
            absl::FunctionRef<bool(const ModuleInfo&)> fn) const;
  // The same for one key; what `fn` said, or true.
  bool VisitKey(const ModuleKey& key, const ModuleFilter& filter,
                bool include_absent,
                absl::FunctionRef<bool(const ModuleInfo&)> fn) const;
  // False: not there, or a reservation.
  bool EvictKey(const ModuleKey& key, absl::Time now, EvictResult* result,
                Effects* effects);
  PinOutcome PinKey(const ModuleKey& key, bool pin, absl::Time now);
  void SetPolicy(const PolicyChange& change, absl::Time now,
                 PolicyResult* result);
  void SetPolicy(const ModuleKey& key, const CachePolicy& policy,
                 absl::Time now, PolicyResult* result);
  void SetPolicy(const ModuleKey& key, const SchemaPolicies& policies,
                 absl::Time now, PolicyResult* result);
  uint64_t pinned_bytes() const;
  uint64_t pin_budget_bytes() const { return options_.pin_budget_bytes; }
  void AddKnown(const ModuleInfo& module, const IdentityParts& parts);

  // cache_invariants.cc
  absl::Status CheckInvariants() const;

 private:
  struct Lease {
    SessionId session{};
    std::vector<Entry*> entries;
  };
  struct Session {
    ModuleCache::SessionArgs args;
    std::shared_ptr<const ModuleCache::ResolvedFn> on_resolved;
    // In the order they were given, so that what a session leaves ages in it.
    absl::btree_set<LeaseId> leases;
    absl::btree_set<ReservationId> reservations;
    // Of its last Acquire: the next is likely of the same.
    std::string domain;
    uint64_t domain_hash = 0;
  };
  // What an ended session of a process held.
  struct LostHolds {
    std::string worker_id;
    std::vector<Entry*> entries;
  };
  struct Move {
    Entry* entry = nullptr;
    Tier to = Tier::kNone;
    uint32_t device = 0;  // whose tier it leaves or enters
    PageRuns destination;
    // Bytes of another isolation domain until they are written over.
    PageRuns must_zero;
    uint64_t bytes = 0;
  };
  // A promotion with readers: the entry has its new pages already.
  struct Arrival {
    Entry* entry = nullptr;
    PageRuns source;
    PageRuns must_zero;  // as a Move's
    uint64_t bytes = 0;
    bool begun = false;
  };
  struct TierTally {
    uint64_t leased_bytes = 0;
    uint64_t pinned_bytes = 0;
    uint64_t reserved_bytes = 0;
    uint64_t moving_bytes = 0;  // destinations, and sources of arrivals
    uint64_t quarantined_bytes = 0;
    std::array<uint64_t, kNumModuleStates> modules{};
  };
  struct Tally {
    std::vector<TierTally> tiers;  // as tiers_
  };
  struct TierCounters {
    Counted hits;
    std::array<Counted, kNumEvictReasons> evictions{};
  };
  struct Expiry {
    absl::Time time;
    ModuleKey key;
    uint64_t serial = 0;
    friend bool operator>(const Expiry& a, const Expiry& b) {
      return a.time > b.time;
    }
  };

  // cache_state.cc: the life of entries.
  //
  // The only way to change an entry: takes it out of the counters and the LRU
  // list, calls `fn`, puts it back as it is now, or frees it when it is hidden
  // and nobody uses it any more (then it must not be used afterwards).
  void Update(Entry* entry, absl::FunctionRef<void()> fn);
  void Count(const Entry& entry, uint64_t sign, Tally* tally) const;
  // The visible copies of a key, one after another (next_copy).
  Entry* FirstCopy(const ModuleKey& key) const;
  Entry* FindIn(const ModuleKey& key, Tier tier, uint32_t device) const;
  // What answers a session of that device: its own copy, else the host's.
  static Entry* AnswerAmong(Entry* first_copy, uint32_t device);
  bool AnyResident(const ModuleKey& key) const;
  bool AnyPinned(const ModuleKey& key) const;
  std::vector<Entry*> ResidentCopies(const ModuleKey& key) const;
  // Gives a RESERVED entry pages and makes it visible; nullptr without memory.
  Entry* AddReserved(std::unique_ptr<Entry> entry, absl::Time now,
                     Effects* effects);
  // From now on no answer to anybody. Counts, remembers and tells why; frees
  // the pages if nobody uses them.
  void Hide(Entry* entry, EvictReason reason, absl::Time now, Effects* effects);
  // The same for a reservation, which leaves no trace but its pages.
  void HideReserved(Entry* entry, bool lost);
  void MoveToHidden(Entry* entry);
  void Free(Entry* entry);
  bool MakeRoom(Tier tier, uint32_t device, uint64_t num_pages,
                uint64_t page_bytes, absl::Time now, Effects* effects);
  void ScheduleExpiry(Entry* entry);
  // COMMITTED, visible and past its time.
  bool ExpiredNow(const Entry& entry, absl::Time now) const;
  CacheEvent MakeEvent(CacheEvent::Kind kind, const Entry& entry,
                       absl::Time now) const;
  // Of all copies of its key.
  ModuleInfo InfoOf(const Entry& first_copy) const;
  void Emit(CacheEvent::Kind kind, const Entry& entry, absl::Time now,
            Effects* effects) const;
  // In tiers_: the devices' in their order, then the host's.
  size_t IndexOf(Tier tier, uint32_t device) const {
    return tier == Tier::kDevice ? device : tiers_.size() - 1;
  }
  size_t IndexOf(const Entry& entry) const {
    return IndexOf(entry.tier, entry.device);
  }
  TierState& TierOf(const Entry& entry) { return *tiers_[IndexOf(entry)]; }
  TierState& device_tier(uint32_t device) { return *tiers_[device]; }
  const TierState& device_tier(uint32_t device) const {
    return *tiers_[device];
  }
  const TierState& host_tier() const { return *tiers_.back(); }
  bool has_host() const { return host_tier().pages().capacity_bytes() > 0; }
  uint64_t NextGeneration() { return next_generation_++; }

  // cache_acquire.cc
  struct Asked {
    const AcquireRequest* request = nullptr;
    SessionId session_id{};
    Session* session = nullptr;
    uint64_t domain_hash = 0;
    AcquireResult* result = nullptr;
    std::vector<Entry*> leased;
  };
  // The first copy of each key, null where there is none. Among many modules
  // every entry lies in cold memory: asks for all of them before the first is
  // waited for.
  std::vector<const Entry*> PrefetchEntries(
      const AcquireRequest& request) const;
  static absl::Status ValidateAcquire(const Session& session,
                                      const AcquireRequest& request,
                                      std::span<const Entry* const> entries);
  // False: the key is missing, with its reason in the result.
  bool AnswerPresent(Asked* asked, size_t index, absl::Time now,
                     Effects* effects);
  void AnswerMissing(Asked* asked, size_t index, absl::Time now,
                     Effects* effects);
  // `first_copy`: of those on other devices.
  void ExplainMiss(const Asked& asked, size_t index, const Entry* first_copy);
  // Of the session's device. A PENDING key is counted when it is resolved.
  void CountLookup(const AcquiredModule& module, AcquirePurpose purpose,
                   uint32_t device, uint32_t num_tokens);
  void CountMiss(const AcquiredModule& module, uint32_t num_tokens);
  LeaseId NewLease(SessionId session, std::vector<Entry*> entries);
  // The one lease of an Acquire, made when it is first needed.
  LeaseId LeaseOf(Asked* asked);
  // Leases the entry to a session of `device`; the caller adds it to the lease.
  void Hit(Entry* entry, uint32_t device, AcquirePurpose purpose,
           bool want_page_sums, absl::Time now, AcquiredModule* out);
  static void ShowReservation(const Entry& entry, AcquiredModule* out);

  // cache_reservations.cc: how they end, and what those who waited are told.
  void CommitOne(SessionId session, const CommitModule& module, absl::Time now,
                 CommitResult* result, Effects* effects);
  void ResolveHits(Entry* entry, std::span<const Waiter> waiters,
                   absl::Time now, Effects* effects);
  // `entry`: what they waited for.
  void ResolveMisses(const Entry& entry, std::span<const Waiter> waiters,
                     MissReason reason, IdentityField differing_field,
                     Effects* effects);
  void CountResolved(const PendingResolved& resolved, const Waiter& waiter,
                     const Entry& entry);
  // The holder stopped writing: its pages serve the next one in line.
  void AbortReservation(Entry* entry, absl::Time now, Effects* effects);
  // The holder may still be writing: its pages stay aside, the next one in
  // line gets others.
  void LoseReservation(Entry* entry, absl::Time now, Effects* effects);
  void CountAbort(const Entry& entry, absl::Time now, Effects* effects);
  // Takes the first waiter who would write out of the line.
  std::optional<Waiter> NextWriter(std::vector<Waiter>* waiters) const;
  // Makes the waiter the holder of a RESERVED entry and tells it.
  void HandOver(Entry* entry, const Waiter& waiter, Effects* effects);
  // An answer to fill in; nullptr when the waiter's session has ended.
  PendingResolved* Deliver(const Waiter& waiter, Effects* effects) const;

  // cache_sessions.cc
  static absl::Status NoSession(SessionId id);
  void EndLost(const std::vector<Entry*>& entries);

  // cache_moves.cc
  // After the last lease of a host module that was hit.
  void QueuePromotion(Entry* entry, Effects* effects);
  bool NeedsDemotion(uint32_t device) const;
  std::optional<MoveTicket> BeginPromotion(uint32_t device, absl::Time now,
                                           Effects* effects);
  std::optional<MoveTicket> Demote(Entry* entry, absl::Time now,
                                   Effects* effects);
  // `device`: whose tier it leaves or enters.
  std::optional<MoveTicket> StartMove(Entry* entry, Tier to, uint32_t device);
  // A demotion without a copy, when the host tier has the same key: nobody uses
  // the entry, and it goes. False: the host has it not.
  bool DropForHostCopy(Entry* entry, absl::Time now, Effects* effects);
  void HideCorrupt(Entry* entry, absl::Time now, Effects* effects);

  // cache_admin.cc
  CachePolicy LongerPolicy(const ModuleKey& key,
                           const CachePolicy& policy) const;
  static uint64_t UnpinnedBytes(const std::vector<Entry*>& copies);
  void SetKnownPolicy(const ModuleKey& key, const CachePolicy& policy,
                      PolicyResult* result);

  // cache_promotion.cc
  // Gives a host module that is about to be leased pages of the device, to be
  // filled while it is read; nothing changes where that cannot be.
  void StartArrival(Entry* entry, uint32_t device, Effects* effects);
  void FailArrival(Entry* entry, absl::Time now, Effects* effects);

  // cache_invariants.cc
  absl::Status CheckCopies(const ModuleKey& key) const;
  absl::Status CheckEntry(const Entry& entry, bool visible) const;
  absl::Status CheckUsers() const;
  absl::Status CheckTallies() const;

  const ModuleCache::Options options_;
  const PagePool* const pool_;

  std::vector<std::unique_ptr<TierState>> tiers_;
  // The first copy of each key; the others hang on it.
  absl::flat_hash_map<ModuleKey, std::unique_ptr<Entry>> visible_;
  size_t num_visible_ = 0;  // copies
  absl::flat_hash_map<const Entry*, std::unique_ptr<Entry>> hidden_;
  absl::btree_set<ModuleKey> ordered_;  // keys of visible_
  KnownModules known_;

  absl::btree_map<SessionId, Session> sessions_;
  absl::flat_hash_map<LeaseId, Lease> leases_;
  absl::flat_hash_map<ReservationId, Entry*> reservations_;
  std::multimap<ProcessId, LostHolds> lost_;
  absl::flat_hash_set<ProcessId> dead_;  // eight bytes a process that came

  absl::flat_hash_map<uint64_t, Move> moves_;
  std::map<uint64_t, Arrival> arrivals_;  // by id: in the order of hits
  std::vector<uint32_t> free_progress_words_;
  std::vector<std::deque<ModuleKey>> promotions_;  // to each device
  std::priority_queue<Expiry, std::vector<Expiry>, std::greater<>> expiries_;

  Tally tally_;
  CacheStats counters_;                      // its counters only
  std::vector<TierCounters> tier_counters_;  // as tiers_
  uint64_t next_id_ = 1;
  uint64_t next_generation_;
};

}  // namespace promptcache::daemon
