// The device tier on a GPU, over the stand-in of tests/cuda_on_cpu. Device
// pages are touched through streams only.
#include <cstdlib>
#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "cache_daemon/core/module_cache.h"
#include "cache_daemon/core/mover.h"
#include "cache_daemon/core/worker_device.h"
#include "common/page_sum.h"
#include "common/progress_word.h"
#include "cuda/runtime/gpus.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/support/fake_clock.h"
#include "tests/support/status_matchers.h"

namespace promptcache::daemon {
namespace {

using gpu::HandleKind;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr uint64_t kMiB = uint64_t{1} << 20;

// Before the stand-in first looks: two GPUs.
[[maybe_unused]] const int kTwoGpus = ::setenv("PC_EMU_DEVICES", "0,1", 1);
constexpr PageShape kShape{.page_bytes = 64 << 10, .page_tokens = 16};

class GpuTierTest : public ::testing::Test {
 protected:
  GpuTierTest() {
    auto device = gpu::OpenGpu(gpu::FindGpus(), "");
    PC_EXPECT_OK(device);
    device_ = *std::move(device);
    stream_ = *device_->NewStream();
    Make({HandleKind::kCudaFd, HandleKind::kCudaIpc});
  }
  ~GpuTierTest() override { PC_EXPECT_OK(cache_->CheckInvariants()); }

  void Make(const std::vector<HandleKind>& handles) {
    mover_.reset();
    cache_.reset();
    auto pool = PagePool::Create({.device_bytes = 4 * kMiB,
                                  .host_bytes = 4 * kMiB,
                                  .segment_bytes = 2 * kMiB,
                                  .devices = {device_.get()},
                                  .handles = handles});
    PC_ASSERT_OK(pool);
    pool_ = *std::move(pool);
    cache_ = *ModuleCache::Create({}, pool_.get(), &clock_, &signal_, nullptr);
    mover_ = std::make_unique<Mover>(cache_.get(), &signal_, Mover::Options{});
    session_ = *cache_->OpenSession({.worker_id = "w", .shape = kShape});
  }

  std::string Path(int module) { return "m" + std::to_string(module); }
  AcquireResult Ask(int module, uint32_t num_pages,
                    const std::string& domain = "default") {
    const std::string path = Path(module);
    const AcquireKey key{.key = Sha256Of(path + domain),
                         .num_tokens = num_pages * 16,
                         .path = path};
    return *cache_->Acquire(session_, {.keys = {&key, 1},
                                       .reserve_missing = true,
                                       .isolation_domain = domain});
  }
  // What a worker's kernels do.
  void Write(const PageRuns& runs, uint8_t value) {
    for (const PageRun& run : runs) {
      const std::vector<uint8_t> bytes(run.num_pages * kShape.page_bytes,
                                       value);
      PC_ASSERT_OK(stream_->Copy(
          pool_->Page(run.segment, run.first_page, kShape.page_bytes).data(),
          bytes.data(), bytes.size(), gpu::CopyKind::kToDevice));
      PC_ASSERT_OK(stream_->Synchronize());
    }
  }
  bool Holds(const PageRuns& runs, uint8_t value) {
    for (const PageRun& run : runs) {
      std::vector<uint8_t> bytes(run.num_pages * kShape.page_bytes);
      const std::byte* from =
          pool_->Page(run.segment, run.first_page, kShape.page_bytes).data();
      if (pool_->tier(run.segment) == Tier::kHost) {
        std::memcpy(bytes.data(), from, bytes.size());
      } else {
        PC_EXPECT_OK(stream_->Copy(bytes.data(), from, bytes.size(),
                                   gpu::CopyKind::kToHost));
        PC_EXPECT_OK(stream_->Synchronize());
      }
      if (bytes != std::vector<uint8_t>(bytes.size(), value)) return false;
    }
    return true;
  }
  uint64_t SumOf(uint8_t value) {
    return PageSum(std::vector<std::byte>(kShape.page_bytes, std::byte{value}));
  }
  // A committed module of bytes `module`, with nobody reading it.
  void Put(int module, uint32_t num_pages,
           const std::string& domain = "default") {
    const AcquireResult got = Ask(module, num_pages, domain);
    ASSERT_EQ(got.modules[0].outcome, Outcome::kReserved);
    Write(got.modules[0].runs, static_cast<uint8_t>(module));
    CommitModule commit;
    commit.reservation = got.modules[0].reservation;
    commit.page_sums.assign(num_pages, SumOf(static_cast<uint8_t>(module)));
    commit.metadata.num_tokens = num_pages * 16;
    PC_ASSERT_OK(cache_->Commit(session_, {&commit, 1}));
    PC_ASSERT_OK(cache_->Release(session_, got.lease));
    clock_.Advance(absl::Seconds(2));
  }
  void RunMover() {
    for (int i = 0; i < 100 && mover_->RunOnce(); ++i) {
    }
  }

