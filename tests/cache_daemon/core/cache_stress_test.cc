// Many threads at once, for the thread sanitizer: sessions that ask, write,
// read and check what they read; a mover; an operator; deaths.
#include <atomic>
#include <random>
#include <thread>
#include <vector>

#include "tests/cache_daemon/core/cache_fixture.h"

namespace promptcache::daemon {
namespace {

constexpr int kNumModules = 24;

int PagesOf(int module) { return 1 + module % 3; }

// One worker: a session on a thread of its own.
class StressWorker {
 public:
  StressWorker(ModuleCache* cache, const PagePool* pool, uint32_t seed)
      : cache_(cache), pool_(pool), random_(seed) {}

  void Run(int num_requests) {
    for (int i = 0; i < num_requests; ++i) {
      if (i % 50 == 0) Reopen();
      Request();
    }
    cache_->CloseSession(session_, "done");
  }
  int num_wrong() const { return num_wrong_; }
  int num_hits() const { return num_hits_; }

 private:
  void Reopen() {
    cache_->CloseSession(session_, "again");
    {
      MutexLock lock(&mu_);
      resolved_.clear();
    }
    session_ = *cache_->OpenSession(
        {.worker_id = "w",
         .shape = kShape,
         .on_resolved = [this](const PendingResolved& resolved) {
           MutexLock lock(&mu_);
           resolved_.push_back(resolved);
         }});
  }

  void Request() {
    const int module = static_cast<int>(random_() % kNumModules);
    const AcquireKey key{
        .key = KeyOf(module),
        .num_tokens = static_cast<uint32_t>(PagesOf(module) * 16)};
    absl::StatusOr<AcquireResult> result =
        cache_->Acquire(session_, {.request_id = static_cast<uint64_t>(module),
                                   .keys = {&key, 1},
                                   .reserve_missing = true});
    Use(module, result->lease, result->modules[0]);
    std::vector<PendingResolved> resolved;
    {
      MutexLock lock(&mu_);
      resolved.swap(resolved_);
    }
    for (const PendingResolved& r : resolved) {
      Use(static_cast<int>(r.request_id), r.lease, r.module);
    }
  }

  void Use(int module, LeaseId lease, const AcquiredModule& answer) {
    if (answer.outcome == Outcome::kReserved) {
      ForEachPageOf(answer.runs, [&](std::span<std::byte> page) {
        std::memset(page.data(), 1 + module, page.size());
      });
      CommitModule commit;
      commit.reservation = answer.reservation;
      commit.page_sums = *pool_->Sums(answer.runs, kPageBytes);
      commit.metadata.num_tokens = static_cast<uint32_t>(PagesOf(module) * 16);
      if (random_() % 8 == 0) {
        cache_->Abort(session_, {&answer.reservation, 1}).IgnoreError();
      } else if (!cache_->Commit(session_, {&commit, 1}).ok()) {
        ++num_wrong_;
      }
    }
    if (answer.outcome == Outcome::kHit) {
      ++num_hits_;
      ForEachPageOf(answer.runs, [&](std::span<std::byte> page) {
        if (page[page.size() - 1] != static_cast<std::byte>(1 + module)) {
          ++num_wrong_;
        }
      });
    }
    // Fails for what an earlier session of this worker was told: not an error.
    if (lease != LeaseId{}) cache_->Release(session_, lease).IgnoreError();
  }

  template <typename Fn>
  void ForEachPageOf(const PageRuns& runs, Fn fn) {
    for (const PageRun& run : runs) {
      for (uint32_t i = 0; i < run.num_pages; ++i) {
        fn(pool_->Page(run.segment, run.first_page + i, kPageBytes));
      }
    }
  }

  ModuleCache* const cache_;
  const PagePool* const pool_;
  std::mt19937 random_;
  SessionId session_{};
  int num_wrong_ = 0;
  int num_hits_ = 0;
  Mutex mu_;
  std::vector<PendingResolved> resolved_ ABSL_GUARDED_BY(mu_);
};

class CacheStressTest : public CacheFixture {};

TEST_F(CacheStressTest, WorkersMoverAndOperatorTogether) {
  Config config{.device_pages = 32, .host_pages = 16};
  config.options.demote_free_fraction = 0.25;
  config.options.default_ttl = absl::Seconds(50);
  Make(config);
  const auto watcher = events_.Watch(/*capacity=*/16, nullptr);
  mover_->Start();
  std::vector<std::unique_ptr<StressWorker>> workers;
  std::vector<std::thread> threads;
  for (uint32_t i = 0; i < 4; ++i) {
    workers.push_back(
        std::make_unique<StressWorker>(cache_.get(), pool_.get(), i));
    threads.emplace_back([w = workers.back().get()] { w->Run(1500); });
  }
  std::atomic<bool> stop{false};
  std::thread operators([&] {
    std::mt19937 random(99);
    while (!stop.load()) {
      const ModuleFilter filter{
          .keys = {KeyOf(static_cast<int>(random() % kNumModules)).ToHex()}};
      PC_EXPECT_OK(cache_->Evict(filter));
      PC_EXPECT_OK(cache_->Pin(filter, random() % 2 == 0));
      PC_EXPECT_OK(cache_->List({.include_absent = true}));
      PC_EXPECT_OK(cache_->CheckInvariants());
      clock_.Advance(absl::Seconds(1));
      while (watcher->Next().has_value()) {
      }
      cache_->Stats();
      absl::SleepFor(absl::Milliseconds(1));
    }
  });
  for (std::thread& thread : threads) thread.join();
  stop.store(true);
  operators.join();
  mover_->Stop();
  int hits = 0;
  for (const auto& worker : workers) {
    EXPECT_EQ(worker->num_wrong(), 0);
    hits += worker->num_hits();
  }
  EXPECT_GT(hits, 0);
  EXPECT_EQ(cache_->Stats().checksum_mismatches, 0u);
  EXPECT_EQ(cache_->Stats().num_sessions, 0u);
  EXPECT_EQ(cache_->Stats().num_leases, 0u);
}

}  // namespace
}  // namespace promptcache::daemon
