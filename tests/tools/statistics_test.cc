#include "tools/bench/statistics.h"

#include <gtest/gtest.h>

#include <random>
#include <vector>

namespace promptcache::bench {
namespace {

TEST(MedianTest, IsTheUpperOneOfAnEvenNumber) {
  EXPECT_EQ(Median({7}), 7);
  EXPECT_EQ(Median({9, 1, 5}), 5);
  EXPECT_EQ(Median({4, 1, 3, 2}), 3);
}

TEST(SpreadTest, GoesFromTheLowestToTheHighest) {
  const Spread spread = SpreadOf({9, 1, 5});
  EXPECT_EQ(spread.median, 5);
  EXPECT_EQ(spread.low, 1);
  EXPECT_EQ(spread.high, 9);
}

struct Pairs {
  std::vector<double> a;
  std::vector<double> b;
};

// b is 100 and its noise, a `ratio` times as much and noise of the same kind:
// most runs are near, some much slower.
Pairs NoisyPairs(double ratio, size_t count, std::mt19937* random) {
  std::lognormal_distribution<double> near(0, 0.02);
  std::bernoulli_distribution disturbed(0.1);
  const auto noise = [&] {
    return near(*random) * (disturbed(*random) ? 2 : 1);
  };
  Pairs pairs;
  for (size_t i = 0; i < count; ++i) {
    pairs.a.push_back(100 * ratio * noise());
    pairs.b.push_back(100 * noise());
  }
  return pairs;
}

TEST(PairedRatioTest, OfPairsThatAgreeIsTheirRatio) {
  std::vector<double> a, b;
  for (int i = 1; i <= 20; ++i) {  // however fast the machine is in between
    a.push_back(3 * i);
    b.push_back(2 * i);
  }
  const PairedRatio ratio = RatioOf(a, b);
  EXPECT_EQ(ratio.num_pairs, 20u);
  EXPECT_DOUBLE_EQ(ratio.estimate, 1.5);
  EXPECT_DOUBLE_EQ(ratio.low, 1.5);
  EXPECT_DOUBLE_EQ(ratio.high, 1.5);
}

TEST(PairedRatioTest, IntervalHoldsTheRatioAsOftenAsItSays) {
  std::mt19937 random(1);
  constexpr int kTrials = 2000;
  for (const size_t count : {10u, 51u}) {
    int held = 0;
    for (int i = 0; i < kTrials; ++i) {
      const Pairs pairs = NoisyPairs(1.01, count, &random);
      const PairedRatio ratio = RatioOf(pairs.a, pairs.b);
      held += ratio.low <= 1.01 && 1.01 <= ratio.high;
    }
    EXPECT_GT(held, kTrials * 0.94) << count << " pairs";
    EXPECT_LT(held, kTrials * 0.99) << count << " pairs";
  }
}

}  // namespace
}  // namespace promptcache::bench
