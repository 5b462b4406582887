#include "inference_worker/serving/scheduler.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <utility>

#include "tests/inference_worker/serving/scheduler_fixture.h"
#include "tests/support/status_matchers.h"

namespace promptcache::worker {
namespace {

using pml::Plan;
using ::testing::Contains;
using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;

TEST_F(SchedulerTest, CreatedCachedAndBypassedAnswersAreEqual) {
  options_.step_tokens = 17;
  Start();
  for (uint32_t seed = 1; seed <= 25; ++seed) {
    const auto plan = PlanBuilder::Random(seed, seed % 3 == 0);
    auto created = Run(Request(plan));
    auto cached = Run(Request(plan));
    GenerationRequest request = Request(plan);
    request.cache_mode = CacheMode::kBypass;
    auto bypassed = Run(std::move(request));
    EXPECT_EQ(created->tokens(), ExpectedTokens(*plan, false, 6));
    for (const auto& sink : {created, cached, bypassed}) {
      PC_EXPECT_OK(sink->status());
      EXPECT_EQ(sink->tokens(), created->tokens());
      EXPECT_EQ(sink->completed().logits_sha256,
                created->completed().logits_sha256);
    }
    const auto tokens = static_cast<uint32_t>(plan->num_tokens);
    const auto modules = static_cast<uint32_t>(plan->num_cached_tokens);
    EXPECT_EQ(created->completed().usage.created_tokens, modules);
    EXPECT_EQ(cached->completed().usage.cached_tokens, modules);
    EXPECT_EQ(cached->completed().usage.fresh_tokens, tokens - modules);
    EXPECT_EQ(bypassed->completed().usage.fresh_tokens, tokens);
    EXPECT_THAT(cached->completed().notices, IsEmpty());
  }
}

TEST_F(SchedulerTest, FullAttentionIgnoresTheCache) {
  Start();
  const auto plan = PlanBuilder::Exact(7);
  GenerationRequest request = Request(plan);
  request.full_attention = true;
  auto full = Run(std::move(request));
  EXPECT_EQ(full->tokens(), ExpectedTokens(*plan, true, 6));
  EXPECT_EQ(cache_.counters().acquires, 0u);
  // An EXACT plan says the same.
  EXPECT_EQ(Run(Request(plan))->tokens(), full->tokens());
}

TEST_F(SchedulerTest, AContextThatIsMissingIsAMiss) {
  Start();
  PlanBuilder b(3);
  b.AddModule({});
  b.AddModule({{.module = 0, .num_tokens = 1, .offset = -9}});
  b.PlaceModule(1, 20);
  b.PlaceFresh(90, b.Tokens(3));
  const auto plan = b.Build();
  const auto misses = Run(Request(plan))->started().misses;
  ASSERT_EQ(misses.size(), 2u);
  EXPECT_EQ(misses[0].module, 0u);
  EXPECT_EQ(misses[0].reason, CacheMissReason::kNeverSeen);
  EXPECT_THAT(Run(Request(plan))->started().misses, IsEmpty());
}

// The last token of a plan is computed for its logits; that does not make it a
// repaired beginning, even when it is all that its span has.
TEST_F(SchedulerTest, ALastTokenComputedAnewCountsAsRead) {
  Start();
  PlanBuilder b(3);
  pml::PlanModule module;
  module.path = "m";
  module.pieces = {{0, b.Tokens(3)}, {5, b.Tokens(1)}};
  module.length = 6;
  b.plan().modules.push_back(module);
  b.PlaceFresh(0, b.Tokens(4));
  b.PlaceModule(0, 4);
  GenerationRequest request = Request(b.Build());
  request.link_tokens = 2;
  Run(request);
  const Usage usage = Run(request)->completed().usage;
  EXPECT_EQ(usage.cached_tokens, 2u);
  EXPECT_EQ(usage.fresh_tokens, 6u);
}

TEST_F(SchedulerTest, AModelThatMustNotReuseAnswersWithoutTheCacheAndSaysSo) {
  options_.no_reuse = "it turns with the length";
  Start();
  const auto plan = PlanBuilder::Random(5);
  ASSERT_FALSE(plan->modules.empty());
  auto sink = Run(Request(plan));
  PC_EXPECT_OK(sink->status());
  EXPECT_EQ(sink->tokens(), ExpectedTokens(*plan, false, 6));
  EXPECT_THAT(sink->completed().notices,
              ElementsAre("answered without the cache: it turns with the "
                          "length"));
  GenerationRequest warm = Request(plan);
  warm.warm = true;
  EXPECT_THAT(Run(std::move(warm))->status(),
              StatusIs(absl::StatusCode::kUnavailable,
                       "modules cannot be kept: it turns with the length"));
  EXPECT_EQ(cache_.counters().acquires, 0u);
}

TEST_F(SchedulerTest, ReadOnlyEncodesNothingIntoTheCache) {
  Start();
  const auto plan = PlanBuilder::Exact(7);
  GenerationRequest request = Request(plan);
  request.cache_mode = CacheMode::kReadOnly;
  auto sink = Run(std::move(request));
  EXPECT_EQ(sink->tokens(), ExpectedTokens(*plan, false, 6));
  EXPECT_EQ(cache_.num_modules(), 0u);
  EXPECT_EQ(sink->started().spans[0].source, StateSource::kComputed);
  EXPECT_EQ(sink->started().spans[0].miss_reason, CacheMissReason::kNeverSeen);
}

TEST_F(SchedulerTest, RequestsTogetherAnswerAsTheyDoAlone) {
  options_.step_tokens = 20;
  options_.max_running = 8;
  Start(2000);
  std::vector<std::shared_ptr<RecordingSink>> sinks;
  std::vector<std::shared_ptr<const Plan>> plans;
  for (uint32_t seed = 1; seed <= 24; ++seed) {
    plans.push_back(PlanBuilder::Random(seed % 7, seed % 2 == 0));
    sinks.push_back(Submit(Request(plans.back(), 9)));
  }
  for (size_t i = 0; i < sinks.size(); ++i) {
    ASSERT_TRUE(sinks[i]->WaitDone());
    PC_EXPECT_OK(sinks[i]->status());
    EXPECT_EQ(sinks[i]->tokens(), ExpectedTokens(*plans[i], false, 9));
  }
}

TEST_F(SchedulerTest, TheSameModuleAtOnceIsEncodedOnce) {
  Start();
  const auto plan = PlanBuilder::Exact(7, 40);
  std::vector<std::shared_ptr<RecordingSink>> sinks;
  for (int i = 0; i < 6; ++i) sinks.push_back(Submit(Request(plan)));
  for (const auto& sink : sinks) {
    ASSERT_TRUE(sink->WaitDone());
    EXPECT_EQ(sink->tokens(), ExpectedTokens(*plan, false, 6));
  }
  EXPECT_EQ(cache_.counters().commits, 2u);
  EXPECT_TRUE(scheduler_->Drain(absl::Now() + absl::Seconds(20)));
  EXPECT_EQ(cache_.counters().used_created, 45u);
  EXPECT_EQ(cache_.counters().used_cached, 5 * 45u);
}

TEST_F(SchedulerTest, ALongPromptDoesNotHoldUpAShortOne) {
  options_.step_tokens = 20;
  Start(2000, /*with_cache=*/false);
  std::vector<std::vector<size_t>> rows;  // of every group of every step
  Gate first, both;
  backend_.SetHook([&](std::span<const RowGroup> groups) {
    if (rows.empty()) {
      first.Open();
      both.Wait();
    }
    std::vector<size_t> step;
    for (const RowGroup& g : groups) step.push_back(g.tokens.size());
    rows.push_back(step);
    return absl::OkStatus();
  });
  PlanBuilder long_plan(1);
  long_plan.PlaceFresh(0, long_plan.Tokens(200));
  PlanBuilder short_plan(2);
  short_plan.PlaceFresh(0, short_plan.Tokens(15));
  auto slow = Submit(Request(long_plan.Build(), 2));
  first.Wait();
  auto fast = Submit(Request(short_plan.Build(), 2));
  both.Open();
  ASSERT_TRUE(fast->WaitDone());
  ASSERT_TRUE(slow->WaitDone());
  EXPECT_GT(rows.size(), 10u);
  // The first alone, then half and half, then a decoding row beside.
  EXPECT_THAT(rows[0], ElementsAre(20u));
  EXPECT_THAT(rows[1], ElementsAre(10u, 10u));
  EXPECT_THAT(rows[2], ElementsAre(5u, 15u));
  EXPECT_THAT(rows[3], ElementsAre(1u, 19u));
}

TEST_F(SchedulerTest, CancellationIsSeenWithinOneStep) {
  Start();
  const auto plan = PlanBuilder::Exact(7);
  Gate submitted;
  uint64_t passes = 0;
  backend_.SetHook([&](std::span<const RowGroup>) {
    submitted.Wait();
    if (++passes == 3) flag_->Cancel();
    return absl::OkStatus();
  });
  auto sink = Submit(Request(plan, 500));
  submitted.Open();
  ASSERT_TRUE(sink->WaitDone());
  EXPECT_THAT(sink->status(),
              StatusIs(absl::StatusCode::kCancelled, HasSubstr("caller")));
  EXPECT_EQ(backend_.passes(), 3u);
  EXPECT_EQ(pages_->free_pages(), pages_->capacity_pages());
}

TEST_F(SchedulerTest, CancellationWhileEncodingGivesReservationsBack) {
  options_.step_tokens = 17;
  Start();
  Gate submitted;
  backend_.SetHook([&](std::span<const RowGroup>) {
    submitted.Wait();
    flag_->Cancel();
    return absl::OkStatus();
  });
  auto sink = Submit(Request(PlanBuilder::Exact(7, 60)));
  submitted.Open();
  ASSERT_TRUE(sink->WaitDone());
  EXPECT_THAT(sink->status(),
              StatusIs(absl::StatusCode::kCancelled, HasSubstr("")));
  EXPECT_TRUE(scheduler_->Drain(absl::Now() + absl::Seconds(20)));
  EXPECT_EQ(cache_.counters().aborts, 2u);
  EXPECT_EQ(cache_.num_modules(), 0u);
}

TEST_F(SchedulerTest, TheDeadlineEndsARequestAndItsWaiting) {
  Start();
  const auto plan = PlanBuilder::Exact(7);
  cache_.ReserveElsewhere(KeyOf(plan, 1), 11);
  elsewhere_ = 1;
  GenerationRequest request = Request(plan);
  request.deadline = absl::Now() + absl::Milliseconds(80);
  auto sink = Run(std::move(request));
  EXPECT_THAT(sink->status(), StatusIs(absl::StatusCode::kDeadlineExceeded,
                                       HasSubstr("deadline")));
  EXPECT_EQ(sink->starts(), 0);
}

TEST_F(SchedulerTest, AReservationPassesOnWhenItsHolderLeaves) {
  Start();
  const auto plan = PlanBuilder::Exact(7);
  cache_.ReserveElsewhere(KeyOf(plan, 1), 11);
  // The preamble is committed before the module is waited for.
  auto sink = Submit(Request(plan));
  while (cache_.counters().commits < 1) absl::SleepFor(absl::Milliseconds(1));
  EXPECT_EQ(sink->starts(), 0);
  cache_.AbandonElsewhere(KeyOf(plan, 1));
  ASSERT_TRUE(sink->WaitDone());
  EXPECT_EQ(sink->tokens(), ExpectedTokens(*plan, false, 6));
  EXPECT_EQ(sink->completed().usage.created_tokens, 16u);
  EXPECT_GT(sink->completed().timings.wait_pending, absl::ZeroDuration());
}

TEST_F(SchedulerTest, WaitingForOthersIsBounded) {
  options_.pending_timeout = absl::Milliseconds(50);
  Start();
  const auto plan = PlanBuilder::Exact(7);
  cache_.ReserveElsewhere(KeyOf(plan, 1), 11);
  elsewhere_ = 1;
  auto sink = Run(Request(plan));
  EXPECT_EQ(sink->tokens(), ExpectedTokens(*plan, false, 6));
  EXPECT_THAT(sink->completed().notices, Contains(HasSubstr("wait longer")));
  EXPECT_EQ(sink->completed().usage.created_tokens, 5u);
  EXPECT_EQ(sink->completed().usage.fresh_tokens, 6u + 11u);
}

TEST_F(SchedulerTest, ADaemonThatGoesIsNotToldAsAnotherRequest) {
  Start();
  const auto plan = PlanBuilder::Exact(7);
  cache_.ReserveElsewhere(KeyOf(plan, 1), 11);
  elsewhere_ = 1;
  auto sink = Submit(Request(plan));
  while (cache_.counters().commits < 1) absl::SleepFor(absl::Milliseconds(1));
  cache_.SetDown(true);
  ASSERT_TRUE(sink->WaitDone());
  EXPECT_EQ(sink->tokens(), ExpectedTokens(*plan, false, 6));
  const auto notices = sink->completed().notices;
  EXPECT_THAT(notices, Contains("answered without the cache: the daemon is "
                                "gone"));
  EXPECT_THAT(notices, Each(Not(HasSubstr("another request"))));
}

TEST_F(SchedulerTest, PendingComputeDoesNotWait) {
  Start();
  const auto plan = PlanBuilder::Exact(7);
  cache_.ReserveElsewhere(KeyOf(plan, 1), 11);
  elsewhere_ = 1;
  GenerationRequest request = Request(plan);
  request.pending_compute = true;
  auto sink = Run(std::move(request));
  EXPECT_EQ(sink->tokens(), ExpectedTokens(*plan, false, 6));
  EXPECT_EQ(sink->completed().timings.wait_pending, absl::ZeroDuration());
}

TEST_F(SchedulerTest, AContextThatIsPendingElsewhereIsComputedPrivately) {
  Start();
  const auto plan = PlanBuilder::Exact(7);
  cache_.ReserveElsewhere(KeyOf(plan, 0), 5);  // the preamble
  elsewhere_ = 1;
  auto sink = Run(Request(plan));
  EXPECT_EQ(sink->tokens(), ExpectedTokens(*plan, false, 6));
  EXPECT_EQ(sink->completed().usage.created_tokens, 11u);
  EXPECT_EQ(sink->completed().timings.wait_pending, absl::ZeroDuration());
}

TEST_F(SchedulerTest, StatesLostWhileDecodingNeverGiveAWrongAnswer) {
  Start();
  const auto plan = PlanBuilder::Exact(7);
  Run(Request(plan));
  uint64_t passes = 0;
  backend_.SetHook([&](std::span<const RowGroup>) {
    if (++passes == 4) cache_.RevokeAll();  // this pass reads garbage
    return absl::OkStatus();
  });
  auto sink = Run(Request(plan, 9));
  PC_EXPECT_OK(sink->status());
  EXPECT_EQ(sink->tokens(), ExpectedTokens(*plan, false, 9));
  EXPECT_EQ(sink->starts(), 1);
  EXPECT_THAT(sink->completed().notices, Contains(HasSubstr("lost")));
  EXPECT_EQ(sink->completed().usage.cached_tokens, 0u);
  EXPECT_EQ(scheduler_->stats().discarded_steps, 1u);
  faults_expected_ = true;
}

// Beside requests whose logits come back, and when a step is discarded.
TEST_F(SchedulerTest, TokensThatTheBackendChoosesAreTheSamplers) {
  Start();
  GenerationRequest described = Request(PlanBuilder::Exact(7), 12);
  described.sampling = {
      .temperature = 0.9f, .top_k = 20, .repetition_penalty = 1.3f, .seed = 11};
  const std::vector<int32_t> expected = Run(described)->tokens();
  backend_.SetChoosesTokens(true);
  GenerationRequest plain = described;
  plain.top_logprobs = 0;
  const auto beside = Submit(described);
  const auto chosen = Run(plain);
  EXPECT_TRUE(beside->WaitDone());
  EXPECT_EQ(beside->tokens(), expected);
  EXPECT_EQ(chosen->tokens(), expected);
  EXPECT_EQ(backend_.choices(), 12u);
  uint64_t passes = 0;
  backend_.SetHook([&](std::span<const RowGroup>) {
    if (++passes == 4) cache_.RevokeAll();
    return absl::OkStatus();
  });
  EXPECT_EQ(Run(plain)->tokens(), expected);
  EXPECT_EQ(scheduler_->stats().discarded_steps, 1u);
  faults_expected_ = true;
}

// Not before the daemon says that it is right.
TEST_F(SchedulerTest, AStepOverWhatArrivesCountsWhenItIsVerified) {
  Start();
  const auto plan = PlanBuilder::Exact(7);
  Run(Request(plan));
  int asked = 0;
  cache_.SetArriving([&] {
    return ++asked < 3 ? ModuleProgress{.num_layers = 1, .ended = false}
                       : ModuleProgress{};
  });
  auto sink = Run(Request(plan));
  PC_EXPECT_OK(sink->status());
  EXPECT_EQ(sink->tokens(), ExpectedTokens(*plan, false, 6));
  EXPECT_GE(asked, 3);
  EXPECT_GT(sink->completed().usage.cached_tokens, 0u);
  EXPECT_GT(sink->completed().timings.arrival, absl::ZeroDuration());
  EXPECT_LE(sink->completed().timings.arrival,
            sink->completed().timings.prefill);
  EXPECT_EQ(scheduler_->stats().discarded_steps, 0u);
}

// What it read was never what it should be.
TEST_F(SchedulerTest, AStepOverWhatNeverArrivedIsComputedAgain) {
  Start();
  const auto plan = PlanBuilder::Exact(7);
  Run(Request(plan));
  cache_.SetArriving([] { return ModuleProgress{.num_layers = 0}; });
  backend_.SetHook([&](std::span<const RowGroup> groups) {
    if (!groups[0].arrivals.empty()) cache_.RevokeAll();
    return absl::OkStatus();
  });
  auto sink = Run(Request(plan));
  PC_EXPECT_OK(sink->status());
  EXPECT_EQ(sink->tokens(), ExpectedTokens(*plan, false, 6));
  EXPECT_THAT(sink->completed().notices, Contains(HasSubstr("lost")));
  EXPECT_EQ(sink->completed().usage.cached_tokens, 0u);
  EXPECT_EQ(scheduler_->stats().discarded_steps, 1u);
  faults_expected_ = true;
}

TEST_F(SchedulerTest, ADaemonThatGoesDownWhileAModuleArrivesCostsTimeOnly) {
  Start();
  const auto plan = PlanBuilder::Exact(7);
  Run(Request(plan));
  int asked = 0;
  Gate waiting;
  cache_.SetArriving([&] {
    if (++asked == 3) waiting.Open();
    return ModuleProgress{.num_layers = 0, .ended = false};
  });
  auto sink = Submit(Request(plan));
  waiting.Wait();
  cache_.SetDown(true);
  sink->WaitDone();
  PC_EXPECT_OK(sink->status());
  EXPECT_EQ(sink->tokens(), ExpectedTokens(*plan, false, 6));
  EXPECT_EQ(scheduler_->stats().discarded_steps, 1u);
}

TEST_F(SchedulerTest, ADaemonThatGoesDownCostsTimeOnly) {
  options_.step_tokens = 17;
  for (uint64_t at = 1; at <= 5; ++at) {
    Start();
    const auto plan = PlanBuilder::Exact(static_cast<uint32_t>(at), 20);
    uint64_t passes = 0;
    backend_.SetHook([&](std::span<const RowGroup>) {
      if (++passes == at) cache_.SetDown(true);
      return absl::OkStatus();
    });
    auto sink = Run(Request(plan));
    PC_EXPECT_OK(sink->status());
    EXPECT_EQ(sink->tokens(), ExpectedTokens(*plan, false, 6)) << at;
    EXPECT_THAT(sink->completed().notices, Not(IsEmpty()));
    auto without = Run(Request(plan));
    EXPECT_EQ(without->tokens(), ExpectedTokens(*plan, false, 6));
    EXPECT_THAT(without->started().notices,
                Contains(HasSubstr("cache daemon unavailable")));
    scheduler_.reset();
    cache_.SetDown(false);
    cache_.RevokeAll();
  }
}

TEST_F(SchedulerTest, ReservationsThatAreGoneAreNotRead) {
  Start();
  cache_.SetLoseReservations(true);
  const auto plan = PlanBuilder::Exact(7);
  auto sink = Run(Request(plan));
  EXPECT_EQ(sink->tokens(), ExpectedTokens(*plan, false, 6));
  EXPECT_THAT(sink->completed().notices, Contains(HasSubstr("not kept")));
  EXPECT_EQ(sink->completed().usage.created_tokens, 0u);
}

TEST_F(SchedulerTest, WithoutMemoryModulesAreComputedPrivately) {
  Start();
  cache_.SetNoMemory(true);
  const auto plan = PlanBuilder::Exact(7);
  auto sink = Run(Request(plan));
  EXPECT_EQ(sink->tokens(), ExpectedTokens(*plan, false, 6));
  EXPECT_THAT(sink->started().notices, Contains(HasSubstr("no memory")));
  EXPECT_EQ(sink->started().spans[0].miss_reason, CacheMissReason::kNoMemory);
}

TEST_F(SchedulerTest, AFlippedByteIsFoundReportedAndRecomputed) {
  options_.verify = VerifyMode::kAlways;
  Start();
  const auto plan = PlanBuilder::Exact(7);
  Run(Request(plan));
  cache_.FlipBytes();
  auto sink = Run(Request(plan));
  EXPECT_EQ(sink->tokens(), ExpectedTokens(*plan, false, 6));
  EXPECT_THAT(sink->started().notices, Contains(HasSubstr("corrupt")));
  EXPECT_EQ(cache_.counters().corruption_reports, 2u);
  EXPECT_EQ(scheduler_->stats().corrupt_pages, 2u);
  // The next request encodes them anew.
  EXPECT_EQ(Run(Request(plan))->completed().usage.created_tokens, 16u);
}

TEST_F(SchedulerTest, SamplingFindsCorruptionAfterAWhile) {
  Start();
  const auto plan = PlanBuilder::Exact(7, 40);
  Run(Request(plan));
  cache_.FlipBytes();
  for (int i = 0; i < 40 && cache_.counters().corruption_reports == 0; ++i) {
    Run(Request(plan, 1));
  }
  EXPECT_GT(cache_.counters().corruption_reports, 0u);
}

TEST_F(SchedulerTest, AFullQueueRefuses) {
  options_.max_running = 1;
  options_.max_queue = 2;
  Start();
  Gate go;
  backend_.SetHook([&](std::span<const RowGroup>) {
    go.Wait();
    return absl::OkStatus();
  });
  std::vector<std::shared_ptr<RecordingSink>> sinks;
  for (int i = 0; i < 3; ++i) {
    sinks.push_back(Submit(Request(PlanBuilder::Exact(7))));
  }
  EXPECT_THAT(scheduler_->Submit(Request(PlanBuilder::Exact(7)),
                                 std::make_shared<RecordingSink>()),
              StatusIs(absl::StatusCode::kResourceExhausted,
                       HasSubstr("queue is full")));
  go.Open();
  for (const auto& sink : sinks) EXPECT_TRUE(sink->WaitDone());
}

TEST_F(SchedulerTest, ADomainDoesNotWaitForAnothersQueue) {
  options_.max_running = 2;
  options_.max_queue = 4;
  Start(400, /*with_cache=*/false);
  Gate first, go;
  backend_.SetHook([&](std::span<const RowGroup>) {
    first.Open();
    go.Wait();
    return absl::OkStatus();
  });
  const auto plan = PlanBuilder::Exact(7);
  std::vector<std::shared_ptr<RecordingSink>> many;
  many.push_back(Submit(RequestOf("a", plan, 3)));
  first.Wait();
  for (int i = 0; i < 5; ++i) many.push_back(Submit(RequestOf("a", plan, 40)));
  // The queue is full for "a", and not for "b", which has none of it.
  EXPECT_THAT(scheduler_->Submit(RequestOf("a", plan, 3),
                                 std::make_shared<RecordingSink>()),
              StatusIs(absl::StatusCode::kResourceExhausted,
                       HasSubstr("queue is full")));
  const auto other = Submit(RequestOf("b", plan, 3));
  go.Open();
  ASSERT_TRUE(other->WaitDone());
  PC_EXPECT_OK(other->status());
  for (const auto& sink : many) ASSERT_TRUE(sink->WaitDone());
  // It came last and waited less.
  EXPECT_LT(other->completed().timings.queue,
            many.back()->completed().timings.queue);
}

TEST_F(SchedulerTest, PrefillIsSharedBetweenDomains) {
  options_.step_tokens = 20;
  Start(2000, /*with_cache=*/false);
  std::vector<size_t> rows;  // of the second step
  Gate first, all;
  int step = 0;
  backend_.SetHook([&](std::span<const RowGroup> groups) {
    if (step == 0) {
      first.Open();
      all.Wait();
    }
    for (const RowGroup& g : groups) {
      if (step == 1) rows.push_back(g.tokens.size());
    }
    ++step;
    return absl::OkStatus();
  });
  PlanBuilder b(1);
  b.PlaceFresh(0, b.Tokens(100));
  const auto plan = b.Build();
  std::vector<std::shared_ptr<RecordingSink>> sinks;
  sinks.push_back(Submit(RequestOf("a", plan, 1)));
  first.Wait();
  for (const char* domain : {"a", "a", "b"}) {
    sinks.push_back(Submit(RequestOf(domain, plan, 1)));
  }
  all.Open();
  for (const auto& sink : sinks) ASSERT_TRUE(sink->WaitDone());
  // Ten for three of "a", ten for the one of "b".
  EXPECT_THAT(rows, ::testing::UnorderedElementsAre(4u, 3u, 3u, 10u));
}

TEST_F(SchedulerTest, ADeadlineIsRespectedInTheQueue) {
  options_.max_running = 1;
  Start();
  // Two wait for another's module, one for each place: no step is made.
  const auto plan = PlanBuilder::Exact(7);
  cache_.ReserveElsewhere(KeyOf(plan, 1), 11);
  const auto waiting = Submit(Request(plan));
  const auto running = Submit(Request(plan));
  while (cache_.counters().commits < 1 || cache_.counters().acquires < 2) {
    absl::SleepFor(absl::Milliseconds(1));
  }
  const uint64_t steps = scheduler_->stats().steps;
  GenerationRequest late = Request(plan);
  late.deadline = absl::Now() + absl::Milliseconds(50);
  const auto queued = Submit(late);
  const auto cancelled = Submit(Request(plan));
  flag_->Cancel();
  scheduler_->Wake();
  ASSERT_TRUE(cancelled->WaitDone());
  EXPECT_THAT(cancelled->status(),
              StatusIs(absl::StatusCode::kCancelled, HasSubstr("caller")));
  ASSERT_TRUE(queued->WaitDone());
  EXPECT_GE(absl::Now(), late.deadline);
  EXPECT_THAT(queued->status(), StatusIs(absl::StatusCode::kDeadlineExceeded,
                                         HasSubstr("deadline")));
  EXPECT_EQ(queued->starts() + cancelled->starts(), 0);
  EXPECT_EQ(cache_.counters().acquires, 2u);
  EXPECT_EQ(scheduler_->stats().steps, steps);
  EXPECT_EQ(running->dones(), 0);
  cache_.AbandonElsewhere(KeyOf(plan, 1));
  ASSERT_TRUE(waiting->WaitDone() && running->WaitDone());
  PC_EXPECT_OK(waiting->status());
  PC_EXPECT_OK(running->status());
}

TEST_F(SchedulerTest, TheDomainOfARequestIsToldToTheDaemon) {
  Start();
  Run(RequestOf("tenant-7", PlanBuilder::Exact(7), 3));
  EXPECT_THAT(cache_.domains(), ElementsAre("tenant-7"));
}

TEST_F(SchedulerTest, RequestsWaitForPagesAndAllAreServed) {
  // One request without the cache needs 10 pages of 4 tokens.
  Start(/*num_pages=*/12);
  const auto plan = PlanBuilder::Exact(7, 20);
  for (CacheMode mode : {CacheMode::kBypass, CacheMode::kReadOnly}) {
    std::vector<std::shared_ptr<RecordingSink>> sinks;
    for (int i = 0; i < 5; ++i) {
      GenerationRequest request = Request(plan);
      request.cache_mode = mode;
      sinks.push_back(Submit(std::move(request)));
    }
    for (const auto& sink : sinks) {
      ASSERT_TRUE(sink->WaitDone());
      EXPECT_EQ(sink->tokens(), ExpectedTokens(*plan, false, 6));
    }
  }
}

// However much of it is cached; module_pages_test.cc has what is not.
TEST_F(SchedulerTest, ARequestThatCanNeverHaveItsPagesIsRefused) {
  Start(/*num_pages=*/12);
  const auto plan = PlanBuilder::Exact(7, 60);
  EXPECT_THAT(
      scheduler_->Submit(Request(plan, 50), std::make_shared<RecordingSink>()),
      StatusIs(absl::StatusCode::kFailedPrecondition,
               HasSubstr("--tail_bytes")));
  PC_EXPECT_OK(Run(Request(plan))->status());
}

TEST_F(SchedulerTest, ASlowReaderPausesOnlyItself) {
  Start();
  const auto plan = PlanBuilder::Exact(7);
  auto slow = std::make_shared<RecordingSink>();
  slow->SetReady(false);
  PC_ASSERT_OK(scheduler_->Submit(Request(plan, 30), slow));
  ASSERT_TRUE(slow->WaitTokens(1));
  auto other = Run(Request(plan, 30));
  PC_EXPECT_OK(other->status());
  EXPECT_EQ(slow->tokens().size(), 1u);
  slow->SetReady(true);
  scheduler_->Wake();
  ASSERT_TRUE(slow->WaitDone());
  EXPECT_EQ(slow->tokens(), other->tokens());
}

TEST_F(SchedulerTest, APassThatFailsFailsOneRequestOnly) {
  Start();
  Gate both;
  backend_.SetHook([&](std::span<const RowGroup> groups) {
    both.Wait();
    for (const RowGroup& group : groups) {
      for (int32_t token : group.tokens) {
        if (token == 77) return absl::InvalidArgumentError("token 77");
      }
    }
    return absl::OkStatus();
  });
  PlanBuilder bad_plan(1);
  bad_plan.PlaceFresh(0, {1, 77});
  const auto plan = PlanBuilder::Exact(7);
  auto good = Submit(Request(plan));
  auto bad = Submit(Request(bad_plan.Build()));
  both.Open();
  ASSERT_TRUE(good->WaitDone());
  ASSERT_TRUE(bad->WaitDone());
  EXPECT_EQ(good->tokens(), ExpectedTokens(*plan, false, 6));
  EXPECT_THAT(bad->status(),
              StatusIs(absl::StatusCode::kInternal, HasSubstr("token 77")));
}

TEST_F(SchedulerTest, WarmingEncodesModulesAndNothingElse) {
  Start();
  PlanBuilder b(3);
  b.AddModule({});
  b.AddModule({{.module = 0, .num_tokens = 1, .offset = -9}});
  GenerationRequest request = Request(b.Build());
  request.warm = true;
  request.prompt = [&] {
    auto prompt = std::make_shared<CompiledPrompt>(*request.prompt);
    prompt->policies[1] = {.ttl = absl::Seconds(7), .pin = true};
    return prompt;
  }();
  auto sink = Run(request);
  PC_EXPECT_OK(sink->status());
  EXPECT_THAT(sink->tokens(), IsEmpty());
  EXPECT_THAT(sink->completed().modules, Each(StateSource::kCreated));
  ASSERT_EQ(cache_.committed().size(), 2u);
  EXPECT_EQ(cache_.committed()[1].ttl, absl::Seconds(7));
  EXPECT_TRUE(cache_.committed()[1].pin);
  auto again = Run(request);
  EXPECT_THAT(again->completed().modules, Each(StateSource::kRead));
  EXPECT_THAT(cache_.policy_changes(), IsEmpty());
  cache_.SetDown(true);
  EXPECT_THAT(Run(request)->status(),
              StatusIs(absl::StatusCode::kUnavailable, HasSubstr("daemon")));
}

TEST_F(SchedulerTest, WarmingCanReplaceThePolicyOfWhatIsThere) {
  Start();
  PlanBuilder b(3);
  b.AddModule({});
  b.AddModule({{.module = 0, .num_tokens = 1, .offset = -9}});
  GenerationRequest request = Request(b.Build());
  request.warm = true;
  Run(request);
  auto prompt = std::make_shared<CompiledPrompt>(*request.prompt);
  prompt->policies[1] = {.ttl = absl::Seconds(7), .pin = true};
  prompt->replace_policy = true;
  request.prompt = prompt;
  EXPECT_THAT(Run(request)->completed().notices, IsEmpty());
  // Its context is another module, with its own policy.
  ASSERT_EQ(cache_.policy_changes().size(), 1u);
  EXPECT_EQ(cache_.policy_changes()[0].key, prompt->identities[1].key);
  EXPECT_EQ(cache_.policy_changes()[0].ttl, absl::Seconds(7));
  EXPECT_TRUE(cache_.policy_changes()[0].pin);
  cache_.SetRefusePins(true);
  EXPECT_THAT(Run(request)->completed().notices,
              ElementsAre("not pinned, the daemon's pin budget has no room: " +
                          prompt->plan->modules[1].path));
}

TEST_F(SchedulerTest, ARefusedPinIsTold) {
  Start();
  PlanBuilder b(3);
  b.AddModule({});
  b.AddModule({});
  GenerationRequest request = Request(b.Build());
  auto prompt = std::make_shared<CompiledPrompt>(*request.prompt);
  prompt->policies[1].pin = true;
  request.prompt = prompt;
  request.warm = true;
  cache_.SetRefusePins(true);
  auto sink = Run(request);
  PC_EXPECT_OK(sink->status());
  EXPECT_THAT(sink->completed().modules, Each(StateSource::kCreated));
  EXPECT_THAT(sink->completed().notices,
              ElementsAre("not pinned, the daemon's pin budget has no room: " +
                          prompt->plan->modules[1].path));
  // What is there already is not committed again.
  EXPECT_THAT(Run(request)->completed().notices, IsEmpty());
}

TEST_F(SchedulerTest, DrainingRefusesNewRequestsAndFinishesTheOld) {
  Start();
  Gate go;
  backend_.SetHook([&](std::span<const RowGroup>) {
    go.Wait();
    return absl::OkStatus();
  });
  auto sink = Submit(Request(PlanBuilder::Exact(7)));
  EXPECT_FALSE(scheduler_->Drain(absl::Now() + absl::Milliseconds(20)));
  EXPECT_THAT(scheduler_->Submit(Request(PlanBuilder::Exact(7)),
                                 std::make_shared<RecordingSink>()),
              StatusIs(absl::StatusCode::kUnavailable, HasSubstr("shutting")));
  go.Open();
  EXPECT_TRUE(scheduler_->Drain(absl::Now() + absl::Seconds(20)));
  PC_EXPECT_OK(sink->status());
}

TEST_F(SchedulerTest, DestructionEndsWhatRuns) {
  Start();
  Gate running;
  backend_.SetHook([&](std::span<const RowGroup>) {
    running.Open();
    return absl::OkStatus();
  });
  auto sink = Submit(Request(PlanBuilder::Exact(7), 1000));
  running.Wait();
  scheduler_.reset();
  EXPECT_EQ(sink->dones(), 1);
}

TEST_F(SchedulerTest, TheModelsRoomEndsAnAnswer) {
  Start(2000);
  PlanBuilder b(1);
  b.PlaceFresh(4090, b.Tokens(3));  // of 4096
  auto sink = Run(Request(b.Build(), 50));
  EXPECT_EQ(sink->tokens().size(), 3u);
  EXPECT_EQ(sink->completed().finish_reason, FinishReason::kContext);
}

}  // namespace
}  // namespace promptcache::worker
