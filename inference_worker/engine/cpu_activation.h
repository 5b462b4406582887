#pragma once

#include "inference_worker/cpu/activation.h"
#include "inference_worker/model/model_file.h"

namespace promptcache::worker {

inline cpu::Activation CpuActivationOf(Activation activation) {
  switch (activation) {
    case Activation::kSilu:
      return cpu::Activation::kSilu;
    case Activation::kGelu:
      return cpu::Activation::kGelu;
    case Activation::kGeluTanh:
      return cpu::Activation::kGeluTanh;
    case Activation::kRelu:
      return cpu::Activation::kRelu;
  }
  return cpu::Activation::kSilu;
}

}  // namespace promptcache::worker
