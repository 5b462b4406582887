#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "cuda/runtime/device.h"

namespace promptcache::bench {

// A line of the table.
struct Figure {
  std::string group;  // "attention", "Llama-2-7B", ...
  std::string name;   // what was measured
  double value = 0;   // in `unit`, the median
  std::string unit;   // "ms", "GB/s", "TFLOP/s"
  double floor = 0;   // the same by the device's measured limits; 0: none
};

// What the device can do at most, measured: floors are computed from them.
struct Limits {
  double read_gb_per_s = 0;
  double tflop_per_s = 0;
  double host_gb_per_s = 0;
};

struct Sizes {
  bool small = false;  // for the emulator: everything runs, nothing is told
  int repetitions() const { return small ? 2 : 10; }
};

// Median of the milliseconds that `queue` takes on the stream, `repetitions`
// times, after one that does not count.
absl::StatusOr<double> MillisecondsOf(
    gpu::Device& device, gpu::Stream& stream, int repetitions,
    const std::function<absl::Status()>& queue);

double Median(std::vector<double> values);

absl::StatusOr<Limits> MeasureLimits(gpu::Device& device, const Sizes& sizes,
                                     std::vector<Figure>* figures);
absl::Status MeasureAttention(gpu::Device& device, const Limits& limits,
                              const Sizes& sizes, std::vector<Figure>* figures);
absl::Status MeasureModels(gpu::Device& device, const Limits& limits,
                           const Sizes& sizes, std::vector<Figure>* figures);

}  // namespace promptcache::bench
