#include <array>

#include "inference_worker/model/gguf_family.h"

namespace promptcache::worker {

std::span<const GgufFamily> GgufFamilies() {
  static constexpr std::array kFamilies = {
      GgufFamily{"llama", ReadGgufLlama},
  };
  return kFamilies;
}

}  // namespace promptcache::worker
