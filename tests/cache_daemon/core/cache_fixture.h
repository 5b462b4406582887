#pragma once

#include <cstring>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "cache_daemon/core/module_cache.h"
#include "cache_daemon/core/mover.h"
#include "common/page_sum.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/support/fake_clock.h"
#include "tests/support/status_matchers.h"

namespace promptcache::daemon {

// Pages of the tests: 4 KiB, 16 tokens.
inline constexpr uint64_t kPageBytes = 4096;
inline constexpr PageShape kShape{.page_bytes = kPageBytes, .page_tokens = 16};

inline ModuleKey KeyOf(int n) { return Sha256Of(absl::StrCat("module ", n)); }

// A cache over small tiers with verbs for what sessions do. Invariants are
// checked when a test ends.
class CacheFixture : public ::testing::Test {
 protected:
  struct Config {
    uint32_t num_devices = 1;
    uint64_t device_pages = 16;  // of each
    uint64_t host_pages = 0;
    uint64_t segment_pages = 8;
    ModuleCache::Options options;
  };
  CacheFixture() { Make(Config{}); }
  ~CacheFixture() override {
    if (cache_ != nullptr) {
      PC_EXPECT_OK(cache_->CheckInvariants());
    }
  }

  void Make(const Config& config) {
    mover_.reset();
    cache_.reset();
    PagePool::Options options{
        .device_bytes = config.device_pages * kPageBytes,
        .host_bytes = config.host_pages * kPageBytes,
        .segment_bytes = config.segment_pages * kPageBytes,
        .min_page_bytes = 512};
    pool_.reset();
    devices_.clear();
    for (uint32_t i = 0; i < config.num_devices; ++i) {
      devices_.push_back(gpu::NewHostDevice());
      options.devices.push_back(devices_.back().get());
    }
    absl::StatusOr<std::unique_ptr<PagePool>> pool = PagePool::Create(options);
    PC_ASSERT_OK(pool);
    pool_ = *std::move(pool);
    absl::StatusOr<std::unique_ptr<ModuleCache>> cache = ModuleCache::Create(
        config.options, pool_.get(), &clock_, &signal_, &events_);
    PC_ASSERT_OK(cache);
    cache_ = *std::move(cache);
    mover_ = std::make_unique<Mover>(cache_.get(), &signal_, Mover::Options{});
  }

  SessionId Open(ProcessId process = ProcessId{},
                 const std::string& worker_id = "w",
                 const PageShape& shape = kShape, uint32_t device = 0,
                 bool reads_arriving = false) {
    absl::StatusOr<SessionId> session =
        cache_->OpenSession({.worker_id = worker_id,
                             .model = "m",
                             .shape = shape,
                             .device = device,
                             .process = process,
                             .on_resolved =
                                 [this](const PendingResolved& resolved) {
                                   resolved_.push_back(resolved);
                                 },
                             .reads_arriving = reads_arriving});
    EXPECT_THAT(session, IsOk());
    return session.ok() ? *session : SessionId{};
  }
  SessionId OpenOn(uint32_t device) {
    return Open(ProcessId{}, absl::StrCat("w", device), kShape, device);
  }

  // One module, with names that tests do not care about.
  AcquireResult Ask(SessionId session, int module, uint32_t num_pages = 1,
                    bool reserve = true, const std::string& domain = "default",
                    uint64_t request_id = 7) {
    const std::string path = absl::StrCat("m", module);
    const AcquireKey key{
        .key = KeyOf(module), .num_tokens = num_pages * 16, .path = path};
    absl::StatusOr<AcquireResult> result =
        cache_->Acquire(session, {.request_id = request_id,
                                  .keys = {&key, 1},
                                  .reserve_missing = reserve,
                                  .schema = "s",
                                  .isolation_domain = domain});
    EXPECT_THAT(result, IsOk());
    return result.ok() ? *result : AcquireResult{};
  }
  AcquiredModule AskOne(SessionId session, int module, uint32_t num_pages = 1) {
    const AcquireResult result = Ask(session, module, num_pages);
    return result.modules.empty() ? AcquiredModule{} : result.modules[0];
  }

  // Every byte of the module's pages.
  void Fill(const PageRuns& runs, int value, uint64_t page_bytes = kPageBytes) {
    ForEachPage(runs, [&](uint32_t segment, uint32_t page) {
      std::memset(pool_->Page(segment, page, page_bytes).data(), value,
                  page_bytes);
    });
  }
  bool Holds(const PageRuns& runs, int value,
             uint64_t page_bytes = kPageBytes) {
    bool all = true;
    ForEachPage(runs, [&](uint32_t segment, uint32_t page) {
      const auto bytes = pool_->Page(segment, page, page_bytes);
      // Each byte is the one before it; a loop here takes most of the time of
      // the property tests.
      all = all && bytes[0] == static_cast<std::byte>(value) &&
            std::memcmp(bytes.data(), bytes.data() + 1, page_bytes - 1) == 0;
    });
    return all;
  }

