// The whole CUDA path as real processes on an emulated GPU: a daemon and
// workers whose engine runs there, modules that one encodes and others read.

#include <gmock/gmock.h>
#include <signal.h>

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "common/rpc/grpc_status.h"
#include "tests/e2e/node_fixture.h"
#include "tests/support/status_matchers.h"

namespace promptcache::e2e {
namespace {

constexpr char kPrompt[] =
    "<prompt schema=\"lib\"><c/><a/><user>When does it open?</user></prompt>";
// What bf16 activations may move a logit of the random models by.
constexpr float kSafeMargin = 0.2f;

class GpuGenerateTest : public NodeTest,
                        public ::testing::WithParamInterface<std::string> {
 protected:
  void SetUp() override {
    UseEmulatedGpu();
    UseTinyModel();
    StartDaemon({"--device_bytes=16MiB", "--segment_bytes=4MiB",
                 "--gpu_handles=" + GetParam()});
  }
  std::unique_ptr<WorkerProcess> StartGpuWorker(
      std::vector<std::string> flags = {}) {
    flags.insert(flags.end(), {"--device=cuda", "--batch_invariant",
                               "--acquire_timeout=30s", "--tail_bytes=16MiB"});
    auto worker = StartWorker(flags);
    WaitAttached(worker.get());
    return worker;
  }
};

TEST_P(GpuGenerateTest, AModuleOfOneWorkerIsReadInPlaceByAnother) {
  const auto first = StartGpuWorker();
  PC_ASSERT_OK(first->PutSchema(SmallSchema("lib")));
  const Answer bypass = first->Generate(Bypass(Request(kPrompt, 6)));
  const Answer created = first->Generate(Request(kPrompt, 6));
  const auto second = StartGpuWorker();
  const Answer cached = second->Generate(Request(kPrompt, 6));
  for (const Answer* answer : {&bypass, &created, &cached}) {
    PC_ASSERT_OK(answer->status);
    EXPECT_EQ(answer->ids, bypass.ids);
    EXPECT_EQ(answer->completed.logits_sha256(),
              bypass.completed.logits_sha256());
  }
  EXPECT_EQ(bypass.usage().cached_tokens(), 0u);
  EXPECT_GT(created.usage().created_tokens(), 0u);
  EXPECT_EQ(cached.usage().cached_tokens(), created.usage().created_tokens());
  EXPECT_EQ(cached.usage().created_tokens(), 0u);
  EXPECT_EQ(DeviceTier().kind(), "cuda");
  EXPECT_GT(DeviceTier().used_bytes(), 0u);
}

// Until a choice that was close: from there on they may differ.
TEST_P(GpuGenerateTest, TokensAreThoseOfTheCpu) {
  const auto gpu = StartGpuWorker();
  PC_ASSERT_OK(gpu->PutSchema(SmallSchema("lib")));
  const v1::GenerateRequest request = Request(kPrompt, 12);
  PC_ASSERT_OK(gpu->Generate(request).status);
  const Answer cached = gpu->Generate(request);
  PC_ASSERT_OK(cached.status);
  EXPECT_GT(cached.usage().cached_tokens(), 0u);
  const auto cpu = StartWorker({"--device=cpu", "--numerics=exact"});
  const Answer expected = cpu->Generate(Bypass(request));
  PC_ASSERT_OK(expected.status);
  ASSERT_EQ(expected.margins.size(), expected.ids.size());
  size_t compared = 0;
  while (compared < std::min(expected.ids.size(), cached.ids.size()) &&
         expected.margins[compared] > kSafeMargin) {
    EXPECT_EQ(cached.ids[compared], expected.ids[compared]) << compared;
    ++compared;
  }
  EXPECT_GT(compared, 0u);
}

// Without log-probabilities no logits come back from the GPU: the tokens are
// those that the worker would sample from them.
TEST_P(GpuGenerateTest, TokensChosenOnTheGpuAreTheSamplers) {
  const auto gpu = StartGpuWorker();
  PC_ASSERT_OK(gpu->PutSchema(SmallSchema("lib")));
  v1::GenerateRequest request = Request(kPrompt, 12);
  for (const float temperature : {0.0f, 0.8f}) {
    request.mutable_sampling()->set_temperature(temperature);
    request.mutable_sampling()->set_repetition_penalty(1.2f);
    request.mutable_sampling()->set_seed(5);
    request.set_top_logprobs(1);
    const Answer sampled = gpu->Generate(request);
    PC_ASSERT_OK(sampled.status);
    request.set_top_logprobs(0);
    const Answer chosen = gpu->Generate(request);
    PC_ASSERT_OK(chosen.status);
    EXPECT_EQ(chosen.ids, sampled.ids) << temperature;
    EXPECT_TRUE(chosen.completed.logits_sha256().empty());
  }
}

// A daemon of two GPUs, and a worker on each.
class TwoGpusGenerateTest : public NodeTest {
 protected:
  void SetUp() override {
    UseEmulatedGpu();
    UseTinyModel();
    ScopedEnv both("PC_EMU_DEVICES", "0,1");
    StartDaemon(
        {"--device_bytes=4MiB", "--segment_bytes=2MiB", "--host_bytes=32MiB"});
  }
  std::unique_ptr<WorkerProcess> StartWorkerOn(int gpu) {
    ScopedEnv one("PC_EMU_DEVICES", absl::StrCat(gpu));
    auto worker = StartWorker({"--device=cuda", "--batch_invariant",
                               "--acquire_timeout=30s", "--tail_bytes=16MiB"});
    WaitAttached(worker.get());
    return worker;
  }
  // Holds so much of that GPU that all of the schema is demoted.
  ChildProcess Press(int gpu) {
    ScopedEnv one("PC_EMU_DEVICES", absl::StrCat(gpu));
    ChildProcess holder = StartPageWorker({"--pages=970", "--hold"});
    EXPECT_TRUE(
        Eventually(absl::Seconds(60), [&] { return AllInHost("lib"); }));
    return holder;
  }
};

TEST_F(TwoGpusGenerateTest, EachComputesItsOwnWithTheSameTokens) {
  const auto first = StartWorkerOn(0);
  const auto second = StartWorkerOn(1);
  PC_ASSERT_OK(first->PutSchema(SmallSchema("lib")));
  const Answer bypass = first->Generate(Bypass(Request(kPrompt, 6)));
  for (WorkerProcess* worker : {first.get(), second.get()}) {
    const Answer created = worker->Generate(Request(kPrompt, 6));
    const Answer cached = worker->Generate(Request(kPrompt, 6));
    PC_ASSERT_OK(created.status);
    PC_ASSERT_OK(cached.status);
    EXPECT_GT(created.usage().created_tokens(), 0u);
    EXPECT_EQ(cached.usage().cached_tokens(), created.usage().created_tokens());
    for (const Answer* answer : {&created, &cached}) {
      EXPECT_EQ(answer->ids, bypass.ids);
      EXPECT_EQ(answer->completed.logits_sha256(),
                bypass.completed.logits_sha256());
    }
    const auto reason = worker == first.get() ? v1::MISS_REASON_NEVER_SEEN
                                              : v1::MISS_REASON_ON_OTHER_DEVICE;
    EXPECT_EQ(created.started.misses(0).reason(), reason);
  }
  EXPECT_EQ(DeviceTier(0).used_bytes(), DeviceTier(1).used_bytes());
  for (const v1::Module& module : Modules(false)) {
    EXPECT_EQ(module.placements_size(), 2) << module.DebugString();
  }
  PC_ASSERT_OK(first->process().Signal(SIGKILL));
  EXPECT_TRUE(Eventually(absl::Seconds(30),
                         [&] { return Stats()->num_sessions() == 1; }));
  const Answer after = second->Generate(Request(kPrompt, 6));
  EXPECT_EQ(after.ids, bypass.ids);
  EXPECT_EQ(after.usage().created_tokens(), 0u);
}

TEST_F(TwoGpusGenerateTest, WhatOneDemotedTheOtherHits) {
  const auto first = StartWorkerOn(0);
  PC_ASSERT_OK(first->PutSchema(SmallSchema("lib")));
  const Answer created = first->Generate(Request(kPrompt, 6));
  PC_ASSERT_OK(created.status);
  const ChildProcess holder = Press(0);
  EXPECT_EQ(DeviceTier(1).used_bytes(), 0u);
  const auto second = StartWorkerOn(1);
  const Answer hit = second->Generate(Request(kPrompt, 6));
  PC_ASSERT_OK(hit.status);
  EXPECT_EQ(hit.usage().created_tokens(), 0u);
  EXPECT_EQ(hit.usage().cached_tokens(), created.usage().created_tokens());
  EXPECT_EQ(hit.ids, created.ids);
  EXPECT_EQ(hit.completed.logits_sha256(), created.completed.logits_sha256());
}

INSTANTIATE_TEST_SUITE_P(Handles, GpuGenerateTest,
                         ::testing::Values("ipc", "fd"),
                         [](const auto& test) { return test.param; });

}  // namespace
}  // namespace promptcache::e2e
