#pragma once

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "inference_worker/serving/prompt_compiler.h"
#include "inference_worker/serving/scheduler.h"
#include "tests/inference_worker/serving/fake_cache.h"
#include "tests/inference_worker/serving/serving_fixture.h"
#include "tests/support/status_matchers.h"

namespace promptcache::worker {

struct PromptCase {
  const char* name;
  const char* pml;
};

// The scheduler over a real engine. `Model` has `file`, `tokenizer` and
// `backend`; it is loaded once, since packing the weights is most of a test's
// time. After every test all pages, leases and reservations have come back.
template <typename Model>
class ServedModelTest : public ::testing::Test {
 protected:
  static constexpr uint64_t kTailBytes = 16 << 20;

  static void SetUpTestSuite() { model_ = new Model(); }
  static void TearDownTestSuite() { delete std::exchange(model_, nullptr); }

  ServedModelTest()
      : cache_(model_->backend->layout()), client_(cache_.NewClient()) {
    Start({});
  }
  ~ServedModelTest() override {
    EXPECT_TRUE(scheduler_->Drain(absl::Now() + absl::Seconds(20)));
    EXPECT_EQ(pages_->free_pages(), pages_->capacity_pages());
    scheduler_.reset();
    EXPECT_EQ(cache_.counters().live_leases, 0u);
    EXPECT_EQ(cache_.counters().live_reservations, 0u);
    EXPECT_EQ(cache_.counters().bad_sums, 0u);
  }

  // REQUIRES: before the first prompt. `schemas` may be null, and is asked as
  // long as prompts are made.
  void CompileWith(const char* chat_template, SchemaSource* schemas,
                   bool separate_segments = false) {
    PromptCompiler::Options options;
    options.identity.tokenizer_digest = model_->tokenizer->digest();
    options.identity.layout = model_->backend->layout();
    options.context_length = 2048;
    options.separate_segments = separate_segments;
    compiler_ = std::make_unique<PromptCompiler>(
        options, model_->tokenizer.get(),
        *ChatTemplate::FromName(chat_template), schemas);
  }
  // Anew, and over another cache when `client` is not null.
  void Start(const Scheduler::Options& options,
             uint64_t tail_bytes = kTailBytes, CacheClient* client = nullptr) {
    scheduler_.reset();
    pages_ = *PrivatePages::Create(model_->backend->layout(), tail_bytes);
    scheduler_ = *Scheduler::Create(options, model_->backend.get(),
                                    pages_.get(), model_->tokenizer.get(),
                                    client != nullptr ? client : client_.get());
  }

  GenerationRequest Make(const PromptForm& form,
                         pml::Layout layout = pml::Layout::kCompact,
                         MatchMode match = MatchMode::kPrefix) {
    GenerationRequest request;
    auto prompt = compiler_->Compile(form, layout, match);
    PC_EXPECT_OK(prompt);
    request.prompt = *prompt;
    request.max_tokens = 5;
    request.ignore_eos = true;
    request.top_logprobs = 2;
    return request;
  }
  static GenerationRequest Bypass(GenerationRequest request) {
    request.cache_mode = CacheMode::kBypass;
    request.retain.reset();
    return request;
  }
  CompletedEvent Run(GenerationRequest request) {
    last_ = std::make_shared<RecordingSink>();
    PC_EXPECT_OK(scheduler_->Submit(std::move(request), last_));
    EXPECT_TRUE(last_->WaitDone());
    PC_EXPECT_OK(last_->status());
    return last_->completed();
  }
  std::string Sha(GenerationRequest request) {
    const CompletedEvent event = Run(std::move(request));
    EXPECT_EQ(event.logits_sha256.size(), 64u);
    return event.logits_sha256;
  }

  // Whether modules are created, read from earlier cases, or all read.
  void ExpectTheCacheChangesNoBit(std::span<const PromptCase> cases) {
    for (const pml::Layout layout :
         {pml::Layout::kCompact, pml::Layout::kSchema}) {
      for (const PromptCase& c : cases) {
        const GenerationRequest request = Make(PmlText{c.pml}, layout);
        const std::string expected = Sha(Bypass(request));
        EXPECT_EQ(Sha(request), expected) << c.name;
        const CompletedEvent cached = Run(request);
        EXPECT_EQ(cached.logits_sha256, expected) << c.name;
        EXPECT_EQ(cached.usage.created_tokens, 0u) << c.name;
        EXPECT_EQ(
            cached.usage.cached_tokens,
            static_cast<uint32_t>(request.prompt->plan->num_cached_tokens))
            << c.name;
        EXPECT_THAT(cached.notices, ::testing::IsEmpty()) << c.name;
      }
    }
  }
  void ExpectChunksAndCompanyChangeNoBit(std::span<const PromptCase> cases) {
    std::vector<std::string> expected;
    for (const PromptCase& c : cases) {
      expected.push_back(Sha(Make(PmlText{c.pml})));
    }
    for (const uint32_t step_tokens : {17, 40}) {
      cache_.RevokeAll();
      Start({.step_tokens = step_tokens});
      std::vector<std::shared_ptr<RecordingSink>> sinks;
      for (const PromptCase& c : cases) {
        sinks.push_back(std::make_shared<RecordingSink>());
        PC_ASSERT_OK(scheduler_->Submit(Make(PmlText{c.pml}), sinks.back()));
      }
      for (size_t i = 0; i < sinks.size(); ++i) {
        ASSERT_TRUE(sinks[i]->WaitDone());
        EXPECT_EQ(sinks[i]->completed().logits_sha256, expected[i])
            << cases[i].name << " in steps of " << step_tokens;
      }
    }
  }
  // As `promptcache warm` does.
  CompletedEvent Warm(std::shared_ptr<const CompiledPrompt> prompt) {
    GenerationRequest request;
    request.prompt = std::move(prompt);
    request.max_tokens = 1;
    request.warm = true;
    return Run(std::move(request));
  }

  inline static Model* model_ = nullptr;
  FakeCache cache_;
  std::unique_ptr<PromptCompiler> compiler_;
  std::unique_ptr<PrivatePages> pages_;
  std::unique_ptr<CacheClient> client_;
  std::unique_ptr<Scheduler> scheduler_;
  std::shared_ptr<RecordingSink> last_;  // of the last Run
};

}  // namespace promptcache::worker
