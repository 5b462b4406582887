#include "common/stop_signals.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>

#include <cstdlib>

namespace promptcache {
namespace {

// Each in a process of its own: signals are of a whole process.
TEST(StopSignalsDeathTest, EndWhatIsStillStarting) {
  for (const int number : {SIGTERM, SIGINT}) {
    EXPECT_EXIT(
        {
          const StopSignals signals("server");
          ::kill(::getpid(), number);
          ::sleep(60);  // a start that takes long
          std::_Exit(1);
        },
        ::testing::ExitedWithCode(0), "server: signal .* while starting");
  }
}

TEST(StopSignalsDeathTest, AreToldOnceTheServerServes) {
  EXPECT_EXIT(
      {
        StopSignals signals("server");
        signals.Defer();
        ::kill(::getpid(), SIGINT);
        std::_Exit(signals.Wait());
      },
      ::testing::ExitedWithCode(SIGINT), "");
}

TEST(StopSignalsDeathTest, AStartThatFailsEndsByItself) {
  EXPECT_EXIT(
      {
        {
          const StopSignals signals("server");
        }
        std::_Exit(3);
      },
      ::testing::ExitedWithCode(3), "");
}

}  // namespace
}  // namespace promptcache
