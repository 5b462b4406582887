#pragma once

#include <cstdint>

namespace promptcache::worker::cpu {

enum class Activation : uint8_t {
  kSilu,      // x / (1 + exp(-x))
  kGelu,      // x Phi(x), by the error function
  kGeluTanh,  // its approximation by tanh
  kRelu,
};

}  // namespace promptcache::worker::cpu
