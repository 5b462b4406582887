#pragma once

#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "inference_worker/model/fingerprint.h"
#include "inference_worker/model/mapped_file.h"
#include "inference_worker/model/safetensors.h"
#include "inference_worker/model/tensor_table.h"

namespace promptcache::worker {

// The tensors of a folder's safetensors files, one or several. Views of the
// mapped files.
class HfWeights final : public TensorSource {
 public:
  // Appends the files and their identities. InvalidArgument when a file is
  // damaged, or the index and the files disagree on which tensor lies where.
  static absl::StatusOr<HfWeights> Open(
      const std::string& folder,
      std::vector<std::unique_ptr<MappedFile>>* mapped,
      std::vector<IdentifiedFile>* identified);

  std::vector<std::string_view> Names() const override;
  absl::StatusOr<TensorView> Locate(std::string_view name,
                                    TensorShape shape) const override;

 private:
  HfWeights() = default;
  absl::Status AddFile(const std::string& folder, const std::string& name,
                       std::vector<std::unique_ptr<MappedFile>>* mapped,
                       std::vector<IdentifiedFile>* identified);
  absl::Status CheckIndex(
      const std::map<std::string, std::string>& file_of) const;

  struct Entry {
    SafetensorsEntry tensor;
    std::string file;
  };
  std::map<std::string, Entry, std::less<>> entries_;
};

}  // namespace promptcache::worker
