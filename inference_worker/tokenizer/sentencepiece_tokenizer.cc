#include <algorithm>
#include <array>
#include <bit>
#include <bitset>
#include <cmath>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "common/status_macros.h"
#include "common/strings.h"
#include "common/utf8.h"
#include "inference_worker/tokenizer/bpe_merger.h"
#include "inference_worker/tokenizer/literal_tokens.h"
#include "inference_worker/tokenizer/tokenizer_models.h"
#include "inference_worker/tokenizer/vocabulary_tokenizer.h"
#include "inference_worker/tokenizer/word_cache.h"

namespace promptcache::worker {
namespace {

constexpr std::string_view kSpace = "\u2581";

std::string SpacesToMarks(std::string_view text) {
  std::string out;
  out.reserve(text.size() + text.size() / 2);
  for (const char c : text) {
    if (c == ' ') {
      out += kSpace;
    } else {
      out += c;
    }
  }
  return out;
}

std::string MarksToSpaces(std::string_view text) {
  std::string out;
  out.reserve(text.size());
  for (size_t i = 0; i < text.size();) {
    const bool is_mark = text.substr(i, kSpace.size()) == kSpace;
    out += is_mark ? ' ' : text[i];
    i += is_mark ? kSpace.size() : 1;
  }
  return out;
}

// The highest score first; equal scores are equal ranks.
int32_t RankOf(float score) {
  const auto bits = std::bit_cast<int32_t>(-score + 0.0f);
  return bits < 0 ? bits ^ 0x7FFFFFFF : bits;
}

size_t CharacterBytes(char first) {
  const auto byte = static_cast<uint8_t>(first);
  if (byte < 0x80) return 1;
  if (byte < 0xE0) return 2;
  return byte < 0xF0 ? 3 : 4;
}

// A character that is no token takes part in merging as a symbol of its own.
int32_t SymbolOfUnknown(char32_t c) { return -2 - static_cast<int32_t>(c); }
char32_t UnknownOfSymbol(int32_t symbol) {
  return static_cast<char32_t>(-2 - symbol);
}

class SentencePieceTokenizer final : public VocabularyTokenizer {
 public:
  static absl::StatusOr<std::unique_ptr<SentencePieceTokenizer>> Create(
      const VocabularyData& vocabulary);

  std::vector<int32_t> Encode(std::string_view text) const override;

 private:
  SentencePieceTokenizer() { byte_ids_.fill(-1); }

  absl::StatusOr<IdsBySpelling> ReadTokens(const VocabularyData& vocabulary);
  absl::Status ReadScores(const VocabularyData& vocabulary,
                          const IdsBySpelling& ids);
  void FindGlue(std::string_view token);
  template <typename Visit>
  void SplitWords(std::string_view text, Visit visit) const;
  void EncodeWord(std::string_view word, WordCache* cache,
                  std::vector<int32_t>* ids) const;
  void Merge(std::string_view word, std::vector<int32_t>* ids) const;
  void SpellUnknown(std::string_view character, bool follows_unknown,
                    std::vector<int32_t>* ids) const;