  FakeClock clock_;
  WorkSignal signal_;
  std::unique_ptr<gpu::Device> device_;
  std::unique_ptr<gpu::Stream> stream_;
  std::unique_ptr<PagePool> pool_;
  std::unique_ptr<ModuleCache> cache_;
  std::unique_ptr<Mover> mover_;
  SessionId session_{};
};

TEST_F(GpuTierTest, StatisticsNameTheGpuAndHowItsMemoryIsMapped) {
  const CacheStats stats = cache_->Stats();
  ASSERT_EQ(stats.tiers.size(), 2u);
  EXPECT_EQ(stats.tiers[0].kind, "cuda");
  EXPECT_EQ(stats.tiers[0].device_uuid, device_->info().uuid);
  EXPECT_THAT(stats.tiers[0].handle_kinds, ElementsAre("fd", "ipc"));
  EXPECT_FALSE(stats.tiers[0].mapped_read_only);
  EXPECT_THAT(stats.tiers[1].kind,
              AllOf(HasSubstr("cpu"), HasSubstr("pinned")));
  EXPECT_THAT(stats.tiers[1].handle_kinds, ElementsAre("memfd"));
  Make({HandleKind::kCudaFd});
  EXPECT_TRUE(cache_->Stats().tiers[0].mapped_read_only);
}

TEST_F(GpuTierTest, DemotesWholeModulesAndPromotesThemAgain) {
  Put(1, 31);
  Put(2, 31);  // 62 of 64 pages: less than a sixteenth is free
  RunMover();
  EXPECT_EQ(cache_->Stats().demotions, 1u);
  const AcquireResult in_host = Ask(1, 31);
  EXPECT_EQ(in_host.modules[0].outcome, Outcome::kHit);
  EXPECT_EQ(in_host.modules[0].tier, Tier::kHost);
  EXPECT_TRUE(Holds(in_host.modules[0].runs, 1));
  PC_ASSERT_OK(cache_->Release(session_, in_host.lease));
  RunMover();
  EXPECT_EQ(cache_->Stats().promotions, 1u);
  const AcquireResult again = Ask(1, 31);
  EXPECT_EQ(again.modules[0].tier, Tier::kDevice);
  EXPECT_TRUE(Holds(again.modules[0].runs, 1));
  EXPECT_EQ(cache_->Stats().checksum_mismatches, 0u);
  PC_ASSERT_OK(cache_->Release(session_, again.lease));
}

TEST_F(GpuTierTest, AHitInTheHostTierArrivesWhileItIsRead) {
  Put(1, 31);
  Put(2, 31);
  RunMover();
  session_ = *cache_->OpenSession(
      {.worker_id = "r", .shape = kShape, .reads_arriving = true});
  const AcquireResult hit = Ask(1, 31);
  const AcquiredModule& module = hit.modules[0];
  EXPECT_EQ(module.tier, Tier::kDevice);
  ASSERT_NE(module.progress_word, 0u);
  Write(module.runs, 99);  // whatever lay there
  EXPECT_TRUE(mover_->RunOnce());
  EXPECT_TRUE(Holds(module.runs, 1));
  EXPECT_EQ(
      ProgressState(pool_->Progress(module.progress_word), module.generation),
      kProgressVerified);
  EXPECT_EQ(cache_->Stats().promotions_on_hit, 1u);
}

TEST_F(GpuTierTest, BytesThatChangedOnTheGpuAreFoundWhenTheyAreDemoted) {
  Put(1, 31);
  const AcquireResult got = Ask(1, 31);
  Write(
      {{got.modules[0].runs[0].segment, got.modules[0].runs[0].first_page, 1}},
      99);
  PC_ASSERT_OK(cache_->Release(session_, got.lease));
  clock_.Advance(absl::Seconds(2));
  Put(2, 31);
  RunMover();
  EXPECT_EQ(cache_->Stats().checksum_mismatches, 1u);
  EXPECT_EQ(Ask(1, 31).modules[0].miss_reason, MissReason::kCorrupt);
}

TEST_F(GpuTierTest, AReportIsCheckedOnTheGpusBytes) {
  Put(1, 3);
  const AcquireResult got = Ask(1, 3);
  const ModuleKey key = Sha256Of(Path(1) + "default");
  EXPECT_FALSE(cache_->ReportCorruption(key, got.modules[0].generation));
  Write(got.modules[0].runs, 7);
  EXPECT_TRUE(cache_->ReportCorruption(key, got.modules[0].generation));
  PC_ASSERT_OK(cache_->Release(session_, got.lease));
}

TEST_F(GpuTierTest, PagesThatChangeDomainAreZeroedOnTheGpu) {
  Put(1, 32, "alice");
  Put(2, 32, "alice");
  PC_ASSERT_OK(cache_->Evict({.all = true}));
  const AcquireResult got = Ask(3, 64, "bob");
  ASSERT_EQ(got.modules[0].outcome, Outcome::kReserved);
  EXPECT_TRUE(Holds(got.modules[0].runs, 0));
}

TEST_F(GpuTierTest, OptionsThatAGpuCannotHaveAreRefused) {
  const auto create = [&](uint64_t segment_bytes, HandleKind kind) {
    return PagePool::Create({.device_bytes = 4 * kMiB,
                             .segment_bytes = segment_bytes,
                             .devices = {device_.get()},
                             .handles = {kind}})
        .status();
  };
  EXPECT_THAT(create(kMiB, HandleKind::kCudaFd),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("multiple of 2097152")));
  EXPECT_THAT(create(2 * kMiB, HandleKind::kMemfd),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("handles of kind memfd")));
}

