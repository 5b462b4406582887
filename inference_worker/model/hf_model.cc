#include "inference_worker/model/hf_model.h"

#include <filesystem>
#include <optional>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "common/status_macros.h"
#include "common/strings.h"
#include "inference_worker/model/gguf.h"
#include "inference_worker/model/hf_family.h"
#include "inference_worker/model/hf_weights.h"
#include "inference_worker/model/json_text.h"

namespace promptcache::worker {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

constexpr std::string_view kConfigFile = "config.json";
// Far above what any has; tokenizer.json goes to tens of MB.
constexpr size_t kMaxTextBytes = size_t{1} << 28;

absl::Status InFile(std::string_view file, const absl::Status& status) {
  return absl::Status(status.code(),
                      absl::StrCat(ToAbsl(file), ": ", status.message()));
}

// The text of a file in the folder; "" when it is not there.
absl::StatusOr<std::string> ReadText(const std::string& folder,
                                     std::string_view name,
                                     FileIdentity* identity = nullptr) {
  const fs::path path = fs::path(folder) / name;
  std::error_code error;
  if (!fs::exists(path, error)) return "";
  const auto mapped = MappedFile::Open(path.string());
  if (!mapped.ok()) return InFile(name, mapped.status());
  const auto bytes = (*mapped)->bytes();
  if (bytes.size() > kMaxTextBytes) {
    return absl::InvalidArgumentError(absl::StrCat(
        ToAbsl(name), ": ", bytes.size(), " bytes exceed ", kMaxTextBytes));
  }
  if (identity != nullptr) *identity = (*mapped)->identity();
  return std::string(reinterpret_cast<const char*>(bytes.data()), bytes.size());
}

absl::StatusOr<ModelLayout> ReadLayout(const HfConfig& file,
                                       const std::string& model_type) {
  PC_RETURN_IF_ERROR(file.RequireAbsent({"quantization_config"}));
  std::string known;
  for (const HfFamily& family : HfFamilies()) {
    if (family.model_type == model_type) {
      PC_RETURN_IF_ERROR(
          file.RequireBool("is_encoder_decoder", family.is_encoder_decoder));
      return family.read(file);
    }
    absl::StrAppend(&known, known.empty() ? "supported: " : ", ",
                    ToAbsl(family.model_type));
  }
  return file.Unsupported("model_type", known);
}

// One id, or a list of them.
absl::StatusOr<std::vector<int32_t>> ReadIds(const json& config,
                                             const std::string& key,
                                             uint32_t vocab_size) {
  std::vector<int32_t> ids;
  const auto it = config.find(key);
  if (it == config.end() || it->is_null()) return ids;
  const json list = it->is_array() ? *it : json::array({*it});
  for (const json& id : list) {
    if (!id.is_number_unsigned() || id.get<uint64_t>() >= vocab_size) {
      return absl::InvalidArgumentError(
          absl::StrCat(key, ": ", DescribeJson(id),
                       " is not a token; the vocabulary has ", vocab_size));
    }
    ids.push_back(id.get<int32_t>());
  }
  return ids;
}

// bos, eos and all ends; what generation_config.json says goes first.
absl::Status ReadSpecialIds(const std::string& folder, const json& config,
                            uint32_t vocab_size, VocabularyData* vocabulary) {
  constexpr std::string_view kGeneration = "generation_config.json";
  PC_ASSIGN_OR_RETURN(const std::string text, ReadText(folder, kGeneration));
  json generation = json::object();
  if (!text.empty()) {
    auto parsed = ParseJsonObject(text);
    if (!parsed.ok()) return InFile(kGeneration, parsed.status());
    generation = *std::move(parsed);
  }
  const auto read =
      [&](const std::string& key) -> absl::StatusOr<std::vector<int32_t>> {
    auto ids = ReadIds(generation, key, vocab_size);
    if (!ids.ok()) return InFile(kGeneration, ids.status());
    if (!ids->empty()) return ids;
    ids = ReadIds(config, key, vocab_size);
    if (!ids.ok()) return InFile(kConfigFile, ids.status());
    return ids;
  };
  PC_ASSIGN_OR_RETURN(const auto bos, read("bos_token_id"));
  if (!bos.empty()) vocabulary->bos_id = bos[0];
  PC_ASSIGN_OR_RETURN(vocabulary->end_ids, read("eos_token_id"));
  if (!vocabulary->end_ids.empty()) vocabulary->eos_id = vocabulary->end_ids[0];
  return absl::OkStatus();
}

// A string, or a list of named ones of which "default" counts.
absl::StatusOr<std::string> TemplateIn(const std::string& tokenizer_config) {
  if (tokenizer_config.empty()) return "";
  PC_ASSIGN_OR_RETURN(const json config, ParseJsonObject(tokenizer_config));
  const auto it = config.find("chat_template");
  if (it == config.end() || it->is_null()) return "";
  if (it->is_string()) return it->get<std::string>();
  if (it->is_array()) {
    for (const json& named : *it) {
      if (named.is_object() && named.value("name", json()) == "default" &&
          named.value("template", json()).is_string()) {
        return named["template"].get<std::string>();
      }
    }
  }
  return absl::InvalidArgumentError(
      absl::StrCat("chat_template: ", DescribeJson(*it),
                   " is neither a text nor a list with a default one"));
}

absl::StatusOr<std::string> ReadTemplate(const std::string& folder,
                                         const std::string& tokenizer_config) {
  // Newer folders have a file of its own, which goes first.
  PC_ASSIGN_OR_RETURN(std::string text,
                      ReadText(folder, "chat_template.jinja"));
  if (!text.empty()) return text;
  auto found = TemplateIn(tokenizer_config);
  if (!found.ok()) return InFile("tokenizer_config.json", found.status());
  return found;
}

}  // namespace

