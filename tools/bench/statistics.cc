#include "tools/bench/statistics.h"

#include <algorithm>
#include <cmath>

#include "glog/logging.h"

namespace promptcache::bench {

double Median(std::vector<double> values) {
  const auto middle =
      values.begin() + static_cast<ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

Spread SpreadOf(const std::vector<double>& values) {
  const auto [low, high] = std::ranges::minmax_element(values);
  return {.median = Median(values), .low = *low, .high = *high};
}

PairedRatio RatioOf(const std::vector<double>& a,
                    const std::vector<double>& b) {
  CHECK_EQ(a.size(), b.size());
  CHECK_GE(a.size(), 10u);
  std::vector<double> logs;
  std::vector<double> means;
  for (size_t i = 0; i < a.size(); ++i) {
    logs.push_back(std::log(a[i] / b[i]));
    for (const double log : logs) means.push_back((log + logs.back()) / 2);
  }
  std::sort(means.begin(), means.end());
  const double n = static_cast<double>(a.size());
  // The normal approximation of the test's statistic, rounded outwards.
  const double rank =
      n * (n + 1) / 4 - 1.96 * std::sqrt(n * (n + 1) * (2 * n + 1) / 24);
  const auto outside = static_cast<size_t>(rank) - 1;
  const size_t middle = means.size() / 2;
  const double center = means.size() % 2 == 1
                            ? means[middle]
                            : 0.5 * (means[middle - 1] + means[middle]);
  return {.num_pairs = a.size(),
          .estimate = std::exp(center),
          .low = std::exp(means[outside]),
          .high = std::exp(means[means.size() - 1 - outside])};
}

}  // namespace promptcache::bench
