#include "inference_worker/model/gguf_vocabulary.h"

#include <algorithm>
#include <iterator>
#include <limits>
#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "common/status_macros.h"
#include "common/strings.h"

namespace promptcache::worker {
namespace {

constexpr std::string_view kTokensKey = "tokenizer.ggml.tokens";

absl::Status CheckParallel(std::string_view key, size_t count,
                           size_t num_tokens) {
  if (count == num_tokens) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat("metadata ", ToAbsl(key), ": ",
                                                 count, " entries for ",
                                                 num_tokens, " tokens"));
}

// -1 when the file does not say.
absl::StatusOr<int32_t> ReadId(const GgufFile& file, std::string_view key,
                               size_t num_tokens) {
  if (file.Find(key) == nullptr) return -1;
  PC_ASSIGN_OR_RETURN(const uint32_t id, file.Uint32(key));
  if (id >= num_tokens) {
    return absl::InvalidArgumentError(
        absl::StrCat("metadata ", ToAbsl(key), ": ", id,
                     " is not a token; the vocabulary has ", num_tokens));
  }
  return static_cast<int32_t>(id);
}

absl::Status ReadLists(const GgufFile& file, VocabularyData* vocabulary) {
  constexpr std::string_view kTypesKey = "tokenizer.ggml.token_type";
  constexpr std::string_view kScoresKey = "tokenizer.ggml.scores";
  constexpr std::string_view kMergesKey = "tokenizer.ggml.merges";
  PC_ASSIGN_OR_RETURN(vocabulary->tokens, file.Strings(kTokensKey));
  const size_t num_tokens = vocabulary->tokens.size();
  if (num_tokens == 0 || num_tokens > std::numeric_limits<int32_t>::max()) {
    return absl::InvalidArgumentError(absl::StrCat(
        "metadata ", ToAbsl(kTokensKey), ": ", num_tokens, " tokens"));
  }
  if (file.Find(kTypesKey) != nullptr) {
    PC_ASSIGN_OR_RETURN(vocabulary->token_types, file.Int32s(kTypesKey));
    PC_RETURN_IF_ERROR(
        CheckParallel(kTypesKey, vocabulary->token_types.size(), num_tokens));
  }
  if (file.Find(kScoresKey) != nullptr) {
    PC_ASSIGN_OR_RETURN(vocabulary->scores, file.Floats(kScoresKey));
    PC_RETURN_IF_ERROR(
        CheckParallel(kScoresKey, vocabulary->scores.size(), num_tokens));
  }
  if (file.Find(kMergesKey) != nullptr) {
    PC_ASSIGN_OR_RETURN(vocabulary->merges, file.Strings(kMergesKey));
  }
  return absl::OkStatus();
}

// What SentencePiece's Unigram does to text first.
absl::Status ReadNormalisation(const GgufFile& file,
                               VocabularyData* vocabulary) {
  constexpr std::string_view kCharsmapKey =
      "tokenizer.ggml.precompiled_charsmap";
  constexpr std::string_view kExtraSpacesKey =
      "tokenizer.ggml.remove_extra_whitespaces";
  if (file.Find(kExtraSpacesKey) != nullptr) {
    PC_ASSIGN_OR_RETURN(vocabulary->removes_extra_spaces,
                        file.Bool(kExtraSpacesKey));
  }
  const GgufValue* charsmap = file.Find(kCharsmapKey);
  if (charsmap == nullptr) return absl::OkStatus();
  if (charsmap->type != GgufType::kArray ||
      (charsmap->element != GgufType::kUint8 &&
       charsmap->element != GgufType::kInt8)) {
    return absl::InvalidArgumentError(
        absl::StrCat("metadata ", ToAbsl(kCharsmapKey), ": ",
                     DescribeGgufValue(*charsmap), ", must be bytes"));
  }
  vocabulary->charsmap.assign(
      reinterpret_cast<const char*>(charsmap->raw.data()),
      charsmap->raw.size());
  return absl::OkStatus();
}

// Where a file does not say, as older ones don't.
bool FamilyAddsBos(const VocabularyData& vocabulary) {
  if (vocabulary.model == "llama") return true;
  constexpr std::string_view kPreTokenizers[] = {"llama-bpe", "llama3",
                                                 "llama-v3"};
  return vocabulary.model == "gpt2" &&
         std::find(std::begin(kPreTokenizers), std::end(kPreTokenizers),
                   vocabulary.pre_tokenizer) != std::end(kPreTokenizers);
}

}  // namespace

absl::StatusOr<VocabularyData> ReadGgufVocabulary(const GgufFile& file) {
  constexpr std::string_view kModelKey = "tokenizer.ggml.model";
  constexpr std::string_view kPreKey = "tokenizer.ggml.pre";
  constexpr std::string_view kAddBosKey = "tokenizer.ggml.add_bos_token";
  constexpr std::string_view kAddEosKey = "tokenizer.ggml.add_eos_token";
  constexpr std::string_view kSpacePrefixKey =
      "tokenizer.ggml.add_space_prefix";
  VocabularyData vocabulary;
  if (file.Find(kModelKey) == nullptr && file.Find(kTokensKey) == nullptr) {
    return vocabulary;
  }
  PC_ASSIGN_OR_RETURN(vocabulary.model, file.String(kModelKey));
  if (file.Find(kPreKey) != nullptr) {
    PC_ASSIGN_OR_RETURN(vocabulary.pre_tokenizer, file.String(kPreKey));
  }
  PC_RETURN_IF_ERROR(ReadLists(file, &vocabulary));

  const size_t num_tokens = vocabulary.tokens.size();
  PC_ASSIGN_OR_RETURN(vocabulary.bos_id,
                      ReadId(file, "tokenizer.ggml.bos_token_id", num_tokens));
  PC_ASSIGN_OR_RETURN(vocabulary.eos_id,
                      ReadId(file, "tokenizer.ggml.eos_token_id", num_tokens));
  PC_ASSIGN_OR_RETURN(vocabulary.eot_id,
                      ReadId(file, "tokenizer.ggml.eot_token_id", num_tokens));
  vocabulary.add_bos = vocabulary.bos_id >= 0 && FamilyAddsBos(vocabulary);
  if (file.Find(kAddBosKey) != nullptr) {
    PC_ASSIGN_OR_RETURN(vocabulary.add_bos, file.Bool(kAddBosKey));
  }
  if (file.Find(kAddEosKey) != nullptr) {
    PC_ASSIGN_OR_RETURN(const bool add_eos, file.Bool(kAddEosKey));
    if (add_eos) vocabulary.text_end_id = vocabulary.eos_id;
  }
  if (file.Find(kSpacePrefixKey) != nullptr) {
    PC_ASSIGN_OR_RETURN(vocabulary.add_space_prefix,
                        file.Bool(kSpacePrefixKey));
  }
  if (vocabulary.model == "t5") {
    PC_RETURN_IF_ERROR(ReadNormalisation(file, &vocabulary));
  }
  return vocabulary;
}

}  // namespace promptcache::worker
