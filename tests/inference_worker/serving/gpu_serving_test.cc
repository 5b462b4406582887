// The scheduler over the engine on an emulated GPU, modules in its memory.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <utility>

#include "inference_worker/engine/cuda_backend.h"
#include "tests/inference_worker/engine/test_gpu.h"
#include "tests/inference_worker/engine/tiny_model.h"
#include "tests/inference_worker/serving/serving_fixture.h"
#include "tests/support/status_matchers.h"

namespace promptcache::worker {
namespace {

// Calls back before each pass.
class HookedBackend final : public Backend {
 public:
  explicit HookedBackend(std::unique_ptr<Backend> model)
      : model_(std::move(model)) {}
  void SetHook(std::function<void()> hook) { hook_ = std::move(hook); }

  absl::Status Forward(std::span<const RowGroup> groups,
                       std::vector<float>* logits) override {
    if (hook_) hook_();
    return model_->Forward(groups, logits);
  }
  const KvLayout& layout() const override { return model_->layout(); }
  uint32_t vocab_size() const override { return model_->vocab_size(); }
  uint32_t context_length() const override { return model_->context_length(); }
  const std::string& numerics() const override { return model_->numerics(); }
  uint32_t num_threads() const override { return model_->num_threads(); }
  bool chooses_tokens() const override { return model_->chooses_tokens(); }

 private:
  const std::unique_ptr<Backend> model_;
  std::function<void()> hook_;
};

std::unique_ptr<Backend> SmallCudaBackend() {
  TinyLlamaSpec spec = OddSpec();
  spec.layers = 2;
  spec.heads = 2;
  spec.kv_heads = 1;
  spec.head_dim = 64;
  auto backend =
      CreateCudaBackend(*TinyModelFile(spec), {.device = TestGpu(),
                                               .batch_invariant = true,
                                               .invariant_rows = 16,
                                               .page_tokens = 8});
  PC_EXPECT_OK(backend);
  return *std::move(backend);
}

// With and without log-probabilities: logits come back, or tokens do.
class GpuServingTest : public ::testing::TestWithParam<uint32_t> {
 protected:
  GpuServingTest()
      : backend_(SmallCudaBackend()),
        pages_(Pool(backend_, 400)),
        cache_(backend_.layout(), TestGpu()),
        client_(cache_.NewClient()),
        scheduler_(*Scheduler::Create({}, &backend_, pages_.get(), &tokenizer_,
                                      client_.get())) {}
  ~GpuServingTest() override {
    EXPECT_TRUE(scheduler_->Drain(absl::Now() + absl::Seconds(20)));
    EXPECT_EQ(pages_->free_pages(), pages_->capacity_pages());
    scheduler_.reset();
    EXPECT_EQ(cache_.counters().live_leases, 0u);
    EXPECT_EQ(cache_.counters().bad_sums, 0u);
  }

  std::shared_ptr<RecordingSink> Run(CacheMode mode) {
    GenerationRequest request = Request(PlanBuilder::Exact(7), 9);
    request.cache_mode = mode;
    request.top_logprobs = GetParam();
    request.sampling = {.temperature = 1, .top_k = 50, .seed = 2};
    auto sink = std::make_shared<RecordingSink>();
    PC_EXPECT_OK(scheduler_->Submit(std::move(request), sink));
    EXPECT_TRUE(sink->WaitDone());
    PC_EXPECT_OK(sink->status());
    return sink;
  }

  HookedBackend backend_;
  LetterTokenizer tokenizer_;
  std::unique_ptr<PrivatePages> pages_;
  FakeCache cache_;
  std::unique_ptr<CacheClient> client_;
  std::unique_ptr<Scheduler> scheduler_;
};

TEST_P(GpuServingTest, CreatedCachedAndBypassedAnswersAreEqual) {
  const auto bypassed = Run(CacheMode::kBypass);
  const auto created = Run(CacheMode::kReadWrite);
  const auto cached = Run(CacheMode::kReadWrite);
  EXPECT_GT(created->completed().usage.created_tokens, 0u);
  EXPECT_GT(cached->completed().usage.cached_tokens, 0u);
  for (const auto& sink : {created, cached}) {
    EXPECT_EQ(sink->tokens(), bypassed->tokens());
    EXPECT_EQ(sink->completed().logits_sha256,
              bypassed->completed().logits_sha256);
  }
}

// The kernels of a step read pages that are another module's by then: nothing
// of that step may be used.
TEST_P(GpuServingTest, AStepOverPagesThatWereTakenIsDiscarded) {
  const auto bypassed = Run(CacheMode::kBypass);
  Run(CacheMode::kReadWrite);
  for (const int taken_in_pass : {1, 4}) {
    int passes = 0;
    backend_.SetHook([&] {
      if (++passes == taken_in_pass) cache_.RevokeAll();
    });
    const auto sink = Run(CacheMode::kReadWrite);
    backend_.SetHook({});
    EXPECT_EQ(sink->tokens(), bypassed->tokens()) << taken_in_pass;
    EXPECT_EQ(sink->completed().logits_sha256,
              bypassed->completed().logits_sha256);
    EXPECT_EQ(sink->completed().usage.cached_tokens, 0u);
    Run(CacheMode::kReadWrite);
  }
  EXPECT_EQ(scheduler_->stats().discarded_steps, 2u);
}

// For want of pages; kernels are told of a tail that grows.
TEST_P(GpuServingTest, APausedRequestAnswersAsAnUndisturbedOne) {
  std::vector<GenerationRequest> requests;
  for (uint32_t seed = 1; seed <= 2; ++seed) {
    PlanBuilder b(seed);
    b.PlaceFresh(0, b.Tokens(10));
    requests.push_back(Request(b.Build(), 20));
    requests.back().top_logprobs = GetParam();
  }
  std::vector<std::shared_ptr<RecordingSink>> alone;
  for (const GenerationRequest& request : requests) {
    alone.push_back(std::make_shared<RecordingSink>());
    PC_ASSERT_OK(scheduler_->Submit(request, alone.back()));
    ASSERT_TRUE(alone.back()->WaitDone());
  }
  scheduler_.reset();
  pages_ = Pool(backend_, 6);  // of 8 tokens; each needs four
  scheduler_ = *Scheduler::Create({}, &backend_, pages_.get(), &tokenizer_,
                                  client_.get());
  Gate both;
  backend_.SetHook([&] { both.Wait(); });
  std::vector<std::shared_ptr<RecordingSink>> sinks;
  for (const GenerationRequest& request : requests) {
    sinks.push_back(std::make_shared<RecordingSink>());
    PC_ASSERT_OK(scheduler_->Submit(request, sinks.back()));
  }
  both.Open();
  for (size_t i = 0; i < sinks.size(); ++i) {
    ASSERT_TRUE(sinks[i]->WaitDone());
    PC_EXPECT_OK(sinks[i]->status());
    EXPECT_EQ(sinks[i]->tokens(), alone[i]->tokens());
    EXPECT_EQ(sinks[i]->completed().logits_sha256,
              alone[i]->completed().logits_sha256);
  }
  EXPECT_EQ(scheduler_->stats().preemptions, 1u);
}

INSTANTIATE_TEST_SUITE_P(TopLogprobs, GpuServingTest, ::testing::Values(0, 1),
                         ::testing::PrintToStringParamName());

}  // namespace
}  // namespace promptcache::worker
