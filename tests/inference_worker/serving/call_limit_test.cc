#include "inference_worker/serving/call_limit.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/support/status_matchers.h"

namespace promptcache::worker {
namespace {

using ::testing::AllOf;
using ::testing::Ge;
using ::testing::Le;

class CallLimitTest : public ::testing::Test {
 protected:
  CallLimitTest() : limit_(80), start_(absl::Now()) {
    for (int i = 0; i < 80; ++i) PC_EXPECT_OK(limit_.Enter(start_));
  }
  // That many a second for so long; the queue stays as it is.
  void Done(int a_second, absl::Duration from, absl::Duration to) {
    const absl::Duration step = absl::Seconds(1) / a_second;
    for (absl::Duration t = from + step; t <= to; t += step) {
      limit_.RequestDone(start_ + t);
    }
  }
  double RetrySeconds(absl::Duration after) {
    return absl::ToDoubleSeconds(limit_.RetryAfter(start_ + after));
  }

  CallLimit limit_;
  absl::Time start_;
};

TEST_F(CallLimitTest, WhoIsRefusedComesWhenTheQueueIsThrough) {
  Done(10, absl::ZeroDuration(), absl::Seconds(8));
  EXPECT_THAT(RetrySeconds(absl::Seconds(8)), AllOf(Ge(7.5), Le(8.5)));
  // It has become slower: what was before counts for a while only.
  Done(4, absl::Seconds(8), absl::Seconds(100));
  EXPECT_THAT(RetrySeconds(absl::Seconds(100)), AllOf(Ge(19), Le(21)));
  // And faster, than what is remembered one by one.
  Done(100, absl::Seconds(100), absl::Seconds(110));
  EXPECT_THAT(RetrySeconds(absl::Seconds(110)), AllOf(Ge(0.7), Le(0.9)));
}

TEST_F(CallLimitTest, HowLongItTakesHasBounds) {
  EXPECT_EQ(RetrySeconds(absl::ZeroDuration()), 0.1);
  EXPECT_EQ(RetrySeconds(absl::Seconds(20)), 30);  // nothing is ever done
}

// Not as long as a queue of all that time would have taken.
TEST_F(CallLimitTest, TheTimeWithoutCallsIsNoPace) {
  CallLimit idle(80);
  idle.RequestDone(absl::Now() - absl::Seconds(25));
  PC_EXPECT_OK(idle.Enter());
  EXPECT_LE(idle.RetryAfter(absl::Now()), absl::Seconds(1));
}

}  // namespace
}  // namespace promptcache::worker
