#include "tests/inference_worker/serving/fake_cache.h"

#include <algorithm>
#include <span>
#include <utility>

#include "common/page_sum.h"
#include "common/status_macros.h"
#include "glog/logging.h"

namespace promptcache::worker {

struct FakeCache::Entry {
  ModuleKey key;
  uint64_t reservation_id = 0;  // 0 once committed
  bool gone = false;            // revoked or aborted
  std::vector<gpu::DeviceBuffer> pages;
  std::vector<uint64_t> sums;

  std::span<std::byte> page(size_t i) const {
    return {pages[i].data(), pages[i].num_bytes()};
  }
};

class FakeLease final : public CacheLease {
 public:
  FakeLease(FakeCache* cache, const CacheClient::AcquireArgs& args)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(cache->mu_)
      : cache_(cache), args_(args), session_(cache->session_) {
    entries_.resize(args.keys.size());
    for (size_t i = 0; i < args.keys.size(); ++i) {
      modules_.push_back(cache->Look(args.keys[i], args, &entries_[i]));
    }
    ++cache->counters_.live_leases;
  }

  ~FakeLease() override {
    std::vector<uint64_t> rest;
    for (const AcquiredModule& module : modules_) {
      if (module.outcome == AcquireOutcome::kReserved) {
        rest.push_back(module.reservation_id);
      }
    }
    Abort(rest);
    MutexLock lock(&cache_->mu_);
    --cache_->counters_.live_leases;
  }

  const std::vector<AcquiredModule>& modules() const override {
    return modules_;
  }

  absl::Status WaitPending(size_t index, absl::Time deadline) override {
    std::function<void()> hook;
    PC_RETURN_IF_ERROR(AwaitOutcome(index, deadline, &hook));
    if (hook) hook();
    return absl::OkStatus();
  }

  absl::StatusOr<std::vector<bool>> Commit(
      const std::vector<CommitModule>& commits, absl::Time) override {
    std::function<void()> hook;
    {
      MutexLock lock(&cache_->mu_);
      hook = cache_->commit_hook_;
    }
    if (hook) hook();
    MutexLock lock(&cache_->mu_);
    if (cache_->down_) return absl::UnavailableError("the daemon is gone");
    std::vector<bool> done;
    for (const CommitModule& commit : commits) {
      FakeCache::Entry* entry = nullptr;
      size_t index = 0;
      for (size_t i = 0; i < entries_.size(); ++i) {
        const auto& e = entries_[i];
        if (e != nullptr && e->reservation_id == commit.reservation_id) {
          entry = e.get();
          index = i;
        }
      }
      if (entry == nullptr || entry->gone || cache_->lose_reservations_) {
        done.push_back(false);
        continue;
      }
      for (size_t p = 0; p < entry->pages.size(); ++p) {
        if (p >= commit.page_sums.size() ||
            commit.page_sums[p] != PageSum(entry->page(p))) {
          ++cache_->counters_.bad_sums;
        }
      }
      entry->sums = commit.page_sums;
      entry->reservation_id = 0;
      modules_[index].pin_refused = commit.pin && cache_->refuse_pins_;
      ++cache_->counters_.commits;
      --cache_->counters_.live_reservations;
      cache_->committed_.push_back(commit);
      done.push_back(true);
    }
    cache_->changed_.SignalAll();
    return done;
  }

  void Abort(const std::vector<uint64_t>& ids) override {
    MutexLock lock(&cache_->mu_);
    for (uint64_t id : ids) {
      for (const auto& e : entries_) {
        if (e == nullptr || e->reservation_id != id || e->gone) continue;
        e->gone = true;
        ++cache_->counters_.aborts;
        --cache_->counters_.live_reservations;
        cache_->entries_.erase(e->key);
      }
    }
    cache_->changed_.SignalAll();
  }

  bool Valid(size_t index) const override {
    MutexLock lock(&cache_->mu_);
    return !cache_->down_ && session_ == cache_->session_ &&
           entries_[index] != nullptr && !entries_[index]->gone;
  }

  ModuleProgress Progress(size_t) const override {
    MutexLock lock(&cache_->mu_);
    if (cache_->down_ || session_ != cache_->session_) return {};
    return cache_->progress_ ? cache_->progress_() : ModuleProgress{};
  }

  void ReportCorruption(size_t index) override {
    MutexLock lock(&cache_->mu_);
    ++cache_->counters_.corruption_reports;
    entries_[index]->gone = true;
    cache_->entries_.erase(entries_[index]->key);
  }

