#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/status/status.h"

namespace promptcache::pml {

enum class Source { kSchema, kPrompt };

std::string_view SourceName(Source source);

// Where an element's '<' stands; both count from 1, columns in characters.
// 0: no place (the structured form has none, limits have none; faults of the
// XML itself have a line only).
struct Place {
  int32_t line = 0;
  int32_t column = 0;

  friend auto operator<=>(const Place&, const Place&) = default;
};

// A document that is refused (LANGUAGE.md, "What is refused").
struct PmlError {
  std::string reason;  // "PML_SYNTAX", ...: the machine's word
  Source source = Source::kSchema;
  Place place;
  std::string detail;  // the human's words: lower case, names the object
  // What the detail says in numbers: {"tokens", 9}, {"length", 6}.
  std::vector<std::pair<std::string, int64_t>> numbers;

  // InvalidArgument with "REASON in SOURCE, line L, column C: detail"; the
  // error itself rides along as a payload.
  absl::Status ToStatus() const;

  // The metadata of a google.rpc.ErrorInfo: source, line, column (when there
  // is one), detail and the numbers.
  std::vector<std::pair<std::string, std::string>> Metadata() const;

  friend bool operator==(const PmlError&, const PmlError&) = default;
};

// The error that `status` carries; none when it is not one of PML.
std::optional<PmlError> PmlErrorOf(const absl::Status& status);

}  // namespace promptcache::pml
