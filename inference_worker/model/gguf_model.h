#pragma once

#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "inference_worker/model/gguf.h"
#include "inference_worker/model/mapped_file.h"
#include "inference_worker/model/model_file.h"
#include "inference_worker/model/tensor_table.h"

namespace promptcache::worker {

// A model in one GGUF file. All tensors are located and checked at Open.
class GgufModel final : public ModelFile {
 public:
  static absl::StatusOr<std::unique_ptr<GgufModel>> Open(
      const std::string& path, const OpenOptions& options);

  const ModelConfig& config() const override { return config_; }
  const VocabularyData& vocabulary() const override { return vocabulary_; }
  const std::string& chat_template() const override { return chat_template_; }
  const std::string& path() const override { return path_; }
  absl::StatusOr<TensorView> Tensor(TensorRole role,
                                    uint32_t layer) const override;
  absl::StatusOr<Digest> Fingerprint() const override;

 private:
  GgufModel() = default;

  absl::Status Read(const GgufFile& file, const OpenOptions& options);
  absl::Status ReadModel(const GgufFile& file, const std::string& architecture);
  absl::StatusOr<uint32_t> ReadVocabSize(const GgufFile& file,
                                         const std::string& architecture) const;

  std::string path_;
  std::string fingerprint_cache_dir_;
  std::unique_ptr<MappedFile> mapped_;
  bool vocabulary_only_ = false;
  ModelConfig config_;
  VocabularyData vocabulary_;
  std::string chat_template_;
  TensorTable tensors_;
};

}  // namespace promptcache::worker
