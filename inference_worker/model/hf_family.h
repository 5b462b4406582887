#pragma once

#include <span>
#include <string_view>

#include "absl/status/statusor.h"
#include "inference_worker/model/hf_config.h"
#include "inference_worker/model/tensor_table.h"

namespace promptcache::worker {

// What sets the folders of one `model_type` apart. What a key means, and what
// its absence means, is as the transformers library has it.
struct HfFamily {
  std::string_view model_type;
  // InvalidArgument, with key and value, for what the engine cannot compute.
  absl::StatusOr<ModelLayout> (*read)(const HfConfig& file);
  bool is_encoder_decoder = false;
};

// Every family that can be read.
std::span<const HfFamily> HfFamilies();

absl::StatusOr<ModelLayout> ReadHfLlama(const HfConfig& file);
absl::StatusOr<ModelLayout> ReadHfMistral(const HfConfig& file);
absl::StatusOr<ModelLayout> ReadHfQwen2(const HfConfig& file);
absl::StatusOr<ModelLayout> ReadHfQwen3(const HfConfig& file);
absl::StatusOr<ModelLayout> ReadHfGemma3(const HfConfig& file);
absl::StatusOr<ModelLayout> ReadHfPhi3(const HfConfig& file);
absl::StatusOr<ModelLayout> ReadHfFalcon(const HfConfig& file);
absl::StatusOr<ModelLayout> ReadHfMpt(const HfConfig& file);
absl::StatusOr<ModelLayout> ReadHfGptNeox(const HfConfig& file);
absl::StatusOr<ModelLayout> ReadHfGpt2(const HfConfig& file);
absl::StatusOr<ModelLayout> ReadHfOpt(const HfConfig& file);
absl::StatusOr<ModelLayout> ReadHfT5(const HfConfig& file);

// The names of a model's dimensions in its family's config.json.
struct HfDimensionKeys {
  std::string_view layers = "num_hidden_layers";
  std::string_view hidden = "hidden_size";
  std::string_view heads = "num_attention_heads";
  std::string_view kv_heads = "num_key_value_heads";  // "": as many as heads
  std::string_view head_dim = "head_dim";  // "": the hidden dimension's share
  std::string_view context = "max_position_embeddings";
};
// Fills layers, dimensions, heads, vocabulary and context; not ffn_dim.
// `default_head_dim`: 0 for the hidden dimension's share.
absl::Status ReadHfDimensions(const HfConfig& file, const HfDimensionKeys& keys,
                              uint32_t default_head_dim, ModelConfig* config);

// The output head: its own matrix, or the embedding's, of which a copy may lie
// in the file.
absl::Status AddHfOutput(const HfConfig& file, bool default_tied,
                         std::string_view name, ModelLayout* layout);

}  // namespace promptcache::worker
