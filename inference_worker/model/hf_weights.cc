#include "inference_worker/model/hf_weights.h"

#include <filesystem>
#include <set>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "common/status_macros.h"
#include "common/strings.h"
#include "inference_worker/model/gguf.h"
#include "inference_worker/model/json_text.h"
#include "inference_worker/model/tensor_types.h"

namespace promptcache::worker {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view kSingle = "model.safetensors";
constexpr std::string_view kIndex = "model.safetensors.index.json";

absl::Status InFile(const std::string& file, const absl::Status& status) {
  return absl::Status(status.code(),
                      absl::StrCat(file, ": ", status.message()));
}

// The index's weight_map. Files are in the folder itself: no paths.
absl::StatusOr<std::map<std::string, std::string>> ParseIndex(
    std::string_view text) {
  PC_ASSIGN_OR_RETURN(const nlohmann::json index, ParseJsonObject(text));
  const auto map = index.find("weight_map");
  if (map == index.end() || !map->is_object() || map->empty()) {
    return absl::InvalidArgumentError("weight_map is not an object of files");
  }
  std::map<std::string, std::string> file_of;
  for (const auto& [tensor, file] : map->items()) {
    const bool is_name =
        file.is_string() &&
        file.get_ref<const std::string&>().ends_with(".safetensors") &&
        file.get_ref<const std::string&>().find_first_of("/\\") ==
            std::string::npos;
    if (!is_name) {
      return absl::InvalidArgumentError(
          absl::StrCat("weight_map: ", QuoteGgufName(tensor), ": ",
                       DescribeJson(file), " is not a file of the folder"));
    }
    file_of.emplace(tensor, file.get<std::string>());
  }
  return file_of;
}

bool HasShape(const SafetensorsEntry& tensor, TensorShape shape) {
  if (tensor.shape.size() == 1) {
    return shape.rows == 1 && tensor.shape[0] == shape.cols;
  }
  return tensor.shape.size() == 2 && tensor.shape[0] == shape.rows &&
         tensor.shape[1] == shape.cols;
}

}  // namespace

absl::StatusOr<HfWeights> HfWeights::Open(
    const std::string& folder, std::vector<std::unique_ptr<MappedFile>>* mapped,
    std::vector<IdentifiedFile>* identified) {
  HfWeights weights;
  const fs::path dir(folder);
  if (fs::exists(dir / kSingle) || !fs::exists(dir / kIndex)) {
    PC_RETURN_IF_ERROR(
        weights.AddFile(folder, std::string(kSingle), mapped, identified));
    return weights;
  }
  const std::string index_name(kIndex);
  const auto text = MappedFile::Open(dir / kIndex);
  if (!text.ok()) return InFile(index_name, text.status());
  const auto bytes = (*text)->bytes();
  const auto file_of =
      ParseIndex({reinterpret_cast<const char*>(bytes.data()), bytes.size()});
  if (!file_of.ok()) return InFile(index_name, file_of.status());
  std::set<std::string> files;
  for (const auto& [tensor, file] : *file_of) files.insert(file);
  for (const std::string& file : files) {
    PC_RETURN_IF_ERROR(weights.AddFile(folder, file, mapped, identified));
  }
  if (const absl::Status status = weights.CheckIndex(*file_of); !status.ok()) {
    return InFile(index_name, status);
  }
  return weights;
}

absl::Status HfWeights::AddFile(
    const std::string& folder, const std::string& name,
    std::vector<std::unique_ptr<MappedFile>>* mapped,
    std::vector<IdentifiedFile>* identified) {
  const std::string path = fs::path(folder) / name;
  auto file = MappedFile::Open(path);
  if (!file.ok()) return InFile(name, file.status());
  auto tensors = ParseSafetensors((*file)->bytes());
  if (!tensors.ok()) return InFile(name, tensors.status());
  for (auto& [tensor, entry] : *tensors) {
    const auto [it, added] =
        entries_.emplace(tensor, Entry{std::move(entry), name});
    if (!added) {
      return absl::InvalidArgumentError(
          absl::StrCat(name, ": tensor ", QuoteGgufName(tensor), ": lies in ",
                       it->second.file, " too"));
    }
  }
  identified->push_back({path, (*file)->identity()});
  mapped->push_back(*std::move(file));
  return absl::OkStatus();
}

// That each tensor lies where the index says, and no other does.
absl::Status HfWeights::CheckIndex(
    const std::map<std::string, std::string>& file_of) const {
  for (const auto& [tensor, file] : file_of) {
    const auto it = entries_.find(tensor);
    if (it == entries_.end() || it->second.file != file) {
      return absl::InvalidArgumentError(absl::StrCat(
          "tensor ", QuoteGgufName(tensor), ": does not lie in ", file));
    }
  }
  for (const auto& [tensor, entry] : entries_) {
    if (file_of.contains(tensor)) continue;
    return absl::InvalidArgumentError(
        absl::StrCat("tensor ", QuoteGgufName(tensor), ": lies in ", entry.file,
                     ", but the index does not list it"));
  }
  return absl::OkStatus();
}

std::vector<std::string_view> HfWeights::Names() const {
  std::vector<std::string_view> names;
  names.reserve(entries_.size());
  for (const auto& [name, entry] : entries_) names.push_back(name);
  return names;
}

absl::StatusOr<TensorView> HfWeights::Locate(std::string_view name,
                                             TensorShape shape) const {
  const auto it = entries_.find(name);
  const SafetensorsEntry& tensor = it->second.tensor;
  const std::string what =
      absl::StrCat(it->second.file, ": tensor ", QuoteGgufName(name), ": ");
  const TensorTypeInfo* info = FindPlainTensorType(tensor.dtype);
  if (info == nullptr) {
    return absl::InvalidArgumentError(
        absl::StrCat(what, "dtype ", tensor.dtype,
                     " is not supported; supported: BF16, F16, F32"));
  }
  if (!HasShape(tensor, shape)) {
    return absl::InvalidArgumentError(
        absl::StrCat(what, "shape ", DescribeShape(tensor.shape), " is not [",
                     shape.rows, ", ", shape.cols, "]"));
  }
  return TensorView{.name = std::string(name),
                    .type = info->type,
                    .rows = shape.rows,
                    .cols = shape.cols,
                    .data = tensor.data};
}

}  // namespace promptcache::worker
