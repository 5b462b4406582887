// What a request holds of the pool for its modules: nothing for those that it
// reads, that it encodes into the cache or that others encode.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <functional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "inference_worker/serving/scheduler.h"
#include "tests/inference_worker/serving/scheduler_fixture.h"
#include "tests/support/status_matchers.h"

namespace promptcache::worker {
namespace {

using pml::Plan;
using ::testing::AllOf;
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
  static auto TooLarge(uint64_t num_pages) {
    return StatusIs(
        absl::StatusCode::kFailedPrecondition,
        AllOf(HasSubstr(absl::StrCat(" ", num_pages, " private KV pages")),
              HasSubstr("--tail_bytes")));
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
  // Counted before they are given back.
  EXPECT_TRUE(Eventually([&] { return used_pages() == of_old; }));
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

// Two requests for a module that needs pages also when it is encoded into the
// cache, in a pool that has them but once. The daemon's answers come when it is
// worst: who has the pages is told that the other one has the reservation, and
// hears it when that one has found no pages and let go of it.
class PassedOnTest : public ModulePagesTest {
 protected:
  static constexpr uint64_t kScaffoldPages = 10;
  static constexpr uint64_t kPromptPages = 2;  // of the tail
  static constexpr uint64_t kPoolPages =
      2 * (kPromptPages + kScaffoldPages) - 1;
  static constexpr uint64_t kCalls = 12;  // then they come as they come

  // The document after a text that is thrown away.
  static std::shared_ptr<const Plan> Scaffolded(uint32_t seed) {
    PlanBuilder b(1);
    const auto scaffold = static_cast<int32_t>(kScaffoldPages) * 4;
    pml::PlanModule module;
    module.path = "document";
    module.context = {{.offset = -scaffold, .tokens = b.Tokens(scaffold)}};
    module.pieces.push_back({0, b.Tokens(8)});
    module.length = 8;
    module.text_sha256 = Sha256Of(module.path);
    b.plan().modules.push_back(std::move(module));
    b.PlaceModule(0, 0);
    PlanBuilder question(seed);
    b.PlaceFresh(8, question.Tokens(6));
    return b.Build();
  }
  void PutAnswersOff() {
    cache_.SetAcquireHook([this] {
      call_ = calls_++;
      if (call_ < kCalls) BeforeAcquire();
    });
    cache_.SetAcquiredHook([this](const CacheLease& lease) {
      if (call_ < kCalls) AfterAcquire(lease.modules()[0].outcome);
    });
    cache_.SetPassedOnHook([this] {
      if (calls_ < kCalls) BeforePassedOn();
    });
  }
  uint64_t pauses() { return scheduler_->stats().preemptions; }

 private:
  // The second call is given what the first lets go of.
  void BeforeAcquire() {
    const auto in_time = [this] {
      const FakeCache::Counters now = cache_.counters();
      if (call_ == 1) return now.acquires == 1 && now.live_reservations == 0;
      return call_ == 0 || now.live_reservations + now.commits == 1;
    };
    EXPECT_TRUE(Eventually(in_time)) << call_;
  }
  void AfterAcquire(AcquireOutcome outcome) {
    const auto in_time = [&] {
      if (call_ == 0) return calls_ == 2;  // both were admitted
      if (call_ == 1) return cache_.counters().acquires == 3;
      return outcome != AcquireOutcome::kPending || pauses() >= call_;
    };
    EXPECT_TRUE(Eventually(in_time)) << call_;
  }
  // Until the other one has asked, or cannot: it has no pages.
  void BeforePassedOn() {
    const uint64_t before = cache_.counters().acquires;
    EXPECT_TRUE(Eventually([&] {
      return cache_.counters().acquires > before ||
             used_pages() == kPromptPages + kScaffoldPages;
    }));
  }

  std::atomic<uint64_t> calls_ = 0;
  static thread_local uint64_t call_;  // which Acquire this thread is in
};
thread_local uint64_t PassedOnTest::call_ = 0;

TEST_F(PassedOnTest, WhoHasThePagesKeepsThemForTheReservation) {
  Start(kPoolPages);
  PutAnswersOff();
  // At first nobody has them.
  const auto others = *pages_->Allocate(kPoolPages - 3 * kPromptPages - 2);
  const std::vector<std::shared_ptr<const Plan>> plans = {Scaffolded(1),
                                                          Scaffolded(2)};
  std::vector<Sink> sinks;
  for (const auto& plan : plans) sinks.push_back(Submit(Request(plan)));
  ASSERT_TRUE(Eventually([this] { return cache_.counters().acquires == 2; }));
  pages_->Free(others);
  scheduler_->Wake();
  for (size_t i = 0; i < plans.size(); ++i) {
    ASSERT_TRUE(sinks[i]->WaitDone());
    EXPECT_EQ(sinks[i]->tokens(), ExpectedTokens(*plans[i], false, 6));
  }
  EXPECT_EQ(pauses(), 2u);  // each once
  EXPECT_EQ(cache_.counters().commits, 1u);
}

TEST_F(ModulePagesTest, APromptLargerThanThePoolRunsWithTheCache) {
  Start(/*num_pages=*/kTailPages);
  const auto created = Run(Request(Document()));
  const auto cached = Run(Request(Document()));
  for (const Sink& sink : {created, cached}) {
    PC_EXPECT_OK(sink->status());
    EXPECT_EQ(sink->tokens(), ExpectedTokens(*Document(), false, 6));
  }
  EXPECT_EQ(created->completed().usage.created_tokens, kDocumentTokens);
  EXPECT_EQ(cached->completed().usage.cached_tokens, kDocumentTokens);
  EXPECT_EQ(pages_->peak_pages(), kTailPages);
}

TEST_F(ModulePagesTest, ATailLargerThanThePoolIsRefused) {
  Start(/*num_pages=*/kTailPages - 1);
  EXPECT_THAT(scheduler_->Submit(Request(Document()),
                                 std::make_shared<RecordingSink>()),
              TooLarge(kTailPages));
  GenerationRequest bypass = Request(Document());
  bypass.cache_mode = CacheMode::kBypass;
  EXPECT_THAT(scheduler_->Submit(bypass, std::make_shared<RecordingSink>()),
              TooLarge(kDocumentPages + kTailPages));
}

TEST_F(ModulePagesTest, WhatMustBeComputedHereAndHasNoRoomIsTold) {
  Start(/*num_pages=*/kDocumentPages);
  const auto never = TooLarge(kDocumentPages + kTailPages);
  cache_.SetNoMemory(true);
  const auto without_memory = Run(Request(Document()));
  EXPECT_THAT(without_memory->status(), never);
  EXPECT_THAT(without_memory->status().message(),
              HasSubstr("the cache has no memory"));
  cache_.SetNoMemory(false);
  GenerationRequest reads = Request(Document());
  reads.cache_mode = CacheMode::kReadOnly;
  EXPECT_THAT(Run(reads)->status(), never);
  cache_.SetDown(true);
  const auto without_daemon = Run(Request(Document()));
  EXPECT_THAT(without_daemon->status(), never);
  EXPECT_THAT(without_daemon->status().message(), HasSubstr("unavailable"));
  EXPECT_EQ(backend_.passes(), 0u);
}

TEST_F(ModulePagesTest, WhoGivesUpWaitingAndHasNoRoomIsTold) {
  options_.pending_timeout = absl::Milliseconds(30);
  Start(/*num_pages=*/kDocumentPages);
  EncodeElsewhere();
  elsewhere_ = 1;
  const auto sink = Run(Request(Document()));
  EXPECT_THAT(sink->status(), TooLarge(kDocumentPages + kTailPages));
  EXPECT_THAT(sink->status().message(), HasSubstr("wait longer"));
}

// Without the cache there is no room.
TEST_F(ModulePagesTest, LostStatesThatHaveNoRoomHereAreEncodedOnceMore) {
  constexpr uint64_t kLongTailPages = 5;
  uint64_t passes = 0;
  int losses = 1;
  backend_.SetHook([&](std::span<const RowGroup>) {
    if (++passes % 4 == 0 && losses-- > 0) cache_.RevokeAll();
    return absl::OkStatus();
  });
  Start(/*num_pages=*/kLongTailPages);
  const auto once = Run(Request(Document(), 14));
  PC_EXPECT_OK(once->status());
  EXPECT_EQ(once->tokens(), ExpectedTokens(*Document(), false, 14));
  EXPECT_THAT(once->completed().notices, Contains(HasSubstr("lost")));
  losses = 2;
  const auto twice = Run(Request(Document(), 14));
  EXPECT_THAT(twice->status(), TooLarge(kDocumentPages + kLongTailPages));
  EXPECT_THAT(twice->status().message(), HasSubstr("lost"));
  faults_expected_ = true;
}

TEST_F(ModulePagesTest, WaitersLeaveTheirPlaceToOthers) {
  options_.max_running = 2;
  Start();
  EncodeElsewhere();
  std::vector<Sink> waiters;
  for (uint32_t i = 0; i < 2; ++i) {
    waiters.push_back(Submit(Request(Document(i))));
  }
  ASSERT_TRUE(Eventually([&] { return cache_.counters().acquires == 2; }));
  EXPECT_EQ(Run(Plain(6))->tokens().size(), 6u);
  EXPECT_EQ(waiters[0]->dones() + waiters[1]->dones(), 0);
  cache_.AbandonElsewhere(KeyOf(Document(), 0));
  for (const Sink& sink : waiters) ASSERT_TRUE(sink->WaitDone());
  EXPECT_EQ(cache_.counters().commits, 1u);
}

// One is cancelled, one runs out of time, one is there at the end.
TEST_F(ModulePagesTest, WhoWaitsIsEndedAsOthersAre) {
  options_.max_running = 2;
  Start();
  EncodeElsewhere();
  elsewhere_ = 1;
  const Sink cancelled = Submit(Request(Document(0)));
  ASSERT_TRUE(Eventually([&] { return cache_.counters().acquires == 1; }));
  flag_->Cancel();
  ASSERT_TRUE(cancelled->WaitDone());
  EXPECT_TRUE(absl::IsCancelled(cancelled->status()));
  GenerationRequest hurried = Request(Document(1));
  hurried.deadline = absl::Now() + absl::Milliseconds(300);
  const Sink late = Submit(hurried);
  const Sink last = Submit(Request(Document(2)));
  ASSERT_TRUE(late->WaitDone());
  EXPECT_TRUE(absl::IsDeadlineExceeded(late->status()));
  EXPECT_TRUE(Eventually([&] { return cache_.counters().acquires == 3; }));
  EXPECT_EQ(last->dones(), 0);
  scheduler_.reset();
  EXPECT_TRUE(absl::IsCancelled(last->status()));
  EXPECT_EQ(cancelled->dones() + late->dones() + last->dones(), 3);
  EXPECT_EQ(used_pages(), 0u);
}

// More that decode than a step has rows.
TEST_F(ModulePagesTest, WaitersGoOnBesideThoseThatTookTheirPlace) {
  options_.max_running = 4;
  options_.step_tokens = 5;
  size_t most_rows = 0;
  backend_.SetHook([&](std::span<const RowGroup> groups) {
    size_t rows = 0;
    for (const RowGroup& group : groups) rows += group.tokens.size();
    most_rows = std::max(most_rows, rows);
    return absl::OkStatus();
  });
  Start();
  EncodeElsewhere();
  std::vector<Sink> sinks;
  for (uint32_t i = 0; i < 4; ++i) {
    sinks.push_back(Submit(Request(Document(i), 200)));
  }
  ASSERT_TRUE(Eventually([&] { return cache_.counters().acquires == 4; }));
  std::vector<Sink> others;
  for (uint32_t i = 0; i < 4; ++i) {
    others.push_back(std::make_shared<RecordingSink>());
    others.back()->SetReady(false);
    PC_ASSERT_OK(scheduler_->Submit(Plain(200), others.back()));
    ASSERT_TRUE(others.back()->WaitTokens(1));
  }
  cache_.AbandonElsewhere(KeyOf(Document(), 0));
  for (const Sink& sink : sinks) ASSERT_TRUE(sink->WaitTokens(1));
  for (const Sink& sink : others) sink->SetReady(true);
  scheduler_->Wake();
  for (uint32_t i = 0; i < 4; ++i) {
    ASSERT_TRUE(sinks[i]->WaitDone() && others[i]->WaitDone());
    EXPECT_EQ(sinks[i]->tokens(), ExpectedTokens(*Document(i), false, 200));
    EXPECT_EQ(others[i]->tokens(), others[0]->tokens());
  }
  EXPECT_LE(most_rows, 5u);
}

}  // namespace
}  // namespace promptcache::worker
