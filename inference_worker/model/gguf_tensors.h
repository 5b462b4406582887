#pragma once

#include <map>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "inference_worker/model/gguf.h"
#include "inference_worker/model/tensor_table.h"

namespace promptcache::worker {

// The tensors of a GGUF file. A view of it.
class GgufTensors final : public TensorSource {
 public:
  explicit GgufTensors(const GgufFile& file);

  std::vector<std::string_view> Names() const override;
  absl::StatusOr<TensorView> Locate(std::string_view name,
                                    TensorShape shape) const override;

 private:
  const GgufFile& file_;
  std::map<std::string_view, const GgufTensor*> tensors_;
};

// The values of a vector of `count` elements.
absl::StatusOr<std::vector<float>> ReadGgufVector(const GgufFile& file,
                                                  const GgufTensor& tensor,
                                                  uint64_t count);

}  // namespace promptcache::worker
