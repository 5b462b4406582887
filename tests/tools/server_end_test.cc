#include "tools/cli/server_end.h"

#include <gtest/gtest.h>

#include "absl/strings/str_cat.h"

namespace promptcache::cli {
namespace {

TEST(WhyEndedTest, TheServersOwnReasonIsToldAlone) {
  EXPECT_EQ(WhyEnded("daemon", "exit status 1",
                     "I20260101 opened\n\npromptcache-daemon: no room\n",
                     "/x/daemon.log"),
            "the daemon ended: no room (log /x/daemon.log)");
}

TEST(WhyEndedTest, TheLineOfAnUnknownFlagIsTold) {
  EXPECT_EQ(WhyEnded("worker", "exit status 2",
                     "ERROR: Unknown command line flag 'nosuch'\n", "w.log"),
            "the worker ended: Unknown command line flag 'nosuch' (log w.log)");
}

TEST(WhyEndedTest, AKilledServerWasKilledWhateverItSaidBefore) {
  EXPECT_EQ(WhyEnded("worker", "signal 9", "ERROR: x\npromptcache-worker: y\n",
                     "w.log"),
            "the worker was killed by signal 9 (log w.log)");
}

TEST(WhyEndedTest, ACrashShowsTheEndOfTheLog) {
  EXPECT_EQ(
      WhyEnded("worker", "signal 6", "F20260101 Check failed: x\n", "w.log"),
      "the worker was killed by signal 6; its log w.log ends:\n"
      "F20260101 Check failed: x\n");
}

TEST(WhyEndedTest, WithoutAReasonTheLastLinesAreShown) {
  std::string log;
  for (int i = 0; i < 20; ++i) absl::StrAppend(&log, "line ", i, "\n");
  const std::string why = WhyEnded("daemon", "exit status 1", log, "d.log");
  EXPECT_TRUE(
      why.starts_with("the daemon ended (exit status 1); its log d.log "
                      "ends:\nline 8\n"))
      << why;
}

}  // namespace
}  // namespace promptcache::cli
