#include "inference_worker/serving/call_requests.h"

#include "tests/inference_worker/serving/scheduler_fixture.h"

namespace promptcache::worker {
namespace {

using ::testing::HasSubstr;

class CallRequestsTest : public SchedulerTest {
 protected:
  CallRequestsTest() { Start(); }
};

// The first pass may begin before Submit has returned.
TEST_F(CallRequestsTest, CancelEndsTheRequestThatRuns) {
  CallRequests requests(scheduler_.get());
  const auto sink = std::make_shared<RecordingSink>();
  backend_.SetHook([&](std::span<const RowGroup>) {
    requests.Cancel();
    return absl::OkStatus();
  });
  PC_ASSERT_OK(requests.Submit(Request(PlanBuilder::Exact(7), 500), sink));
  ASSERT_TRUE(sink->WaitDone());
  EXPECT_THAT(sink->status(),
              StatusIs(absl::StatusCode::kCancelled, HasSubstr("caller")));
  EXPECT_EQ(backend_.passes(), 1u);
}

TEST_F(CallRequestsTest, NoneIsSubmittedAfterCancel) {
  CallRequests requests(scheduler_.get());
  const auto first = std::make_shared<RecordingSink>();
  PC_ASSERT_OK(requests.Submit(Request(PlanBuilder::Exact(7), 2), first));
  ASSERT_TRUE(first->WaitDone());
  PC_ASSERT_OK(first->status());
  requests.Cancel();
  EXPECT_TRUE(requests.cancelled());
  const auto second = std::make_shared<RecordingSink>();
  EXPECT_THAT(requests.Submit(Request(PlanBuilder::Exact(7), 2), second),
              StatusIs(absl::StatusCode::kCancelled, HasSubstr("caller")));
  EXPECT_EQ(second->dones(), 0);
}

}  // namespace
}  // namespace promptcache::worker
