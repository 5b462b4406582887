#include "inference_worker/cpu/rope_table.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "tests/support/status_matchers.h"

namespace promptcache::worker::cpu {
namespace {

TEST(RopeTableTest, HoldsDoublePrecisionAnglesRoundedOnce) {
  const std::vector<double> freq = RopeTable::PlainFrequencies(100000.0, 64);
  ASSERT_EQ(freq.size(), 32u);
  EXPECT_DOUBLE_EQ(freq[0], 1.0);
  EXPECT_DOUBLE_EQ(freq[16], std::pow(100000.0, -0.5));
  const auto table = RopeTable::Create(
      {.inv_freq = freq, .factor = 1.25, .max_position = 8191});
  PC_ASSERT_OK(table);
  for (int32_t position : {0, 1, 77, 8191}) {
    for (size_t i = 0; i < freq.size(); ++i) {
      const double angle = position * freq[i];
      EXPECT_EQ(table->Cos(position)[i],
                static_cast<float>(1.25 * std::cos(angle)));
      EXPECT_EQ(table->Sin(position)[i],
                static_cast<float>(1.25 * std::sin(angle)));
    }
  }
  EXPECT_EQ(table->dims(), 64u);
  EXPECT_EQ(table->max_position(), 8191);
}

TEST(RopeTableTest, RefusesWhatMakesNoSense) {
  using absl::StatusCode;
  const double infinity = std::numeric_limits<double>::infinity();
  for (const RopeTable::Options& options :
       {RopeTable::Options{},
        RopeTable::Options{.inv_freq = {1.0}, .max_position = -1},
        RopeTable::Options{.inv_freq = {1.0}, .max_position = (1 << 24) + 1},
        RopeTable::Options{.inv_freq = {infinity}},
        RopeTable::Options{.inv_freq = {1.0}, .factor = std::nan("")}}) {
    EXPECT_THAT(RopeTable::Create(options),
                StatusIs(StatusCode::kInvalidArgument,
                         ::testing::HasSubstr("rotation out of range")));
  }
}

}  // namespace
}  // namespace promptcache::worker::cpu