absl::StatusOr<std::unique_ptr<HfModel>> HfModel::Open(
    const std::string& folder, const OpenOptions& options) {
  std::unique_ptr<HfModel> model(new HfModel());
  model->folder_ = folder;
  model->fingerprint_cache_dir_ = options.fingerprint_cache_dir;
  model->vocabulary_only_ = options.vocabulary_only;
  if (const absl::Status read = model->Read(options); !read.ok()) {
    return InFile(folder, read);
  }
  return model;
}

absl::Status HfModel::Read(const OpenOptions& options) {
  FileIdentity config_identity;
  PC_ASSIGN_OR_RETURN(const std::string text,
                      ReadText(folder_, kConfigFile, &config_identity));
  if (text.empty()) {
    return absl::NotFoundError("the folder has no config.json");
  }
  const auto json_config = ParseJsonObject(text);
  if (!json_config.ok()) return InFile(kConfigFile, json_config.status());
  const HfConfig file(*json_config);
  PC_ASSIGN_OR_RETURN(const std::string model_type, file.String("model_type"));

  PC_ASSIGN_OR_RETURN(tokenizer_, ReadText(folder_, "tokenizer.json"));
  PC_ASSIGN_OR_RETURN(tokenizer_config_,
                      ReadText(folder_, "tokenizer_config.json"));
  PC_ASSIGN_OR_RETURN(chat_template_, ReadTemplate(folder_, tokenizer_config_));
  if (options.vocabulary_only) {
    config_.architecture = model_type;
    PC_ASSIGN_OR_RETURN(config_.vocab_size,
                        file.Dimension("vocab_size", INT32_MAX));
  } else {
    PC_ASSIGN_OR_RETURN(ModelLayout layout, ReadLayout(file, model_type));
    files_.push_back(
        {fs::path(folder_) / std::string(kConfigFile), config_identity});
    PC_RETURN_IF_ERROR(ReadWeights(layout));
    config_ = std::move(layout.config);
  }
  config_.name = fs::path(folder_).lexically_normal().filename().string();
  if (config_.name.empty()) {  // "folder/"
    config_.name =
        fs::path(folder_).lexically_normal().parent_path().filename().string();
  }
  return ReadSpecialIds(folder_, *json_config, config_.vocab_size,
                        &vocabulary_);
}

absl::Status HfModel::ReadWeights(const ModelLayout& layout) {
  PC_ASSIGN_OR_RETURN(const HfWeights weights,
                      HfWeights::Open(folder_, &mapped_, &files_));
  PC_ASSIGN_OR_RETURN(tensors_, TensorTable::Build(layout, weights));
  return absl::OkStatus();
}

absl::StatusOr<TensorView> HfModel::Tensor(TensorRole role,
                                           uint32_t layer) const {
  if (vocabulary_only_) {
    return absl::NotFoundError(
        absl::StrCat(folder_, ": was opened for its vocabulary only"));
  }
  auto view = tensors_.Find(role, layer);
  if (view.ok()) return view;
  return InFile(folder_, view.status());
}

absl::StatusOr<Digest> HfModel::Fingerprint() const {
  if (vocabulary_only_) {
    return absl::FailedPreconditionError(
        absl::StrCat(folder_, ": was opened for its vocabulary only"));
  }
  return FingerprintOf(config_, tensors_, files_, fingerprint_cache_dir_);
}

}  // namespace promptcache::worker
