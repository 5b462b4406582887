#include "inference_worker/cpu/rope_table.h"

#include <cmath>

#include "absl/strings/str_cat.h"

namespace promptcache::worker::cpu {

std::vector<double> RopeTable::PlainFrequencies(double theta, uint32_t dims) {
  std::vector<double> inv_freq(dims / 2);
  for (size_t i = 0; i < inv_freq.size(); ++i) {
    inv_freq[i] = std::pow(theta, -2.0 * static_cast<double>(i) / dims);
  }
  return inv_freq;
}

absl::StatusOr<RopeTable> RopeTable::Create(const Options& options) {
  bool sane = !options.inv_freq.empty() && std::isfinite(options.factor) &&
              options.max_position >= 0 && options.max_position <= 1 << 24;
  for (double f : options.inv_freq) sane = sane && std::isfinite(f);
  if (!sane) {
    return absl::InvalidArgumentError(absl::StrCat(
        "rotation out of range: ", options.inv_freq.size(), " pairs, factor ",
        options.factor, ", largest position ", options.max_position));
  }
  RopeTable table;
  table.num_pairs_ = static_cast<uint32_t>(options.inv_freq.size());
  table.max_position_ = options.max_position;
  table.pairing_ = options.pairing;
  const size_t pairs = table.num_pairs_;
  table.table_.resize((static_cast<size_t>(options.max_position) + 1) * 2 *
                      pairs);
  float* out = table.table_.data();
  for (int32_t position = 0; position <= options.max_position; ++position) {
    for (size_t i = 0; i < pairs; ++i) {
      const double angle = position * options.inv_freq[i];
      out[i] = static_cast<float>(std::cos(angle) * options.factor);
      out[pairs + i] = static_cast<float>(std::sin(angle) * options.factor);
    }
    out += 2 * pairs;
  }
  return table;
}

}  // namespace promptcache::worker::cpu
