// Tails that grow page by page, and what happens when no page is left.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <functional>
#include <map>
#include <random>
#include <utility>

#include "inference_worker/serving/plan_execution.h"
#include "inference_worker/serving/scheduler.h"
#include "tests/inference_worker/serving/scheduler_fixture.h"
#include "tests/support/status_matchers.h"

namespace promptcache::worker {
namespace {

using pml::Plan;
using ::testing::AnyOf;
using ::testing::Contains;
using ::testing::Each;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;
using Sink = std::shared_ptr<RecordingSink>;

// Pages hold four tokens.
class PreemptionTest : public SchedulerTest {
 protected:
  // One fresh text of eight tokens: with 24 of an answer eight pages.
  static GenerationRequest Plain(uint32_t seed, uint32_t max_tokens = 24) {
    PlanBuilder b(seed);
    b.PlaceFresh(0, b.Tokens(8));
    return Request(b.Build(), max_tokens);
  }
  // Nothing runs until all are there.
  std::vector<Sink> RunTogether(
      const std::vector<GenerationRequest>& requests) {
    Gate all;
    backend_.SetHook([&](std::span<const RowGroup> groups) {
      all.Wait();
      most_together_ = std::max(most_together_, groups.size());
      return absl::OkStatus();
    });
    std::vector<Sink> sinks;
    for (const GenerationRequest& request : requests) {
      sinks.push_back(Submit(request));
    }
    all.Open();
    for (const Sink& sink : sinks) EXPECT_TRUE(sink->WaitDone());
    EXPECT_TRUE(scheduler_->Drain(absl::Now() + absl::Seconds(20)));
    return sinks;
  }
  // In a pool where nobody is in the way.
  std::vector<Sink> RunAlone(const std::vector<GenerationRequest>& requests,
                             bool with_cache = true) {
    Start(2000, with_cache);
    std::vector<Sink> sinks;
    for (const GenerationRequest& request : requests) {
      sinks.push_back(Run(request));
    }
    EXPECT_EQ(scheduler_->stats().preemptions, 0u);
    scheduler_.reset();
    return sinks;
  }
  static void ExpectSame(const Sink& sink, const Sink& alone) {
    ExpectSameAnswer(sink, alone);
    const CompletedEvent got = sink->completed();
    const CompletedEvent want = alone->completed();
    EXPECT_EQ(got.modules, want.modules);
    EXPECT_EQ(got.usage.prompt_tokens, want.usage.prompt_tokens);
    EXPECT_EQ(got.usage.cached_tokens, want.usage.cached_tokens);
    EXPECT_EQ(got.usage.created_tokens, want.usage.created_tokens);
  }
  static bool Eventually(const std::function<bool()>& condition) {
    const absl::Time deadline = absl::Now() + absl::Seconds(20);
    while (!condition() && absl::Now() < deadline) {
      absl::SleepFor(absl::Milliseconds(1));
    }
    return condition();
  }
  static bool WasPaused(const Sink& sink) {
    for (const std::string& notice : sink->completed().notices) {
      if (notice.starts_with("paused")) return true;
    }
    return false;
  }

