#include "common/child_process.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>

#include "tests/support/status_matchers.h"
#include "tests/support/test_files.h"

namespace promptcache {
namespace {

using ::testing::HasSubstr;

class ChildProcessTest : public ::testing::Test {
 protected:
  absl::StatusOr<ChildProcess> StartShell(const std::string& script) {
    return ChildProcess::Start({.program = "/bin/sh",
                                .args = {"-c", script},
                                .log_path = dir_.path() + "/log"});
  }
  TempDir dir_;
};

TEST_F(ChildProcessTest, SaysHowItEndedAndWhatItWrote) {
  auto child = StartShell("echo out; echo err >&2; exit 3");
  PC_ASSERT_OK(child);
  EXPECT_THAT(child->Wait(absl::Seconds(20)), IsOkAndHolds("exit status 3"));
  EXPECT_FALSE(child->Running());
  EXPECT_THAT(child->Log(), HasSubstr("out\n"));
  EXPECT_THAT(child->Log(), HasSubstr("err\n"));
}

TEST_F(ChildProcessTest, WhatEarlierRunsWroteIsNotItsOwn) {
  auto first = StartShell("echo first");
  PC_ASSERT_OK(first);
  PC_ASSERT_OK(first->Wait(absl::Seconds(20)));
  auto second = StartShell("echo second");
  PC_ASSERT_OK(second);
  ChildProcess moved = *std::move(second);
  PC_ASSERT_OK(moved.Wait(absl::Seconds(20)));
  EXPECT_EQ(moved.Log(), "second\n");
  EXPECT_EQ(ReadFileOrDie(dir_.path() + "/log"), "first\nsecond\n");
}

TEST_F(ChildProcessTest, AProgramThatIsNotThereIsAnError) {
  EXPECT_THAT(
      ChildProcess::Start({.program = "/no/such/program"}),
      StatusIs(absl::StatusCode::kNotFound, HasSubstr("/no/such/program")));
}

TEST_F(ChildProcessTest, WaitsNoLongerThanTold) {
  auto child = StartShell("exec sleep 60");
  PC_ASSERT_OK(child);
  EXPECT_THAT(child->Wait(absl::Milliseconds(10)),
              StatusIs(absl::StatusCode::kDeadlineExceeded, HasSubstr("runs")));
  EXPECT_TRUE(child->Running());
  PC_ASSERT_OK(child->Signal(SIGKILL));
  EXPECT_THAT(child->Wait(absl::Seconds(20)), IsOkAndHolds("signal 9"));
}

TEST_F(ChildProcessTest, StopEndsOneThatIgnoresSigterm) {
  auto child =
      StartShell("trap '' TERM; echo ready; while :; do sleep 1; done");
  PC_ASSERT_OK(child);
  while (child->Log().empty()) ASSERT_TRUE(child->Running());
  child->Stop(absl::Milliseconds(50));
  EXPECT_THAT(child->Wait(absl::ZeroDuration()), IsOkAndHolds("signal 9"));
}

TEST_F(ChildProcessTest, GoesWithItsOwner) {
  pid_t pid;
  {
    auto child = StartShell("exec sleep 60");
    PC_ASSERT_OK(child);
    pid = child->pid();
    EXPECT_EQ(::kill(pid, 0), 0);
  }
  EXPECT_EQ(::kill(pid, 0), -1);
}

}  // namespace
}  // namespace promptcache
