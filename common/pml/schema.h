#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "common/chat_template.h"
#include "common/pml/limits.h"
#include "common/tokenizer.h"

namespace promptcache::pml {

struct SchemaTree;

// What a schema's reader wants to know of one module.
struct ModuleSummary {
  std::string path;  // "" preamble, "#1" anonymous, "a/b"
  int32_t num_tokens = 0;
  bool cached = true;  // false: computed fresh each time
};

// A schema, read, judged, tokenised and laid out: all that does not depend on
// a prompt is done once, here.
// Immutable, thread-safe. Must not outlive its tokenizer.
class Schema {
 public:
  ~Schema();
  Schema(const Schema&) = delete;
  Schema& operator=(const Schema&) = delete;

  const std::string& name() const;
  // In document order; the preamble first, when it has tokens.
  std::vector<ModuleSummary> Modules() const;
  // Borders of modules and params that split what the tokenizer would have
  // joined, each with a hint; at most 20 and then their number.
  std::vector<std::string> BorderWarnings() const;

  const Tokenizer& tokenizer() const { return *tokenizer_; }
  const ChatTemplate& chat_template() const { return chat_template_; }
  // For the compiler. In a prompt with roles, white space between the modules
  // of a schema without roles vanishes: that is another tree.
  const SchemaTree& tree(bool prompt_has_roles) const {
    return prompt_has_roles && roles_tree_ != nullptr ? *roles_tree_ : *tree_;
  }

 private:
  friend absl::StatusOr<std::shared_ptr<const Schema>> CompileSchema(
      std::string_view text, const Tokenizer& tokenizer,
      const ChatTemplate& chat_template, const Limits& limits);
  Schema(const Tokenizer& tokenizer, const ChatTemplate& chat_template);

  const Tokenizer* tokenizer_;
  ChatTemplate chat_template_;
  std::unique_ptr<const SchemaTree> tree_;
  std::unique_ptr<const SchemaTree> roles_tree_;  // null: the same
};

// Shared: by the registry of schemas and by requests that are compiling.
// A PmlError (error.h) of source schema when the document is refused;
// FailedPrecondition when the tokenizer lacks a control token of the template.
absl::StatusOr<std::shared_ptr<const Schema>> CompileSchema(
    std::string_view text, const Tokenizer& tokenizer,
    const ChatTemplate& chat_template, const Limits& limits = {});

}  // namespace promptcache::pml
