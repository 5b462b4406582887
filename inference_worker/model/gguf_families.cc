#include <array>

#include "inference_worker/model/gguf_family.h"

namespace promptcache::worker {

std::span<const GgufFamily> GgufFamilies() {
  static constexpr std::array kFamilies = {
      GgufFamily{"llama", ReadGgufLlama},
      GgufFamily{"qwen2", ReadGgufQwen2},
      GgufFamily{"qwen3", ReadGgufQwen3},
      GgufFamily{"gemma3", ReadGgufGemma3},
      GgufFamily{"phi3", ReadGgufPhi3},
      GgufFamily{"falcon", ReadGgufFalcon},
      GgufFamily{"mpt", ReadGgufMpt},
      GgufFamily{"gptneox", ReadGgufGptNeox},
      GgufFamily{"gpt2", ReadGgufGpt2},
      GgufFamily{"t5", ReadGgufT5},
  };
  return kFamilies;
}

}  // namespace promptcache::worker
