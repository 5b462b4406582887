#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "absl/status/statusor.h"
#include "inference_worker/model/gguf.h"
#include "inference_worker/model/model_file.h"

namespace promptcache::worker {

struct TensorShape {
  uint64_t rows = 0;
  uint64_t cols = 0;
};

// A tensor that a family's files hold, once or once a layer.
struct TensorRule {
  TensorRole role;
  // In the file: "output_norm.weight"; of a layer after "blk.<layer>.".
  std::string_view name;
  bool per_layer = false;
  bool optional = false;
  TensorShape (*shape)(const ModelConfig&) = nullptr;
};

// What sets one architecture's GGUF files apart: a row of a table, so that a
// family is added by one file like gguf_llama.cc.
struct GgufFamily {
  std::string_view architecture;
  // Everything but vocab_size and tied_embeddings, which the tensors tell.
  // InvalidArgument for what the engine would compute wrongly.
  absl::StatusOr<ModelConfig> (*read_config)(const GgufFile&);
  std::span<const TensorRule> tensors;
};

const GgufFamily& LlamaFamily();

}  // namespace promptcache::worker