  size_t most_together_ = 0;
};

TEST_F(PreemptionTest, APromptIsAdmittedWithoutThePagesOfItsAnswer) {
  Start(/*num_pages=*/8 + 4);
  // Both may need eight, and end before.
  auto requests = {Plain(1), Plain(2)};
  backend_.SetHook({});
  std::vector<GenerationRequest> short_ones;
  for (GenerationRequest request : requests) {
    const auto tokens = ExpectedTokens(*request.prompt->plan, false, 24);
    request.stop = {tokenizer_.Decode(tokens[4]) +
                    tokenizer_.Decode(tokens[5])};
    short_ones.push_back(std::move(request));
  }
  for (const Sink& sink : RunTogether(short_ones)) {
    PC_EXPECT_OK(sink->status());
    EXPECT_EQ(sink->completed().finish_reason, FinishReason::kStopString);
    EXPECT_FALSE(WasPaused(sink));
  }
  EXPECT_EQ(most_together_, 2u);
  EXPECT_EQ(scheduler_->stats().preemptions, 0u);
}

TEST_F(PreemptionTest, TheYoungestPausesAndAnswersAsIfAlone) {
  const std::vector<GenerationRequest> requests = {Plain(1), Plain(2),
                                                   Plain(3)};
  const std::vector<Sink> alone = RunAlone(requests);
  // All of one, of two, and nearly of three.
  for (const uint64_t num_pages : {8u, 16u, 21u}) {
    Start(num_pages);
    const std::vector<Sink> sinks = RunTogether(requests);
    for (size_t i = 0; i < sinks.size(); ++i) ExpectSame(sinks[i], alone[i]);
    EXPECT_FALSE(WasPaused(sinks[0])) << num_pages;
    const SchedulerStats stats = scheduler_->stats();
    if (num_pages > 8) {
      EXPECT_TRUE(WasPaused(sinks[2])) << num_pages;
      EXPECT_GT(stats.preemptions, 0u) << num_pages;
      EXPECT_GE(stats.recomputed_tokens, 8 * stats.preemptions) << num_pages;
    }
    EXPECT_EQ(stats.restarts, 0u);
  }
}

TEST_F(PreemptionTest, WhatItCostIsToldToTheDaemon) {
  Start(/*num_pages=*/16);
  RunTogether({Plain(1), Plain(2), Plain(3)});
  const SchedulerStats stats = scheduler_->stats();
  ASSERT_GT(stats.preemptions, 0u);
  EXPECT_EQ(cache_.counters().preemptions, stats.preemptions);
  EXPECT_EQ(cache_.counters().recomputed_tokens, stats.recomputed_tokens);
}

TEST_F(PreemptionTest, TokensComputedAgainAreCountedExactly) {
  // Two grow from two pages to five, then the younger has 8 + 12 tokens there,
  // or one less when the first pass began before it came.
  Start(/*num_pages=*/10);
  RunTogether({Plain(1), Plain(2)});
  const SchedulerStats stats = scheduler_->stats();
  EXPECT_EQ(stats.preemptions, 1u);
  EXPECT_THAT(stats.recomputed_tokens, AnyOf(19u, 20u));
  EXPECT_EQ(stats.rows, 2 * (8 + 23) + stats.recomputed_tokens);
}

TEST_F(PreemptionTest, ChoicesDrawnAtRandomStayTheSame) {
  std::vector<GenerationRequest> requests;
  for (uint32_t seed = 1; seed <= 4; ++seed) {
    requests.push_back(Plain(seed));
    requests.back().sampling = {.temperature = 1.5f,
                                .top_p = 0.95f,
                                .repetition_penalty = 1.3f,
                                .seed = seed};
  }
  const std::vector<Sink> alone = RunAlone(requests);
  Start(/*num_pages=*/16);
  const std::vector<Sink> sinks = RunTogether(requests);
  for (size_t i = 0; i < sinks.size(); ++i) ExpectSame(sinks[i], alone[i]);
  EXPECT_GT(scheduler_->stats().preemptions, 0u);
}

TEST_F(PreemptionTest, TheDomainWithMostRunningGivesWay) {
  Start(/*num_pages=*/18);
  std::vector<GenerationRequest> requests = {Plain(1), Plain(2), Plain(3)};
  requests[2].isolation_domain = "other";
  const std::vector<Sink> sinks = RunTogether(requests);
  EXPECT_FALSE(WasPaused(sinks[0]));
  EXPECT_TRUE(WasPaused(sinks[1]));
  EXPECT_FALSE(WasPaused(sinks[2]));  // the youngest, and alone in its domain
}

TEST_F(PreemptionTest, ModulesAreReadAgainAndCountAsTheyDid) {
  std::vector<GenerationRequest> requests;
  for (uint32_t seed = 1; seed <= 3; ++seed) {
    requests.push_back(Request(PlanBuilder::Exact(seed, 20), 30));
  }
  const std::vector<Sink> alone = RunAlone(requests);
  cache_.RevokeAll();
  Start(/*num_pages=*/17);
  // None is done while another's modules are committed.
  std::vector<Sink> sinks;
  for (const GenerationRequest& request : requests) {
    sinks.push_back(std::make_shared<RecordingSink>());
    sinks.back()->SetRoom(1);
    PC_ASSERT_OK(scheduler_->Submit(request, sinks.back()));
    ASSERT_TRUE(sinks.back()->WaitTokens(1));
  }
  for (const Sink& sink : sinks) sink->SetRoom(1000);
  scheduler_->Wake();
  for (const Sink& sink : sinks) ASSERT_TRUE(sink->WaitDone());
  for (size_t i = 0; i < sinks.size(); ++i) {
    ExpectSame(sinks[i], alone[i]);
    EXPECT_THAT(sinks[i]->completed().modules, Each(StateSource::kCreated));
  }
  EXPECT_GT(scheduler_->stats().preemptions, 0u);
}

TEST_F(PreemptionTest, TheCacheIsToldWhoAsksAgain) {
  std::vector<GenerationRequest> requests;
  for (uint32_t seed = 1; seed <= 3; ++seed) {
    requests.push_back(Request(PlanBuilder::Exact(seed, 20), 30));
  }
  Start(/*num_pages=*/17);
  RunTogether(requests);
  const SchedulerStats stats = scheduler_->stats();
  ASSERT_GT(stats.preemptions, 0u);
  const auto purposes = cache_.purposes();
  EXPECT_EQ(std::ranges::count(purposes, AcquirePurpose::kRequest), 3);
  EXPECT_EQ(std::ranges::count(purposes, AcquirePurpose::kAgain),
            static_cast<int64_t>(stats.preemptions + stats.restarts));
}

TEST_F(PreemptionTest, PagesThatATaskHoldsAreWaitedFor) {
  Start(/*num_pages=*/16);
  const auto plan = PlanBuilder::Exact(7, 20);
  auto old = std::make_shared<RecordingSink>();
  old->SetReady(false);
  PC_ASSERT_OK(scheduler_->Submit(Plain(1, 50), old));  // 15 pages
  ASSERT_TRUE(old->WaitTokens(1));
  // Its tail's pages are its own while the cache is asked.
  Gate answer;
  cache_.SetAcquireHook([&] { answer.Wait(); });
  const Sink young = Submit(Request(plan));
  old->SetReady(true);
  scheduler_->Wake();
  ASSERT_TRUE(Eventually([&] { return pages_->free_pages() == 0; }));
  EXPECT_EQ(old->dones(), 0);
  answer.Open();
  ASSERT_TRUE(old->WaitDone());
  ASSERT_TRUE(young->WaitDone());
  EXPECT_FALSE(WasPaused(old));
  EXPECT_EQ(old->tokens().size(), 50u);
  EXPECT_EQ(young->tokens(), ExpectedTokens(*plan, false, 6));
}

// An answer that needs all of the pool, with room for so many tokens at its
// reader; and a younger request for a module that others encode.
class LentPagesTest : public PreemptionTest {
 protected:
  static constexpr uint32_t kAnswer = 50;

