#include "inference_worker/model/gguf_model.h"

#include <algorithm>
#include <array>
#include <initializer_list>
#include <limits>
#include <optional>
#include <string_view>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "common/status_macros.h"
#include "common/strings.h"
#include "inference_worker/model/fingerprint.h"
#include "inference_worker/model/gguf_family.h"
#include "inference_worker/model/gguf_tensors.h"
#include "inference_worker/model/gguf_vocabulary.h"

namespace promptcache::worker {
namespace {

constexpr std::string_view kEmbedding = "token_embd.weight";

absl::StatusOr<const GgufFamily*> FindFamily(std::string_view architecture) {
  std::string known;
  for (const GgufFamily& family : GgufFamilies()) {
    if (family.architecture == architecture) return &family;
    absl::StrAppend(&known, known.empty() ? "" : ", ",
                    ToAbsl(family.architecture));
  }
  return absl::InvalidArgumentError(absl::StrCat(
      "metadata general.architecture: ", QuoteGgufName(architecture),
      " is not supported; supported: ", known));
}

// The layouts of the quantised types changed with this number, before GGUF.
constexpr uint32_t kQuantizationVersion = 2;

// That an integer, if it is there at all, is one of `allowed`.
absl::Status RequireNeutral(const GgufFile& file, std::string_view key,
                            std::initializer_list<uint32_t> allowed) {
  if (file.Find(key) == nullptr) return absl::OkStatus();
  PC_ASSIGN_OR_RETURN(const uint32_t value, file.Uint32(key));
  if (std::find(allowed.begin(), allowed.end(), value) != allowed.end()) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(
      absl::StrCat("metadata ", ToAbsl(key), ": ", value, " is not supported"));
}

}  // namespace

absl::StatusOr<std::unique_ptr<GgufModel>> GgufModel::Open(
    const std::string& path, const OpenOptions& options) {
  const auto annotate = [&path](const absl::Status& status) {
    return absl::Status(status.code(),
                        absl::StrCat(path, ": ", status.message()));
  };
  std::unique_ptr<GgufModel> model(new GgufModel());
  model->path_ = path;
  model->fingerprint_cache_dir_ = options.fingerprint_cache_dir;
  auto mapped = MappedFile::Open(path);
  if (!mapped.ok()) return annotate(mapped.status());
  model->mapped_ = *std::move(mapped);
  const auto file = GgufFile::Parse(model->mapped_->bytes());
  if (!file.ok()) return annotate(file.status());
  if (const absl::Status read = model->Read(*file, options); !read.ok()) {
    return annotate(read);
  }
  return model;
}

absl::Status GgufModel::Read(const GgufFile& file, const OpenOptions& options) {
  PC_ASSIGN_OR_RETURN(const std::string architecture,
                      file.String("general.architecture"));
  PC_ASSIGN_OR_RETURN(vocabulary_, ReadGgufVocabulary(file));
  if (file.Find("tokenizer.chat_template") != nullptr) {
    PC_ASSIGN_OR_RETURN(chat_template_, file.String("tokenizer.chat_template"));
  }
  vocabulary_only_ = options.vocabulary_only;
  if (vocabulary_only_) {
    config_.architecture = architecture;
    config_.vocab_size = static_cast<uint32_t>(vocabulary_.tokens.size());
  } else {
    PC_RETURN_IF_ERROR(ReadModel(file, architecture));
  }
  if (file.Find("general.name") != nullptr) {
    PC_ASSIGN_OR_RETURN(config_.name, file.String("general.name"));
  }
  return absl::OkStatus();
}

absl::Status GgufModel::ReadModel(const GgufFile& file,
                                  const std::string& architecture) {
  PC_RETURN_IF_ERROR(RequireNeutral(file, "split.count", {0, 1}));
  PC_RETURN_IF_ERROR(RequireNeutral(file, "general.quantization_version",
                                    {kQuantizationVersion}));
  PC_ASSIGN_OR_RETURN(const GgufFamily* family, FindFamily(architecture));
  PC_ASSIGN_OR_RETURN(const uint32_t vocab_size,
                      ReadVocabSize(file, architecture));
  PC_ASSIGN_OR_RETURN(ModelLayout layout, family->read(file, vocab_size));
  PC_ASSIGN_OR_RETURN(tensors_, TensorTable::Build(layout, GgufTensors(file)));
  config_ = std::move(layout.config);
  config_.tied_embeddings = !Tensor(TensorRole::kOutput, 0).ok();
  return absl::OkStatus();
}

// The embedding's rows, with which everything else that counts tokens agrees.
absl::StatusOr<uint32_t> GgufModel::ReadVocabSize(
    const GgufFile& file, const std::string& architecture) const {
  uint32_t vocab_size = 0;
  for (const GgufTensor& tensor : file.tensors()) {
    if (tensor.name != kEmbedding) continue;
    if (tensor.dims[1] > std::numeric_limits<int32_t>::max()) {
      return absl::InvalidArgumentError(
          absl::StrCat("tensor ", QuoteGgufName(tensor.name), ": ",
                       tensor.dims[1], " rows are too many tokens"));
    }
    vocab_size = static_cast<uint32_t>(tensor.dims[1]);
  }
  const std::string key = absl::StrCat(architecture, ".vocab_size");
  if (file.Find(key) != nullptr) {
    PC_ASSIGN_OR_RETURN(const uint32_t stated, file.Uint32(key));
    if (vocab_size != 0 && stated != vocab_size) {
      return absl::InvalidArgumentError(absl::StrCat(
          "metadata ", key, ": ", stated,
          " is not the number of the embedding's rows, ", vocab_size));
    }
  }
  const size_t num_tokens = vocabulary_.tokens.size();
  if (vocab_size != 0 && num_tokens != 0 && num_tokens != vocab_size) {
    return absl::InvalidArgumentError(
        absl::StrCat("metadata tokenizer.ggml.tokens: ", num_tokens,
                     " tokens, but the embedding has ", vocab_size, " rows"));
  }
  return vocab_size;
}

absl::StatusOr<TensorView> GgufModel::Tensor(TensorRole role,
                                             uint32_t layer) const {
  if (vocabulary_only_) {
    return absl::NotFoundError(
        absl::StrCat(path_, ": was opened for its vocabulary only"));
  }
  auto view = tensors_.Find(role, layer);
  if (view.ok()) return view;
  return absl::Status(view.status().code(),
                      absl::StrCat(path_, ": ", view.status().message()));
}

absl::StatusOr<Digest> GgufModel::Fingerprint() const {
  if (vocabulary_only_) {
    return absl::FailedPreconditionError(
        absl::StrCat(path_, ": was opened for its vocabulary only"));
  }
  const std::array files = {IdentifiedFile{path_, mapped_->identity()}};
  return FingerprintOf(config_, tensors_, files, fingerprint_cache_dir_);
}

}  // namespace promptcache::worker
