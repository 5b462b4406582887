#include <array>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "common/status_macros.h"
#include "inference_worker/model/hf_family.h"
#include "inference_worker/model/model_limits.h"

namespace promptcache::worker {

std::span<const HfFamily> HfFamilies() {
  static constexpr std::array kFamilies = {
      HfFamily{"llama", ReadHfLlama},
      HfFamily{"mistral", ReadHfMistral},
      HfFamily{"qwen2", ReadHfQwen2},
      HfFamily{"qwen3", ReadHfQwen3},
      HfFamily{"gemma3_text", ReadHfGemma3},
      HfFamily{"phi3", ReadHfPhi3},
      HfFamily{"falcon", ReadHfFalcon},
      HfFamily{"mpt", ReadHfMpt},
      HfFamily{"gpt_neox", ReadHfGptNeox},
      HfFamily{"gpt2", ReadHfGpt2},
      HfFamily{"opt", ReadHfOpt},
      HfFamily{"t5", ReadHfT5, /*is_encoder_decoder=*/true},
      HfFamily{"mt5", ReadHfT5, /*is_encoder_decoder=*/true},
  };
  return kFamilies;
}

absl::Status ReadHfDimensions(const HfConfig& file, const HfDimensionKeys& keys,
                              uint32_t default_head_dim, ModelConfig* config) {
  PC_ASSIGN_OR_RETURN(config->num_layers,
                      file.Dimension(keys.layers, kMaxLayers));
  PC_ASSIGN_OR_RETURN(config->hidden_dim, file.Dimension(keys.hidden, kMaxDim));
  PC_ASSIGN_OR_RETURN(config->num_heads, file.Dimension(keys.heads, kMaxDim));
  PC_ASSIGN_OR_RETURN(config->vocab_size,
                      file.Dimension("vocab_size", kMaxDim));
  PC_ASSIGN_OR_RETURN(config->context_length,
                      file.Dimension(keys.context, kMaxContext));
  config->num_kv_heads = config->num_heads;
  if (!keys.kv_heads.empty()) {
    PC_ASSIGN_OR_RETURN(
        config->num_kv_heads,
        file.Dimension(keys.kv_heads, kMaxDim, config->num_heads));
    if (config->num_heads % config->num_kv_heads != 0) {
      return file.Unsupported(
          keys.kv_heads,
          absl::StrCat("the ", config->num_heads, " heads are no multiple"));
    }
  }
  if (default_head_dim == 0) {
    default_head_dim = config->hidden_dim / config->num_heads;
    const bool stated = !keys.head_dim.empty() && file.Has(keys.head_dim);
    if (!stated && config->hidden_dim % config->num_heads != 0) {
      return file.Unsupported(
          keys.hidden,
          absl::StrCat("not a multiple of the ", config->num_heads, " heads"));
    }
  }
  config->head_dim = default_head_dim;
  if (!keys.head_dim.empty()) {
    PC_ASSIGN_OR_RETURN(config->head_dim, file.Dimension(keys.head_dim, kMaxDim,
                                                         default_head_dim));
  }
  return absl::OkStatus();
}

absl::Status AddHfOutput(const HfConfig& file, bool default_tied,
                         std::string_view name, ModelLayout* layout) {
  PC_ASSIGN_OR_RETURN(layout->config.tied_embeddings,
                      file.Bool("tie_word_embeddings", default_tied));
  if (layout->config.tied_embeddings) {
    layout->ignored_endings.emplace_back(name);
  } else {
    RuleWriter(layout).Add(TensorRole::kOutput, name);
  }
  return absl::OkStatus();
}

}  // namespace promptcache::worker
