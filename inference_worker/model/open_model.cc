#include <filesystem>

#include "inference_worker/model/gguf_model.h"
#include "inference_worker/model/hf_model.h"
#include "inference_worker/model/model_file.h"

namespace promptcache::worker {

absl::StatusOr<std::unique_ptr<ModelFile>> OpenModelFile(
    const std::string& path, const OpenOptions& options) {
  std::error_code error;
  if (std::filesystem::is_directory(path, error)) {
    return HfModel::Open(path, options);
  }
  return GgufModel::Open(path, options);
}

}  // namespace promptcache::worker