TEST_F(GpuTierTest, AWorkerIsRefusedWithWordsThatSayWhatToChange) {
  const auto refusal = [&](const WorkerDevice& worker) {
    const absl::Status status = FindWorkerDevice(worker, *pool_).status();
    EXPECT_TRUE(status.ok() || absl::IsFailedPrecondition(status)) << status;
    return std::string(status.message());
  };
  const std::string uuid = device_->info().uuid;
  const std::vector<HandleKind> all = {HandleKind::kMemfd, HandleKind::kCudaIpc,
                                       HandleKind::kCudaFd};
  EXPECT_EQ(refusal({uuid, 13000, all}), "");
  EXPECT_THAT(refusal({"CPU", 0, {HandleKind::kMemfd}}),
              HasSubstr("start the worker with --device=cuda"));
  EXPECT_THAT(refusal({"GPU-other", 13000, all}),
              HasSubstr("start the worker with --device=" + uuid));
  EXPECT_THAT(refusal({uuid, 12080, all}),
              AllOf(HasSubstr("CUDA 12.8"), HasSubstr("CUDA 13.0"),
                    HasSubstr("same driver libraries")));
  EXPECT_THAT(
      refusal({uuid, 13000, {HandleKind::kMemfd, HandleKind::kCudaIpc}}),
      AllOf(HasSubstr("kind fd"), HasSubstr("--gpu_handles=ipc")));
}

// Two GPUs of 2 MiB each, one host tier.
class TwoGpusTest : public ::testing::Test {
 protected:
  TwoGpusTest() {
    const gpu::GpuSurvey survey = gpu::FindGpus();
    PagePool::Options options{.device_bytes = 2 * kMiB,
                              .host_bytes = 4 * kMiB,
                              .segment_bytes = 2 * kMiB};
    for (const gpu::DeviceInfo& info : survey.gpus) {
      devices_.push_back(*gpu::OpenGpu(survey, info.uuid));
      options.devices.push_back(devices_.back().get());
    }
    pool_ = *PagePool::Create(options);
    cache_ = *ModuleCache::Create({}, pool_.get(), &clock_, &signal_, nullptr);
    mover_ = std::make_unique<Mover>(cache_.get(), &signal_, Mover::Options{});
    for (uint32_t i = 0; i < 2; ++i) {
      sessions_[i] = *cache_->OpenSession(
          {.worker_id = "w", .shape = kShape, .device = i});
      streams_[i] = *devices_[i]->NewStream();
    }
  }
  ~TwoGpusTest() override { PC_EXPECT_OK(cache_->CheckInvariants()); }

  AcquireResult Ask(uint32_t device, const std::string& module) {
    const AcquireKey key{
        .key = Sha256Of(module), .num_tokens = 31 * 16, .path = module};
    return *cache_->Acquire(sessions_[device],
                            {.keys = {&key, 1}, .reserve_missing = true});
  }
  // A module of 31 of the 32 pages, all bytes of that value.
  void Put(uint32_t device, const std::string& module, uint8_t value) {
    const AcquireResult got = Ask(device, module);
    ASSERT_EQ(got.modules[0].outcome, Outcome::kReserved);
    const PageRun run = got.modules[0].runs[0];
    const std::vector<uint8_t> bytes(31 * kShape.page_bytes, value);
    PC_ASSERT_OK(streams_[device]->Copy(
        pool_->Page(run.segment, run.first_page, kShape.page_bytes).data(),
        bytes.data(), bytes.size(), gpu::CopyKind::kToDevice));
    PC_ASSERT_OK(streams_[device]->Synchronize());
    CommitModule commit;
    commit.reservation = got.modules[0].reservation;
    commit.page_sums.assign(31, PageSum(std::vector<std::byte>(
                                    kShape.page_bytes, std::byte{value})));
    commit.metadata.num_tokens = 31 * 16;
    PC_ASSERT_OK(cache_->Commit(sessions_[device], {&commit, 1}));
    PC_ASSERT_OK(cache_->Release(sessions_[device], got.lease));
    clock_.Advance(absl::Seconds(2));
  }
  void RunMover() {
    for (int i = 0; i < 100 && mover_->RunOnce(); ++i) {
    }
  }

