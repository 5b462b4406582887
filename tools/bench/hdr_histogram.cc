#include "tools/bench/hdr_histogram.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstddef>

namespace promptcache::bench {
namespace {

constexpr int kSubBits = 6;
constexpr int kMaxBits = 40;
constexpr uint64_t kSub = uint64_t{1} << kSubBits;
constexpr uint64_t kLargest = (uint64_t{1} << kMaxBits) - 1;

size_t BucketOf(uint64_t value) {
  if (value < 2 * kSub) return value;
  const int shift = static_cast<int>(std::bit_width(value)) - kSubBits - 1;
  return static_cast<size_t>(shift) * kSub + (value >> shift);
}

// The largest value that falls into it.
uint64_t UpperEnd(size_t bucket) {
  if (bucket < 2 * kSub) return bucket;
  const auto shift = bucket / kSub - 1;
  return ((bucket - shift * kSub + 1) << shift) - 1;
}

}  // namespace

HdrHistogram::HdrHistogram() : buckets_(BucketOf(kLargest) + 1, 0) {}

void HdrHistogram::Add(uint64_t value) {
  value = std::min(value, kLargest);
  ++buckets_[BucketOf(value)];
  ++count_;
  max_ = std::max(max_, value);
  sum_ += static_cast<double>(value);
}

void HdrHistogram::Merge(const HdrHistogram& other) {
  for (size_t i = 0; i < buckets_.size(); ++i) buckets_[i] += other.buckets_[i];
  count_ += other.count_;
  max_ = std::max(max_, other.max_);
  sum_ += other.sum_;
}

double HdrHistogram::mean() const {
  return count_ == 0 ? 0 : sum_ / static_cast<double>(count_);
}

uint64_t HdrHistogram::Percentile(double percent) const {
  if (count_ == 0) return 0;
  const auto rank = static_cast<uint64_t>(
      std::ceil(percent / 100 * static_cast<double>(count_)));
  uint64_t seen = 0;
  for (size_t i = 0; i < buckets_.size(); ++i) {
    seen += buckets_[i];
    if (seen >= std::max<uint64_t>(rank, 1)) {
      return std::min(UpperEnd(i), max_);
    }
  }
  return max_;
}

}  // namespace promptcache::bench
