// Commits that fail after the token was sampled that ends the answer.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <utility>

#include "inference_worker/serving/scheduler.h"
#include "tests/inference_worker/serving/scheduler_fixture.h"
#include "tests/support/status_matchers.h"

namespace promptcache::worker {
namespace {

using ::testing::Contains;
using ::testing::HasSubstr;
using Sink = std::shared_ptr<RecordingSink>;

class CommitFailureTest : public SchedulerTest {
 protected:
  // A plan with modules to which the model's first word is an end token, or is
  // not.
  static std::shared_ptr<const pml::Plan> PlanWhoseAnswerIsEmpty(bool empty) {
    for (uint32_t seed = 1;; ++seed) {
      auto plan = PlanBuilder::Exact(seed);
      if ((ExpectedTokens(*plan, false, 1)[0] == 0) == empty) return plan;
    }
  }
  // The daemon is killed before the commit, or has given the pages away.
  void ExpectSameHoweverTheCommitFails(const GenerationRequest& request) {
    const std::vector<std::function<void()>> failures = {
        [this] { cache_.SetDown(true); },
        [this] { cache_.SetLoseReservations(true); }};
    for (const auto& failure : failures) {
      Start();
      cache_.SetCommitHook(failure);
      ExpectSame(Run(request), Bypassed(request));
      scheduler_.reset();
      cache_.SetDown(false);
      cache_.SetLoseReservations(false);
    }
  }
  Sink Bypassed(GenerationRequest request) {
    request.cache_mode = CacheMode::kBypass;
    return Run(std::move(request));
  }
  Sink SubmitForOneToken(const GenerationRequest& request) {
    auto sink = std::make_shared<RecordingSink>();
    sink->SetRoom(1);
    PC_EXPECT_OK(scheduler_->Submit(request, sink));
    EXPECT_TRUE(sink->WaitTokens(1));
    return sink;
  }
  static void ExpectSame(const Sink& sink, const Sink& alone) {
    ExpectSameAnswer(sink, alone);
    const CompletedEvent got = sink->completed();
    EXPECT_EQ(got.usage.created_tokens, 0u);
    EXPECT_EQ(got.stop_string, alone->completed().stop_string);
    EXPECT_THAT(got.notices, Contains(HasSubstr("not kept")));
  }
};

TEST_F(CommitFailureTest, OneTokenStaysOne) {
  ExpectSameHoweverTheCommitFails(Request(PlanWhoseAnswerIsEmpty(false), 1));
}

TEST_F(CommitFailureTest, NothingFollowsAnEndToken) {
  GenerationRequest request = Request(PlanWhoseAnswerIsEmpty(true), 9);
  request.ignore_eos = false;
  ExpectSameHoweverTheCommitFails(request);
}

TEST_F(CommitFailureTest, NothingFollowsAStopString) {
  const auto plan = PlanWhoseAnswerIsEmpty(false);
  GenerationRequest request = Request(plan, 9);
  request.stop = {tokenizer_.Decode(ExpectedTokens(*plan, false, 1)[0])};
  ExpectSameHoweverTheCommitFails(request);
}

TEST_F(CommitFailureTest, TheDeadlineDoesNotFindACompleteAnswerWaiting) {
  options_.reply_time = absl::Hours(1);
  Start();
  Gate gate;
  cache_.SetCommitHook([&] { gate.Wait(); });
  GenerationRequest request = Request(PlanWhoseAnswerIsEmpty(false), 1);
  const Sink alone = Bypassed(request);
  request.deadline = absl::Now() + options_.reply_time + absl::Seconds(1);
  const Sink sink = Run(request);
  gate.Open();
  ExpectSame(sink, alone);
  EXPECT_THAT(sink->completed().notices, Contains(HasSubstr("the deadline")));
  ASSERT_TRUE(scheduler_->Drain(absl::Now() + absl::Seconds(20)));
  EXPECT_EQ(cache_.counters().commits, 2u);  // nevertheless
}

// What is not complete has its whole time.
TEST_F(CommitFailureTest, WithMoreToComeTheCommitIsWaitedFor) {
  options_.reply_time = absl::Hours(1);
  Start();
  GenerationRequest request = Request(PlanWhoseAnswerIsEmpty(false), 9);
  request.deadline = absl::Now() + absl::Minutes(1);
  const Sink sink = Run(request);
  EXPECT_EQ(sink->tokens().size(), 9u);
  EXPECT_EQ(sink->completed().usage.created_tokens, 16u);
}

// The request's pages are taken when it has so many tokens that one of the
// lengths is complete with the first row after that; its modules are evicted
// meanwhile, encoded again, and not kept.
TEST_F(CommitFailureTest, APausedAnswerIsCompleteOnce) {
  PlanBuilder b(1);
  b.PlaceFresh(0, b.Tokens(8));
  const GenerationRequest old = Request(b.Build(), 40);
  uint64_t failed = 0;
  for (uint32_t length = 12; length <= 24; ++length) {
    const GenerationRequest young = Request(PlanBuilder::Exact(3, 3), length);
    Start(2000, /*with_cache=*/false);
    const Sink alone = Run(young);
    scheduler_.reset();
    Start(/*num_pages=*/14);
    cache_.SetAcquireHook([&] {
      cache_.RevokeAll();
      const bool again = scheduler_->stats().preemptions > 0;
      cache_.SetLoseReservations(again);
      if (again) ++failed;
    });
    // Neither runs ahead of the other.
    const Sink first = SubmitForOneToken(old);
    const Sink second = SubmitForOneToken(young);
    for (const Sink& sink : {first, second}) sink->SetRoom(1000);
    scheduler_->Wake();
    ASSERT_TRUE(first->WaitDone());
    ASSERT_TRUE(second->WaitDone());
    PC_EXPECT_OK(first->status());
    PC_EXPECT_OK(second->status());
    EXPECT_EQ(second->tokens(), alone->tokens()) << length;
    EXPECT_EQ(second->completed().logits_sha256,
              alone->completed().logits_sha256);
    EXPECT_EQ(second->completed().usage.completion_tokens, length);
    scheduler_.reset();
  }
  EXPECT_GT(failed, 0u);
}

}  // namespace
}  // namespace promptcache::worker
