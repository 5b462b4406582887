#include "tools/bench/conditions.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <string>

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

TEST(StolenTimeTest, IsItsShareOfAllTimeSince) {
  const std::string file = ::testing::TempDir() + "stolen_time_test.stat";
  std::ofstream(file) << "cpu  10 0 10 70 0 0 0 10 7 0\n";
  const StolenTime stolen(file);
  EXPECT_EQ(stolen.Share(), 0);
  std::ofstream(file) << "cpu  20 5 15 90 5 5 5 55 7 0\n";  // 100 more
  EXPECT_DOUBLE_EQ(stolen.Share(), 0.45);
  std::filesystem::remove(file);
}

TEST(StolenTimeTest, IsZeroWhereNothingTells) {
  EXPECT_EQ(StolenTime("/no/such/file").Share(), 0);
}

}  // namespace
}  // namespace promptcache::bench
