#include "tools/bench/conditions.h"

#include <gtest/gtest.h>

namespace promptcache::bench {
namespace {

TEST(BarTest, SaysWhetherItIsHeld) {
  EXPECT_EQ(
      ToText({{.name = "miss, %", .value = 0.5, .limit = 1},
              {.name = "ttft", .value = 59, .limit = 60, .at_least = true}}),
      "miss, %: 0.5, to be <= 1: held\n"
      "ttft: 59, to be >= 60: not held\n");
}

TEST(BarTest, ItsLimitIsHeld) {
  EXPECT_TRUE((Bar{.value = 1, .limit = 1}.held()));
  EXPECT_TRUE((Bar{.value = 1, .limit = 1, .at_least = true}.held()));
}

TEST(StolenTimeTest, IsAShareOfWhatHasPassed) {
  const StolenTime stolen;
  const double share = stolen.Share();
  EXPECT_GE(share, 0);
  EXPECT_LE(share, 1);
}

}  // namespace
}  // namespace promptcache::bench
