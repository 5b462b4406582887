#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "absl/status/statusor.h"
#include "inference_worker/model/gguf.h"
#include "inference_worker/model/model_file.h"
#include "inference_worker/model/tensor_table.h"

namespace promptcache::worker {

// What sets one architecture's GGUF files apart: its metadata, as a layout.
struct GgufFamily {
  std::string_view architecture;
  // `vocab_size`: the embedding's rows. InvalidArgument for what the engine
  // would compute wrongly. tied_embeddings is told by the tensors.
  absl::StatusOr<ModelLayout> (*read)(const GgufFile&, uint32_t vocab_size);
};

// Every family that can be read.
std::span<const GgufFamily> GgufFamilies();

absl::StatusOr<ModelLayout> ReadGgufLlama(const GgufFile& file,
                                          uint32_t vocab_size);

// The metadata under an architecture's prefix. A view of the file.
class GgufConfig {
 public:
  GgufConfig(const GgufFile& file, std::string_view architecture)
      : file_(file), prefix_(std::string(architecture) + ".") {}

  const GgufFile& file() const { return file_; }
  std::string Key(std::string_view suffix) const;
  bool Has(std::string_view suffix) const;

  // From 1 to `max`; the fallback when there is no such key.
  absl::StatusOr<uint32_t> Dimension(
      std::string_view suffix, uint32_t max,
      std::optional<uint32_t> fallback = {}) const;
  absl::StatusOr<float> PositiveFloat(std::string_view suffix,
                                      std::optional<float> fallback = {}) const;

  // InvalidArgument for a key that is neither in `known` nor among those that
  // every family reads or can ignore, unless its value means "not in use".
  absl::Status RefuseUnknown(std::span<const std::string_view> known) const;

  // Fills what every family has: the layers, dimensions, heads and the context.
  // `epsilon_key`: of the norm. The rotation: dims default to the head's.
  absl::Status ReadDimensions(std::string_view epsilon_key,
                              ModelConfig* config) const;
  absl::Status ReadRope(ModelConfig* config) const;

 private:
  absl::Status ReadHeads(ModelConfig* config) const;

  const GgufFile& file_;
  const std::string prefix_;
};

}  // namespace promptcache::worker
