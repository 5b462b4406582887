#include "inference_worker/tokenizer/bpe_tokenizer.h"

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "common/status_macros.h"
#include "common/strings.h"
#include "common/utf8.h"
#include "inference_worker/tokenizer/bpe_merger.h"
#include "inference_worker/tokenizer/byte_level.h"
#include "inference_worker/tokenizer/literal_tokens.h"
#include "inference_worker/tokenizer/pre_tokenizer.h"
#include "inference_worker/tokenizer/tokenizer_json.h"
#include "inference_worker/tokenizer/tokenizer_models.h"
#include "inference_worker/tokenizer/vocabulary_tokenizer.h"
#include "inference_worker/tokenizer/word_cache.h"

namespace promptcache::worker {
namespace {

class BpeTokenizer final : public VocabularyTokenizer {
 public:
  static absl::StatusOr<std::unique_ptr<BpeTokenizer>> Create(
      const VocabularyData& vocabulary);

  std::vector<int32_t> Encode(std::string_view text) const override;

 private:
  BpeTokenizer() = default;

  absl::StatusOr<IdsBySpelling> ReadTokens(const VocabularyData& vocabulary);
  void EncodePiece(std::string_view piece, WordCache* cache,
                   std::vector<int32_t>* ids) const;

  ByteLevelSpelling spelling_;
  std::unique_ptr<PreTokenizer> pre_tokenizer_;
  BpeMerger merger_;
  LiteralTokens literal_tokens_;
  // By their bytes; empty unless the pre-tokenizer takes tokens whole.
  IdsBySpelling whole_tokens_;
  mutable WordCachePool word_caches_;  // changes nothing that can be seen
};

absl::StatusOr<std::unique_ptr<BpeTokenizer>> BpeTokenizer::Create(
    const VocabularyData& vocabulary) {
  std::unique_ptr<BpeTokenizer> tokenizer(new BpeTokenizer());
  PC_ASSIGN_OR_RETURN(tokenizer->pre_tokenizer_,
                      PreTokenizer::Create(vocabulary.pre_tokenizer));
  PC_ASSIGN_OR_RETURN(const IdsBySpelling ids,
                      tokenizer->ReadTokens(vocabulary));
  PC_RETURN_IF_ERROR(ReadMerges(vocabulary, ids, &tokenizer->merger_));
  return tokenizer;
}

// Returns the tokens that merging can make, by their spelling.
absl::StatusOr<BpeTokenizer::IdsBySpelling> BpeTokenizer::ReadTokens(
    const VocabularyData& vocabulary) {
  IdsBySpelling ids;
  ids.reserve(vocabulary.tokens.size());
  PC_RETURN_IF_ERROR(ReadVocabulary(
      vocabulary, [&](const std::string& token, int32_t id, TokenKind kind) {
        ids.try_emplace(token, id);
        if (kind != TokenKind::kUserDefined) {
          return spelling_.Bytes(token).value_or(token);
        }
        literal_tokens_.Add(token, id);
        return token;
      }));
  for (int byte = 0; byte < 256; ++byte) {
    const auto b = static_cast<uint8_t>(byte);
    const auto it = ids.find(spelling_.Spell(b));
    if (it != ids.end()) merger_.SetByte(b, it->second);
  }
  if (pre_tokenizer_->takes_whole_tokens()) {
    for (const auto& [spelling, id] : ids) {
      whole_tokens_.try_emplace(decoded(id), id);
    }
  }
  return ids;
}

std::vector<int32_t> BpeTokenizer::Encode(std::string_view text) const {
  std::string replaced;
  if (!IsValidUtf8(text)) {
    replaced = ReplaceInvalidUtf8(text);
    text = replaced;
  }
  const WordCachePool::Borrowed cache = word_caches_.Borrow();
  std::vector<int32_t> ids;
  ids.reserve(text.size() / 3);
  literal_tokens_.Split(text, [&](std::string_view part, int32_t id) {
    if (id >= 0) {
      ids.push_back(id);
      return;
    }
    std::string buffer;
    const std::string_view normal = pre_tokenizer_->Normalize(part, &buffer);
    pre_tokenizer_->Split(normal, [&](std::string_view piece) {
      EncodePiece(piece, &*cache, &ids);
    });
  });
  return ids;
}

void BpeTokenizer::EncodePiece(std::string_view piece, WordCache* cache,
                               std::vector<int32_t>* ids) const {
  const bool is_cached = piece.size() <= WordCache::kMaxWordBytes;
  if (is_cached && cache->Find(piece, ids)) return;
  const size_t before = ids->size();
  const auto whole = whole_tokens_.find(ToAbsl(piece));
  if (whole != whole_tokens_.end()) {
    ids->push_back(whole->second);
  } else {
    merger_.Merge(piece, ids);
  }
  if (is_cached) {
    cache->Insert(piece, ids->data() + before, ids->size() - before);
  }
}

}  // namespace

absl::StatusOr<std::unique_ptr<Tokenizer>> CreateBpeTokenizer(
    const VocabularyData& vocabulary) {
  return BpeTokenizer::Create(vocabulary);
}

absl::StatusOr<std::unique_ptr<Tokenizer>> CreateTokenizer(
    const VocabularyData& vocabulary) {
  if (vocabulary.model == "gpt2") return CreateBpeTokenizer(vocabulary);
  if (vocabulary.model == "llama") {
    return CreateSentencePieceTokenizer(vocabulary);
  }
  if (vocabulary.model == "t5") return CreateUnigramTokenizer(vocabulary);
  return absl::InvalidArgumentError(absl::StrCat(
      "tokenizer model \"", absl::CHexEscape(vocabulary.model),
      "\" is not supported; supported: gpt2 (byte-level BPE), llama "
      "(SentencePiece BPE), t5 (SentencePiece Unigram)"));
}

absl::StatusOr<std::unique_ptr<Tokenizer>> CreateTokenizer(
    const ModelFile& file) {
  if (file.tokenizer_json().empty()) return CreateTokenizer(file.vocabulary());
  PC_ASSIGN_OR_RETURN(
      VocabularyData vocabulary,
      ReadTokenizerJson(file.tokenizer_json(), file.tokenizer_config_json()));
  vocabulary.end_ids = file.vocabulary().end_ids;
  return CreateTokenizer(vocabulary);
}

}  // namespace promptcache::worker
