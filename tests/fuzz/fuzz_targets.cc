#include "tests/fuzz/fuzz_targets.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <array>
#include <cstdlib>
#include <string_view>

#include "absl/strings/str_cat.h"
#include "common/pml/compiler.h"
#include "common/unique_fd.h"
#include "glog/logging.h"
#include "inference_worker/model/gguf.h"
#include "inference_worker/model/model_file.h"
#include "inference_worker/model/safetensors.h"
#include "inference_worker/tokenizer/bpe_tokenizer.h"
#include "tests/support/fake_tokenizer.h"
#include "tests/support/test_files.h"

namespace promptcache::worker {
namespace {

void ReadModel(const ModelFile& model) {
  for (int role = 0; role <= static_cast<int>(TensorRole::kFfnDownBias);
       ++role) {
    for (uint32_t layer = 0; layer < 2; ++layer) {
      const auto view = model.Tensor(static_cast<TensorRole>(role), layer);
      if (!view.ok()) continue;
      std::vector<float> row(view->cols);
      for (const uint64_t r : {uint64_t{0}, view->rows / 2, view->rows - 1}) {
        DequantizeRow(*view, r, row);
      }
    }
  }
  model.Fingerprint().status().IgnoreError();
}

// A file without a name, rewritten for each input: the readers map files.
class ScratchFile {
 public:
  ScratchFile() : fd_(memfd_create("fuzz", MFD_CLOEXEC)) {
    PCHECK(fd_.get() >= 0);
  }
  std::string path() const { return absl::StrCat("/proc/self/fd/", fd_.get()); }
  void Write(std::string_view bytes) const {
    PCHECK(ftruncate(fd_.get(), 0) == 0);
    PCHECK(pwrite(fd_.get(), bytes.data(), bytes.size(), 0) ==
           static_cast<ssize_t>(bytes.size()));
  }

 private:
  UniqueFd fd_;
};

// A folder whose files are memfds behind symbolic links: no disk is written.
class ScratchFolder {
 public:
  static constexpr std::array<const char*, 4> kNames = {
      "config.json", "model.safetensors", "tokenizer.json",
      "tokenizer_config.json"};

  ScratchFolder() {
    for (size_t i = 0; i < kNames.size(); ++i) there_[i] = false;
  }
  const std::string& path() const { return dir_.path(); }
  // Empty: not there.
  void Write(size_t file, std::string_view bytes) {
    const std::string link = absl::StrCat(dir_.path(), "/", kNames[file]);
    files_[file].Write(bytes);
    const bool wanted = !bytes.empty();
    if (wanted == there_[file]) return;
    there_[file] = wanted;
    if (wanted) {
      PCHECK(symlink(files_[file].path().c_str(), link.c_str()) == 0);
    } else {
      PCHECK(unlink(link.c_str()) == 0);
    }
  }

 private:
  TempDir dir_;
  std::array<ScratchFile, kNames.size()> files_;
  std::array<bool, kNames.size()> there_;
};

std::string_view TextOf(std::span<const std::byte> bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

ScratchFolder& SharedFolder() {
  static ScratchFolder& folder = *new ScratchFolder;
  return folder;
}

std::vector<std::string_view> SplitFiles(std::string_view text, size_t most) {
  std::vector<std::string_view> parts;
  while (parts.size() + 1 < most) {
    const size_t at = text.find(kFolderSeparator);
    if (at == std::string_view::npos) break;
    parts.push_back(text.substr(0, at));
    text.remove_prefix(at + std::string_view(kFolderSeparator).size());
  }
  parts.push_back(text);
  parts.resize(most);
  return parts;
}

}  // namespace

void FuzzGguf(std::span<const std::byte> bytes) {
  // In a buffer of exactly this length, where the sanitizer sees its end.
  if (const auto file = GgufFile::Parse(bytes); file.ok()) {
    for (const auto& [key, value] : file->metadata()) {
      DescribeGgufValue(value);
      file->Strings(key).status().IgnoreError();
      file->Int32s(key).status().IgnoreError();
      file->Floats(key).status().IgnoreError();
      file->String(key).status().IgnoreError();
    }
  } else {
    return;
  }
  static const ScratchFile& scratch = *new ScratchFile;
  scratch.Write(TextOf(bytes));
  for (const bool vocabulary_only : {false, true}) {
    const auto model =
        OpenModelFile(scratch.path(), {.vocabulary_only = vocabulary_only});
    if (!model.ok()) continue;
    ReadModel(**model);
    break;
  }
}

void FuzzHfFolder(std::span<const std::byte> bytes) {
  const std::vector<std::string_view> files =
      SplitFiles(TextOf(bytes), ScratchFolder::kNames.size());
  {
    // A copy of exactly this length, as above.
    const std::vector<char> weights(files[1].begin(), files[1].end());
    ParseSafetensors(std::as_bytes(std::span(weights))).status().IgnoreError();
  }
  ScratchFolder& folder = SharedFolder();
  for (size_t i = 0; i < files.size(); ++i) folder.Write(i, files[i]);
  for (const bool vocabulary_only : {false, true}) {
    const auto model =
        OpenModelFile(folder.path(), {.vocabulary_only = vocabulary_only});
    if (!model.ok()) continue;
    ReadModel(**model);
    break;
  }
}

void FuzzTokenizer(std::span<const std::byte> bytes) {
  // Not only English: what a damaged vocabulary encodes must be its own.
  constexpr char kText[] =
      "The caf\xC3\xA9 opens at 9:30,\n<|im_start|> \xFF ok";
  const std::vector<std::string_view> files =
      SplitFiles(TextOf(bytes), ScratchFolder::kNames.size());
  ScratchFolder& folder = SharedFolder();
  for (size_t i = 0; i < files.size(); ++i) folder.Write(i, files[i]);
  const auto model = OpenModelFile(folder.path(), {.vocabulary_only = true});
  if (!model.ok()) return;
  const auto tokenizer = CreateTokenizer(**model);
  if (!tokenizer.ok()) return;
  for (const int32_t id : (*tokenizer)->Encode(kText)) {
    CHECK_GE(id, 0);
    CHECK_LT(id, (*tokenizer)->vocab_size());
    (*tokenizer)->Decode(id);
  }
}

void FuzzPml(std::span<const std::byte> bytes) {
  static const FakeTokenizer& tokenizer = *new FakeTokenizer;
  static const ChatTemplate& chatml =
      *new ChatTemplate(*ChatTemplate::FromName("chatml"));
  const std::vector<std::string_view> files = SplitFiles(TextOf(bytes), 2);
  const auto schema = pml::CompileSchema(files[0], tokenizer, chatml);
  const auto prompt = pml::ParsePrompt(files[1]);
  if (!schema.ok() || !prompt.ok()) return;
  for (const pml::Layout layout :
       {pml::Layout::kCompact, pml::Layout::kSchema}) {
    const auto plan = pml::Compile(**schema, **prompt, {.layout = layout});
    if (!plan.ok()) continue;
    int32_t num_tokens = 0;
    for (const pml::PlanSpan& span : plan->spans) {
      num_tokens += span.num_tokens();
    }
    CHECK_EQ(num_tokens, plan->num_tokens);
  }
}

}  // namespace promptcache::worker
