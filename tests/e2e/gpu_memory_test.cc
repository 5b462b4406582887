// Daemon and workers as processes of their own on an emulated GPU: memory that
// is written by one and read by others, through handles of both kinds, and what
// killing a worker at any moment leaves of it.

#include <gmock/gmock.h>
#include <signal.h>

#include <random>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "tests/e2e/node_fixture.h"
#include "tests/support/status_matchers.h"

namespace promptcache::e2e {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr absl::Duration kPatience = absl::Seconds(60);

class GpuMemoryTest : public NodeTest {
 protected:
  GpuMemoryTest() { UseEmulatedGpu(); }

  void StartGpuDaemon(const std::string& handles,
                      std::vector<std::string> flags = {}) {
    flags.insert(flags.begin(), {"--device_bytes=4MiB", "--segment_bytes=2MiB",
                                 "--gpu_handles=" + handles});
    StartDaemon(flags);
  }
  // Runs it to its end; its log.
  std::string Pages(const std::vector<std::string>& flags) {
    ChildProcess worker = StartPageWorker(flags);
    const auto ended = worker.Wait(kPatience);
    EXPECT_THAT(ended, IsOk());
    if (ended.ok()) {
      EXPECT_EQ(*ended, "exit status 0") << worker.Log();
    }
    return worker.Log();
  }
  void ExpectNothingHeld() {
    EXPECT_TRUE(Eventually(absl::Seconds(5), [&] {
      const auto stats = Stats();
      return stats.ok() && stats->num_sessions() == 0 &&
             stats->num_reservations() == 0 && stats->num_leases() == 0 &&
             DeviceTier().quarantined_bytes() == 0 &&
             DeviceTier().reserved_bytes() == 0;
    })) << Stats()->DebugString();
  }
};

class GpuHandlesTest : public GpuMemoryTest,
                       public ::testing::WithParamInterface<std::string> {};

TEST_P(GpuHandlesTest, WrittenByOneProcessAndReadInPlaceByAnother) {
  StartGpuDaemon(GetParam());
  const v1::TierStats tier = DeviceTier();
  EXPECT_EQ(tier.kind(), "cuda");
  EXPECT_THAT(tier.device_uuid(), testing::StartsWith("GPU-"));
  EXPECT_EQ(testing::PrintToString(tier.handle_kinds().size()),
            GetParam() == "fd,ipc" ? "2" : "1");
  EXPECT_EQ(tier.mapped_read_only(), GetParam() == "fd");
  EXPECT_THAT(Pages({"--count=3", "--pages=100"}),
              AllOf(HasSubstr("wrote 0"), HasSubstr("wrote 2"),
                    HasSubstr(tier.mapped_read_only() ? "mapped read-only"
                                                      : "are writable")));
  EXPECT_THAT(Pages({"--count=3", "--pages=100"}),
              AllOf(HasSubstr("read 0 in place"), HasSubstr("read 1 in place"),
                    HasSubstr("read 2 in place")));
  EXPECT_EQ(DeviceTier().used_bytes(), 300u * 4096);
}

TEST_P(GpuHandlesTest, TheStatsCommandNamesTheGpuAndTheKinds) {
  StartGpuDaemon(GetParam(), {"--host_bytes=2MiB"});
  const std::string log = dir() + "/stats.log";
  auto stats =
      ChildProcess::Start({.program = PROMPTCACHE_BIN "promptcache",
                           .args = {"stats", "--daemon", daemon_address()},
                           .log_path = log});
  PC_ASSERT_OK(stats);
  EXPECT_THAT(stats->Wait(kPatience),
              IsOkAndHolds(std::string("exit status 0")));
  EXPECT_THAT(
      stats->Log(),
      AllOf(
          HasSubstr("Emulated GPU 0 GPU-"),
          HasSubstr(GetParam() == "fd"    ? "read-only in workers (by fd)"
                    : GetParam() == "ipc" ? "writable in workers (by ipc)"
                                          : "writable in workers (by fd, ipc)"),
          HasSubstr("read-only in workers (by memfd)")));
}

// With both in turn, a module may lie in segments of both kinds.
TEST_P(GpuHandlesTest, AModuleMayFillTheWholeTier) {
  StartGpuDaemon(GetParam());
  EXPECT_THAT(Pages({"--pages=1024"}), HasSubstr("wrote 0"));
  EXPECT_THAT(Pages({"--pages=1024"}), HasSubstr("read 0 in place"));
}

INSTANTIATE_TEST_SUITE_P(Kinds, GpuHandlesTest,
                         ::testing::Values("fd", "ipc", "fd,ipc"),
                         [](const auto& test) {
                           return test.param == "fd,ipc" ? std::string("both")
                                                         : test.param;
                         });

TEST_F(GpuMemoryTest, ReadsTheHostTierThroughACopyAndThePromotedOneInPlace) {
  StartGpuDaemon("fd", {"--host_bytes=8MiB"});
  // 1000 of 1024 pages: the mover demotes the oldest.
  Pages({"--count=2", "--pages=500"});
  ASSERT_TRUE(Eventually(kPatience, [&] { return Stats()->demotions() == 1; }));
  EXPECT_THAT(Pages({"--pages=500"}), HasSubstr("read 0 through a copy"));
  ASSERT_TRUE(
      Eventually(kPatience, [&] { return Stats()->promotions() == 1; }));
  EXPECT_THAT(Pages({"--pages=500"}), HasSubstr("read 0 in place"));
  EXPECT_EQ(Stats()->checksum_mismatches(), 0u);
}

TEST_F(GpuMemoryTest, PromotesOnTheHitAndLayersAreReadAsTheyArrive) {
  // 20 MiB in four layers: three groups.
  StartGpuDaemon("fd", {"--device_bytes=32MiB", "--segment_bytes=32MiB",
                        "--host_bytes=32MiB"});
  Pages({"--pages=5120"});
  Pages({"--first=1", "--pages=2600"});  // less than 1/16 is free then
  ASSERT_TRUE(Eventually(kPatience, [&] { return Stats()->demotions() == 1; }));
  EXPECT_THAT(Pages({"--pages=5120", "--arriving"}),
              HasSubstr("read 0 as it arrived"));
  EXPECT_THAT(Pages({"--pages=5120", "--arriving"}),
              HasSubstr("read 0 in place"));
  EXPECT_EQ(Stats()->promotions_on_hit(), 1u);
  EXPECT_EQ(Stats()->checksum_mismatches(), 0u);
  ExpectNothingHeld();
}

TEST_F(GpuMemoryTest, ADaemonKilledWhileAModuleArrivesHangsNoReader) {
  // Not before its answer has come.
  const ScopedEnv file("PROMPTCACHE_FAULT_FILE", dir() + "/acquired");
  {
    ScopedEnv fault("PROMPTCACHE_FAULT", "arriving:kill");
    StartGpuDaemon("fd", {"--host_bytes=8MiB"});
  }
  Pages({"--count=2", "--pages=500"});
  ASSERT_TRUE(Eventually(kPatience, [&] { return Stats()->demotions() == 1; }));
  const ScopedEnv touch("PROMPTCACHE_FAULT", "acquired:touch");
  EXPECT_THAT(Pages({"--pages=500", "--arriving"}), HasSubstr("invalid 0"));
  EXPECT_THAT(daemon().Wait(kPatience), IsOkAndHolds(std::string("signal 9")));
}

TEST_F(GpuMemoryTest, EvictsForOthersAndWritesAgainWhatWasEvicted) {
  StartGpuDaemon("ipc");
  Pages({"--count=4", "--pages=400"});
  EXPECT_LE(DeviceTier().used_bytes(), DeviceTier().capacity_bytes());
  EXPECT_THAT(Pages({"--count=4", "--pages=400"}), HasSubstr("wrote"));
  EXPECT_THAT(Pages({"--first=3", "--pages=400"}),
              HasSubstr("read 3 in place"));
}

TEST_F(GpuMemoryTest, RefusesAWorkerOfAnotherGpuAndSaysWhatToChange) {
  StartGpuDaemon("fd");
  ScopedEnv other("PC_EMU_DEVICES", "1");
  ChildProcess worker = StartPageWorker({});
  EXPECT_TRUE(Eventually(kPatience, [&] {
    return absl::StrContains(worker.Log(),
                             "start the worker with --device=GPU-");
  })) << worker.Log();
}

TEST_F(GpuMemoryTest, RefusesAWorkerOfTheCpu) {
  StartGpuDaemon("fd");
  ChildProcess worker = StartPageWorker({"--device=cpu"});
  EXPECT_TRUE(Eventually(kPatience, [&] {
    return absl::StrContains(worker.Log(), "with --device=cuda");
  })) << worker.Log();
}

TEST_F(GpuMemoryTest, RefusesAWorkerThatCannotImportTheKind) {
  StartGpuDaemon("fd");
  ScopedEnv no_vmm("PC_EMU_NO_VMM", "1");
  ChildProcess worker = StartPageWorker({});
  EXPECT_TRUE(Eventually(kPatience, [&] {
    return absl::StrContains(worker.Log(), "--gpu_handles=ipc");
  })) << worker.Log();
}

// Every moment at which a worker may go while it has the daemon's memory.
constexpr const char* kFaultPoints[] = {"imported", "acquired", "half_written",
                                        "written",  "summed",   "committed"};

TEST_F(GpuMemoryTest, KilledAtAnyNamedMomentItGivesBackWhatItHeld) {
  StartGpuDaemon("fd,ipc");
  Pages({"--first=100", "--pages=300"});
  uint64_t used = 300 * 4096;
  int module = 0;
  for (const char* point : kFaultPoints) {
    SCOPED_TRACE(point);
    {
      ScopedEnv fault("PROMPTCACHE_FAULT", absl::StrCat(point, ":kill"));
      ChildProcess worker =
          StartPageWorker({absl::StrCat("--first=", module), "--pages=100"});
      EXPECT_THAT(worker.Wait(kPatience), IsOkAndHolds(std::string("signal 9")))
          << worker.Log();
    }
    ExpectNothingHeld();
    const bool kept = std::string(point) == "committed";
    if (kept) used += 100 * 4096;
    EXPECT_EQ(DeviceTier().used_bytes(), used);
    // What it began somebody else does; what it finished is whole.
    EXPECT_THAT(Pages({absl::StrCat("--first=", module), "--pages=100"}),
                HasSubstr(kept ? "read" : "wrote"));
    if (!kept) used += 100 * 4096;
    EXPECT_THAT(Pages({"--first=100", "--pages=300"}), HasSubstr("read 100"));
    ++module;
  }
  EXPECT_EQ(Stats()->checksum_mismatches(), 0u);
}

TEST_F(GpuMemoryTest, AReaderKilledWhileItReadsLetsGo) {
  StartGpuDaemon("ipc");
  Pages({"--pages=300"});
  ScopedEnv fault("PROMPTCACHE_FAULT", "reading:kill");
  ChildProcess worker = StartPageWorker({"--pages=300"});
  EXPECT_THAT(worker.Wait(kPatience), IsOkAndHolds(std::string("signal 9")));
  ExpectNothingHeld();
  EXPECT_EQ(DeviceTier().leased_bytes(), 0u);
}

TEST_F(GpuMemoryTest, AStoppedWritersPagesAreNotHandedOut) {
  StartGpuDaemon("fd");
  ChildProcess stopped;
  {
    ScopedEnv fault("PROMPTCACHE_FAULT", "half_written:stop");
    stopped = StartPageWorker({"--pages=500"});
  }
  ASSERT_TRUE(Eventually(
      kPatience, [&] { return DeviceTier().reserved_bytes() == 500u * 4096; }));
  // Others want more than is left; they get what is free, and never more.
  for (int i = 1; i < 5; ++i) {
    Pages({absl::StrCat("--first=", i), "--pages=300"});
    const v1::TierStats tier = DeviceTier();
    EXPECT_EQ(tier.reserved_bytes() + tier.quarantined_bytes(), 500u * 4096);
    EXPECT_LE(tier.used_bytes(), tier.capacity_bytes());
  }
  PC_ASSERT_OK(stopped.Signal(SIGKILL));
  ExpectNothingHeld();
}

// A daemon of two GPUs, workers that see one.
class TwoGpusTest : public GpuMemoryTest {
 protected:
  void StartTwoGpuDaemon(const std::string& handles) {
    ScopedEnv both("PC_EMU_DEVICES", "0,1");
    StartGpuDaemon(handles, {"--host_bytes=8MiB"});
  }
  std::string PagesOn(int gpu, const std::vector<std::string>& flags) {
    ScopedEnv one("PC_EMU_DEVICES", absl::StrCat(gpu));
    return Pages(flags);
  }
};

TEST_F(TwoGpusTest, WhatOneGpuDemotedTheOtherReadsAndGetsPromoted) {
  StartTwoGpuDaemon("fd,ipc");
  EXPECT_NE(DeviceTier(0).device_uuid(), DeviceTier(1).device_uuid());
  // 1000 of 1024 pages: the mover demotes the oldest.
  PagesOn(0, {"--count=2", "--pages=500"});
  ASSERT_TRUE(Eventually(kPatience, [&] { return Stats()->demotions() == 1; }));
  EXPECT_EQ(DeviceTier(1).used_bytes(), 0u);
  EXPECT_THAT(PagesOn(1, {"--pages=500"}), HasSubstr("read 0 through a copy"));
  ASSERT_TRUE(
      Eventually(kPatience, [&] { return Stats()->promotions() == 1; }));
  EXPECT_EQ(DeviceTier(1).used_bytes(), 500u * 4096);
  EXPECT_THAT(PagesOn(1, {"--pages=500"}), HasSubstr("read 0 in place"));
  // What lies on the other GPU alone is written again.
  EXPECT_THAT(PagesOn(1, {"--first=1", "--pages=500"}), HasSubstr("wrote 1"));
  EXPECT_THAT(PagesOn(0, {"--first=1", "--pages=500"}),
              HasSubstr("read 1 in place"));
  EXPECT_EQ(Stats()->checksum_mismatches(), 0u);
}

TEST_F(TwoGpusTest, AWorkerOfAThirdGpuIsToldBothThatAreServed) {
  StartTwoGpuDaemon("fd");
  ScopedEnv third("PC_EMU_DEVICES", "2");
  ChildProcess worker = StartPageWorker({});
  EXPECT_TRUE(Eventually(kPatience, [&] {
    const std::string log = worker.Log();
    return absl::StrContains(log, "start the worker with --device=") &&
           absl::StrContains(log, DeviceTier(0).device_uuid()) &&
           absl::StrContains(log, DeviceTier(1).device_uuid());
  })) << worker.Log();
}

TEST_F(TwoGpusTest, AKilledWorkerLeavesTheOtherGpuUntouched) {
  StartTwoGpuDaemon("ipc");
  PagesOn(0, {"--pages=300"});
  const v1::TierStats before = DeviceTier(0);
  {
    ScopedEnv one("PC_EMU_DEVICES", "1");
    ScopedEnv fault("PROMPTCACHE_FAULT", "half_written:kill");
    ChildProcess worker = StartPageWorker({"--first=1", "--pages=400"});
    EXPECT_THAT(worker.Wait(kPatience), IsOkAndHolds(std::string("signal 9")))
        << worker.Log();
  }
  ExpectNothingHeld();
  EXPECT_TRUE(Eventually(kPatience, [&] {
    return DeviceTier(1).used_bytes() == 0 &&
           DeviceTier(1).quarantined_bytes() == 0;
  }));
  EXPECT_EQ(DeviceTier(0).DebugString(), before.DebugString());
  EXPECT_THAT(PagesOn(0, {"--pages=300"}), HasSubstr("read 0 in place"));
}

TEST_F(GpuMemoryTest, RandomKillsNeverCorruptACommittedPage) {
  StartGpuDaemon("fd,ipc", {"--host_bytes=4MiB"});
  std::mt19937 random(20261130);
  for (int round = 0; round < 12; ++round) {
    const std::vector<std::string> flags = {"--count=12", "--pages=120"};
    ChildProcess victim = StartPageWorker(flags);
    ChildProcess other = StartPageWorker(flags);
    // After so many words of its own it dies, wherever it is by then.
    const size_t words = random() % 200;
    Eventually(kPatience, [&] {
      return victim.Log().size() > words || !victim.Running();
    });
    if (victim.Running()) victim.Signal(SIGKILL).IgnoreError();
    const auto ended = other.Wait(kPatience);
    EXPECT_THAT(ended, IsOkAndHolds(std::string("exit status 0")))
        << other.Log();
  }
  ExpectNothingHeld();
  EXPECT_EQ(Stats()->checksum_mismatches(), 0u);
}

}  // namespace
}  // namespace promptcache::e2e
