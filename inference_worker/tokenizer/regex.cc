#include "inference_worker/tokenizer/regex.h"

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "glog/logging.h"

#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>

namespace promptcache::worker {
namespace {

struct FreeMatchData {
  void operator()(pcre2_match_data* data) const { pcre2_match_data_free(data); }
};

PCRE2_SPTR Subject(std::string_view text) {
  return reinterpret_cast<PCRE2_SPTR>(text.data());
}

}  // namespace

struct Regex::Impl {
  ~Impl() { pcre2_code_free(code); }

  pcre2_code* code = nullptr;
};

Regex::Regex(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Regex::~Regex() = default;

absl::StatusOr<std::unique_ptr<Regex>> Regex::Compile(
    const std::string& pattern, Unit unit) {
  int error = 0;
  PCRE2_SIZE offset = 0;
  auto impl = std::make_unique<Impl>();
  impl->code = pcre2_compile(Subject(pattern), pattern.size(),
                             unit == Unit::kByte ? 0 : PCRE2_UTF | PCRE2_UCP,
                             &error, &offset, /*ccontext=*/nullptr);
  if (impl->code == nullptr) {
    PCRE2_UCHAR message[128] = {};
    pcre2_get_error_message(error, message, sizeof(message));
    return absl::InvalidArgumentError(
        absl::StrCat("pattern ", pattern, ", offset ", offset, ": ",
                     reinterpret_cast<const char*>(message)));
  }
  uint32_t matches_empty = 0;
  pcre2_pattern_info(impl->code, PCRE2_INFO_MATCHEMPTY, &matches_empty);
  if (matches_empty != 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("pattern ", pattern, " matches the empty text"));
  }
  // Where there is no JIT the interpreter gives the same matches, slower.
  if (pcre2_jit_compile(impl->code, PCRE2_JIT_COMPLETE) != 0) {
    LOG(WARNING) << "no JIT for the pattern " << pattern;
  }
  return std::unique_ptr<Regex>(new Regex(std::move(impl)));
}

void Regex::Split(std::string_view text,
                  absl::FunctionRef<void(std::string_view)> visit) const {
  const std::unique_ptr<pcre2_match_data, FreeMatchData> match(
      pcre2_match_data_create(/*ovecsize=*/1, /*gcontext=*/nullptr));
  size_t position = 0;
  while (position < text.size()) {
    // The whole text was validated once: checking it for each match would be
    // quadratic.
    const int found =
        pcre2_match(impl_->code, Subject(text), text.size(), position,
                    PCRE2_NO_UTF_CHECK, match.get(), /*mcontext=*/nullptr);
    if (found < 0) {
      // Anything but "no more" is a limit that our patterns, which never
      // backtrack by more than one character, do not reach.
      LOG_IF(DFATAL, found != PCRE2_ERROR_NOMATCH) << "pcre2_match: " << found;
      visit(text.substr(position));
      return;
    }
    const PCRE2_SIZE* bounds = pcre2_get_ovector_pointer(match.get());
    if (bounds[0] > position) {
      visit(text.substr(position, bounds[0] - position));
    }
    visit(text.substr(bounds[0], bounds[1] - bounds[0]));
    position = bounds[1];
  }
}

}  // namespace promptcache::worker