  CommitModule Sealed(const AcquiredModule& reserved, int module,
                      const CachePolicy& policy = {}, uint64_t compute_us = 0,
                      const PageShape& shape = kShape) {
    CommitModule commit;
    commit.reservation = reserved.reservation;
    commit.page_sums = *pool_->Sums(reserved.runs, shape.page_bytes);
    commit.metadata.schema = "s";
    commit.metadata.path = absl::StrCat("m", module);
    commit.metadata.num_tokens =
        static_cast<uint32_t>(commit.page_sums.size() * shape.page_tokens);
    commit.metadata.policy = policy;
    commit.metadata.compute_us = compute_us;
    return commit;
  }
  bool CommitOne(SessionId session, const AcquiredModule& reserved, int module,
                 const CachePolicy& policy = {}, uint64_t compute_us = 0) {
    const CommitModule commit = Sealed(reserved, module, policy, compute_us);
    absl::StatusOr<std::vector<CommitResult>> results =
        cache_->Commit(session, {&commit, 1});
    EXPECT_THAT(results, IsOk());
    return results.ok() && results->at(0).committed;
  }

  // Reserves, writes, commits; returns the lease.
  LeaseId Put(SessionId session, int module, uint32_t num_pages = 1,
              const CachePolicy& policy = {}, uint64_t compute_us = 0) {
    const AcquireResult result = Ask(session, module, num_pages);
    EXPECT_EQ(result.modules.at(0).outcome, Outcome::kReserved);
    Fill(result.modules[0].runs, module);
    EXPECT_TRUE(
        CommitOne(session, result.modules[0], module, policy, compute_us));
    return result.lease;
  }
  // The same, and lets go of it: a module that may be evicted.
  void PutFree(SessionId session, int module, uint32_t num_pages = 1,
               const CachePolicy& policy = {}, uint64_t compute_us = 0) {
    Release(session, Put(session, module, num_pages, policy, compute_us));
  }
  void Release(SessionId session, LeaseId lease) {
    PC_EXPECT_OK(cache_->Release(session, lease));
  }
  // A hit that is released at once; false for anything else.
  bool Touch(SessionId session, int module, uint32_t num_pages = 1) {
    const AcquireResult result =
        Ask(session, module, num_pages, /*reserve=*/false);
    if (result.modules[0].outcome != Outcome::kHit) return false;
    Release(session, result.lease);
    return true;
  }
  MissReason WhyMissing(SessionId session, int module, uint32_t num_pages = 1) {
    const AcquireResult result =
        Ask(session, module, num_pages, /*reserve=*/false);
    EXPECT_EQ(result.modules[0].outcome, Outcome::kMiss);
    return result.modules[0].miss_reason;
  }

  TierStats StatsOf(Tier tier, uint32_t device = 0) {
    for (const TierStats& stats : cache_->Stats().tiers) {
      if (stats.tier == tier && device-- == 0) return stats;
    }
    return {};
  }
  uint64_t UsedPages(Tier tier = Tier::kDevice, uint32_t device = 0) {
    return StatsOf(tier, device).used_bytes / kPageBytes;
  }
  uint64_t CountIn(ModuleState state) {
    return cache_->Stats().modules[static_cast<size_t>(state)];
  }
  ModuleInfo Info(int module) {
    absl::StatusOr<ModuleInfo> info = cache_->Get(KeyOf(module).ToHex());
    EXPECT_THAT(info, IsOk());
    return info.ok() ? *info : ModuleInfo{};
  }
  void RunMover() {
    for (int i = 0; i < 1000 && mover_->RunOnce(); ++i) {
    }
  }

  template <typename Fn>
  static void ForEachPage(const PageRuns& runs, Fn fn) {
    for (const PageRun& run : runs) {
      for (uint32_t i = 0; i < run.num_pages; ++i) {
        fn(run.segment, run.first_page + i);
      }
    }
  }

  FakeClock clock_;
  WorkSignal signal_;
  EventHub events_;
  std::vector<std::unique_ptr<gpu::Device>> devices_;
  std::unique_ptr<PagePool> pool_;
  std::unique_ptr<ModuleCache> cache_;
  std::unique_ptr<Mover> mover_;
  std::vector<PendingResolved> resolved_;
};

}  // namespace promptcache::daemon
