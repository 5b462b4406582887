#include "common/pml/schema.h"

#include <utility>

#include "common/pml/borders.h"
#include "common/pml/schema_tree.h"
#include "common/status_macros.h"

namespace promptcache::pml {

Schema::Schema(const Tokenizer& tokenizer, const ChatTemplate& chat_template)
    : tokenizer_(&tokenizer), chat_template_(chat_template) {}

Schema::~Schema() = default;

const std::string& Schema::name() const { return tree_->name; }

std::vector<ModuleSummary> Schema::Modules() const {
  std::vector<ModuleSummary> out;
  for (const SchemaModule& m : tree_->modules) {
    if (!m.named && m.num_tokens == 0) continue;  // no preamble
    out.push_back(
        {.path = m.path, .num_tokens = m.num_tokens, .cached = m.cached});
  }
  return out;
}

std::vector<std::string> Schema::BorderWarnings() const {
  return SchemaBorders(*tree_, *tokenizer_);
}

absl::StatusOr<std::shared_ptr<const Schema>> CompileSchema(
    std::string_view text, const Tokenizer& tokenizer,
    const ChatTemplate& chat_template, const Limits& limits) {
  std::shared_ptr<Schema> schema(new Schema(tokenizer, chat_template));
  SchemaSource source{.text = text,
                      .chat_template = &schema->chat_template_,
                      .limits = &limits};
  const auto make_tree =
      [&]() -> absl::StatusOr<std::unique_ptr<const SchemaTree>> {
    PC_ASSIGN_OR_RETURN(SchemaTree tree, ReadSchema(source));
    PC_RETURN_IF_ERROR(LayOutSchema(tokenizer, schema->chat_template_, &tree));
    return std::make_unique<const SchemaTree>(std::move(tree));
  };
  PC_ASSIGN_OR_RETURN(schema->tree_, make_tree());
  if (schema->tree_->has_plain_space && !schema->tree_->has_plain_text) {
    source.drop_root_space = true;
    PC_ASSIGN_OR_RETURN(schema->roles_tree_, make_tree());
  }
  return schema;
}

}  // namespace promptcache::pml
