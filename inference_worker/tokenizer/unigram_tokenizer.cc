#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <limits>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "common/status_macros.h"
#include "common/utf8.h"
#include "inference_worker/tokenizer/literal_tokens.h"
#include "inference_worker/tokenizer/piece_trie.h"
#include "inference_worker/tokenizer/tokenizer_models.h"
#include "inference_worker/tokenizer/unigram_normalizer.h"
#include "inference_worker/tokenizer/vocabulary_tokenizer.h"
#include "inference_worker/tokenizer/word_cache.h"

namespace promptcache::worker {
namespace {

constexpr std::string_view kMark = "\u2581";
// How much worse than the worst piece a character is that is none.
constexpr double kUnknownPenalty = 10;

class UnigramTokenizer final : public VocabularyTokenizer {
 public:
  static absl::StatusOr<std::unique_ptr<UnigramTokenizer>> Create(
      const VocabularyData& vocabulary);

  std::vector<int32_t> Encode(std::string_view text) const override;

 private:
  // The best way to the place where a piece ends.
  struct Best {
    double score = 0;
    int32_t id = kUnreached;
    uint32_t begin = 0;
  };
  static constexpr int32_t kUnreached = -2;
  static constexpr int32_t kUnknown = -1;

  UnigramTokenizer() { byte_ids_.fill(-1); }

  absl::Status ReadPieces(const VocabularyData& vocabulary);
  void EncodeWord(std::string_view word, WordCache* cache,
                  std::vector<int32_t>* ids) const;
  void FindBest(std::string_view word, std::vector<int32_t>* ids) const;
  void SpellUnknown(std::string_view text, std::vector<int32_t>* ids) const;

