#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

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
absl::StatusOr<ModelLayout> ReadGgufQwen2(const GgufFile& file,
                                          uint32_t vocab_size);
absl::StatusOr<ModelLayout> ReadGgufQwen3(const GgufFile& file,
                                          uint32_t vocab_size);
absl::StatusOr<ModelLayout> ReadGgufGemma3(const GgufFile& file,
                                           uint32_t vocab_size);
absl::StatusOr<ModelLayout> ReadGgufPhi3(const GgufFile& file,
                                         uint32_t vocab_size);
absl::StatusOr<ModelLayout> ReadGgufFalcon(const GgufFile& file,
                                           uint32_t vocab_size);
absl::StatusOr<ModelLayout> ReadGgufMpt(const GgufFile& file,
                                        uint32_t vocab_size);
absl::StatusOr<ModelLayout> ReadGgufGptNeox(const GgufFile& file,
                                            uint32_t vocab_size);
absl::StatusOr<ModelLayout> ReadGgufGpt2(const GgufFile& file,
                                         uint32_t vocab_size);
absl::StatusOr<ModelLayout> ReadGgufT5(const GgufFile& file,
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
  // `epsilon_key`: of the norm.
  absl::Status ReadDimensions(std::string_view epsilon_key,
                              ModelConfig* config) const;
  // The rotation and its scaling, of metadata and of the tensors of
  // divisors. The theta that is set already is the default.
  absl::Status ReadRope(ModelLayout* layout) const;

 private:
  absl::Status ReadHeads(ModelConfig* config) const;
  absl::Status ReadRopeScaling(ModelConfig* config) const;
  absl::Status ReadYarn(RopeScaling* scaling) const;
  absl::Status ReadDivisors(ModelLayout* layout) const;
  // Leaves `out` empty when there is no such tensor.
  absl::Status ReadPositiveVector(std::string_view name, ModelLayout* layout,
                                  std::vector<float>* out) const;

  const GgufFile& file_;
  const std::string prefix_;
};

}  // namespace promptcache::worker
