#include "tools/cli/check_runner.h"

#include <algorithm>
#include <filesystem>
#include <set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/pml/case_check.h"
#include "common/pml/conversation_check.h"
#include "common/status_macros.h"
#include "inference_worker/engine/kv_memory.h"
#include "inference_worker/engine/private_pages.h"
#include "inference_worker/engine/vector_check.h"
#include "inference_worker/model/model_file.h"
#include "inference_worker/tokenizer/bpe_tokenizer.h"
#include "inference_worker/tokenizer/vector_check.h"
#include "tools/cli/files.h"

namespace promptcache::cli {
namespace {

namespace fs = std::filesystem;

// Room for the states of the longest case there is, with a margin.
constexpr uint64_t kPrivateTokens = 4096;

bool MayHoldVectors(const fs::path& path) {
  return path.extension() == ".json" || path.extension() == ".jsonl";
}

// JSON that belongs to a model's folder.
bool IsModelPart(const fs::path& path) {
  static const std::set<std::string> kParts{"config.json",
                                            "generation_config.json",
                                            "tokenizer.json",
                                            "tokenizer_config.json",
                                            "added_tokens.json",
                                            "special_tokens_map.json",
                                            "vocab.json",
                                            "chat_template.json",
                                            "preprocessor_config.json",
                                            "model.safetensors.index.json"};
  return kParts.contains(path.filename().string());
}

// The model that lies in a folder: a GGUF file, or the folder itself.
std::string ModelIn(const fs::path& folder) {
  std::error_code error;
  std::vector<std::string> found;
  for (const auto& entry : fs::directory_iterator(folder, error)) {
    if (entry.path().extension() == ".gguf") {
      found.push_back(entry.path().string());
    }
  }
  if (!found.empty()) return *std::min_element(found.begin(), found.end());
  if (fs::exists(folder / "config.json", error)) return folder.string();
  return "";
}

std::vector<std::string> FilesBelow(const fs::path& root, std::string* error) {
  std::vector<std::string> files;
  std::error_code code;
  fs::recursive_directory_iterator it(
      root, fs::directory_options::skip_permission_denied, code);
  for (; !code && it != fs::end(it); it.increment(code)) {
    std::error_code ignored;
    if (it->is_regular_file(ignored) && MayHoldVectors(it->path()) &&
        !IsModelPart(it->path())) {
      files.push_back(it->path().string());
    }
  }
  if (code) *error = code.message();
  std::sort(files.begin(), files.end());
  return files;
}

std::vector<CaseResult> AllFail(const VectorFile& file,
                                const std::string& why) {
  std::vector<CaseResult> results;
  for (const VectorPart& part : file.parts) {
    results.push_back({.name = part.name, .difference = why});
  }
  return results;
}

std::string Message(const absl::Status& status) {
  return status.message().empty() ? status.ToString()
                                  : std::string(status.message());
}

}  // namespace

struct CheckRunner::Model {
  std::unique_ptr<worker::ModelFile> vocabulary;
  std::unique_ptr<Tokenizer> tokenizer;
  std::unique_ptr<worker::Backend> backend;
  std::unique_ptr<worker::KvMemory> memory;
  std::unique_ptr<worker::PrivatePages> pages;
  // Why loading failed; asked for once only.
  absl::Status tokenizer_status;
  absl::Status backend_status;
};

CheckRunner::CheckRunner(std::string model, worker::Numerics numerics,
                         std::string device)
    : model_(std::move(model)),
      numerics_(numerics),
      device_name_(std::move(device)) {}
CheckRunner::~CheckRunner() = default;

void CheckRunner::Run(const std::vector<std::string>& paths,
                      const OnFile& on_file, const OnResult& on_result) {
  for (const std::string& path : paths) {
    std::error_code error;
    std::vector<std::string> files{path};
    const bool named = !fs::is_directory(path, error);
    if (!named) {
      std::string problem;
      files = FilesBelow(path, &problem);
      if (!problem.empty()) on_result(path, {"folder", problem});
      if (files.empty() && problem.empty()) {
        on_result(path, {"folder", "no file of vectors at or below it"});
      }
    }
    for (const std::string& file : files) {
      on_file(file);
      for (const CaseResult& result :
           RunFile(file, named ? fs::path(file).parent_path().string() : path,
                   named)) {
        on_result(file, result);
      }
    }
  }
}

std::string CheckRunner::ModelFor(const std::string& path,
                                  const std::string& root) const {
  std::error_code error;
  const fs::path top = fs::weakly_canonical(root.empty() ? "." : root, error);
  fs::path folder = fs::weakly_canonical(path, error).parent_path();
  for (;;) {
    if (std::string model = ModelIn(folder); !model.empty()) return model;
    if (folder == top || folder == folder.parent_path()) return model_;
    folder = folder.parent_path();
  }
}

std::vector<CaseResult> CheckRunner::RunFile(const std::string& path,
                                             const std::string& root,
                                             bool named) {
  auto text = ReadFile(path);
  if (!text.ok()) return {{"file", Message(text.status())}};
  const VectorFile file = cli::ParseVectorFile(path, *text);
  switch (file.kind) {
    case VectorKind::kDamaged:
      return {{"file", file.problem}};
    case VectorKind::kNone:
      return {{"file", named ? "not a file of vectors: none of the fields by "
                               "which one is recognised"
                             : "no fields by which vectors are recognised"}};
    default:
      break;
  }
  if (file.kind == VectorKind::kConversations && !file.has_ids) {
    auto results = pml::CheckConversations(*text, /*tokenizer=*/nullptr);
    if (results.ok()) return *std::move(results);
    return AllFail(file, Message(results.status()));
  }
  const std::string model = ModelFor(path, root);
  if (file.kind == VectorKind::kFolderLogits) {
    auto results = RunText(VectorKind::kLogits, *text, model);
    if (results.ok()) return *std::move(results);
    return AllFail(file, Message(results.status()));
  }
  auto results = RunText(file.kind, *text, model);
  if (results.ok() && !results->empty()) return *std::move(results);
  // Refused as a whole, for one bad case maybe: each on its own.
  std::vector<CaseResult> each;
  for (const VectorPart& part : file.parts) {
    auto one = RunText(file.kind, part.text, model);
    if (!one.ok()) {
      each.push_back({part.name, Message(one.status())});
    } else if (one->empty()) {
      each.push_back({part.name, "not a case that can be run"});
    } else {
      for (CaseResult& result : *one) {
        each.push_back({part.name, std::move(result.difference)});
      }
    }
  }
  if (each.empty()) each.push_back({"file", "no cases in it"});
  return each;
}

absl::StatusOr<std::vector<CaseResult>> CheckRunner::RunText(
    VectorKind kind, const std::string& text, const std::string& model) {
  Model* loaded = nullptr;
  if (kind == VectorKind::kLogits) {
    PC_RETURN_IF_ERROR(LoadBackend(model, &loaded));
    return worker::CheckLogitVectors(text, *loaded->backend, *loaded->pages,
                                     &logit_errors_);
  }
  PC_RETURN_IF_ERROR(LoadTokenizer(model, &loaded));
  if (kind == VectorKind::kConversations) {
    return pml::CheckConversations(text, loaded->tokenizer.get());
  }
  if (kind == VectorKind::kPml) {
    return pml::CheckPmlCases(text, *loaded->tokenizer);
  }
  return worker::CheckTokenizerVectors(text, *loaded->tokenizer);
}

absl::StatusOr<worker::ComputeDevice*> CheckRunner::Device() {
  if (device_ == nullptr) {
    PC_ASSIGN_OR_RETURN(device_, worker::ComputeDevice::Open(device_name_));
  }
  return device_.get();
}

absl::Status CheckRunner::LoadTokenizer(const std::string& model, Model** out) {
  std::unique_ptr<Model>& slot = models_[model];
  if (slot == nullptr) {
    slot = std::make_unique<Model>();
    slot->tokenizer_status = [&]() -> absl::Status {
      PC_ASSIGN_OR_RETURN(const std::string path, FindModel(model));
      PC_ASSIGN_OR_RETURN(
          slot->vocabulary,
          worker::OpenModelFile(path, {.vocabulary_only = true}));
      PC_ASSIGN_OR_RETURN(slot->tokenizer,
                          worker::CreateTokenizer(*slot->vocabulary));
      return absl::OkStatus();
    }();
    slot->backend_status = absl::UnknownError("not tried");
  }
  *out = slot.get();
  return slot->tokenizer_status;
}

absl::Status CheckRunner::LoadBackend(const std::string& model, Model** out) {
  // The model's own slot, whatever became of its tokenizer.
  LoadTokenizer(model, out).IgnoreError();
  Model& slot = **out;
  if (!absl::IsUnknown(slot.backend_status)) return slot.backend_status;
  slot.backend_status = [&]() -> absl::Status {
    PC_ASSIGN_OR_RETURN(const std::string path, FindModel(model));
    PC_ASSIGN_OR_RETURN(auto file, worker::OpenModelFile(path, {}));
    PC_ASSIGN_OR_RETURN(worker::ComputeDevice* const device, Device());
    PC_ASSIGN_OR_RETURN(slot.backend,
                        device->CreateBackend(*file, {.numerics = numerics_}));
    const KvLayout& layout = slot.backend->layout();
    PC_ASSIGN_OR_RETURN(slot.memory,
                        worker::KvMemory::Create(device->memory()));
    PC_ASSIGN_OR_RETURN(
        slot.pages,
        worker::PrivatePages::Create(
            layout, layout.PagesFor(kPrivateTokens) * layout.page_bytes(),
            slot.memory.get()));
    return absl::OkStatus();
  }();
  return slot.backend_status;
}

}  // namespace promptcache::cli
