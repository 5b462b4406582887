// An answer that is paused after any of its tokens, and computed again from
// there, is that of an undisturbed request to the last detail.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "inference_worker/serving/scheduler.h"
#include "tests/inference_worker/serving/scheduler_fixture.h"
#include "tests/support/status_matchers.h"

namespace promptcache::worker {
namespace {

using pml::Plan;
using Sink = std::shared_ptr<RecordingSink>;

// Whole letters, and characters of two and three bytes in two halves each.
class HalfCharacterTokenizer final : public Tokenizer {
 public:
  static constexpr int32_t kFirst = 1, kSecond = 2;  // modulo 5: an "ä"

  std::vector<int32_t> Encode(std::string_view) const override { return {}; }
  std::string Decode(int32_t id) const override {
    constexpr const char* kTexts[] = {"a", "\xC3", "\xA4", "\xE2\x82", "\xAC"};
    return kTexts[id % 5];
  }
  int32_t ControlToken(std::string_view) const override { return -1; }
  int32_t bos_id() const override { return -1; }
  int32_t vocab_size() const override { return 64; }
  const std::vector<int32_t>& stop_ids() const override { return stop_ids_; }
  const Digest& digest() const override { return digest_; }

 private:
  const std::vector<int32_t> stop_ids_;
  const Digest digest_ = Sha256Of("halves");
};

class PausedAnswerTest : public SchedulerTest {
 protected:
  static constexpr uint32_t kTokens = 14;

  PausedAnswerTest() {
    options_.max_running = 1;
    options_.reader_patience = absl::ZeroDuration();
  }