 private:
  absl::Status AwaitOutcome(size_t index, absl::Time deadline,
                            std::function<void()>* passed_on) {
    MutexLock lock(&cache_->mu_);
    while (modules_[index].outcome == AcquireOutcome::kPending) {
      if (cache_->down_ || session_ != cache_->session_) {
        return absl::UnavailableError("the daemon is gone");
      }
      AcquiredModule now =
          cache_->Look(args_.keys[index], args_, &entries_[index]);
      if (now.outcome != AcquireOutcome::kPending) {
        modules_[index] = std::move(now);
        break;
      }
      const absl::Duration left = deadline - absl::Now();
      if (left <= absl::ZeroDuration()) {
        return absl::DeadlineExceededError("still pending");
      }
      cache_->changed_.WaitWithTimeout(&cache_->mu_, left);
    }
    if (modules_[index].outcome == AcquireOutcome::kReserved) {
      *passed_on = cache_->passed_on_hook_;
    }
    return absl::OkStatus();
  }

  FakeCache* const cache_;
  const CacheClient::AcquireArgs args_;
  const uint64_t session_;
  std::vector<AcquiredModule> modules_;
  std::vector<std::shared_ptr<FakeCache::Entry>> entries_;
};

class FakeClient final : public CacheClient {
 public:
  explicit FakeClient(FakeCache* cache) : cache_(cache) {}

  bool attached() const override {
    MutexLock lock(&cache_->mu_);
    return !cache_->down_;
  }
  absl::Status WaitAttached(absl::Time) override {
    return attached() ? absl::OkStatus() : absl::UnavailableError("down");
  }
  absl::StatusOr<std::unique_ptr<CacheLease>> Acquire(
      const AcquireArgs& args) override {
    std::function<void()> hook;
    std::function<void(const CacheLease&)> acquired_hook;
    {
      MutexLock lock(&cache_->mu_);
      hook = cache_->hook_;
      acquired_hook = cache_->acquired_hook_;
    }
    if (hook) hook();
    auto lease = Grant(args);
    if (acquired_hook && lease.ok()) acquired_hook(**lease);
    return lease;
  }
  void ReportUse(const RequestUse& use) override {
    MutexLock lock(&cache_->mu_);
    cache_->counters_.used_cached += use.cached_tokens;
    cache_->counters_.used_created += use.created_tokens;
    cache_->counters_.used_fresh += use.fresh_tokens;
    cache_->counters_.preemptions += use.preemptions;
    cache_->counters_.recomputed_tokens += use.recomputed_tokens;
    cache_->counters_.attention_needed_tokens += use.attention_needed_tokens;
    cache_->counters_.attention_read_tokens += use.attention_read_tokens;
  }
  absl::StatusOr<std::vector<bool>> SetPolicy(
      const std::vector<PolicyChange>& changes) override {
    MutexLock lock(&cache_->mu_);
    cache_->policy_changes_.insert(cache_->policy_changes_.end(),
                                   changes.begin(), changes.end());
    std::vector<bool> refused;
    for (const PolicyChange& change : changes) {
      refused.push_back(change.pin && cache_->refuse_pins_);
    }
    return refused;
  }

 private:
  absl::StatusOr<std::unique_ptr<CacheLease>> Grant(const AcquireArgs& args) {
    MutexLock lock(&cache_->mu_);
    if (cache_->down_)
      return absl::UnavailableError("cache daemon unavailable");
    ++cache_->counters_.acquires;
    cache_->domains_.insert(args.isolation_domain);
    cache_->purposes_.push_back(args.purpose);
    return std::make_unique<FakeLease>(cache_, args);
  }