  bool add_space_prefix_ = true;
  bool one_space_prefix_ = false;  // none where the text begins with one
  BpeMerger merger_;
  LiteralTokens literal_tokens_;
  absl::flat_hash_map<char32_t, int32_t> character_ids_;
  std::array<int32_t, 256> byte_ids_;
  bool has_all_bytes_ = false;
  // Last bytes of what some token has before a U+2581 that does not begin it.
  // After others nothing ever merges over the beginning of a word.
  std::bitset<256> glue_;
  mutable WordCachePool word_caches_;  // changes nothing that can be seen
};

absl::StatusOr<std::unique_ptr<SentencePieceTokenizer>>
SentencePieceTokenizer::Create(const VocabularyData& vocabulary) {
  std::unique_ptr<SentencePieceTokenizer> tokenizer(
      new SentencePieceTokenizer());
  tokenizer->add_space_prefix_ = vocabulary.add_space_prefix;
  tokenizer->one_space_prefix_ = vocabulary.pre_tokenizer == "metaspace";
  PC_ASSIGN_OR_RETURN(const IdsBySpelling ids,
                      tokenizer->ReadTokens(vocabulary));
  if (vocabulary.merges.empty()) {
    PC_RETURN_IF_ERROR(tokenizer->ReadScores(vocabulary, ids));
    return tokenizer;
  }
  PC_RETURN_IF_ERROR(ReadMerges(vocabulary, ids, &tokenizer->merger_));
  return tokenizer;
}

// Returns the tokens that merging can make, by their spelling.
absl::StatusOr<SentencePieceTokenizer::IdsBySpelling>
SentencePieceTokenizer::ReadTokens(const VocabularyData& vocabulary) {
  IdsBySpelling ids;
  ids.reserve(vocabulary.tokens.size());
  absl::Status fault;
  PC_RETURN_IF_ERROR(ReadVocabulary(
      vocabulary, [&](const std::string& token, int32_t id, TokenKind kind) {
        if (kind == TokenKind::kByte) {
          const int byte = ByteOfToken(token);
          if (byte < 0) {
            fault = absl::InvalidArgumentError(absl::StrCat(
                "token ", id, " is of the type byte, but not spelled <0xNN>"));
            return std::string();
          }
          byte_ids_[static_cast<size_t>(byte)] = id;
          return std::string(1, static_cast<char>(byte));
        }
        if (kind == TokenKind::kUserDefined) {
          literal_tokens_.Add(SpacesToMarks(token), id);
        } else if (!IsValidUtf8(token)) {
          fault = absl::InvalidArgumentError(
              absl::StrCat("token ", id, " is not UTF-8"));
        } else {
          ids.try_emplace(token, id);
          FindGlue(token);
          if (CharacterBytes(token[0]) == token.size()) {
            character_ids_.try_emplace(CodePointOf(token), id);
          }
        }
        return MarksToSpaces(token);
      }));
  PC_RETURN_IF_ERROR(fault);
  has_all_bytes_ =
      std::find(byte_ids_.begin(), byte_ids_.end(), -1) == byte_ids_.end();
  return ids;
}

// Every way to make a token of two symbols is a rule.
absl::Status SentencePieceTokenizer::ReadScores(
    const VocabularyData& vocabulary, const IdsBySpelling& ids) {
  if (vocabulary.scores.size() != vocabulary.tokens.size()) {
    return absl::InvalidArgumentError(
        absl::StrCat(vocabulary.scores.size(), " scores for ",
                     vocabulary.tokens.size(), " tokens"));
  }
  const auto symbol_of = [&ids](std::string_view text, int32_t* symbol) {
    const auto it = ids.find(ToAbsl(text));
    if (it != ids.end()) {
      *symbol = it->second;
      return true;
    }
    if (CharacterBytes(text[0]) != text.size()) return false;
    *symbol = SymbolOfUnknown(CodePointOf(text));
    return true;
  };
  merger_.Reserve(ids.size() * 2);
  for (const auto& [spelling, id] : ids) {
    const std::string_view token = ToStd(spelling);
    const float score = vocabulary.scores[static_cast<size_t>(id)];
    if (std::isnan(score)) {
      return absl::InvalidArgumentError(
          absl::StrCat("token ", id, ": its score is not a number"));
    }
    int32_t left = 0;
    int32_t right = 0;
    for (size_t i = CharacterBytes(token[0]); i < token.size();
         i += CharacterBytes(token[i])) {
      if (symbol_of(token.substr(0, i), &left) &&
          symbol_of(token.substr(i), &right)) {
        merger_.AddRule(left, right, RankOf(score), id);
      }
    }
  }
  return absl::OkStatus();
}

void SentencePieceTokenizer::FindGlue(std::string_view token) {
  for (size_t i = token.find(kSpace, 1); i != std::string_view::npos;
       i = token.find(kSpace, i + 1)) {
    if (token.substr(0, i).ends_with(kSpace)) continue;
    glue_.set(static_cast<uint8_t>(token[i - 1]));
  }
}

// Words begin at runs of U+2581.
template <typename Visit>
void SentencePieceTokenizer::SplitWords(std::string_view text,
                                        Visit visit) const {
  size_t begin = 0;
  for (size_t i = text.find(kSpace, 1); i != std::string_view::npos;
       i = text.find(kSpace, i + kSpace.size())) {
    if (text.substr(0, i).ends_with(kSpace) ||
        glue_[static_cast<uint8_t>(text[i - 1])]) {
      continue;
    }
    visit(text.substr(begin, i - begin));
    begin = i;
  }
  visit(text.substr(begin));
}

std::vector<int32_t> SentencePieceTokenizer::Encode(
    std::string_view text) const {
  std::vector<int32_t> ids;
  if (text.empty()) return ids;
  const bool begins_with_space = text[0] == ' ' || text.starts_with(kSpace);
  const bool add_space =
      add_space_prefix_ && !(one_space_prefix_ && begins_with_space);
  std::string normal(add_space ? kSpace : "");
  normal += SpacesToMarks(IsValidUtf8(text) ? std::string(text)
                                            : ReplaceInvalidUtf8(text));
  ids.reserve(text.size() / 3);
  const WordCachePool::Borrowed cache = word_caches_.Borrow();
  literal_tokens_.Split(normal, [&](std::string_view part, int32_t id) {
    if (id >= 0) {
      ids.push_back(id);
      return;
    }
    SplitWords(part,
               [&](std::string_view word) { EncodeWord(word, &*cache, &ids); });
  });
  return ids;
}

void SentencePieceTokenizer::EncodeWord(std::string_view word, WordCache* cache,
                                        std::vector<int32_t>* ids) const {
  const bool is_cached = word.size() <= WordCache::kMaxWordBytes;
  if (is_cached && cache->Find(word, ids)) return;
  const size_t before = ids->size();
  Merge(word, ids);
  if (is_cached) {
    cache->Insert(word, ids->data() + before, ids->size() - before);
  }
}

void SentencePieceTokenizer::Merge(std::string_view word,
                                   std::vector<int32_t>* ids) const {
  std::vector<int32_t> symbols;
  symbols.reserve(word.size());
  bool has_unknown = false;
  for (size_t i = 0; i < word.size();) {
    const std::string_view c = word.substr(i, CharacterBytes(word[i]));
    const char32_t point = CodePointOf(c);
    const auto it = character_ids_.find(point);
    has_unknown |= it == character_ids_.end();
    symbols.push_back(it != character_ids_.end() ? it->second
                                                 : SymbolOfUnknown(point));
    i += c.size();
  }
  if (!has_unknown) {
    merger_.Merge(symbols, ids);
    return;
  }
  std::vector<int32_t> merged;
  merger_.Merge(symbols, &merged);
  bool follows_unknown = false;
  for (const int32_t symbol : merged) {
    if (symbol >= 0) {
      ids->push_back(symbol);
    } else {
      std::string character;
      AppendUtf8(UnknownOfSymbol(symbol), &character);
      SpellUnknown(character, follows_unknown, ids);
    }
    follows_unknown = symbol < 0;
  }
}

void SentencePieceTokenizer::SpellUnknown(std::string_view character,
                                          bool follows_unknown,
                                          std::vector<int32_t>* ids) const {
  if (!has_all_bytes_) {
    // Neighbours are one.
    if (!follows_unknown && unknown_id() >= 0) ids->push_back(unknown_id());
    return;
  }
  for (const char c : character) {
    ids->push_back(byte_ids_[static_cast<uint8_t>(c)]);
  }
}

}  // namespace

absl::StatusOr<std::unique_ptr<Tokenizer>> CreateSentencePieceTokenizer(
    const VocabularyData& vocabulary) {
  return SentencePieceTokenizer::Create(vocabulary);
}

}  // namespace promptcache::worker