  UnigramNormalizer normalizer_;
  LiteralTokens literal_tokens_;
  PieceTrie pieces_;
  std::vector<float> scores_;
  double unknown_score_ = 0;
  std::array<int32_t, 256> byte_ids_;
  bool has_all_bytes_ = false;
  // No piece goes over the beginning of a word, so that words can be tokenised
  // each on its own.
  bool pieces_keep_to_words_ = false;
  mutable WordCachePool word_caches_;  // changes nothing that can be seen
};

absl::StatusOr<std::unique_ptr<UnigramTokenizer>> UnigramTokenizer::Create(
    const VocabularyData& vocabulary) {
  std::unique_ptr<UnigramTokenizer> tokenizer(new UnigramTokenizer());
  PC_ASSIGN_OR_RETURN(tokenizer->normalizer_,
                      UnigramNormalizer::Create(vocabulary));
  PC_RETURN_IF_ERROR(tokenizer->ReadPieces(vocabulary));
  return tokenizer;
}

absl::Status UnigramTokenizer::ReadPieces(const VocabularyData& vocabulary) {
  if (vocabulary.scores.size() != vocabulary.tokens.size()) {
    return absl::InvalidArgumentError(
        absl::StrCat(vocabulary.scores.size(), " scores for ",
                     vocabulary.tokens.size(), " tokens"));
  }
  scores_ = vocabulary.scores;
  std::vector<std::pair<std::string_view, int32_t>> pieces;
  double lowest = std::numeric_limits<double>::infinity();
  bool has_mark = false;
  pieces_keep_to_words_ = true;
  absl::Status fault;
  PC_RETURN_IF_ERROR(ReadVocabulary(
      vocabulary, [&](const std::string& token, int32_t id, TokenKind kind) {
        const float score = scores_[static_cast<size_t>(id)];
        if (kind == TokenKind::kByte) {
          const int byte = ByteOfToken(token);
          if (byte >= 0) byte_ids_[static_cast<size_t>(byte)] = id;
          return std::string(1, static_cast<char>(std::max(byte, 0)));
        }
        if (!IsValidUtf8(token) || !std::isfinite(score)) {
          fault = absl::InvalidArgumentError(absl::StrCat(
              "token ", id, " is not UTF-8, or its score ", score, " is none"));
        } else if (kind == TokenKind::kUserDefined) {
          literal_tokens_.Add(token, id);
        } else if (kind == TokenKind::kNormal) {
          pieces.emplace_back(vocabulary.tokens[static_cast<size_t>(id)], id);
          lowest = std::min(lowest, double{score});
          has_mark |= token == kMark;
          const size_t text = token.find_first_not_of(kMark);
          if (text != std::string::npos &&
              token.find(kMark, text) != std::string::npos) {
            pieces_keep_to_words_ = false;
          }
        }
        return absl::StrReplaceAll(token, {{"\u2581", " "}});
      }));
  PC_RETURN_IF_ERROR(fault);
  // An unknown U+2581 would be one with unknown characters before it.
  pieces_keep_to_words_ &= has_mark;
  unknown_score_ = pieces.empty() ? 0 : lowest - kUnknownPenalty;
  pieces_ = PieceTrie(std::move(pieces));
  has_all_bytes_ =
      std::find(byte_ids_.begin(), byte_ids_.end(), -1) == byte_ids_.end();
  return absl::OkStatus();
}

std::vector<int32_t> UnigramTokenizer::Encode(std::string_view text) const {
  std::string replaced;
  if (!IsValidUtf8(text)) {
    replaced = ReplaceInvalidUtf8(text);
    text = replaced;
  }
  struct Part {
    std::string_view text;
    int32_t id;
  };
  std::vector<Part> parts;
  literal_tokens_.Split(text, [&](std::string_view part, int32_t id) {
    parts.push_back({part, id});
  });
  const WordCachePool::Borrowed cache = word_caches_.Borrow();
  std::vector<int32_t> ids;
  ids.reserve(text.size() / 3);
  if (!parts.empty() && parts.front().id >= 0 &&
      normalizer_.prefixes_literal_tokens()) {
    EncodeWord(kMark, &*cache, &ids);
  }
  for (const Part& part : parts) {
    if (part.id >= 0) {
      ids.push_back(part.id);
      continue;
    }
    normalizer_.Normalize(
        part.text,
        {.first = &part == &parts.front(), .last = &part == &parts.back()},
        [&](std::string_view normal) { EncodeWord(normal, &*cache, &ids); });
  }
  return ids;
}

// Cut before each run of U+2581 that follows something else, where no piece
// reaches over.
void UnigramTokenizer::EncodeWord(std::string_view word, WordCache* cache,
                                  std::vector<int32_t>* ids) const {
  const auto encode = [&](std::string_view part) {
    const bool is_cached = part.size() <= WordCache::kMaxWordBytes;
    if (is_cached && cache->Find(part, ids)) return;
    const size_t before = ids->size();
    FindBest(part, ids);
    if (is_cached) {
      cache->Insert(part, ids->data() + before, ids->size() - before);
    }
  };
  size_t begin = 0;
  if (pieces_keep_to_words_) {
    for (size_t i = word.find(kMark, 1); i != std::string_view::npos;
         i = word.find(kMark, i + kMark.size())) {
      if (word.substr(0, i).ends_with(kMark)) continue;
      encode(word.substr(begin, i - begin));
      begin = i;
    }
  }
  encode(word.substr(begin));
}

// The way through the word with the highest sum of scores; of equal ones that
// whose last piece begins first. Linear, but for the longest piece.
void UnigramTokenizer::FindBest(std::string_view word,
                                std::vector<int32_t>* ids) const {
  std::vector<Best> best(word.size() + 1);
  best[0].id = kUnknown;
  for (size_t begin = 0; begin < word.size();) {
    const size_t character = NextUtf8(word.substr(begin)).num_bytes;
    const double score = best[begin].score;
    bool is_known = false;
    const auto offer = [&](size_t num_bytes, int32_t id, double sum) {
      Best& at_end = best[begin + num_bytes];
      if (at_end.id != kUnreached && sum <= at_end.score) return;
      at_end = {sum, id, static_cast<uint32_t>(begin)};
    };
    pieces_.VisitPrefixes(word.substr(begin), [&](size_t num_bytes,
                                                  int32_t id) {
      offer(num_bytes, id, score + double{scores_[static_cast<size_t>(id)]});
      is_known |= num_bytes == character;
    });
    if (!is_known) offer(character, kUnknown, score + unknown_score_);
    begin += character;
  }
  struct Piece {
    size_t begin, end;
    int32_t id;
  };
  std::vector<Piece> way;  // from the end
  for (size_t end = word.size(); end > 0;) {
    const Best& last = best[end];
    if (last.id == kUnknown && !way.empty() && way.back().id == kUnknown) {
      way.back().begin = last.begin;
    } else {
      way.push_back({last.begin, end, last.id});
    }
    end = last.begin;
  }
  for (auto piece = way.rbegin(); piece != way.rend(); ++piece) {
    if (piece->id != kUnknown) {
      ids->push_back(piece->id);
    } else {
      SpellUnknown(word.substr(piece->begin, piece->end - piece->begin), ids);
    }
  }
}

void UnigramTokenizer::SpellUnknown(std::string_view text,
                                    std::vector<int32_t>* ids) const {
  if (!has_all_bytes_) {
    if (unknown_id() >= 0) ids->push_back(unknown_id());
    return;
  }
  for (const char c : text) {
    ids->push_back(byte_ids_[static_cast<uint8_t>(c)]);
  }
}

}  // namespace

absl::StatusOr<std::unique_ptr<Tokenizer>> CreateUnigramTokenizer(
    const VocabularyData& vocabulary) {
  return UnigramTokenizer::Create(vocabulary);
}

}  // namespace promptcache::worker