  FakeClock clock_;
  WorkSignal signal_;
  std::vector<std::unique_ptr<gpu::Device>> devices_;
  std::unique_ptr<gpu::Stream> streams_[2];
  std::unique_ptr<PagePool> pool_;
  std::unique_ptr<ModuleCache> cache_;
  std::unique_ptr<Mover> mover_;
  SessionId sessions_[2]{};
};

TEST_F(TwoGpusTest, EachHasATierThatStatisticsTellApart) {
  const CacheStats stats = cache_->Stats();
  ASSERT_EQ(stats.tiers.size(), 3u);
  for (uint32_t i = 0; i < 2; ++i) {
    EXPECT_EQ(stats.tiers[i].tier, Tier::kDevice);
    EXPECT_EQ(stats.tiers[i].device_uuid, devices_[i]->info().uuid);
    EXPECT_EQ(stats.tiers[i].capacity_bytes, 2 * kMiB);
  }
  EXPECT_NE(stats.tiers[0].device_uuid, stats.tiers[1].device_uuid);
  EXPECT_EQ(stats.tiers[2].device_uuid, "");
}

// Down from one GPU, up to the other: the right streams, and sums that hold.
TEST_F(TwoGpusTest, WhatOneDemotedTheOtherHitsAndGetsPromoted) {
  Put(0, "m", 7);  // 31 of 32 pages: at once more than is to be used
  RunMover();
  const AcquireResult hit = Ask(1, "m");
  EXPECT_EQ(hit.modules[0].outcome, Outcome::kHit);
  EXPECT_EQ(hit.modules[0].tier, Tier::kHost);
  PC_ASSERT_OK(cache_->Release(sessions_[1], hit.lease));
  ASSERT_TRUE(mover_->RunOnce());
  EXPECT_EQ(cache_->Stats().promotions, 1u);
  const AcquireResult again = Ask(1, "m");
  ASSERT_EQ(again.modules[0].tier, Tier::kDevice);
  const PageRun run = again.modules[0].runs[0];
  EXPECT_EQ(pool_->device(run.segment), 1u);
  EXPECT_EQ(cache_->Stats().checksum_mismatches, 0u);
  std::vector<uint8_t> bytes(31 * kShape.page_bytes);
  PC_ASSERT_OK(streams_[1]->Copy(
      bytes.data(),
      pool_->Page(run.segment, run.first_page, kShape.page_bytes).data(),
      bytes.size(), gpu::CopyKind::kToHost));
  PC_ASSERT_OK(streams_[1]->Synchronize());
  EXPECT_EQ(bytes, std::vector<uint8_t>(bytes.size(), 7));
  PC_ASSERT_OK(cache_->Release(sessions_[1], again.lease));
}

TEST_F(TwoGpusTest, AWorkerIsFoundByItsUuidOrToldAllOfThem) {
  const std::vector<HandleKind> all = {HandleKind::kMemfd, HandleKind::kCudaIpc,
                                       HandleKind::kCudaFd};
  for (uint32_t i = 0; i < 2; ++i) {
    EXPECT_THAT(
        FindWorkerDevice({devices_[i]->info().uuid, 13000, all}, *pool_),
        IsOkAndHolds(i));
  }
  EXPECT_THAT(FindWorkerDevice({"GPU-other", 13000, all}, *pool_),
              StatusIs(absl::StatusCode::kFailedPrecondition,
                       AllOf(HasSubstr(devices_[0]->info().uuid),
                             HasSubstr(devices_[1]->info().uuid))));
}

TEST(WorkerDeviceTest, AGpuWorkerIsRefusedByADaemonOfTheCpu) {
  const auto pool =
      *PagePool::Create({.device_bytes = 1 << 20, .segment_bytes = 1 << 20});
  EXPECT_THAT(FindWorkerDevice({"GPU-1", 13000, {HandleKind::kMemfd}}, *pool),
              StatusIs(absl::StatusCode::kFailedPrecondition,
                       HasSubstr("start the daemon with --device=cuda")));
  EXPECT_THAT(FindWorkerDevice({"CPU", 0, {HandleKind::kMemfd}}, *pool),
              IsOkAndHolds(0u));
}

}  // namespace
}  // namespace promptcache::daemon
