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

PairedRatio RatioOf(const std::vector<double>& a,
                    const std::vector<double>& b) {
  CHECK_EQ(a.size(), b.size());
  CHECK_GE(a.size(), 10u);
  std::vector<double> ratios;
  for (size_t i = 0; i < a.size(); ++i) ratios.push_back(a[i] / b[i]);
  std::sort(ratios.begin(), ratios.end());
  const double n = static_cast<double>(ratios.size());
  // 1-based ranks, rounded outwards.
  const double reach = 0.98 * std::sqrt(n);
  const auto low = static_cast<size_t>(std::floor(n / 2 - reach));
  const auto high = static_cast<size_t>(std::ceil(n / 2 + reach + 1));
  const size_t middle = ratios.size() / 2;
  return {.num_pairs = ratios.size(),
          .median = ratios.size() % 2 == 1
                        ? ratios[middle]
                        : 0.5 * (ratios[middle - 1] + ratios[middle]),
          .low = ratios[std::max<size_t>(low, 1) - 1],
          .high = ratios[std::min(high, ratios.size()) - 1]};
}

}  // namespace promptcache::bench