  void StartBoth(size_t room) {
    options_.reader_patience = options_.reader_limit;
    Start(/*num_pages=*/15);
    old_ = std::make_shared<RecordingSink>();
    old_->SetRoom(1);
    PC_ASSERT_OK(scheduler_->Submit(Plain(1, kAnswer), old_));
    ASSERT_TRUE(old_->WaitTokens(1));
    cache_.ReserveElsewhere(KeyOf(plan_, 1), 20);
    young_ = Submit(Request(plan_));
    // The other module is there: nothing else is left to do for it.
    ASSERT_TRUE(Eventually([&] { return cache_.counters().commits == 1; }));
    old_->SetRoom(room);
    scheduler_->Wake();
    ASSERT_TRUE(old_->WaitTokens(room));
    EXPECT_EQ(scheduler_->stats().preemptions, 0u);
  }
  void LetYoungGoOn() { cache_.AbandonElsewhere(KeyOf(plan_, 1)); }
  void ExpectAnswers() {
    ASSERT_TRUE(old_->WaitDone());
    ASSERT_TRUE(young_->WaitDone());
    EXPECT_FALSE(WasPaused(old_));
    EXPECT_EQ(old_->tokens().size(), kAnswer);
    EXPECT_EQ(young_->tokens(), ExpectedTokens(*plan_, false, 6));
  }

