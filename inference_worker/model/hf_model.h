#pragma once

#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "inference_worker/model/fingerprint.h"
#include "inference_worker/model/mapped_file.h"
#include "inference_worker/model/model_file.h"
#include "inference_worker/model/tensor_table.h"

namespace promptcache::worker {

// A model in a Hugging Face folder: config.json decides; the weights are in
// model.safetensors or in the files that model.safetensors.index.json lists.
// All tensors are located and checked at Open. Errors begin with the file.
class HfModel final : public ModelFile {
 public:
  static absl::StatusOr<std::unique_ptr<HfModel>> Open(
      const std::string& folder, const OpenOptions& options);

  const ModelConfig& config() const override { return config_; }
  const VocabularyData& vocabulary() const override { return vocabulary_; }
  const std::string& chat_template() const override { return chat_template_; }
  const std::string& path() const override { return folder_; }
  const std::string& tokenizer_json() const override { return tokenizer_; }
  const std::string& tokenizer_config_json() const override {
    return tokenizer_config_;
  }
  absl::StatusOr<TensorView> Tensor(TensorRole role,
                                    uint32_t layer) const override;
  absl::StatusOr<Digest> Fingerprint() const override;

 private:
  HfModel() = default;

  absl::Status Read(const OpenOptions& options);
  absl::Status ReadWeights(const ModelLayout& layout);

  std::string folder_;
  std::string fingerprint_cache_dir_;
  bool vocabulary_only_ = false;
  // config.json, then the files of weights: what the fingerprint depends on.
  std::vector<IdentifiedFile> files_;
  std::vector<std::unique_ptr<MappedFile>> mapped_;
  ModelConfig config_;
  VocabularyData vocabulary_;
  std::string chat_template_;
  std::string tokenizer_;
  std::string tokenizer_config_;
  TensorTable tensors_;
};

}  // namespace promptcache::worker