  FakeCache* const cache_;
};

FakeCache::FakeCache(const KvLayout& layout, gpu::Device* device)
    : layout_(layout),
      host_device_(gpu::NewHostDevice()),
      device_(device != nullptr ? device : host_device_.get()) {}

FakeCache::~FakeCache() = default;

std::unique_ptr<CacheClient> FakeCache::NewClient() {
  return std::make_unique<FakeClient>(this);
}

AcquiredModule FakeCache::Describe(const Entry& entry, AcquireOutcome outcome,
                                   bool want_sums) const {
  AcquiredModule module;
  module.outcome = outcome;
  module.on_host = !device_->is_cuda();
  for (const auto& page : entry.pages) {
    module.read_pages.push_back(page.data());
    if (outcome == AcquireOutcome::kReserved) {
      module.write_pages.push_back(page.data());
    }
  }
  module.reservation_id = entry.reservation_id;
  if (want_sums) module.page_sums = entry.sums;
  return module;
}

AcquiredModule FakeCache::Look(const AcquireKey& key,
                               const CacheClient::AcquireArgs& args,
                               std::shared_ptr<Entry>* entry) {
  AcquiredModule module;
  const auto it = entries_.find(key.key);
  if (it != entries_.end()) {
    *entry = it->second;
    if (it->second->reservation_id == 0) {
      ++counters_.hits;
      module = Describe(*it->second, AcquireOutcome::kHit, args.want_page_sums);
      module.arriving = progress_ != nullptr;
      return module;
    }
    if (!args.no_wait) module.outcome = AcquireOutcome::kPending;
    module.miss_reason = CacheMissReason::kNotYetCommitted;
    return module;
  }
  module.miss_reason = CacheMissReason::kNeverSeen;
  if (!args.reserve_missing) return module;
  if (no_memory_) {
    module.miss_reason = CacheMissReason::kNoMemory;
    return module;
  }
  auto fresh = std::make_shared<Entry>();
  fresh->key = key.key;
  fresh->reservation_id = next_id_++;
  for (uint64_t p = 0; p < layout_.PagesFor(key.num_tokens); ++p) {
    auto page = device_->Allocate(layout_.page_bytes());
    CHECK(page.ok()) << page.status();
    fresh->pages.push_back(*std::move(page));
    // Garbage, as pages that were somebody else's.
    std::ranges::fill(fresh->page(p), std::byte{0x5A});
  }
  entries_[key.key] = fresh;
  *entry = fresh;
  ++counters_.live_reservations;
  module = Describe(*fresh, AcquireOutcome::kReserved, false);
  module.differing_field = differing_field_;
  module.miss_reason = differing_field_ == IdentityField::kNone
                           ? CacheMissReason::kNeverSeen
                           : CacheMissReason::kIdentityDiffers;
  return module;
}

FakeCache::Counters FakeCache::counters() const {
  MutexLock lock(&mu_);
  return counters_;
}

uint64_t FakeCache::num_modules() const {
  MutexLock lock(&mu_);
  return entries_.size();
}

std::vector<CommitModule> FakeCache::committed() const {
  MutexLock lock(&mu_);
  return committed_;
}

std::vector<AcquirePurpose> FakeCache::purposes() const {
  MutexLock lock(&mu_);
  return purposes_;
}

std::set<std::string> FakeCache::domains() const {
  MutexLock lock(&mu_);
  return domains_;
}

std::vector<PolicyChange> FakeCache::policy_changes() const {
  MutexLock lock(&mu_);
  return policy_changes_;
}

void FakeCache::SetDown(bool down) {
  MutexLock lock(&mu_);
  down_ = down;
  if (down) ++session_;
  changed_.SignalAll();
}

void FakeCache::SetNoMemory(bool no_memory) {
  MutexLock lock(&mu_);
  no_memory_ = no_memory;
}

void FakeCache::SetDifferingField(IdentityField field) {
  MutexLock lock(&mu_);
  differing_field_ = field;
}

void FakeCache::SetArriving(std::function<ModuleProgress()> progress) {
  MutexLock lock(&mu_);
  progress_ = std::move(progress);
}

void FakeCache::SetLoseReservations(bool lose) {
  MutexLock lock(&mu_);
  lose_reservations_ = lose;
}

void FakeCache::SetRefusePins(bool refuse) {
  MutexLock lock(&mu_);
  refuse_pins_ = refuse;
}

void FakeCache::RevokeAll() {
  MutexLock lock(&mu_);
  for (auto& [key, entry] : entries_) {
    entry->gone = true;
    for (size_t p = 0; p < entry->pages.size(); ++p) {
      std::ranges::fill(entry->page(p), std::byte{0xEE});
    }
  }
  entries_.clear();
}

void FakeCache::EvictUnleased() {
  MutexLock lock(&mu_);
  // A lease has a reference of its own.
  std::erase_if(entries_, [](const auto& item) {
    return item.second->reservation_id == 0 && item.second.use_count() == 1;
  });
}

void FakeCache::FlipBytes() {
  MutexLock lock(&mu_);
  for (auto& [key, entry] : entries_) {
    for (size_t p = 0; p < entry->pages.size(); ++p) {
      entry->page(p)[1] ^= std::byte{0x10};
    }
  }
}

void FakeCache::ReserveElsewhere(const ModuleKey& key, uint32_t num_tokens) {
  MutexLock lock(&mu_);
  std::shared_ptr<Entry> entry;
  CHECK(Look({.key = key, .num_tokens = num_tokens}, {}, &entry).outcome ==
        AcquireOutcome::kReserved);
}

void FakeCache::AbandonElsewhere(const ModuleKey& key) {
  MutexLock lock(&mu_);
  entries_.erase(key);
  --counters_.live_reservations;
  changed_.SignalAll();
}

void FakeCache::SetAcquireHook(std::function<void()> hook) {
  MutexLock lock(&mu_);
  hook_ = std::move(hook);
}

void FakeCache::SetAcquiredHook(std::function<void(const CacheLease&)> hook) {
  MutexLock lock(&mu_);
  acquired_hook_ = std::move(hook);
}

void FakeCache::SetPassedOnHook(std::function<void()> hook) {
  MutexLock lock(&mu_);
  passed_on_hook_ = std::move(hook);
}

void FakeCache::SetCommitHook(std::function<void()> hook) {
  MutexLock lock(&mu_);
  commit_hook_ = std::move(hook);
}

}  // namespace promptcache::worker
