// How long ModuleCache takes to answer one Acquire of 64 modules, in process,
// with 1,000 and 1,000,000 modules in memory:
//   build/bin/cache_bench
#include <cstring>
#include <memory>
#include <random>
#include <utility>
#include <vector>

#include "benchmark/benchmark.h"
#include "cache_daemon/core/module_cache.h"
#include "glog/logging.h"

namespace promptcache::daemon {
namespace {

constexpr uint64_t kPageBytes = 64;  // so that a million fit 64 MiB
constexpr size_t kBatch = 64;

ModuleKey KeyNumber(uint64_t n) {
  ModuleKey key;
  uint64_t z = (n + 1) * 0x9e3779b97f4a7c15ULL;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ULL;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebULL;
  z ^= z >> 31;
  std::memcpy(key.bytes.data(), &z, sizeof(z));
  std::memcpy(key.bytes.data() + sizeof(z), &n, sizeof(n));
  return key;
}

class FullCache {
 public:
  explicit FullCache(uint64_t num_modules) : num_modules_(num_modules) {
    absl::StatusOr<std::unique_ptr<PagePool>> pool =
        PagePool::Create({.device_bytes = uint64_t{64} << 20,
                          .segment_bytes = uint64_t{64} << 20,
                          .min_page_bytes = kPageBytes});
    CHECK(pool.ok()) << pool.status();
    pool_ = *std::move(pool);
    cache_ = *ModuleCache::Create({}, pool_.get(), &clock_, nullptr, nullptr);
    session_ = *cache_->OpenSession(
        {.shape = {.page_bytes = kPageBytes, .page_tokens = 16}});
    for (uint64_t first = 0; first < num_modules; first += kBatch) Add(first);
  }

  std::vector<AcquireKey> RandomKeys() {
    std::vector<AcquireKey> keys(kBatch);
    for (AcquireKey& key : keys) {
      key = {.key = KeyNumber(random_() % num_modules_), .num_tokens = 16};
    }
    return keys;
  }
  AcquireResult Acquire(const std::vector<AcquireKey>& keys, bool reserve) {
    return *cache_->Acquire(
        session_,
        {.keys = keys, .reserve_missing = reserve, .schema = "schema"});
  }
  void Release(LeaseId lease) {
    const absl::Status status = cache_->Release(session_, lease);
    CHECK(status.ok()) << status;
  }
  void Add(uint64_t first) {
    std::vector<AcquireKey> keys(kBatch);
    for (size_t i = 0; i < kBatch; ++i) {
      keys[i] = {.key = KeyNumber(first + i), .num_tokens = 16, .path = "m"};
    }
    const AcquireResult result = Acquire(keys, /*reserve=*/true);
    std::vector<CommitModule> commits(kBatch);
    for (size_t i = 0; i < kBatch; ++i) {
      commits[i].reservation = result.modules[i].reservation;
      commits[i].page_sums = {1};
      commits[i].metadata.num_tokens = 16;
    }
    CHECK(cache_->Commit(session_, commits).ok());
    Release(result.lease);
  }
  uint64_t num_modules() const { return num_modules_; }

 private:
  const uint64_t num_modules_;
  RealClock clock_;
  std::unique_ptr<PagePool> pool_;
  std::unique_ptr<ModuleCache> cache_;
  SessionId session_{};
  std::mt19937_64 random_{1};
};

// The setting up of a million takes seconds: once for all repetitions.
FullCache& CacheOf(uint64_t num_modules) {
  static std::unique_ptr<FullCache> cache;
  if (cache == nullptr || cache->num_modules() != num_modules) {
    cache.reset();
    cache = std::make_unique<FullCache>(num_modules);
  }
  return *cache;
}

void BM_Acquire64Hits(benchmark::State& state) {
  FullCache& cache = CacheOf(static_cast<uint64_t>(state.range(0)));
  for (auto _ : state) {
    const std::vector<AcquireKey> keys = cache.RandomKeys();
    const absl::Time start = absl::Now();
    const AcquireResult result = cache.Acquire(keys, /*reserve=*/false);
    state.SetIterationTime(absl::ToDoubleSeconds(absl::Now() - start));
    CHECK(result.modules[kBatch - 1].outcome == Outcome::kHit);
    cache.Release(result.lease);
  }
}
BENCHMARK(BM_Acquire64Hits)
    ->Arg(1'000)
    ->Arg(1'000'000)
    ->UseManualTime()
    ->Unit(benchmark::kMicrosecond);

void BM_Release64(benchmark::State& state) {
  FullCache& cache = CacheOf(static_cast<uint64_t>(state.range(0)));
  for (auto _ : state) {
    const AcquireResult result =
        cache.Acquire(cache.RandomKeys(), /*reserve=*/false);
    const absl::Time start = absl::Now();
    cache.Release(result.lease);
    state.SetIterationTime(absl::ToDoubleSeconds(absl::Now() - start));
  }
}
BENCHMARK(BM_Release64)
    ->Arg(1'000)
    ->Arg(1'000'000)
    ->UseManualTime()
    ->Unit(benchmark::kMicrosecond);

// Reserves, commits and releases 64 new modules; at a million with evictions.
void BM_Create64(benchmark::State& state) {
  FullCache& cache = CacheOf(static_cast<uint64_t>(state.range(0)));
  static uint64_t next = 10'000'000;
  for (auto _ : state) {
    cache.Add(next);
    next += kBatch;
  }
}
BENCHMARK(BM_Create64)
    ->Arg(1'000)
    ->Arg(1'000'000)
    ->Unit(benchmark::kMicrosecond);

}  // namespace
}  // namespace promptcache::daemon

BENCHMARK_MAIN();
