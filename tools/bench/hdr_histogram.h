#pragma once

#include <cstdint>
#include <vector>

namespace promptcache::bench {

// Counts of values from 0 to 2^40, each within 1/64 of what it was: a bucket
// for each value below 128, then 64 to an octave. Bounded memory however many
// values, and percentiles of merged histograms are those of all values.
// Thread-compatible.
class HdrHistogram {
 public:
  HdrHistogram();

  // Larger values count as 2^40 - 1.
  void Add(uint64_t value);
  void Merge(const HdrHistogram& other);

  uint64_t count() const { return count_; }
  uint64_t max() const { return max_; }
  double mean() const;
  // The smallest bucket's upper end that `percent` of the values do not exceed;
  // 0 without values. 100: the largest value itself.
  uint64_t Percentile(double percent) const;

 private:
  std::vector<uint64_t> buckets_;
  uint64_t count_ = 0;
  uint64_t max_ = 0;
  double sum_ = 0;
};

}  // namespace promptcache::bench
