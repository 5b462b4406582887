#pragma once

#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/statusor.h"
#include "inference_worker/model/model_file.h"
#include "inference_worker/tokenizer/charsmap.h"

namespace promptcache::worker {

// What a Unigram tokenizer does to text before it looks for pieces: U+2581 for
// spaces, and what the vocabulary says. Immutable and thread-safe.
class UnigramNormalizer {
 public:
  // Where in the whole text a part of it stands.
  struct Place {
    bool first = true;
    bool last = true;
  };

  // `pre_tokenizer`: steps as tokenizer_json makes them; anything else is
  // SentencePiece's own way, as GGUF files mean it. InvalidArgument for a
  // damaged charsmap.
  static absl::StatusOr<UnigramNormalizer> Create(
      const VocabularyData& vocabulary);

  // Calls `visit` with the normal form of `text` (valid UTF-8) in words that
  // are to be tokenised each on its own.
  void Normalize(std::string_view text, Place place,
                 absl::FunctionRef<void(std::string_view)> visit) const;

  // Whether the space in front of a text stands in front of a literal token,
  // too, where the text begins with one.
  bool prefixes_literal_tokens() const {
    return !has_steps_ && prefix_ != SpacePrefix::kNever;
  }

  // tokenizer.json's steps, joined by "+" behind this.
  static constexpr std::string_view kStepsPrefix = "unigram";

 private:
  enum class Step {
    kCharsmap,
    kStripLeft,
    kStripRight,
    kJoinSpaces,
    kJoinMarks
  };
  enum class SpacePrefix { kNever, kFirst, kAlways };

  absl::Status ReadSteps(std::string_view steps);
  void Apply(Step step, std::string* text) const;
  std::string Mapped(std::string_view text) const;
  std::string AsSentencePiece(std::string_view text, Place place) const;
  void VisitMarked(std::string_view text, Place place,
                   absl::FunctionRef<void(std::string_view)> visit) const;

  Charsmap charsmap_;
  // Of tokenizer.json.
  bool has_steps_ = false;
  std::vector<Step> steps_;
  bool splits_at_white_space_ = false;
  bool splits_at_marks_ = false;
  SpacePrefix prefix_ = SpacePrefix::kFirst;
  // SentencePiece's.
  bool removes_extra_spaces_ = false;
};

}  // namespace promptcache::worker
