#include "inference_worker/tokenizer/bpe_tokenizer.h"

#include <algorithm>
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
#include "inference_worker/tokenizer/word_cache.h"

namespace promptcache::worker {
namespace {

constexpr uint64_t kDigestVersion = 1;

// GGUF's numbers.
enum class TokenKind : int32_t {
  kNormal = 1,
  kUnknown = 2,
  kControl = 3,
  kUserDefined = 4,
  kUnused = 5,
  kByte = 6,
};

// Each with its length before it; one field, since hashing 100,000 small ones
// takes 5 ms of a start.
std::string Joined(const std::vector<std::string>& strings) {
  std::string joined;
  for (const std::string& s : strings) {
    const uint64_t num_bytes = s.size();
    joined.append(reinterpret_cast<const char*>(&num_bytes), sizeof(num_bytes));
    joined.append(s);
  }
  return joined;
}

Digest DigestOf(const VocabularyData& vocabulary) {
  const int32_t bos = vocabulary.add_bos ? vocabulary.bos_id : -1;
  return Sha256()
      .Add("tokenizer version", kDigestVersion)
      .Add("model", vocabulary.model)
      .Add("pre-tokenizer", vocabulary.pre_tokenizer)
      .Add("tokens", Joined(vocabulary.tokens))
      .Add("types", std::span<const int32_t>(vocabulary.token_types))
      .Add("merges", Joined(vocabulary.merges))
      .Add("bos", std::span<const int32_t>(&bos, 1))
      .Finish();
}

}  // namespace

class BpeTokenizer final : public Tokenizer {
 public:
  static absl::StatusOr<std::unique_ptr<BpeTokenizer>> Create(
      const VocabularyData& vocabulary);

  std::vector<int32_t> Encode(std::string_view text) const override;
  std::string Decode(int32_t id) const override;
  int32_t ControlToken(std::string_view text) const override;
  int32_t bos_id() const override { return bos_id_; }
  int32_t vocab_size() const override {
    return static_cast<int32_t>(decoded_.size());
  }
  const std::vector<int32_t>& stop_ids() const override { return stop_ids_; }
  const Digest& digest() const override { return digest_; }

 private:
  using IdsBySpelling = absl::flat_hash_map<absl::string_view, int32_t>;

  BpeTokenizer() = default;

  absl::StatusOr<IdsBySpelling> ReadTokens(const VocabularyData& vocabulary);
  absl::Status ReadMerges(const VocabularyData& vocabulary,
                          const IdsBySpelling& ids);
  void ReadStopIds(const VocabularyData& vocabulary);
  void EncodePiece(std::string_view piece, WordCache* cache,
                   std::vector<int32_t>* ids) const;

