#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include "absl/status/statusor.h"
#include "common/pml/error.h"
#include "common/pml/limits.h"

namespace promptcache::pml {

// One item of a prompt, as it stands in the document; not judged yet, since
// most faults need the schema.
struct PromptItem {
  enum class Kind { kText, kImport, kRole };
  Kind kind = Kind::kText;
  Place place;
  // kText: white space is done with already. kImport: the path. kRole: the
  // role's name.
  std::string text;
  std::vector<std::pair<std::string, std::string>> arguments;  // kImport
  std::vector<PromptItem> items;
  // Faults of the element's own attributes, for the judge: "" is none.
  std::string unknown_attribute;
  bool bad_space_value = false;

  friend bool operator==(const PromptItem&, const PromptItem&) = default;
};

// A prompt, read but not judged. Immutable.
struct Prompt {
  std::string schema;  // "" when none is named
  Place place;         // of the prompt element
  std::vector<PromptItem> items;
  std::string unknown_attribute;
  bool bad_space_value = false;
};

// Refuses only what is no well-formed prompt document or over a limit; the
// rest is the compiler's to judge, in document order.
absl::StatusOr<std::shared_ptr<const Prompt>> ParsePrompt(
    std::string_view text, const Limits& limits = {});

// The structured form: mirrors promptcache.v1.StructuredPrompt. Text is
// literal and its white space is kept.
struct StructuredItem;

struct StructuredImport {
  std::string path;  // relative to the import it stands in
  std::map<std::string, std::string> arguments;
  std::vector<StructuredImport> imports;
};

struct StructuredMessage {
  std::string role;  // system, user, assistant
  std::vector<StructuredItem> items;
};

struct StructuredItem {
  std::variant<std::string, StructuredImport, StructuredMessage> item;
};

struct StructuredPrompt {
  std::string schema;
  std::vector<StructuredItem> items;
};

absl::StatusOr<std::shared_ptr<const Prompt>> MakePrompt(
    const StructuredPrompt& prompt, const Limits& limits = {});

}  // namespace promptcache::pml
