#include <gmock/gmock.h>

#include <nlohmann/json.hpp>

#include "common/child_process.h"
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

// A question whose answer repeats what the prompt has, so that no margin of the
// 64 tokens is small. The least that was seen: 0.80 in exact (avx2, avx512,
// avx512bf16), 0.73 in fast (avx512, avx512bf16), 0.44 in fast with avx2.
TEST_F(RealModelTest, AnExactPlanAgreesWithFullAttention) {
  auto request = Request(
      "<prompt schema=\"clerk\"><hours/><user>Continue: 1, 2, 3, 4, 5, 6, 7, "
      "8, 9, 10, 11, 12, 13, 14, 15, 16,</user></prompt>",
      64);
  const Answer warm = worker_->Generate(request);
  const Answer cached = worker_->Generate(request);
  PC_ASSERT_OK(warm.status);
  PC_ASSERT_OK(cached.status);
  EXPECT_EQ(cached.completed.exactness(), v1::EXACTNESS_EXACT);
  EXPECT_GT(cached.usage().cached_tokens(), 30u);
  request.set_attention(v1::ATTENTION_MODE_FULL);
  v1::GenerateRequest with_margins = request;
  with_margins.set_top_logprobs(2);
  const Answer full = worker_->Generate(with_margins);
  PC_ASSERT_OK(full.status);
  ASSERT_EQ(full.ids.size(), 64u);
  ASSERT_EQ(cached.ids.size(), 64u);
  size_t compared = 0;
  // Below this margin bf16 rounding may choose, and all after it differs.
  while (compared < 64 && full.margins[compared] > 0.25f) {
    EXPECT_EQ(cached.ids[compared], full.ids[compared]) << compared;
    ++compared;
  }
  EXPECT_GE(compared, 48u) << "margin " << full.margins[compared];
}

TEST(RealDemoTest, TheExactPromptIsAnsweredAlikeInEveryWay) {
  if (SmolLm2Path().empty()) {
    GTEST_SKIP() << "the real model is not there: run tools/fetch_model";
  }
  const TempDir dir;
  auto process = ChildProcess::Start(
      {.program = "/bin/sh",
       .args = {"-c", "exec \"$0\" \"$@\" 2>" + dir.path() + "/err",
                std::string(PROMPTCACHE_BIN) + "promptcache", "demo", "--json",
                "--repeats", "1", "--model", SmolLm2Path()},
       .log_path = dir.path() + "/out"});
  PC_ASSERT_OK(process);
  ASSERT_THAT(process->Wait(absl::Seconds(560)), IsOkAndHolds("exit status 0"))
      << ReadFileOrDie(dir.path() + "/err");
  const auto demo = nlohmann::json::parse(process->Log(), nullptr, false);
  ASSERT_TRUE(demo.is_object()) << process->Log();
  EXPECT_EQ(demo["exactness"], "EXACT");
  EXPECT_EQ(demo["answers_agree"], true);
  EXPECT_EQ(demo["full_answer_agrees"], true) << process->Log();
  EXPECT_GE(demo["cached_tokens"], 2000);
  EXPECT_LE(demo["fresh_tokens"], 64);
  for (const auto& answer : demo["prompts"][0]["answers"]) {
    EXPECT_THAT(answer["text"].get<std::string>(),
                ::testing::HasSubstr("Mill Lane"));
  }
}

}  // namespace
}  // namespace promptcache::e2e
