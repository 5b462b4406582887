#include <algorithm>
#include <utility>

#include "common/pml/schema_tree.h"

namespace promptcache::pml {
namespace {

// Appends the own text and the scaffold texts of module `parent` before its
// child, with the offsets that they have from the child's origin.
void AppendOwnText(const SchemaTree& tree, int32_t parent, int32_t child,
                   std::vector<ContextItem>* context) {
  const SchemaModule& owner = tree.modules[static_cast<size_t>(parent)];
  const int32_t shift =
      tree.modules[static_cast<size_t>(child)].offset_in_parent;
  int32_t first = 0;  // token of the owner not appended yet
  int32_t end = 0;
  const auto append_states = [&] {
    if (end == first) return;
    context->push_back({.module = parent,
                        .first_token = first,
                        .num_tokens = end - first,
                        .offset = -shift});
    first = end;
  };
  for (const SchemaPart& part : owner.parts) {
    if (part.kind == SchemaPart::Kind::kText) {
      end += static_cast<int32_t>(
          owner.pieces[static_cast<size_t>(part.index)].tokens.size());
    } else if (part.kind == SchemaPart::Kind::kParam) {
      const SchemaParam& param = owner.params[static_cast<size_t>(part.index)];
      if (param.tokens.empty()) continue;
      append_states();
      context->push_back(
          {.offset = param.offset - shift, .tokens = param.tokens});
    } else if (std::find(part.modules.begin(), part.modules.end(), child) !=
               part.modules.end()) {
      break;
    }
  }
  append_states();
}

}  // namespace

// The preamble directly before the block, then, from the outermost in, what
// each enclosing module has before the next.
std::vector<ContextItem> SchemaTree::ContextOf(int32_t module) const {
  std::vector<ContextItem> context;
  if (module == 0) return context;
  std::vector<int32_t> path;  // innermost first
  for (int32_t m = module; m >= 0; m = modules[static_cast<size_t>(m)].parent) {
    path.push_back(m);
  }
  if (const SchemaModule& preamble = modules.front(); preamble.num_tokens > 0) {
    context.push_back({.module = 0,
                       .num_tokens = preamble.num_tokens,
                       .offset = -preamble.length});
  }
  for (size_t i = path.size() - 1; i > 0; --i) {
    const int32_t child = path[i - 1];
    for (ContextItem& item : context) {
      item.offset -= modules[static_cast<size_t>(child)].offset_in_parent;
    }
    AppendOwnText(*this, path[i], child, &context);
  }
  return context;
}

}  // namespace promptcache::pml