  const std::shared_ptr<const Plan> plan_ = PlanBuilder::Exact(7, 20);
  Sink old_;
  Sink young_;
};

TEST_F(LentPagesTest, WhoWaitsForAModuleIsNotWaitedFor) {
  StartBoth(/*room=*/kAnswer);
  EXPECT_TRUE(old_->WaitDone());
  EXPECT_EQ(young_->dones(), 0);
  LetYoungGoOn();
  ExpectAnswers();
  EXPECT_FALSE(WasPaused(young_));
  EXPECT_EQ(cache_.counters().acquires, 1u);
}

TEST_F(LentPagesTest, WhoFindsNoneWhenItHasWaitedIsPaused) {
  StartBoth(/*room=*/kAnswer - 1);
  LetYoungGoOn();
  ASSERT_TRUE(Eventually([&] { return scheduler_->stats().preemptions == 1; }));
  old_->SetRoom(kAnswer);
  scheduler_->Wake();
  ExpectAnswers();
  EXPECT_TRUE(WasPaused(young_));
  EXPECT_EQ(scheduler_->stats().preemptions, 1u);
  EXPECT_EQ(scheduler_->stats().recomputed_tokens, 0u);
}

TEST_F(LentPagesTest, NobodyNewIsAdmittedIntoThem) {
  StartBoth(/*room=*/20);
  const auto others = *pages_->Allocate(pages_->free_pages());
  old_->SetRoom(26);
  scheduler_->Wake();
  ASSERT_TRUE(old_->WaitTokens(26));
  pages_->Free(others);
  // The two of its prompt, and two for each that runs.
  ASSERT_EQ(pages_->free_pages(), 6u);
  const Sink newest = Submit(Plain(3));
  old_->SetRoom(27);  // into the page that it has
  scheduler_->Wake();
  ASSERT_TRUE(old_->WaitTokens(27));
  EXPECT_EQ(pages_->free_pages(), 6u);
  EXPECT_EQ(newest->starts(), 0);
  LetYoungGoOn();
  old_->SetRoom(kAnswer);
  scheduler_->Wake();
  ExpectAnswers();
  EXPECT_TRUE(newest->WaitDone());
}

TEST_F(PreemptionTest, APausedRequestHeedsItsDeadline) {
  Start(/*num_pages=*/12);
  Gate both, late;
  backend_.SetHook([&](std::span<const RowGroup>) {
    both.Wait();
    // They begin together; then the younger is put off.
    if (scheduler_->stats().preemptions > 0) late.Wait();
    return absl::OkStatus();
  });
  const Sink old = Submit(Plain(1));
  GenerationRequest request = Plain(2);
  request.deadline = absl::Now() + absl::Milliseconds(300);
  const Sink young = Submit(request);
  both.Open();
  while (absl::Now() < request.deadline) absl::SleepFor(absl::Milliseconds(10));
  late.Open();
  ASSERT_TRUE(young->WaitDone());
  ASSERT_TRUE(old->WaitDone());
  PC_EXPECT_OK(old->status());
  EXPECT_THAT(young->status(), StatusIs(absl::StatusCode::kDeadlineExceeded,
                                        HasSubstr("deadline")));
  EXPECT_LT(young->tokens().size(), 24u);
}

// Everything at once: shapes, domains, modes, ends, cancellation, slow readers,
// modules that others encode or do not, and modules that are evicted when
// nobody reads them. Who can be served is, and only who cannot is told so.
class PreemptionStorm : public PreemptionTest {
 protected:
  uint32_t Pick(uint32_t count) {
    return static_cast<uint32_t>(random_() % count);
  }
  GenerationRequest RandomRequest() {
    auto plan = Pick(2) == 0 ? PlanBuilder::Random(Pick(6), Pick(2) == 0)
                             : PlanBuilder::Exact(Pick(6), 4 + 8);
    GenerationRequest request = Request(plan, 1 + Pick(40));
    request.isolation_domain = std::string(1, static_cast<char>('a' + Pick(3)));
    request.top_logprobs = 1 + Pick(3);
    if (Pick(4) == 0) request.cache_mode = CacheMode::kBypass;
    if (Pick(4) == 0) request.cache_mode = CacheMode::kReadOnly;
    if (Pick(6) == 0) request.full_attention = true;
    if (Pick(3) == 0) request.sampling = {.temperature = 1, .seed = Pick(99)};
    if (Pick(4) == 0) request.ignore_eos = false;
    if (Pick(4) == 0) request.stop = {tokenizer_.Decode(1 + Pick(26)), "ab"};
    if (Pick(4) == 0) request.link_tokens = 1 + Pick(3);
    return request;
  }
  void StartStorm() {
    options_.step_tokens = 10 + Pick(30);
    options_.max_running = 2 + Pick(7);
    options_.max_queue = 64;
    options_.reader_patience = absl::Milliseconds(Pick(3));
    options_.pending_timeout = absl::Milliseconds(1 + Pick(20));
    Start(/*num_pages=*/22 + Pick(25));
    cache_.SetAcquireHook([this] {
      if (++acquires_ % 3 == 0) cache_.EvictUnleased();
    });
  }
  // Some modules of the requests: until Abandon, or as long as anybody waits.
  void EncodeElsewhere();
  void Abandon();
  void SubmitAll();
  void ReadAll();
  void ExpectAsAlone(size_t i);
  // That it needs of the pool with a whole answer, all modules `cached` or all
  // computed here.
  uint64_t MostPages(const GenerationRequest& request, bool cached);
  void Blow(uint32_t seed);

