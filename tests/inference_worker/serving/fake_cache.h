#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "common/kv_layout.h"
#include "common/mutex.h"
#include "cuda/runtime/device.h"
#include "inference_worker/cache/cache_client.h"

namespace promptcache::worker {

// A cache daemon in this process's memory: single flight, leases, generations,
// page sums; and everything that can go wrong, on request. Several clients
// (workers) may share one. Thread-safe.
class FakeCache {
 public:
  // Pages lie in memory of `device`, which must outlive the cache and which
  // this process must be able to read (the CPU, or an emulated GPU); null: the
  // CPU.
  explicit FakeCache(const KvLayout& layout, gpu::Device* device = nullptr);
  ~FakeCache();

  std::unique_ptr<CacheClient> NewClient();

  struct Counters {
    uint64_t acquires = 0;
    uint64_t hits = 0;
    uint64_t commits = 0;
    uint64_t aborts = 0;
    uint64_t corruption_reports = 0;
    uint64_t bad_sums = 0;  // commits whose sums were not the pages'
    uint64_t live_leases = 0;
    uint64_t live_reservations = 0;
    uint64_t used_cached = 0;
    uint64_t used_created = 0;
    uint64_t used_fresh = 0;
    uint64_t preemptions = 0;
    uint64_t recomputed_tokens = 0;
    uint64_t attention_needed_tokens = 0;
    uint64_t attention_read_tokens = 0;
  };
  Counters counters() const ABSL_LOCKS_EXCLUDED(mu_);
  uint64_t num_modules() const ABSL_LOCKS_EXCLUDED(mu_);
  std::vector<CommitModule> committed() const ABSL_LOCKS_EXCLUDED(mu_);
  std::vector<PolicyChange> policy_changes() const ABSL_LOCKS_EXCLUDED(mu_);

  // Of every Acquire that was answered.
  std::vector<AcquirePurpose> purposes() const ABSL_LOCKS_EXCLUDED(mu_);
  // Of all that asked, without repetitions.
  std::set<std::string> domains() const ABSL_LOCKS_EXCLUDED(mu_);

  // The daemon goes away: every call fails, every lease is invalid.
  void SetDown(bool down) ABSL_LOCKS_EXCLUDED(mu_);
  void SetNoMemory(bool no_memory) ABSL_LOCKS_EXCLUDED(mu_);
  // What is missing is missing because its identity differs there.
  void SetDifferingField(IdentityField field) ABSL_LOCKS_EXCLUDED(mu_);
  // Commits answer that the reservations are gone.
  void SetLoseReservations(bool lose) ABSL_LOCKS_EXCLUDED(mu_);
  // Commits answer that the pin budget is full.
  void SetRefusePins(bool refuse) ABSL_LOCKS_EXCLUDED(mu_);
  // Hits are told to be still arriving; `progress` says how far, each time it
  // is asked (with a lock held: it must not call this). Empty: no more.
  void SetArriving(std::function<ModuleProgress()> progress)
      ABSL_LOCKS_EXCLUDED(mu_);
  // Drops what is committed although leases read it; its bytes change, too.
  void RevokeAll() ABSL_LOCKS_EXCLUDED(mu_);
  // Drops what is committed and nobody reads, as for want of memory.
  void EvictUnleased() ABSL_LOCKS_EXCLUDED(mu_);
  // Flips one byte of every committed page.
  void FlipBytes() ABSL_LOCKS_EXCLUDED(mu_);
  // Holds a reservation for a module, as another worker would, and lets go.
  void ReserveElsewhere(const ModuleKey& key, uint32_t num_tokens)
      ABSL_LOCKS_EXCLUDED(mu_);
  void AbandonElsewhere(const ModuleKey& key) ABSL_LOCKS_EXCLUDED(mu_);
  // Called at the start of every Acquire, without a lock.
  void SetAcquireHook(std::function<void()> hook) ABSL_LOCKS_EXCLUDED(mu_);
  // And before its answer gets there, with what was granted.
  void SetAcquiredHook(std::function<void(const CacheLease&)> hook)
      ABSL_LOCKS_EXCLUDED(mu_);
  // The same of who has waited for a module and is given it to encode.
  void SetPassedOnHook(std::function<void()> hook) ABSL_LOCKS_EXCLUDED(mu_);
  // The same for Commit.
  void SetCommitHook(std::function<void()> hook) ABSL_LOCKS_EXCLUDED(mu_);

 private:
  friend class FakeLease;
  friend class FakeClient;
  struct Entry;
  AcquiredModule Look(const AcquireKey& key,
                      const CacheClient::AcquireArgs& args,
                      std::shared_ptr<Entry>* entry)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  AcquiredModule Describe(const Entry& entry, AcquireOutcome outcome,
                          bool want_sums) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  const KvLayout layout_;
  const std::unique_ptr<gpu::Device> host_device_;
  gpu::Device* const device_;
  mutable Mutex mu_;
  CondVar changed_;
  std::map<ModuleKey, std::shared_ptr<Entry>> entries_ ABSL_GUARDED_BY(mu_);
  std::vector<CommitModule> committed_ ABSL_GUARDED_BY(mu_);
  std::vector<PolicyChange> policy_changes_ ABSL_GUARDED_BY(mu_);
  std::vector<AcquirePurpose> purposes_ ABSL_GUARDED_BY(mu_);
  std::set<std::string> domains_ ABSL_GUARDED_BY(mu_);
  std::function<void()> hook_ ABSL_GUARDED_BY(mu_);
  std::function<void(const CacheLease&)> acquired_hook_ ABSL_GUARDED_BY(mu_);
  std::function<void()> passed_on_hook_ ABSL_GUARDED_BY(mu_);
  std::function<void()> commit_hook_ ABSL_GUARDED_BY(mu_);
  std::function<ModuleProgress()> progress_ ABSL_GUARDED_BY(mu_);
  Counters counters_ ABSL_GUARDED_BY(mu_);
  uint64_t next_id_ ABSL_GUARDED_BY(mu_) = 1;
  uint64_t session_ ABSL_GUARDED_BY(mu_) = 1;
  bool down_ ABSL_GUARDED_BY(mu_) = false;
  bool no_memory_ ABSL_GUARDED_BY(mu_) = false;
  bool lose_reservations_ ABSL_GUARDED_BY(mu_) = false;
  bool refuse_pins_ ABSL_GUARDED_BY(mu_) = false;
  IdentityField differing_field_ ABSL_GUARDED_BY(mu_) = IdentityField::kNone;
};

}  // namespace promptcache::worker
