#include <gmock/gmock.h>

#include "tests/e2e/node_fixture.h"
#include "tests/support/status_matchers.h"

namespace promptcache::e2e {
namespace {

constexpr char kSchema[] =
    "<schema name=\"clerk\"><system>You answer questions about a library.\n"
    "<module name=\"hours\">The library opens at nine in the morning and "
    "closes "
    "at five in the afternoon. On Friday it closes at noon.\n</module>"
    "<module name=\"loans\">A reader may borrow three books for two weeks."
    "\n</module></system></schema>";

class RealModelTest : public NodeTest {
 protected:
  void SetUp() override {
    if (SmolLm2Path().empty()) {
      GTEST_SKIP() << "the real model is not there: run tools/fetch_model";
    }
    UseModelFile(SmolLm2Path());
    StartDaemon({"--device_bytes=128MiB"});
    worker_ = StartWorker();
    WaitAttached(worker_.get());
    PC_ASSERT_OK(worker_->PutSchema(kSchema));
  }
  std::unique_ptr<WorkerProcess> worker_;
};

TEST_F(RealModelTest, CachedEqualsBypassBitForBit) {
  const auto request = Request(
      "<prompt schema=\"clerk\"><loans/><hours/><user>How many books may I "
      "borrow?</user></prompt>",
      24);
  const Answer bypass = worker_->Generate(Bypass(request));
  const Answer created = worker_->Generate(request);
  const Answer cached = worker_->Generate(request);
  PC_ASSERT_OK(bypass.status);
  PC_ASSERT_OK(cached.status);
  EXPECT_FALSE(bypass.text.empty());
  EXPECT_EQ(cached.text, bypass.text);
  EXPECT_EQ(created.completed.logits_sha256(),
            bypass.completed.logits_sha256());
  EXPECT_EQ(cached.completed.logits_sha256(), bypass.completed.logits_sha256());
  EXPECT_EQ(cached.completed.exactness(), v1::EXACTNESS_MODULAR);
  EXPECT_GT(cached.usage().cached_tokens(), 40u);
}

TEST_F(RealModelTest, AnExactPlanAgreesWithFullAttention) {
  auto request = Request(
      "<prompt schema=\"clerk\"><hours/><user>When does the library "
      "open?</user></prompt>",
      64);
  const Answer warm = worker_->Generate(request);
  const Answer cached = worker_->Generate(request);
  PC_ASSERT_OK(warm.status);
  PC_ASSERT_OK(cached.status);
  EXPECT_EQ(cached.completed.exactness(), v1::EXACTNESS_EXACT);
  request.set_attention(v1::ATTENTION_MODE_FULL);
  v1::GenerateRequest with_margins = request;
  with_margins.set_top_logprobs(2);
  const Answer full = worker_->Generate(with_margins);
  PC_ASSERT_OK(full.status);
  ASSERT_EQ(full.ids.size(), cached.ids.size());
  for (size_t i = 0; i < full.ids.size(); ++i) {
    // Below this margin bf16 rounding may choose, and all after it differs.
    if (full.margins[i] <= 0.25f) break;
    EXPECT_EQ(cached.ids[i], full.ids[i]) << "token " << i;
  }
}

}  // namespace
}  // namespace promptcache::e2e