  std::mt19937 random_;
  std::atomic<int> acquires_ = 0;
  std::vector<GenerationRequest> requests_;
  std::vector<Sink> alone_;
  std::map<ModuleKey, uint32_t> elsewhere_keys_;  // and their tokens
  // By index, of those that were not refused; and the flags of some.
  std::map<size_t, Sink> sinks_;
  std::map<size_t, std::shared_ptr<CancelFlag>> flags_;
  uint64_t preemptions_ = 0;
  uint64_t reader_pauses_ = 0;
  uint64_t refused_ = 0;
  uint64_t too_large_ = 0;  // as was found later
};

uint64_t PreemptionStorm::MostPages(const GenerationRequest& request,
                                    bool cached) {
  const auto& plan = request.prompt->plan;
  const PlanExecution execution(plan, backend_.layout(),
                                {.full_attention = request.full_attention,
                                 .link_tokens = request.link_tokens,
                                 .max_new_tokens = request.max_tokens});
  uint64_t pages = execution.max_tail_pages();
  if (cached || request.full_attention) return pages;
  const auto needed =
      NeededModules(*plan, std::vector<bool>(plan->modules.size(), false));
  for (size_t i = 0; i < needed.size(); ++i) {
    if (!needed[i]) continue;
    pages += execution.module_pages(i) + execution.temporary_pages(i);
  }
  return pages;
}

void PreemptionStorm::EncodeElsewhere() {
  cache_.RevokeAll();
  for (const GenerationRequest& request : requests_) {
    const CompiledPrompt& prompt = *request.prompt;
    for (size_t i = 0; i < prompt.identities.size(); ++i) {
      if (Pick(4) > 0) continue;
      elsewhere_keys_[prompt.identities[i].key] =
          static_cast<uint32_t>(prompt.plan->modules[i].num_tokens());
    }
  }
  for (const auto& [key, tokens] : elsewhere_keys_) {
    cache_.ReserveElsewhere(key, tokens);
  }
}

void PreemptionStorm::Abandon() {
  if (elsewhere_keys_.empty()) return;
  cache_.AbandonElsewhere(elsewhere_keys_.begin()->first);
  elsewhere_keys_.erase(elsewhere_keys_.begin());
}

void PreemptionStorm::SubmitAll() {
  for (size_t i = 0; i < requests_.size(); ++i) {
    auto sink = std::make_shared<RecordingSink>();
    sink->SetReady(Pick(4) != 0);
    if (Pick(3) == 0) sink->SetRoom(1 + Pick(9));
    const auto flag = scheduler_->Submit(requests_[i], sink);
    const bool asks = requests_[i].cache_mode != CacheMode::kBypass;
    EXPECT_EQ(flag.ok(),
              MostPages(requests_[i], asks) <= pages_->capacity_pages())
        << i;
    if (!flag.ok()) {
      EXPECT_THAT(flag, StatusIs(absl::StatusCode::kFailedPrecondition,
                                 HasSubstr("private KV pages")));
      ++refused_;
      continue;
    }
    sinks_[i] = sink;
    if (Pick(5) == 0) flags_[i] = *flag;
    if (!flags_.empty() && Pick(3) == 0) flags_.begin()->second->Cancel();
    scheduler_->Wake();
  }
}

// Some read a few tokens at a time, then all of them read all.
void PreemptionStorm::ReadAll() {
  for (const auto& [i, sink] : sinks_) sink->SetReady(true);
  for (int turn = 0; turn < 40; ++turn) {
    for (const auto& [i, sink] : sinks_) sink->Read(Pick(4));
    if (turn > 20 && Pick(4) == 0) Abandon();
    scheduler_->Wake();
    absl::SleepFor(absl::Microseconds(200));
  }
  for (const auto& [i, sink] : sinks_) sink->SetRoom(1 << 20);
  scheduler_->Wake();
}

void PreemptionStorm::ExpectAsAlone(size_t i) {
  const Sink& sink = sinks_[i];
  ASSERT_TRUE(sink->WaitDone());
  EXPECT_EQ(sink->dones(), 1);
  if (absl::IsFailedPrecondition(sink->status())) {
    EXPECT_THAT(sink->status().message(), HasSubstr("private KV pages"));
    // And could not be served without the cache, were the pool its own.
    EXPECT_GT(MostPages(requests_[i], /*cached=*/false),
              pages_->capacity_pages());
    ++too_large_;
    return;
  }
  if (flags_.contains(i) && !sink->status().ok()) {
    EXPECT_THAT(sink->status(),
                StatusIs(absl::StatusCode::kCancelled, HasSubstr("caller")));
    const auto all = alone_[i]->tokens();
    const auto some = sink->tokens();
    ASSERT_LE(some.size(), all.size());
    EXPECT_TRUE(std::equal(some.begin(), some.end(), all.begin()));
    return;
  }
  PC_EXPECT_OK(sink->status());
  EXPECT_EQ(sink->starts(), 1);
  EXPECT_EQ(sink->tokens(), alone_[i]->tokens());
  EXPECT_EQ(sink->text(), alone_[i]->text());
  const CompletedEvent got = sink->completed();
  const CompletedEvent want = alone_[i]->completed();
  EXPECT_EQ(got.logits_sha256, want.logits_sha256);
  EXPECT_EQ(got.finish_reason, want.finish_reason);
  EXPECT_EQ(got.stop_string, want.stop_string);
}

void PreemptionStorm::Blow(uint32_t seed) {
  random_.seed(seed);
  requests_.clear();
  sinks_.clear();
  flags_.clear();
  for (int i = 0; i < 40; ++i) requests_.push_back(RandomRequest());
  alone_ = RunAlone(requests_, /*with_cache=*/false);
  StartStorm();
  EncodeElsewhere();
  SubmitAll();
  for (const auto& [i, flag] : flags_) flag->Cancel();
  ReadAll();
  for (const auto& [i, sink] : sinks_) {
    SCOPED_TRACE(i);
    ExpectAsAlone(i);
  }
  EXPECT_TRUE(scheduler_->Drain(absl::Now() + absl::Seconds(20)));
  EXPECT_EQ(pages_->free_pages(), pages_->capacity_pages());
  while (!elsewhere_keys_.empty()) Abandon();
  preemptions_ += scheduler_->stats().preemptions;
  reader_pauses_ += scheduler_->stats().reader_pauses;
  scheduler_.reset();
  cache_.SetAcquireHook({});
}

// In one test, so that it can say that there was a storm.
TEST_F(PreemptionStorm, EveryAnswerIsThatOfAnUndisturbedRequest) {
  for (uint32_t seed = 1; seed < 25; ++seed) {
    SCOPED_TRACE(seed);
    Blow(seed);
    if (HasFatalFailure()) return;
  }
  EXPECT_GT(preemptions_, 0u);
  EXPECT_GT(reader_pauses_, 0u);
  EXPECT_GT(refused_, 0u);
  EXPECT_GT(too_large_, 0u);
}

}  // namespace
}  // namespace promptcache::worker