  ByteLevelSpelling spelling_;
  std::unique_ptr<PreTokenizer> pre_tokenizer_;
  BpeMerger merger_;
  LiteralTokens literal_tokens_;
  std::vector<std::string> decoded_;  // by id
  // By their bytes; empty unless the pre-tokenizer takes tokens whole.
  absl::flat_hash_map<absl::string_view, int32_t> whole_tokens_;
  absl::flat_hash_map<std::string, int32_t> control_tokens_;
  int32_t bos_id_ = -1;
  std::vector<int32_t> stop_ids_;
  Digest digest_;
  mutable WordCachePool word_caches_;  // changes nothing that can be seen
};

absl::StatusOr<std::unique_ptr<BpeTokenizer>> BpeTokenizer::Create(
    const VocabularyData& vocabulary) {
  std::unique_ptr<BpeTokenizer> tokenizer(new BpeTokenizer());
  PC_ASSIGN_OR_RETURN(tokenizer->pre_tokenizer_,
                      PreTokenizer::Create(vocabulary.pre_tokenizer));
  PC_ASSIGN_OR_RETURN(const IdsBySpelling ids,
                      tokenizer->ReadTokens(vocabulary));
  PC_RETURN_IF_ERROR(tokenizer->ReadMerges(vocabulary, ids));
  tokenizer->ReadStopIds(vocabulary);
  if (vocabulary.add_bos) tokenizer->bos_id_ = vocabulary.bos_id;
  tokenizer->digest_ = DigestOf(vocabulary);
  return tokenizer;
}

// Returns the tokens that merging can make, by their spelling.
absl::StatusOr<BpeTokenizer::IdsBySpelling> BpeTokenizer::ReadTokens(
    const VocabularyData& vocabulary) {
  const size_t num_tokens = vocabulary.tokens.size();
  if (!vocabulary.token_types.empty() &&
      vocabulary.token_types.size() != num_tokens) {
    return absl::InvalidArgumentError(
        absl::StrCat(vocabulary.token_types.size(), " token types for ",
                     num_tokens, " tokens"));
  }
  IdsBySpelling ids;
  ids.reserve(num_tokens);
  decoded_.resize(num_tokens);
  for (size_t i = 0; i < num_tokens; ++i) {
    const std::string& token = vocabulary.tokens[i];
    const auto id = static_cast<int32_t>(i);
    const TokenKind kind = vocabulary.token_types.empty()
                               ? TokenKind::kNormal
                               : TokenKind{vocabulary.token_types[i]};
    switch (kind) {
      case TokenKind::kUnknown:
        continue;
      case TokenKind::kControl:
        control_tokens_.try_emplace(token, id);
        continue;
      case TokenKind::kUserDefined:
        literal_tokens_.Add(token, id);
        decoded_[i] = token;
        break;
      case TokenKind::kNormal:
      case TokenKind::kUnused:
      case TokenKind::kByte:
        decoded_[i] = spelling_.Bytes(token).value_or(token);
        break;
      default:
        return absl::InvalidArgumentError(
            absl::StrCat("token ", id, " (\"", absl::CHexEscape(token),
                         "\"): unknown type ", static_cast<int32_t>(kind)));
    }
    if (token.empty()) continue;
    ids.try_emplace(token, id);
    if (kind == TokenKind::kNormal && pre_tokenizer_->takes_whole_tokens()) {
      whole_tokens_.try_emplace(decoded_[i], id);
    }
  }
  for (int byte = 0; byte < 256; ++byte) {
    const auto b = static_cast<uint8_t>(byte);
    const auto it = ids.find(spelling_.Spell(b));
    if (it != ids.end()) merger_.SetByte(b, it->second);
  }
  return ids;
}

absl::Status BpeTokenizer::ReadMerges(const VocabularyData& vocabulary,
                                      const IdsBySpelling& ids) {
  merger_.Reserve(vocabulary.merges.size());
  std::string merged;
  for (size_t i = 0; i < vocabulary.merges.size(); ++i) {
    const std::string_view merge = vocabulary.merges[i];
    // A byte-level spelling holds no space: there is one, between the halves.
    const size_t space = merge.find(' ', 1);
    const std::string_view left = merge.substr(0, space);
    const std::string_view right = space == std::string_view::npos
                                       ? std::string_view()
                                       : merge.substr(space + 1);
    merged.assign(left).append(right);
    const auto left_id = ids.find(ToAbsl(left));
    const auto right_id = ids.find(ToAbsl(right));
    const auto merged_id = ids.find(merged);
    if (left_id == ids.end() || right_id == ids.end() ||
        merged_id == ids.end()) {
      return absl::InvalidArgumentError(
          absl::StrCat("merge ", i, " (\"", absl::CHexEscape(ToAbsl(merge)),
                       "\") is not of tokens into a token"));
    }
    merger_.AddRule(left_id->second, right_id->second, merged_id->second);
  }
  return absl::OkStatus();
}

void BpeTokenizer::ReadStopIds(const VocabularyData& vocabulary) {
  for (const int32_t id :
       {vocabulary.eos_id, vocabulary.eot_id, ControlToken("<|im_end|>"),
        ControlToken("<|endoftext|>")}) {
    const bool known =
        std::find(stop_ids_.begin(), stop_ids_.end(), id) != stop_ids_.end();
    if (id >= 0 && !known) stop_ids_.push_back(id);
  }
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

std::string BpeTokenizer::Decode(int32_t id) const {
  if (id < 0 || id >= vocab_size()) return "";
  return decoded_[static_cast<size_t>(id)];
}

int32_t BpeTokenizer::ControlToken(std::string_view text) const {
  const auto it = control_tokens_.find(ToAbsl(text));
  return it == control_tokens_.end() ? -1 : it->second;
}

absl::StatusOr<std::unique_ptr<Tokenizer>> CreateTokenizer(
    const VocabularyData& vocabulary) {
  if (vocabulary.model != "gpt2") {
    return absl::InvalidArgumentError(
        absl::StrCat("tokenizer model \"", absl::CHexEscape(vocabulary.model),
                     "\" is not supported; supported: gpt2 (byte-level BPE)"));
  }
  return BpeTokenizer::Create(vocabulary);
}

}  // namespace promptcache::worker
