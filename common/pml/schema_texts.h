#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "common/pml/compiler.h"
#include "common/pml/marked_text.h"
#include "common/pml/plan.h"
#include "common/pml/schema.h"

namespace promptcache::pml {

struct SchemaTree;

// The texts of a schema that a prompt without schema may contain: its preamble,
// and the modules of its root that are one text each, markers of messages
// included. Immutable, thread-safe.
class SchemaTexts {
 public:
  // What a prompt without schema is, as the chat template renders it.
  struct Rendered {
    MarkedText text;
    bool messages = false;  // a list of messages, not a plain text
    // Its plan without modules, of CompileText or CompileMessages.
    const Plan* plan = nullptr;
  };

  // Null when there is nothing to be found.
  static std::shared_ptr<const SchemaTexts> Create(
      std::shared_ptr<const Schema> schema);

  // A plan of the schema with the modules whose text stands in the prompt, each
  // once, the longest first, of a union one, and the rest as fresh text: where
  // the prompt begins with the preamble, which is all that they saw. The model
  // reads what it reads in `rendered.plan`, though the tokens may be cut
  // elsewhere. None when no module is there, when the tokenizer would make
  // another text of the parts (one that puts a space in front), or when the
  // plan does not fit.
  std::optional<Plan> Find(const Rendered& rendered,
                           const CompileOptions& options) const;

 private:
  explicit SchemaTexts(std::shared_ptr<const Schema> schema);

  const std::shared_ptr<const Schema> schema_;
  // Of the schema's two trees, the roots' modules, the longest text first.
  std::vector<int32_t> modules_[2];
};

}  // namespace promptcache::pml
