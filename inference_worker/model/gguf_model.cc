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
#include "inference_worker/model/gguf_vocabulary.h"
#include "inference_worker/model/tensor_types.h"

namespace promptcache::worker {
namespace {

absl::StatusOr<const GgufFamily*> FindFamily(std::string_view architecture) {
  const std::array families = {&LlamaFamily()};
  std::string known;
  for (const GgufFamily* family : families) {
    if (family->architecture == architecture) return family;
    absl::StrAppend(&known, known.empty() ? "" : ", ",
                    ToAbsl(family->architecture));
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

std::string NameOf(const TensorRule& rule, uint32_t layer) {
  return rule.per_layer ? absl::StrCat("blk.", layer, ".", ToAbsl(rule.name))
                        : std::string(rule.name);
}

std::string Shape(const GgufTensor& tensor) {
  std::string shape;
  for (uint32_t i = tensor.num_dims; i-- > 0;) {
    absl::StrAppend(&shape, shape.empty() ? "[" : ", ", tensor.dims[i]);
  }
  return shape + "]";
}

// The tensor as a matrix of `shape`, whole inside the file.
absl::StatusOr<TensorView> Locate(const GgufFile& file,
                                  const GgufTensor& tensor, TensorShape shape) {
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

absl::Status CheckNoOverlap(const std::map<std::string, TensorView>& tensors) {
  std::vector<const TensorView*> by_address;
  by_address.reserve(tensors.size());
  for (const auto& [name, view] : tensors) by_address.push_back(&view);
  std::sort(by_address.begin(), by_address.end(),
            [](const TensorView* a, const TensorView* b) {
              return a->data.data() < b->data.data();
            });
  for (size_t i = 1; i < by_address.size(); ++i) {
    const TensorView& before = *by_address[i - 1];
    const TensorView& after = *by_address[i];
    if (before.data.data() + before.data.size() > after.data.data()) {
      return absl::InvalidArgumentError(absl::StrCat(
          "tensor ", QuoteGgufName(after.name), ": its data overlaps that of ",
          QuoteGgufName(before.name)));
    }
  }
  return absl::OkStatus();
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
  if (options.vocabulary_only) {
    config_.architecture = architecture;
    config_.vocab_size = static_cast<uint32_t>(vocabulary_.tokens.size());
  } else {
    PC_RETURN_IF_ERROR(RequireNeutral(file, "split.count", {0, 1}));
    PC_RETURN_IF_ERROR(RequireNeutral(file, "general.quantization_version",
                                      {kQuantizationVersion}));
    PC_ASSIGN_OR_RETURN(family_, FindFamily(architecture));
    PC_ASSIGN_OR_RETURN(config_, family_->read_config(file));
    PC_RETURN_IF_ERROR(ReadVocabSize(file));
    PC_RETURN_IF_ERROR(ReadTensors(file));
  }
  if (file.Find("general.name") != nullptr) {
    PC_ASSIGN_OR_RETURN(config_.name, file.String("general.name"));
  }
  return absl::OkStatus();
}

// The embedding's rows, with which everything else that counts tokens agrees.
absl::Status GgufModel::ReadVocabSize(const GgufFile& file) {
  for (const TensorRule& rule : family_->tensors) {
    if (rule.role != TensorRole::kTokenEmbedding) continue;
    for (const GgufTensor& tensor : file.tensors()) {
      if (tensor.name != rule.name) continue;
      if (tensor.dims[1] > std::numeric_limits<int32_t>::max()) {
        return absl::InvalidArgumentError(
            absl::StrCat("tensor ", QuoteGgufName(tensor.name), ": ",
                         tensor.dims[1], " rows are too many tokens"));
      }
      config_.vocab_size = static_cast<uint32_t>(tensor.dims[1]);
    }
  }
  const std::string key =
      absl::StrCat(ToAbsl(family_->architecture), ".vocab_size");
  if (file.Find(key) != nullptr) {
    PC_ASSIGN_OR_RETURN(const uint32_t stated, file.Uint32(key));
    if (config_.vocab_size != 0 && stated != config_.vocab_size) {
      return absl::InvalidArgumentError(absl::StrCat(
          "metadata ", key, ": ", stated,
          " is not the number of the embedding's rows, ", config_.vocab_size));
    }
  }
  const size_t num_tokens = vocabulary_.tokens.size();
  if (config_.vocab_size != 0 && num_tokens != 0 &&
      num_tokens != config_.vocab_size) {
    return absl::InvalidArgumentError(absl::StrCat(
        "metadata tokenizer.ggml.tokens: ", num_tokens,
        " tokens, but the embedding has ", config_.vocab_size, " rows"));
  }
  return absl::OkStatus();
}

absl::Status GgufModel::ReadTensors(const GgufFile& file) {
  std::map<std::string_view, const GgufTensor*> left;
  for (const GgufTensor& tensor : file.tensors()) left[tensor.name] = &tensor;
  for (const TensorRule& rule : family_->tensors) {
    const uint32_t count = rule.per_layer ? config_.num_layers : 1;
    for (uint32_t layer = 0; layer < count; ++layer) {
      std::string name = NameOf(rule, layer);
      const auto it = left.find(name);
      if (it == left.end()) {
        if (rule.optional) continue;
        return absl::InvalidArgumentError(
            absl::StrCat("tensor ", QuoteGgufName(name), " is missing"));
      }
      PC_ASSIGN_OR_RETURN(TensorView view,
                          Locate(file, *it->second, rule.shape(config_)));
      tensors_.emplace(std::move(name), std::move(view));
      left.erase(it);
    }
  }
  // A bias, a scale, a table of frequencies, more layers than stated: computing
  // without it would be wrong.
  if (!left.empty()) {
    return absl::InvalidArgumentError(
        absl::StrCat("tensor ", QuoteGgufName(left.begin()->first),
                     " is not one of a ", config_.num_layers, "-layer ",
                     ToAbsl(family_->architecture), " model"));
  }
  config_.tied_embeddings = !Tensor(TensorRole::kOutput, 0).ok();
  return CheckNoOverlap(tensors_);
}

absl::StatusOr<TensorView> GgufModel::Tensor(TensorRole role,
                                             uint32_t layer) const {
  if (family_ == nullptr) {
    return absl::NotFoundError(
        absl::StrCat(path_, ": was opened for its vocabulary only"));
  }
  const auto rule = std::find_if(
      family_->tensors.begin(), family_->tensors.end(),
      [role](const TensorRule& candidate) { return candidate.role == role; });
  if (rule == family_->tensors.end()) {
    return absl::NotFoundError(
        absl::StrCat(path_, ": no tensor has role ", static_cast<int>(role),
                     " in the architecture ", ToAbsl(family_->architecture)));
  }
  const std::string name = NameOf(*rule, layer);
  const auto it = tensors_.find(name);
  if (it == tensors_.end()) {
    return absl::NotFoundError(
        absl::StrCat(path_, ": no tensor ", QuoteGgufName(name)));
  }
  return it->second;
}

absl::StatusOr<Digest> GgufModel::Fingerprint() const {
  if (family_ == nullptr) {
    return absl::FailedPreconditionError(
        absl::StrCat(path_, ": was opened for its vocabulary only"));
  }
  const FingerprintCache cache(fingerprint_cache_dir_);
  if (const auto kept = cache.Find(path_, mapped_->identity())) return *kept;
  const Digest digest = HashTensors();
  cache.Keep(path_, mapped_->identity(), digest);
  return digest;
}

Digest GgufModel::HashTensors() const {
  Sha256 sha;
  AddModelGeometry(config_, &sha);
  for (const auto& [name, view] : tensors_) AddTensor(view, &sha);
  return sha.Finish();
}

absl::StatusOr<std::unique_ptr<ModelFile>> OpenModelFile(
    const std::string& path, const OpenOptions& options) {
  return GgufModel::Open(path, options);
}

}  // namespace promptcache::worker
