#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "cache_daemon/core/event_hub.h"
#include "cache_daemon/core/page_pool.h"
#include "cache_daemon/core/requests.h"
#include "cache_daemon/core/types.h"
#include "cache_daemon/core/work_signal.h"
#include "common/clock.h"
#include "common/mutex.h"

namespace promptcache::daemon {

class CacheState;
struct Effects;

// Every module that the node has KV of, and who may read or write it. It may
// have copies: one in the tier of each device, one in the host tier. A session
// sees its own device's and the host's.
//
//   RESERVED --Commit--> COMMITTED(tier) <--> MOVING (arriving: readable)
//      |                    |
//      | holder lost        | evicted, expired, corrupt
//      v                    v
//   QUARANTINED          EVICTED (only while somebody still reads) --> gone
//
// * A key has at most one visible copy in a tier, RESERVED, COMMITTED or
//   MOVING, and a session is answered with its own device's before the host's.
//   What
//   is hidden (evicted or found corrupt while in use, aborted by a lost
//   session) is no answer to anybody; its pages go back with its last user.
// * Users are leases, moves and checks in progress, and *lost* users: what a
//   session held when it ended, until its process is known dead or says that
//   it has dropped it. Only pages without users are freed, and freed pages lose
//   their generation first.
// * A session's lost holds end when OnProcessDeath is called for its process,
//   or when a session with the same process and worker id opens: **opening a
//   session declares that this worker has dropped every view and every writable
//   alias of its earlier sessions.** Never by a timeout.
// * Nothing waits: every key of an Acquire is answered at once. A PENDING key
//   is answered again, once, through its session's ResolvedFn.
// * Pages that come from another isolation domain are zeroed before hand-out;
//   otherwise they hold old bytes of the same domain. Writers zero the unused
//   slots of a module's last page (they count in its sum).
//
// Thread-safe, one mutex. No method copies, zeroes, sums, calls back or emits
// an event under it. ReportCorruption reads the module's pages; Acquire, Commit
// and Abort zero pages that change domain; nothing else touches bytes.
// Invariants: CheckInvariants().
class ModuleCache {
 public:
  struct Options {
    absl::Duration default_ttl = absl::Hours(24);  // sliding; infinite: none
    // At most half of all tiers' bytes, whatever it says.
    uint64_t pin_budget_bytes = uint64_t{256} << 20;
    // Demote until this part of the device tier is free, when there is a host
    // tier. What Acquire needs beyond it is evicted outright.
    double demote_free_fraction = 1.0 / 16;
    // Among the least recently used modules, those used within this time of the
    // very oldest count as equally old: the one that is cheapest to compute
    // again per byte goes first (of at most 8 looked at).
    absl::Duration lru_tie_window = absl::Seconds(1);
    // Modules that are remembered after they went, and names whose identity is
    // remembered, each.
    size_t max_known_modules = 200'000;
    uint64_t first_generation = 1;
  };
  // All must outlive it; `signal` and `events` may be null.
  static absl::StatusOr<std::unique_ptr<ModuleCache>> Create(
      const Options& options, const PagePool* pool, const Clock* clock,
      WorkSignal* signal, EventHub* events);
  ~ModuleCache();
  ModuleCache(const ModuleCache&) = delete;
  ModuleCache& operator=(const ModuleCache&) = delete;

  // ---- sessions -----------------------------------------------------------

  // Called without a lock, on any thread that resolves a key of the session,
  // possibly before the Acquire that it belongs to has returned, and possibly
  // once more after CloseSession has (the answer is void then). Must not block;
  // may call the cache.
  using ResolvedFn = std::function<void(const PendingResolved&)>;
  struct SessionArgs {
    std::string worker_id;
    std::string model;
    PageShape shape;
    uint32_t device = 0;  // that the worker computes on, of PagePool
    // Of ProcessWatcher. 0: a caller in this process, whose holds end with its
    // sessions.
    ProcessId process{};
    ResolvedFn on_resolved;
    // The device is a GPU, and the session waits for progress words: its hits
    // in the host tier are promoted at once where pages are free. Others are
    // not given what is arriving.
    bool reads_arriving = false;
  };
  // InvalidArgument for a page that does not fit a segment or has no whole
  // number of words, or a device that is not there. Aborted when the process
  // died meanwhile.
  absl::StatusOr<SessionId> OpenSession(SessionArgs args)
      ABSL_LOCKS_EXCLUDED(mu_);
  // The one path of a session's end, whatever the reason (`why` is for the
  // event). Leases end, reservations are aborted and pass on; what was held
  // stays protected as lost until the process is gone. Idempotent.
  void CloseSession(SessionId session, std::string_view why)
      ABSL_LOCKS_EXCLUDED(mu_);
  // Closes what the process still had open and ends its lost holds.
  void OnProcessDeath(ProcessId process) ABSL_LOCKS_EXCLUDED(mu_);

