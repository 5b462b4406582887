#pragma once

#include <cstddef>
#include <vector>

namespace promptcache::bench {

// The upper one of an even number. REQUIRES: not empty.
double Median(std::vector<double> values);

// What a/b is, from pairs that were measured in turn. The interval is that of
// the median by order statistics (no assumption about the distribution): ranks
// n/2 -+ 0.98 sqrt(n) hold it with 95 % confidence.
struct PairedRatio {
  size_t num_pairs = 0;
  double median = 0;
  double low = 0;
  double high = 0;
};

// REQUIRES: a and b of the same length, at least 10.
PairedRatio RatioOf(const std::vector<double>& a, const std::vector<double>& b);

}  // namespace promptcache::bench
