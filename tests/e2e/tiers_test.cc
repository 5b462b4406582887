#include <gmock/gmock.h>

#include "absl/strings/str_cat.h"
#include "tests/e2e/node_fixture.h"
#include "tests/support/status_matchers.h"

namespace promptcache::e2e {
namespace {

// Each module has about 12 pages: less than the sixteenth of the device tier
// that demotion keeps free, so that nobody has to evict who asks after the
// mover is done. All of them together are more than the device tier.
constexpr int kDevicePages = 256;
constexpr int kFreePages = kDevicePages / 16;
constexpr int kModules = 28;

std::string Schema(int i) {
  return absl::StrCat("<schema name=\"s", i, "\"><module name=\"m\">Number ", i,
                      ". ", Words(30), "</module></schema>");
}

v1::GenerateRequest Prompt(const std::string& schema) {
  return Request(
      absl::StrCat("<prompt schema=\"", schema, "\"><m/>And then</prompt>"), 3);
}

class TiersTest : public NodeTest {
 protected:
  void SetUp() override {
    UseTinyModel();
    const uint64_t device = kDevicePages * PageBytes();
    StartDaemon({absl::StrCat("--device_bytes=", device),
                 absl::StrCat("--host_bytes=", 4 * device),
                 absl::StrCat("--segment_bytes=", device)});
    worker_ = StartWorker({"--verify=always"});
    WaitAttached(worker_.get());
  }
  // Asks for one module after the other, and waits each time until the mover
  // has made room again.
  void FillBothTiers() {
    for (int i = 0; i < kModules; ++i) {
      PC_ASSERT_OK(worker_->PutSchema(Schema(i)));
      PC_ASSERT_OK(worker_->Generate(Prompt(absl::StrCat("s", i))).status);
      ASSERT_TRUE(Eventually(absl::Seconds(30), [&] {
        return DeviceTier().used_bytes() <=
               (kDevicePages - kFreePages) * PageBytes();
      }));
    }
  }
  v1::Tier TierOf(const std::string& schema) {
    for (const v1::Module& module : Modules(false)) {
      if (module.schema() == schema) return module.tier();
    }
    return v1::TIER_UNSPECIFIED;
  }
  // The schema of a module that was demoted.
  std::string Demoted() {
    for (const v1::Module& module : Modules(false)) {
      if (module.tier() == v1::TIER_HOST) return module.schema();
    }
    return "";
  }
  std::unique_ptr<WorkerProcess> worker_;
};

TEST_F(TiersTest, DemotedModulesAreHitsAndComeBackUnchanged) {
  ASSERT_NO_FATAL_FAILURE(FillBothTiers());
  auto stats = Stats();
  PC_ASSERT_OK(stats);
  EXPECT_GT(stats->demotions(), 0u);
  EXPECT_EQ(stats->promotions(), 0u);
  EXPECT_EQ(Modules(false).size(), size_t{kModules});  // none was dropped
  EXPECT_EQ(TierNow(v1::TIER_HOST).hit_tokens(), 0u);
  const std::string schema = Demoted();
  ASSERT_NE(schema, "");
  const Answer bypass = worker_->Generate(Bypass(Prompt(schema)));
  PC_ASSERT_OK(bypass.status);

  // Read where it is, then promoted once nobody reads it.
  const Answer from_host = worker_->Generate(Prompt(schema));
  PC_ASSERT_OK(from_host.status);
  EXPECT_GT(from_host.usage().cached_tokens(), 100u);
  EXPECT_EQ(TierNow(v1::TIER_HOST).hit_tokens(),
            from_host.usage().cached_tokens());
  ASSERT_TRUE(Eventually(absl::Seconds(30),
                         [&] { return TierOf(schema) == v1::TIER_DEVICE; }));
  const Answer promoted = worker_->Generate(Prompt(schema));
  PC_ASSERT_OK(promoted.status);
  for (const Answer* answer : {&from_host, &promoted}) {
    EXPECT_EQ(answer->usage().created_tokens(), 0u);
    EXPECT_EQ(answer->usage().cached_tokens(),
              from_host.usage().cached_tokens());
    EXPECT_EQ(answer->completed.logits_sha256(),
              bypass.completed.logits_sha256());
  }
  stats = Stats();
  PC_ASSERT_OK(stats);
  EXPECT_GT(stats->promotions(), 0u);
  EXPECT_EQ(stats->checksum_mismatches(), 0u);
  EXPECT_LE(DeviceTier().used_bytes(), DeviceTier().capacity_bytes());
}

}  // namespace
}  // namespace promptcache::e2e