  // NotFound: no such session. InvalidArgument: a key without tokens, or with
  // another number of tokens than the module has; nothing changes then.
  absl::StatusOr<AcquireResult> Acquire(SessionId session,
                                        const AcquireRequest& request)
      ABSL_LOCKS_EXCLUDED(mu_);
  // Parallel to `modules`. A committed module is leased from now on under the
  // id of its Acquire's lease, unless that was released. InvalidArgument when
  // the number of sums or tokens is not the reservation's; nothing changes.
  // Pinned if the policy says so, or if it was pinned when it expired, was
  // found corrupt or lost by a restart (AddKnown).
  absl::StatusOr<std::vector<CommitResult>> Commit(
      SessionId session, std::span<const CommitModule> modules)
      ABSL_LOCKS_EXCLUDED(mu_);
  // The caller has stopped writing. NotFound names the first unknown one; the
  // others are aborted all the same.
  absl::Status Abort(SessionId session,
                     std::span<const ReservationId> reservations)
      ABSL_LOCKS_EXCLUDED(mu_);
  // Reservations under the lease stay; committed after, they are not leased.
  absl::Status Release(SessionId session, LeaseId lease)
      ABSL_LOCKS_EXCLUDED(mu_);
  // Sums the module's pages. True: a page was wrong, and the module is hidden
  // and counted. False: the bytes are right, or the module has gone. Reads
  // memory: not for a thread that must not be kept.
  bool ReportCorruption(const ModuleKey& key, uint64_t generation)
      ABSL_LOCKS_EXCLUDED(mu_);
  void ReportUse(const RequestUse& use) ABSL_LOCKS_EXCLUDED(mu_);

  // ---- operators: of all copies of a key -----------------------------------

  CacheStats Stats() const ABSL_LOCKS_EXCLUDED(mu_);

  // InvalidArgument: a prefix that is too short, not hexadecimal or ambiguous;
  // a path without a schema. Looks at 1024 modules per hold of the lock.
  absl::StatusOr<ListResult> List(const ListArgs& args) const
      ABSL_LOCKS_EXCLUDED(mu_);
  // Hexadecimal or a prefix. NotFound when it is neither resident nor known.
  absl::StatusOr<ModuleInfo> Get(std::string_view key) const
      ABSL_LOCKS_EXCLUDED(mu_);
  // Pinned modules too. Reservations stay.
  absl::StatusOr<EvictResult> Evict(const ModuleFilter& filter)
      ABSL_LOCKS_EXCLUDED(mu_);
  // Pins what is resident and the budget still has room for, all copies of a
  // key or none, in the order of keys. Unpins what is known, too: it would come
  // back pinned.
  absl::StatusOr<PinResult> Pin(const ModuleFilter& filter, bool pin)
      ABSL_LOCKS_EXCLUDED(mu_);
  // Replaces the policies of modules, resident or known; others are ignored.
  // Where that changes something, it counts as a use: a sliding TTL runs from
  // now, an absolute one from the commit. A pin ends when the policy that asked
  // for it does; an operator's pin stays. Reservations keep what their commit
  // will say.
  PolicyResult SetPolicy(std::span<const PolicyChange> changes)
      ABSL_LOCKS_EXCLUDED(mu_);
  // The same for all modules that were committed under a schema's name.
  absl::StatusOr<PolicyResult> SetPolicy(const std::string& schema,
                                         const SchemaPolicies& policies)
      ABSL_LOCKS_EXCLUDED(mu_);
  // Tells of modules from before a restart: their absence is kNotResident.
  // `parts`: of the identity, when known. Ignored for what is resident.
  void AddKnown(const ModuleInfo& module, const IdentityParts& parts)
      ABSL_LOCKS_EXCLUDED(mu_);

  // ---- movers -------------------------------------------------------------

  // The next move to or from that device's tier. Moves of several devices may
  // be under way at once. Leaving a device's tier for the host's needs no copy
  // where the host has one: it is dropped here, and counts as a demotion.
  std::optional<MoveTicket> BeginMove(uint32_t device = 0)
      ABSL_LOCKS_EXCLUDED(mu_);
  // `copied_sums`: what PagePool::Copy gave. A mismatch hides the module as
  // corrupt. A module that was hit meanwhile stays where it was, and so does
  // one that could not be copied.
  void EndMove(const MoveTicket& ticket,
               const absl::StatusOr<std::vector<uint64_t>>& copied_sums)
      ABSL_LOCKS_EXCLUDED(mu_);
  // The same for promotions that readers wait for. The caller tells the
  // progress word how many layers have arrived; the end says whether they
  // count. Anything but the right sums hides the module as corrupt.
  std::optional<ArrivalTicket> BeginArrival(uint32_t device = 0)
      ABSL_LOCKS_EXCLUDED(mu_);
  void EndArrival(const ArrivalTicket& ticket,
                  const absl::StatusOr<std::vector<uint64_t>>& copied_sums)
      ABSL_LOCKS_EXCLUDED(mu_);
  // Evicts what has expired. Idempotent; cheap when nothing has.
  void ExpireDue() ABSL_LOCKS_EXCLUDED(mu_);

  const PagePool& pool() const { return *pool_; }
  // Internal when an invariant does not hold. Walks everything.
  absl::Status CheckInvariants() const ABSL_LOCKS_EXCLUDED(mu_);

 private:
  ModuleCache(const PagePool* pool, const Clock* clock, WorkSignal* signal,
              EventHub* events, std::unique_ptr<CacheState> state);
  Effects NewEffects() const;
  absl::StatusOr<std::vector<ModuleKey>> ResolveKeys(
      const ModuleFilter& filter) const ABSL_LOCKS_EXCLUDED(mu_);
  // Calls `fn` under the lock, in the order of keys, some modules at a time.
  absl::Status ForEach(const ModuleFilter& filter, bool include_absent,
                       absl::FunctionRef<void(const ModuleKey&)> fn)
      ABSL_LOCKS_EXCLUDED(mu_);
  // What has to be done after the lock is gone.
  void Perform(Effects effects) ABSL_LOCKS_EXCLUDED(mu_);

  const PagePool* const pool_;
  const Clock* const clock_;
  WorkSignal* const signal_;
  EventHub* const events_;

  mutable Mutex mu_;
  const std::unique_ptr<CacheState> state_ ABSL_PT_GUARDED_BY(mu_);
};

}  // namespace promptcache::daemon
