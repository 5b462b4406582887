#pragma once

#include <cstddef>
#include <vector>

namespace promptcache::bench {

// The upper one of an even number. REQUIRES: not empty.
double Median(std::vector<double> values);

// The median of repeated measurements, and from where to where they went.
struct Spread {
  double median = 0;
  double low = 0;
  double high = 0;
};
// REQUIRES: not empty.
Spread SpreadOf(const std::vector<double>& values);

// What a/b is, from pairs that were measured in turn: the median of the means
// of any two pairs' log(a/b) (Hodges and Lehmann's estimate), and the interval
// that the signed-rank test does not reject with 95 % confidence. Supposes of
// the noise only that it lengthens a and b alike, not how it is distributed;
// from normal noise as good as the mean (95 %), where the median is worth 64 %.
struct PairedRatio {
  size_t num_pairs = 0;
  double estimate = 0;
  double low = 0;
  double high = 0;
};

// REQUIRES: a and b of the same length, at least 10.
PairedRatio RatioOf(const std::vector<double>& a, const std::vector<double>& b);

}  // namespace promptcache::bench
