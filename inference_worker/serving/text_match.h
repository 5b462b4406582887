#pragma once

#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "common/pml/plan.h"
#include "common/pml/prompt.h"
#include "common/pml/schema.h"

namespace promptcache::worker {

// The texts of a schema that plain text may contain: its preamble, and its
// modules of the root that are one text each. Immutable, thread-safe.
class SchemaTexts {
 public:
  // Null when there is nothing to be found: no such module, or a schema whose
  // prompts have texts that nobody wrote there (anonymous modules, roles).
  static std::shared_ptr<const SchemaTexts> Create(
      std::shared_ptr<const pml::Schema> schema);

  // `text` as a prompt of the schema: where it begins with the preamble, which
  // is all that these modules saw, the modules that stand in it, each once,
  // the longest first where several begin at one place, and the rest as text.
  // None when no module is there.
  std::optional<pml::StructuredPrompt> Find(std::string_view text) const;

  const pml::Schema& schema() const { return *schema_; }

 private:
  struct Module {
    std::string path;
    std::string text;
    size_t order = 0;  // among the schema's
  };
  const std::shared_ptr<const pml::Schema> schema_;
  std::string preamble_;
  std::vector<Module> modules_;  // the longest first

  explicit SchemaTexts(std::shared_ptr<const pml::Schema> schema)
      : schema_(std::move(schema)) {}
};

// The plan's tokens are, but for BOS, those of `text` and nothing else.
bool IsPlanOf(const pml::Plan& plan, std::string_view text,
              const Tokenizer& tokenizer);

}  // namespace promptcache::worker
