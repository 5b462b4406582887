#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "glog/logging.h"
#include "inference_worker/cpu/kernels.h"

namespace promptcache::worker::cpu {

// Kernels of a name that runs here.
inline std::unique_ptr<Kernels> MakeKernels(const std::string& name,
                                            uint32_t num_threads) {
  auto kernels = Kernels::Create({.name = name, .num_threads = num_threads});
  CHECK(kernels.ok()) << kernels.status();
  return *std::move(kernels);
}

// Normally distributed, the same for a seed.
inline std::vector<float> RandomFloats(size_t count, uint32_t seed,
                                       float deviation = 1.0f) {
  std::mt19937 engine(seed);
  std::normal_distribution<float> normal(0.0f, deviation);
  std::vector<float> values(count);
  for (float& value : values) value = normal(engine);
  return values;
}

inline float RoundedToBf16(float value) { return FromBf16(ToBf16(value)); }

}  // namespace promptcache::worker::cpu
