#include "inference_worker/model/gguf_tensors.h"

#include <optional>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "common/status_macros.h"
#include "inference_worker/model/tensor_types.h"

namespace promptcache::worker {
namespace {

std::string Shape(const GgufTensor& tensor) {
  std::string shape;
  for (uint32_t i = tensor.num_dims; i-- > 0;) {
    absl::StrAppend(&shape, shape.empty() ? "[" : ", ", tensor.dims[i]);
  }
  return shape + "]";
}

// The tensor as a matrix of `shape`, whole inside the file.
absl::StatusOr<TensorView> LocateIn(const GgufFile& file,
                                    const GgufTensor& tensor,
                                    TensorShape shape) {
  const std::string what = absl::StrCat("tensor ", QuoteGgufName(tensor.name));
  const TensorTypeInfo* info = FindGgufTensorType(tensor.type);
  if (info == nullptr) {
    return absl::InvalidArgumentError(absl::StrCat(
        what, ": type ", DescribeGgufTensorType(tensor.type),
        " is not supported; supported: ", SupportedTensorTypeNames()));
  }
  if (tensor.dims[0] != shape.cols || tensor.dims[1] != shape.rows ||
      tensor.dims[2] != 1 || tensor.dims[3] != 1) {
    return absl::InvalidArgumentError(
        absl::StrCat(what, ": shape ", Shape(tensor), " is not [", shape.rows,
                     ", ", shape.cols, "]"));
  }
  const std::optional<uint64_t> num_bytes =
      TensorBytes(info->type, shape.rows, shape.cols);
  if (!num_bytes.has_value()) {
    return absl::InvalidArgumentError(absl::StrCat(
        what, ": rows of ", shape.cols, " elements are not whole blocks of ",
        info->block_elements, ", which type ", info->name, " needs"));
  }
  const uint64_t data_bytes = file.data().size();
  if (tensor.offset > data_bytes || *num_bytes > data_bytes - tensor.offset) {
    return absl::InvalidArgumentError(
        absl::StrCat(what, ": offset ", tensor.offset, " + ", *num_bytes,
                     " exceeds the file's ", data_bytes, " bytes of data"));
  }
  return TensorView{.name = std::string(tensor.name),
                    .type = info->type,
                    .rows = shape.rows,
                    .cols = shape.cols,
                    .data = file.data().subspan(tensor.offset, *num_bytes)};
}

}  // namespace

GgufTensors::GgufTensors(const GgufFile& file) : file_(file) {
  for (const GgufTensor& tensor : file.tensors()) {
    tensors_.emplace(tensor.name, &tensor);
  }
}

std::vector<std::string_view> GgufTensors::Names() const {
  std::vector<std::string_view> names;
  names.reserve(tensors_.size());
  for (const auto& [name, tensor] : tensors_) names.push_back(name);
  return names;
}

absl::StatusOr<TensorView> GgufTensors::Locate(std::string_view name,
                                               TensorShape shape) const {
  return LocateIn(file_, *tensors_.at(name), shape);
}

absl::StatusOr<std::vector<float>> ReadGgufVector(const GgufFile& file,
                                                  const GgufTensor& tensor,
                                                  uint64_t count) {
  PC_ASSIGN_OR_RETURN(const TensorView view,
                      LocateIn(file, tensor, {.rows = 1, .cols = count}));
  std::vector<float> values(count);
  DequantizeRow(view, 0, values);
  return values;
}

}  // namespace promptcache::worker