  static GenerationRequest Described(const std::shared_ptr<const Plan>& plan) {
    GenerationRequest request = Request(plan, kTokens);
    request.top_logprobs = 4;
    return request;
  }
  // The first plan of which the tokens that the model says are so.
  static std::shared_ptr<const Plan> Find(
      const std::function<bool(const std::vector<int32_t>&)>& is_so) {
    for (uint32_t seed = 1;; ++seed) {
      auto plan = PlanBuilder::Exact(seed);
      if (is_so(ExpectedTokens(*plan, false, kTokens))) return plan;
    }
  }
  Sink RunAlone(const GenerationRequest& request) {
    scheduler_.reset();
    Start();
    return Run(request);
  }
  // Gives place, pages and lease up after so many tokens, for another request.
  Sink RunPaused(
      const GenerationRequest& request, size_t after,
      const std::function<void()>& meanwhile = [] {}) {
    scheduler_.reset();
    Start();
    auto sink = std::make_shared<RecordingSink>();
    sink->SetRoom(after);
    PC_EXPECT_OK(scheduler_->Submit(request, sink));
    EXPECT_TRUE(sink->WaitTokens(after));
    PlanBuilder b(1);
    b.PlaceFresh(0, b.Tokens(3));
    Run(Request(b.Build(), 1));
    EXPECT_EQ(scheduler_->stats().reader_pauses, 1u);
    EXPECT_EQ(sink->dones(), 0);
    meanwhile();
    sink->SetRoom(1 << 20);
    scheduler_->Wake();
    EXPECT_TRUE(sink->WaitDone());
    return sink;
  }
  // After every token but the last.
  void ExpectSameWhereverItIsPaused(
      const GenerationRequest& request,
      const std::function<void()>& meanwhile = [] {}) {
    const Sink alone = RunAlone(request);
    ASSERT_GT(alone->tokens().size(), 2u);
    for (size_t after = 1; after < alone->tokens().size(); ++after) {
      SCOPED_TRACE(after);
      ExpectSame(RunPaused(request, after, meanwhile), alone);
    }
  }
  static void ExpectSame(const Sink& sink, const Sink& alone) {
    PC_EXPECT_OK(sink->status());
    EXPECT_EQ(sink->starts(), 1);
    EXPECT_EQ(sink->tokens(), alone->tokens());
    EXPECT_EQ(sink->text(), alone->text());
    const auto got = sink->events(), want = alone->events();
    ASSERT_EQ(got.size(), want.size());
    for (size_t i = 0; i < got.size(); ++i) {
      EXPECT_EQ(got[i].text, want[i].text) << i;
      EXPECT_EQ(got[i].logprob, want[i].logprob) << i;
      EXPECT_EQ(got[i].margin, want[i].margin) << i;
      EXPECT_EQ(got[i].top, want[i].top) << i;
    }
    const CompletedEvent end = sink->completed(),
                         end_alone = alone->completed();
    EXPECT_EQ(end.logits_sha256, end_alone.logits_sha256);
    EXPECT_EQ(end.finish_reason, end_alone.finish_reason);
    EXPECT_EQ(end.stop_string, end_alone.stop_string);
    EXPECT_EQ(end.usage.prompt_tokens, end_alone.usage.prompt_tokens);
    EXPECT_EQ(end.usage.completion_tokens, end_alone.usage.completion_tokens);
  }
};

TEST_F(PausedAnswerTest, LogprobsAreTheSame) {
  const GenerationRequest request = Described(PlanBuilder::Exact(7));
  ExpectSameWhereverItIsPaused(request);
  EXPECT_EQ(RunAlone(request)->events()[0].top.size(), 4u);
}

// Also where its beginning is held back.
TEST_F(PausedAnswerTest, AStopStringIsFound) {
  const auto plan = PlanBuilder::Exact(7);
  const auto tokens = ExpectedTokens(*plan, false, kTokens);
  GenerationRequest request = Described(plan);
  request.stop = {tokenizer_.Decode(tokens[5]) + tokenizer_.Decode(tokens[6]) +
                  tokenizer_.Decode(tokens[7])};
  ExpectSameWhereverItIsPaused(request);
  const Sink alone = RunAlone(request);
  EXPECT_EQ(alone->completed().finish_reason, FinishReason::kStopString);
  EXPECT_EQ(alone->tokens().size(), 8u);
}

TEST_F(PausedAnswerTest, AnEndTokenIsTheEnd) {
  GenerationRequest request = Described(Find([](const auto& tokens) {
    return std::find(tokens.begin() + 3, tokens.end() - 1, 0) !=
               tokens.end() - 1 &&
           std::find(tokens.begin(), tokens.begin() + 3, 0) ==
               tokens.begin() + 3;
  }));
  request.ignore_eos = false;
  ExpectSameWhereverItIsPaused(request);
  const Sink alone = RunAlone(request);
  EXPECT_EQ(alone->completed().finish_reason, FinishReason::kStop);
  EXPECT_LT(alone->tokens().size(), kTokens);
}

TEST_F(PausedAnswerTest, ACharacterThatWasCutIsWhole) {
  const HalfCharacterTokenizer halves;
  speaks_ = &halves;
  const auto cut_at = [](const std::vector<int32_t>& tokens) {
    size_t i = 1;
    while (i < tokens.size() &&
           !(tokens[i - 1] % 5 == HalfCharacterTokenizer::kFirst &&
             tokens[i] % 5 == HalfCharacterTokenizer::kSecond)) {
      ++i;
    }
    return i;
  };
  const GenerationRequest request =
      Described(Find([&](const auto& tokens) { return cut_at(tokens) < 10; }));
  const Sink alone = RunAlone(request);
  EXPECT_NE(alone->text().find("ä"), std::string::npos);
  // Its first half was said, and is not shown.
  const size_t cut = cut_at(alone->tokens());
  EXPECT_EQ(alone->events()[cut - 1].text.find("\xC3"), std::string::npos);
  EXPECT_NE(alone->events()[cut].text.find("ä"), std::string::npos);
  ExpectSameWhereverItIsPaused(request);
  scheduler_.reset();  // before its tokenizer
}

TEST_F(PausedAnswerTest, LinkedTokensAreTheSame) {
  for (uint32_t seed = 1; seed <= 3; ++seed) {
    GenerationRequest request = Described(PlanBuilder::Random(seed));
    request.link_tokens = 2;
    ExpectSameWhereverItIsPaused(request);
  }
}

TEST_F(PausedAnswerTest, ModulesThatWereEvictedMeanwhileChangeNothing) {
  for (uint32_t seed = 1; seed <= 3; ++seed) {
    ExpectSameWhereverItIsPaused(Described(PlanBuilder::Random(seed)),
                                 [this] { cache_.EvictUnleased(); });
  }
  EXPECT_GT(cache_.counters().commits, 3 * kTokens);
}

// Plans with contexts and scaffold texts, which are computed with a module and
// not kept; before the first request the modules are there or are not.
TEST_F(PausedAnswerTest, WhatIsComputedAgainIsCountedToTheRow) {
  for (uint32_t seed = 1; seed <= 12; ++seed) {
    const GenerationRequest request = Described(PlanBuilder::Random(seed));
    for (const bool there : {false, true}) {
      const auto prepare = [&] {
        cache_.EvictUnleased();
        if (there) RunAlone(request);
      };
      prepare();
      RunAlone(request);
      const uint64_t rows = scheduler_->stats().rows;
      for (const bool evicted : {false, true}) {
        SCOPED_TRACE(absl::StrCat(seed, there ? " there" : "",
                                  evicted ? " evicted" : ""));
        prepare();
        RunPaused(request, 5, [&] {
          if (evicted) cache_.EvictUnleased();
        });
        const SchedulerStats stats = scheduler_->stats();
        // The other request has three.
        EXPECT_EQ(stats.rows, rows + 3 + stats.recomputed_tokens);
      }
    }
  }
}

TEST_F(PausedAnswerTest, UsageSaysHowItWasInTheEnd) {
  const GenerationRequest request = Described(PlanBuilder::Exact(7));
  constexpr uint32_t kModules = 16;
  const auto usage = [&](bool evicted, bool memory) {
    const Sink sink = RunPaused(request, 5, [&] {
      if (evicted) cache_.EvictUnleased();
      cache_.SetNoMemory(!memory);
    });
    cache_.SetNoMemory(false);
    const Usage u = sink->completed().usage;
    EXPECT_EQ(u.prompt_tokens,
              u.cached_tokens + u.created_tokens + u.fresh_tokens);
    return std::pair(u.cached_tokens, u.created_tokens);
  };
  // Created, and read when it went on.
  EXPECT_EQ(usage(false, true), std::pair(0u, kModules));
  EXPECT_EQ(usage(false, true), std::pair(kModules, 0u));
  // Read, and created when it went on.
  EXPECT_EQ(usage(true, true), std::pair(0u, kModules));
  // Read, and not kept when it went on.
  EXPECT_EQ(usage(true, false), std::pair(0u, 0u));
}

}  // namespace
}  // namespace promptcache::worker
