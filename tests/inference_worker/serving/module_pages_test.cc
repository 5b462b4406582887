// What a request holds of the pool for its modules: nothing for those that it
// reads, that it encodes into the cache or that others encode.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <functional>
#include <utility>

#include "inference_worker/serving/scheduler.h"
#include "tests/inference_worker/serving/scheduler_fixture.h"
#include "tests/support/status_matchers.h"

namespace promptcache::worker {
namespace {

using pml::Plan;
using ::testing::Contains;
using ::testing::HasSubstr;
using Sink = std::shared_ptr<RecordingSink>;

// Pages hold four tokens: the document 50, a question of six tokens with an
// answer of six three.
constexpr uint32_t kDocumentTokens = 200;
constexpr uint64_t kDocumentPages = 50;
constexpr uint64_t kTailPages = 3;

class ModulePagesTest : public SchedulerTest {
 protected:
  // The same document, a question that depends on the seed.
  static std::shared_ptr<const Plan> Document(uint32_t seed = 1) {
    PlanBuilder b(1);
    pml::PlanModule module;
    module.path = "document";
    module.pieces.push_back({0, b.Tokens(kDocumentTokens)});
    module.length = kDocumentTokens;
    module.text_sha256 = Sha256Of(module.path);
    b.plan().modules.push_back(std::move(module));
    b.PlaceModule(0, 0);
    PlanBuilder question(seed);
    b.PlaceFresh(kDocumentTokens, question.Tokens(6));
    return b.Build();
  }
  // One fresh text of eight tokens.
  static GenerationRequest Plain(uint32_t max_tokens) {
    PlanBuilder b(7);
    b.PlaceFresh(0, b.Tokens(8));
    return Request(b.Build(), max_tokens);
  }
  void EncodeElsewhere() {
    cache_.ReserveElsewhere(KeyOf(Document(), 0), kDocumentTokens);
  }
  static bool Eventually(const std::function<bool()>& condition) {
    const absl::Time deadline = absl::Now() + absl::Seconds(10);
    while (!condition() && absl::Now() < deadline) {
      absl::SleepFor(absl::Milliseconds(1));
    }
    return condition();
  }
  uint64_t used_pages() {
    return pages_->capacity_pages() - pages_->free_pages();
  }
};

TEST_F(ModulePagesTest, WhoWaitsForAnothersEncodingHoldsItsTailOnly) {
  constexpr uint32_t kCallers = 16;
  options_.max_running = kCallers;
  // Room for all tails, and what is left for each to grow.
  Start(/*num_pages=*/kCallers * (kTailPages + 2));
  cache_.SetCommitHook([this] {
    EXPECT_TRUE(
        Eventually([this] { return cache_.counters().acquires == kCallers; }));
  });
  std::vector<std::shared_ptr<const Plan>> plans;
  std::vector<Sink> sinks;
  for (uint32_t i = 0; i < kCallers; ++i) {
    plans.push_back(Document(i));
    sinks.push_back(Submit(Request(plans.back())));
  }
  for (uint32_t i = 0; i < kCallers; ++i) {
    ASSERT_TRUE(sinks[i]->WaitDone());
    PC_EXPECT_OK(sinks[i]->status());
    EXPECT_EQ(sinks[i]->tokens(), ExpectedTokens(*plans[i], false, 6));
  }
  EXPECT_EQ(cache_.counters().commits, 1u);
  EXPECT_EQ(cache_.counters().acquires, kCallers);
  EXPECT_LE(pages_->peak_pages(), kCallers * kTailPages);
  EXPECT_EQ(scheduler_->stats().preemptions + scheduler_->stats().restarts, 0u);
}

TEST_F(ModulePagesTest, AReservationThatPassesOnTakesNoPages) {
  Start();
  EncodeElsewhere();
  const Sink sink = Submit(Request(Document()));
  ASSERT_TRUE(Eventually([&] { return cache_.counters().acquires == 1; }));
  cache_.AbandonElsewhere(KeyOf(Document(), 0));
  ASSERT_TRUE(sink->WaitDone());
  EXPECT_EQ(sink->completed().usage.created_tokens, kDocumentTokens);
  EXPECT_EQ(pages_->peak_pages(), kTailPages);
}

// It has a page less than it needs when it has waited long enough.
TEST_F(ModulePagesTest, WhoGivesUpWaitingTakesItsTurnForPages) {
  options_.pending_timeout = absl::Milliseconds(30);
  options_.reader_patience = options_.reader_limit;
  Start(/*num_pages=*/kDocumentPages + kTailPages);
  EncodeElsewhere();
  elsewhere_ = 1;
  auto old = std::make_shared<RecordingSink>();
  old->SetReady(false);
  PC_ASSERT_OK(scheduler_->Submit(Plain(24), old));
  ASSERT_TRUE(old->WaitTokens(1));
  const uint64_t of_old = used_pages();
  const Sink young = Submit(Request(Document()));
  ASSERT_TRUE(Eventually([&] { return scheduler_->stats().preemptions == 1; }));
  EXPECT_EQ(used_pages(), of_old);
  EXPECT_EQ(young->dones(), 0);
  old->SetReady(true);
  scheduler_->Wake();
  ASSERT_TRUE(old->WaitDone());
  ASSERT_TRUE(young->WaitDone());
  EXPECT_EQ(old->completed().notices.size(), 0u);
  EXPECT_EQ(young->tokens(), ExpectedTokens(*Document(), false, 6));
  EXPECT_THAT(young->completed().notices, Contains(HasSubstr("wait longer")));
  EXPECT_EQ(young->completed().usage.fresh_tokens, kDocumentTokens + 6);
  // It has not waited again.
  EXPECT_EQ(cache_.counters().acquires, 2u);
  EXPECT_EQ(scheduler_->stats().preemptions, 1u);
  EXPECT_LT(young->completed().timings.wait_pending,
            2 * options_.pending_timeout);
}

// Kept for what it had to compute the first time, and not needed now.
TEST_F(ModulePagesTest, PagesThatWereKeptForAModuleGoBackBeforeTheNextStep) {
  options_.reader_patience = options_.reader_limit;
  std::atomic<bool> again = false;
  std::atomic<uint64_t> most = 0;
  backend_.SetHook([&](std::span<const RowGroup>) {
    if (again) most = std::max(most.load(), used_pages());
    return absl::OkStatus();
  });
  Start(/*num_pages=*/kDocumentPages + kTailPages);
  cache_.SetNoMemory(true);
  auto old = std::make_shared<RecordingSink>();
  old->SetReady(false);
  PC_ASSERT_OK(scheduler_->Submit(Plain(24), old));
  ASSERT_TRUE(old->WaitTokens(1));
  const Sink young = Submit(Request(Document()));
  ASSERT_TRUE(Eventually([&] { return scheduler_->stats().preemptions == 1; }));
  cache_.SetNoMemory(false);
  cache_.SetAcquireHook([&] {
    EXPECT_GE(used_pages(), kDocumentPages);
    again = true;
  });
  old->SetReady(true);
  scheduler_->Wake();
  ASSERT_TRUE(old->WaitDone());
  ASSERT_TRUE(young->WaitDone());
  EXPECT_EQ(young->tokens(), ExpectedTokens(*Document(), false, 6));
  EXPECT_EQ(young->completed().usage.created_tokens, kDocumentTokens);
  EXPECT_EQ(most, kTailPages);
}

}  // namespace
}  // namespace promptcache::worker
