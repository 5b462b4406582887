#include "inference_worker/tokenizer/unigram_normalizer.h"

#include <algorithm>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "common/status_macros.h"
#include "common/strings.h"
#include "common/utf8.h"

namespace promptcache::worker {
namespace {

constexpr std::string_view kMark = "\u2581";

// Unicode's White_Space.
bool IsSpace(char32_t c) {
  return (c >= 0x09 && c <= 0x0D) || c == 0x20 || c == 0x85 || c == 0xA0 ||
         c == 0x1680 || (c >= 0x2000 && c <= 0x200A) || c == 0x2028 ||
         c == 0x2029 || c == 0x202F || c == 0x205F || c == 0x3000;
}

// Calls visit(begin, end, is_space) for each character of valid UTF-8.
template <typename Visit>
void VisitCharacters(std::string_view text, Visit visit) {
  for (size_t i = 0; i < text.size();) {
    const size_t end = i + NextUtf8(text.substr(i)).num_bytes;
    visit(i, end, IsSpace(CodePointOf(text.substr(i, end - i))));
    i = end;
  }
}

void Strip(bool left, bool right, std::string* text) {
  size_t begin = text->size();
  size_t end = 0;
  VisitCharacters(*text, [&](size_t from, size_t to, bool is_space) {
    if (is_space) return;
    begin = std::min(begin, from);
    end = to;
  });
  if (end == 0) {
    text->clear();
    return;
  }
  if (right) text->resize(end);
  if (left) text->erase(0, begin);
}

// Runs of two spaces and more become `with`.
void JoinSpaces(std::string_view with, std::string* text) {
  std::string out;
  out.reserve(text->size());
  for (size_t i = 0; i < text->size();) {
    size_t end = i;
    while (end < text->size() && (*text)[end] == ' ') ++end;
    if (end - i >= 2) {
      out += with;
      i = end;
    } else {
      out += (*text)[i++];
    }
  }
  *text = std::move(out);
}

std::string SpacesToMarks(std::string_view text) {
  std::string out;
  out.reserve(text.size() + text.size() / 2);
  for (const char c : text) {
    if (c == ' ') {
      out += kMark;
    } else {
      out += c;
    }
  }
  return out;
}

}  // namespace

absl::StatusOr<UnigramNormalizer> UnigramNormalizer::Create(
    const VocabularyData& vocabulary) {
  UnigramNormalizer normalizer;
  PC_ASSIGN_OR_RETURN(normalizer.charsmap_,
                      Charsmap::Create(vocabulary.charsmap));
  normalizer.removes_extra_spaces_ = vocabulary.removes_extra_spaces;
  if (!vocabulary.add_space_prefix) normalizer.prefix_ = SpacePrefix::kNever;
  std::string_view steps = vocabulary.pre_tokenizer;
  if (steps.starts_with(kStepsPrefix)) {
    normalizer.has_steps_ = true;
    steps.remove_prefix(kStepsPrefix.size());
    PC_RETURN_IF_ERROR(normalizer.ReadSteps(steps));
  }
  return normalizer;
}

absl::Status UnigramNormalizer::ReadSteps(std::string_view steps) {
  for (const absl::string_view step :
       absl::StrSplit(ToAbsl(steps), '+', absl::SkipEmpty())) {
    if (step == "charsmap") {
      steps_.push_back(Step::kCharsmap);
    } else if (step == "strip-left") {
      steps_.push_back(Step::kStripLeft);
    } else if (step == "strip-right") {
      steps_.push_back(Step::kStripRight);
    } else if (step == "join-spaces") {
      steps_.push_back(Step::kJoinSpaces);
    } else if (step == "join-marks") {
      steps_.push_back(Step::kJoinMarks);
    } else if (step == "white-space") {
      splits_at_white_space_ = true;
    } else if (step == "split") {
      splits_at_marks_ = true;
    } else if (step == "never" || step == "first" || step == "always") {
      prefix_ = step == "never"   ? SpacePrefix::kNever
                : step == "first" ? SpacePrefix::kFirst
                                  : SpacePrefix::kAlways;
    } else {
      return absl::InvalidArgumentError(
          absl::StrCat("unknown step of a Unigram tokenizer: ", step));
    }
  }
  return absl::OkStatus();
}

std::string UnigramNormalizer::Mapped(std::string_view text) const {
  std::string out;
  out.reserve(text.size());
  for (size_t i = 0; i < text.size();) {
    const Charsmap::Step step = charsmap_.Match(text.substr(i));
    const size_t num_bytes = step.num_bytes > 0
                                 ? step.num_bytes
                                 : NextUtf8(text.substr(i)).num_bytes;
    out += step.num_bytes > 0 ? step.replacement : text.substr(i, num_bytes);
    i += num_bytes;
  }
  return out;
}

void UnigramNormalizer::Apply(Step step, std::string* text) const {
  switch (step) {
    case Step::kCharsmap:
      *text = Mapped(*text);
      break;
    case Step::kStripLeft:
      Strip(/*left=*/true, /*right=*/false, text);
      break;
    case Step::kStripRight:
      Strip(/*left=*/false, /*right=*/true, text);
      break;
    case Step::kJoinSpaces:
      JoinSpaces(" ", text);
      break;
    case Step::kJoinMarks:
      JoinSpaces(kMark, text);
      break;
  }
}

// Spaces that others follow go, those at the text's ends too; then one in
// front, where the vocabulary wants it.
std::string UnigramNormalizer::AsSentencePiece(std::string_view text,
                                               Place place) const {
  const std::string mapped = Mapped(text);
  std::string joined;
  joined.reserve(mapped.size());
  bool follows_space = removes_extra_spaces_ && place.first;
  for (const char c : mapped) {
    if (c == ' ' && follows_space) continue;
    joined += c;
    follows_space = removes_extra_spaces_ && c == ' ';
  }
  std::string marked = SpacesToMarks(joined);
  if (removes_extra_spaces_ && place.last) {
    while (marked.ends_with(kMark)) marked.resize(marked.size() - kMark.size());
  }
  // Where spaces stay, so does the one in front of what became nothing.
  if (marked.empty() && (removes_extra_spaces_ || text.empty())) return marked;
  if (place.first && prefix_ != SpacePrefix::kNever) {
    marked.insert(0, kMark);
  }
  return marked;
}

void UnigramNormalizer::VisitMarked(
    std::string_view text, Place place,
    absl::FunctionRef<void(std::string_view)> visit) const {
  if (text.empty()) return;
  std::string marked = SpacesToMarks(text);
  const bool adds = prefix_ == SpacePrefix::kAlways ||
                    (prefix_ == SpacePrefix::kFirst && place.first);
  if (adds && !marked.starts_with(kMark)) marked.insert(0, kMark);
  if (!splits_at_marks_) {
    visit(marked);
    return;
  }
  const std::string_view all = marked;
  for (size_t begin = 0; begin < all.size();) {
    const size_t end = std::min(all.find(kMark, begin + 1), all.size());
    visit(all.substr(begin, end - begin));
    begin = end;
  }
}

void UnigramNormalizer::Normalize(
    std::string_view text, Place place,
    absl::FunctionRef<void(std::string_view)> visit) const {
  if (!has_steps_) {
    const std::string marked = AsSentencePiece(text, place);
    if (!marked.empty()) visit(marked);
    return;
  }
  std::string normal(text);
  for (const Step step : steps_) Apply(step, &normal);
  if (!splits_at_white_space_) {
    VisitMarked(normal, place, visit);
    return;
  }
  size_t begin = 0;
  const std::string_view all = normal;
  const auto end_word = [&](size_t end) {
    VisitMarked(all.substr(begin, end - begin),
                {.first = place.first && begin == 0, .last = true}, visit);
  };
  VisitCharacters(all, [&](size_t from, size_t to, bool is_space) {
    if (!is_space) return;
    end_word(from);
    begin = to;
  });
  end_word(all.size());
}

}  // namespace promptcache::worker
