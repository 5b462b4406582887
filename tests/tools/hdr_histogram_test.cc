#include "tools/bench/hdr_histogram.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <random>
#include <vector>

namespace promptcache::bench {
namespace {

uint64_t Exact(std::vector<uint64_t> values, double percent) {
  std::sort(values.begin(), values.end());
  const auto rank = static_cast<size_t>(
      std::ceil(percent / 100 * static_cast<double>(values.size())));
  return values[std::max<size_t>(rank, 1) - 1];
}

TEST(HdrHistogramTest, NothingIsZero) {
  const HdrHistogram h;
  EXPECT_EQ(h.count(), 0u);
  EXPECT_EQ(h.Percentile(50), 0u);
  EXPECT_EQ(h.mean(), 0);
}

TEST(HdrHistogramTest, SmallValuesAreExact) {
  HdrHistogram h;
  for (uint64_t v = 0; v < 128; ++v) h.Add(v);
  for (const double p : {1.0, 25.0, 50.0, 99.0, 100.0}) {
    EXPECT_EQ(h.Percentile(p),
              static_cast<uint64_t>(std::ceil(p / 100 * 128)) - 1);
  }
}

TEST(HdrHistogramTest, PercentilesAreWithinABucketOfTheValues) {
  std::mt19937_64 random(3);
  std::lognormal_distribution<double> spread(10, 3);
  std::vector<uint64_t> values;
  HdrHistogram h;
  double sum = 0;
  for (int i = 0; i < 20000; ++i) {
    values.push_back(static_cast<uint64_t>(spread(random)));
    h.Add(values.back());
    sum += static_cast<double>(values.back());
  }
  EXPECT_EQ(h.count(), values.size());
  EXPECT_EQ(h.max(), *std::max_element(values.begin(), values.end()));
  EXPECT_NEAR(h.mean(), sum / 20000, 1e-6 * sum / 20000);
  for (const double p : {0.1, 1.0, 10.0, 50.0, 90.0, 99.0, 99.9, 100.0}) {
    const auto exact = static_cast<double>(Exact(values, p));
    const auto got = static_cast<double>(h.Percentile(p));
    EXPECT_GE(got, exact) << p;
    EXPECT_LE(got, exact * (1 + 1.0 / 64) + 1) << p;
  }
}

TEST(HdrHistogramTest, MergedIsAsIfAddedToOne) {
  HdrHistogram a, b, both;
  for (uint64_t v = 1; v < 100000; v = v * 3 / 2 + 1) {
    (v % 2 == 0 ? a : b).Add(v);
    both.Add(v);
  }
  a.Merge(b);
  EXPECT_EQ(a.count(), both.count());
  EXPECT_EQ(a.mean(), both.mean());
  for (const double p : {5.0, 50.0, 95.0, 100.0}) {
    EXPECT_EQ(a.Percentile(p), both.Percentile(p));
  }
}

TEST(HdrHistogramTest, TooLargeIsTheLargest) {
  HdrHistogram h;
  h.Add(~uint64_t{0});
  h.Add(1);
  EXPECT_EQ(h.count(), 2u);
  EXPECT_EQ(h.Percentile(100), (uint64_t{1} << 40) - 1);
  EXPECT_EQ(h.Percentile(50), 1u);
}

}  // namespace
}  // namespace promptcache::bench
