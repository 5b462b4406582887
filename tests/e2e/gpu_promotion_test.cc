// Answers over modules that are in the host tier of an emulated GPU when they
// are asked for: promoted on the hit and read while they arrive, or read
// through a copy of the worker's own; and a daemon that dies or hangs over it.

#include <gmock/gmock.h>
#include <signal.h>

#include <algorithm>
#include <optional>

#include "absl/strings/str_cat.h"
#include "tests/e2e/node_fixture.h"
#include "tests/support/status_matchers.h"

namespace promptcache::e2e {
namespace {

using ::testing::Contains;
using ::testing::HasSubstr;

constexpr absl::Duration kPatience = absl::Seconds(60);
constexpr char kPrompt[] =
    "<prompt schema=\"lib\"><c/><a/><user>When does it open?</user></prompt>";
// The device tier; the model's pages have as many bytes as those of the
// page worker.
constexpr int kDevicePages = 1024;

class GpuPromotionTest : public NodeTest {
 protected:
  // `fault` is the daemon's; while a module arrives it waits for a worker that
  // has the answer. Everything of the schema is in the host tier, and
  // `free_pages` of the device tier are free (those that the mover keeps, or
  // none).
  void Start(const std::string& fault, bool free_pages) {
    UseEmulatedGpu();
    UseTinyModel();
    {
      std::optional<ScopedEnv> env;
      if (!fault.empty()) env.emplace("PROMPTCACHE_FAULT", fault);
      StartDaemon({absl::StrCat("--device_bytes=", kDevicePages * PageBytes()),
                   absl::StrCat("--segment_bytes=", kDevicePages * PageBytes()),
                   "--host_bytes=16MiB"});
    }
    const auto first = StartGpuWorker();
    PC_ASSERT_OK(first->PutSchema(SmallSchema("lib")));
    PC_ASSERT_OK(first->Generate(Request(kPrompt, 1)).status);
    bypass_ = first->Generate(Bypass(Request(kPrompt, 6)));
    PC_ASSERT_OK(bypass_.status);
    holder_ = StartPageWorker({"--pages=970", "--hold"});
    ASSERT_TRUE(Eventually(kPatience, [&] { return AllInHost("lib"); }));
    if (free_pages) return;
    rest_ = StartPageWorker({"--first=1", "--pages=54", "--hold"});
    ASSERT_TRUE(Eventually(kPatience, [&] {
      return DeviceTier().used_bytes() == kDevicePages * PageBytes();
    }));
  }
  std::unique_ptr<WorkerProcess> StartGpuWorker() {
    auto worker = StartWorker({"--device=cuda", "--batch_invariant",
                               "--acquire_timeout=30s", "--tail_bytes=16MiB"});
    WaitAttached(worker.get());
    return worker;
  }
  void ExpectTheSame(const Answer& answer) {
    PC_ASSERT_OK(answer.status);
    EXPECT_EQ(answer.ids, bypass_.ids);
    EXPECT_EQ(answer.completed.logits_sha256(),
              bypass_.completed.logits_sha256());
  }

  Answer bypass_;
  ChildProcess holder_;
  ChildProcess rest_;
};

TEST_F(GpuPromotionTest, AHitInTheHostTierIsReadWhileItArrives) {
  ASSERT_NO_FATAL_FAILURE(Start("", /*free_pages=*/true));
  const auto worker = StartGpuWorker();
  const Answer answer = worker->Generate(Request(kPrompt, 6));
  ExpectTheSame(answer);
  EXPECT_GT(answer.usage().cached_tokens(), 0u);
  EXPECT_EQ(answer.usage().created_tokens(), 0u);
  EXPECT_LE(answer.completed.timings().arrival_ms(),
            answer.completed.timings().prefill_ms());
  EXPECT_GT(TierNow(v1::TIER_HOST).hit_tokens(), 0u);
  EXPECT_GT(Stats()->promotions_on_hit(), 0u);
  EXPECT_EQ(Stats()->promotions_on_hit(), Stats()->promotions());
  EXPECT_EQ(Stats()->checksum_mismatches(), 0u);
}

TEST_F(GpuPromotionTest, WithoutFreePagesItIsReadThroughACopy) {
  ASSERT_NO_FATAL_FAILURE(Start("", /*free_pages=*/false));
  const auto worker = StartGpuWorker();
  const Answer answer = worker->Generate(Request(kPrompt, 6));
  ExpectTheSame(answer);
  EXPECT_GT(answer.usage().cached_tokens(), 0u);
  EXPECT_EQ(Stats()->promotions_on_hit(), 0u);
}

TEST_F(GpuPromotionTest, ADaemonKilledWhileAModuleArrivesCostsTimeOnly) {
  const ScopedEnv file("PROMPTCACHE_FAULT_FILE", dir() + "/acquired");
  ASSERT_NO_FATAL_FAILURE(Start("arriving:kill", /*free_pages=*/true));
  const ScopedEnv touch("PROMPTCACHE_FAULT", "acquired:touch");
  const auto worker = StartGpuWorker();
  const Answer answer = worker->Generate(Request(kPrompt, 6));
  ExpectTheSame(answer);
  EXPECT_EQ(answer.usage().cached_tokens(), 0u);
  EXPECT_THAT(answer.completed.notices(), Contains(HasSubstr("recomputed")));
  EXPECT_THAT(daemon().Wait(kPatience), IsOkAndHolds(std::string("signal 9")));
}

TEST_F(GpuPromotionTest, ADaemonThatHangsWhileAModuleArrivesCostsTimeOnly) {
  const ScopedEnv file("PROMPTCACHE_FAULT_FILE", dir() + "/acquired");
  ASSERT_NO_FATAL_FAILURE(Start("arriving:stop", /*free_pages=*/true));
  const ScopedEnv touch("PROMPTCACHE_FAULT", "acquired:touch");
  const auto worker = StartGpuWorker();
  const Answer answer = worker->Generate(Request(kPrompt, 6));
  ExpectTheSame(answer);
  EXPECT_EQ(answer.usage().cached_tokens(), 0u);
  EXPECT_THAT(answer.completed.notices(), Contains(HasSubstr("recomputed")));
  PC_EXPECT_OK(daemon().Signal(SIGKILL));
}

}  // namespace
}  // namespace promptcache::e2e
