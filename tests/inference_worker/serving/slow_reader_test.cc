// Readers that are behind, and what others have of it.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <utility>

#include "inference_worker/serving/scheduler.h"
#include "tests/inference_worker/serving/scheduler_fixture.h"
#include "tests/support/status_matchers.h"

namespace promptcache::worker {
namespace {

using ::testing::Contains;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using Sink = std::shared_ptr<RecordingSink>;

constexpr size_t kAll = 1 << 20;

// Pages hold four tokens.
class SlowReaderTest : public SchedulerTest {
 protected:
  SlowReaderTest() { options_.reader_patience = absl::Milliseconds(20); }

  // Eight tokens: with 24 of an answer eight pages.
  static GenerationRequest Plain(uint32_t seed, uint32_t max_tokens = 24) {
    PlanBuilder b(seed);
    b.PlaceFresh(0, b.Tokens(8));
    return Request(b.Build(), max_tokens);
  }
  // Of whom the reader takes nothing, so that it stops after `room` tokens.
  Sink SubmitStalled(GenerationRequest request, size_t room) {
    auto sink = std::make_shared<RecordingSink>();
    sink->SetRoom(room);
    PC_EXPECT_OK(scheduler_->Submit(std::move(request), sink));
    EXPECT_TRUE(sink->WaitTokens(room));
    return sink;
  }
  // Who is told of its end is counted for a moment still.
  void AwaitRequests(uint32_t count) {
    const absl::Time deadline = absl::Now() + absl::Seconds(20);
    while (scheduler_->num_requests() != count && absl::Now() < deadline) {
      absl::SleepFor(absl::Milliseconds(1));
    }
    EXPECT_EQ(scheduler_->num_requests(), count);
  }
  void ReadAll(const Sink& sink) {
    sink->SetRoom(kAll);
    scheduler_->Wake();
    EXPECT_TRUE(sink->WaitDone());
  }
  static void ExpectWhole(const Sink& sink, const GenerationRequest& request) {
    PC_EXPECT_OK(sink->status());
    EXPECT_EQ(sink->starts(), 1);
    EXPECT_EQ(sink->tokens(),
              ExpectedTokens(*request.prompt->plan, false, request.max_tokens));
  }
};

TEST_F(SlowReaderTest, AsManyAsThereArePlacesStopNobody) {
  Start();
  std::vector<GenerationRequest> requests;
  std::vector<Sink> stalled;
  for (uint32_t i = 0; i < options_.max_running; ++i) {
    requests.push_back(Request(PlanBuilder::Exact(i), 30));
    stalled.push_back(SubmitStalled(requests.back(), 3 + i % 5));
  }
  const GenerationRequest other = Request(PlanBuilder::Exact(99), 30);
  const Sink quick = Run(other);
  ExpectWhole(quick, other);
  EXPECT_LT(quick->completed().timings.queue, absl::Seconds(5));
  EXPECT_EQ(scheduler_->stats().reader_pauses, 1u);
  for (size_t i = 0; i < stalled.size(); ++i) {
    EXPECT_EQ(stalled[i]->tokens().size(), 3 + i % 5);
    ReadAll(stalled[i]);
    ExpectWhole(stalled[i], requests[i]);
  }
  EXPECT_EQ(scheduler_->stats().preemptions, 0u);
}

TEST_F(SlowReaderTest, PlacePagesAndLeaseGoBack) {
  options_.max_running = 2;
  Start();
  const GenerationRequest request = Request(PlanBuilder::Exact(7), 30);
  const Sink stalled[] = {SubmitStalled(request, 5), SubmitStalled(request, 9)};
  EXPECT_EQ(cache_.counters().live_leases, 2u);
  // Both have been behind for long enough: else the second other one might
  // find the first one's place free again before that.
  absl::SleepFor(2 * options_.reader_patience);
  // Both places are wanted at once.
  Gate both;
  backend_.SetHook([&](std::span<const RowGroup>) {
    both.Wait();
    return absl::OkStatus();
  });
  const Sink others[] = {Submit(Plain(1)), Submit(Plain(2))};
  both.Open();
  for (const Sink& other : others) ASSERT_TRUE(other->WaitDone());
  EXPECT_EQ(scheduler_->stats().reader_pauses, 2u);
  EXPECT_EQ(cache_.counters().live_leases, 0u);
  EXPECT_EQ(pages_->free_pages(), pages_->capacity_pages());
  for (const Sink& sink : stalled) {
    ReadAll(sink);
    ExpectWhole(sink, request);
    EXPECT_THAT(sink->completed().notices,
                Contains(HasSubstr("its reader was behind")));
  }
}

TEST_F(SlowReaderTest, TheOldestsPagesAreNotWaitedFor) {
  Start(/*num_pages=*/12);
  const GenerationRequest first = Plain(1);
  const Sink old = SubmitStalled(first, 16);
  // Needs eight, of which the other one has six.
  const GenerationRequest second = Plain(2);
  ExpectWhole(Run(second), second);
  EXPECT_EQ(old->tokens().size(), 16u);
  ReadAll(old);
  ExpectWhole(old, first);
}

// Nor are they taken without need.
TEST_F(SlowReaderTest, WithoutOthersWhoWaitItKeepsWhatItHas) {
  Start();
  const GenerationRequest request = Plain(1);
  const Sink stalled = SubmitStalled(request, 5);
  for (uint32_t seed = 2; seed < 5; ++seed) Run(Plain(seed));
  absl::SleepFor(2 * options_.reader_patience);
  Run(Plain(9));
  ReadAll(stalled);
  ExpectWhole(stalled, request);
  EXPECT_THAT(stalled->completed().notices, IsEmpty());
  EXPECT_EQ(scheduler_->stats().recomputed_tokens, 0u);
}

TEST_F(SlowReaderTest, NothingIsComputedAgainForAReaderThatIsStillBehind) {
  options_.max_running = 1;
  Start();
  const Sink stalled = SubmitStalled(Plain(1), 16);
  for (uint32_t seed = 2; seed < 5; ++seed) Run(Plain(seed));
  // Half of what may wait is read, but for one.
  stalled->Read(7);
  scheduler_->Wake();
  Run(Plain(5));
  EXPECT_EQ(scheduler_->stats().rows, 8 + 15 + 4 * (8 + 23u));
  stalled->Read(1);
  scheduler_->Wake();
  ASSERT_TRUE(stalled->WaitTokens(24));
  EXPECT_EQ(scheduler_->stats().reader_pauses, 1u);
  EXPECT_EQ(scheduler_->stats().recomputed_tokens, 8 + 15u);
}

TEST_F(SlowReaderTest, WhoWaitsForItsReaderKeepsNobodyOut) {
  options_.max_running = 1;
  options_.max_queue = 1;
  Start();
  std::vector<Sink> stalled;
  // The last runs; each of the others was paused for the next.
  for (uint32_t seed = 1; seed <= 3; ++seed) {
    stalled.push_back(SubmitStalled(Plain(seed), 5));
  }
  ExpectWhole(Run(Plain(8)), Plain(8));
  EXPECT_EQ(scheduler_->stats().reader_pauses, 3u);
  AwaitRequests(3);
  // There is an end to it: the third one and these take both places.
  const Sink fourth = SubmitStalled(Plain(4), 5);
  const auto refused =
      scheduler_->Submit(Plain(9), std::make_shared<RecordingSink>());
  EXPECT_THAT(refused, StatusIs(absl::StatusCode::kResourceExhausted,
                                HasSubstr("queue is full: 2")));
  EXPECT_LE(scheduler_->num_requests(), scheduler_->max_requests());
  for (uint32_t i = 0; i < 3; ++i) {
    ReadAll(stalled[i]);
    ExpectWhole(stalled[i], Plain(i + 1));
  }
  ReadAll(fourth);
  AwaitRequests(0);
  ExpectWhole(Run(Plain(9)), Plain(9));
}

// It may be the same one's again, and again.
TEST_F(SlowReaderTest, AReaderThatCatchesUpAndStallsHasOnePlaceOrNone) {
  options_.max_running = 1;
  options_.max_queue = 1;
  Start();
  const GenerationRequest request = Plain(1, 60);
  const Sink slow = SubmitStalled(request, 6);
  for (uint32_t times = 1; times < 8; ++times) {
    ExpectWhole(Run(Plain(2)), Plain(2));  // pauses it
    EXPECT_EQ(scheduler_->stats().reader_pauses, times);
    slow->Read(6);
    scheduler_->Wake();
    ASSERT_TRUE(slow->WaitTokens(6 * (times + 1)));
  }
  ReadAll(slow);
  ExpectWhole(slow, request);
  AwaitRequests(0);
  // Both places are there.
  Gate gate;
  backend_.SetHook([&](std::span<const RowGroup>) {
    gate.Wait();
    return absl::OkStatus();
  });
  const Sink last[] = {Submit(Plain(3)), Submit(Plain(4))};
  EXPECT_THAT(scheduler_->Submit(Plain(5), std::make_shared<RecordingSink>()),
              StatusIs(absl::StatusCode::kResourceExhausted,
                       HasSubstr("queue is full")));
  gate.Open();
  for (const Sink& sink : last) EXPECT_TRUE(sink->WaitDone());
}

// A token at a time, while others always wait and nobody is patient.
TEST_F(SlowReaderTest, AReaderThatGetsOnIsNotPausedForEveryToken) {
  options_.max_running = 1;
  options_.reader_patience = absl::ZeroDuration();
  Start();
  const GenerationRequest request = Plain(1, 60);
  const Sink slow = SubmitStalled(request, 12);
  while (slow->dones() == 0) {
    const Sink other = Submit(Plain(2, 2));
    slow->Read(1);
    scheduler_->Wake();
    ASSERT_TRUE(other->WaitDone());
  }
  ExpectWhole(slow, request);
  // At least six tokens each time.
  EXPECT_GT(scheduler_->stats().reader_pauses, 2u);
  EXPECT_LE(scheduler_->stats().reader_pauses, 60u / 6);
}

// Nothing runs that could wake the scheduler.
TEST_F(SlowReaderTest, APausedRequestHeedsItsDeadline) {
  options_.max_running = 1;
  Start();
  GenerationRequest request = Plain(1);
  request.deadline = absl::Now() + absl::Seconds(1);
  const Sink stalled = SubmitStalled(request, 5);
  Run(Plain(2));
  EXPECT_EQ(stalled->dones(), 0);
  ASSERT_TRUE(stalled->WaitDone());
  EXPECT_GE(absl::Now(), request.deadline);
  EXPECT_THAT(stalled->status(), StatusIs(absl::StatusCode::kDeadlineExceeded,
                                          HasSubstr("deadline")));
}

TEST_F(SlowReaderTest, AfterALongWhileItKeepsNothingAlthoughNobodyWaits) {
  options_.reader_limit = absl::Milliseconds(100);
  Start();
  const GenerationRequest request = Request(PlanBuilder::Exact(7), 30);
  const Sink stalled = SubmitStalled(request, 5);
  EXPECT_EQ(cache_.counters().live_leases, 1u);
  const absl::Time deadline = absl::Now() + absl::Seconds(20);
  while (cache_.counters().live_leases > 0 && absl::Now() < deadline) {
    absl::SleepFor(absl::Milliseconds(1));
  }
  EXPECT_EQ(cache_.counters().live_leases, 0u);
  ReadAll(stalled);
  ExpectWhole(stalled, request);
}

TEST_F(SlowReaderTest, PatienceIsWithinItsLimits) {
  options_.reader_patience = options_.reader_limit + absl::Milliseconds(1);
  EXPECT_THAT(options_.Validate(), StatusIs(absl::StatusCode::kInvalidArgument,
                                            HasSubstr("reader_limit")));
  options_.reader_patience = -absl::Milliseconds(1);
  EXPECT_THAT(options_.Validate(), StatusIs(absl::StatusCode::kInvalidArgument,
                                            HasSubstr("reader_patience")));
}

}  // namespace
}  // namespace promptcache::worker
