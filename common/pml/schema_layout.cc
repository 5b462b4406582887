#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/pml/schema_tree.h"
#include "common/pml/xml.h"
#include "common/status_macros.h"

namespace promptcache::pml {
namespace {

// Positions are 32-bit; sums of them must stay so.
constexpr int64_t kMaxSchemaTokens = int64_t{1} << 30;

class LayOut {
 public:
  LayOut(const Tokenizer& tokenizer, const ChatTemplate& chat_template,
         SchemaTree* tree)
      : tokenizer_(tokenizer), template_(chat_template), tree_(*tree) {}

  absl::Status Run() {
    for (SchemaModule& m : tree_.modules) PC_RETURN_IF_ERROR(Tokenise(&m));
    PC_RETURN_IF_ERROR(CheckScaffoldTexts());
    // Children come after their parents.
    for (size_t i = tree_.modules.size(); i-- > 0;) {
      PC_RETURN_IF_ERROR(Measure(&tree_.modules[i]));
    }
    PC_RETURN_IF_ERROR(PlaceRoot());
    for (SchemaModule& m : tree_.modules) {
      if (m.parent >= 0) {
        m.schema_start = module(m.parent).schema_start + m.offset_in_parent;
      }
    }
    return absl::OkStatus();
  }

 private:
  SchemaModule& module(int32_t index) {
    return tree_.modules[static_cast<size_t>(index)];
  }

  absl::Status Tokenise(SchemaModule* m) {
    std::string text;
    for (const MarkedText& piece : m->texts) {
      text += piece.Text();
      PC_ASSIGN_OR_RETURN(std::vector<int32_t> tokens,
                          piece.Tokens(tokenizer_));
      m->pieces.push_back({.tokens = std::move(tokens)});
    }
    const bool is_preamble = m == &tree_.modules.front();
    if (is_preamble && tokenizer_.bos_id() >= 0) {
      if (m->pieces.empty()) {
        m->pieces.emplace_back();
        m->parts.push_back({.index = 0});
      }
      std::vector<int32_t>& tokens = m->pieces.front().tokens;
      tokens.insert(tokens.begin(), tokenizer_.bos_id());
    }
    for (SchemaParam& param : m->params) {
      param.tokens = tokenizer_.Encode(param.scaffold);
    }
    m->text_sha256 = Sha256Of(text);
    return absl::OkStatus();
  }

  // The first in the document: a parent's param may stand after a child's.
  absl::Status CheckScaffoldTexts() {
    const SchemaParam* first = nullptr;
    for (const SchemaModule& m : tree_.modules) {
      for (const SchemaParam& param : m.params) {
        if (static_cast<int64_t>(param.tokens.size()) > param.length &&
            (first == nullptr || param.place < first->place)) {
          first = &param;
        }
      }
    }
    if (first == nullptr) return absl::OkStatus();
    return PmlError{
        .reason = "PML_ARGUMENT_TOO_LONG",
        .source = Source::kSchema,
        .place = first->place,
        .detail = absl::StrCat("the scaffold text of param \"", first->name,
                               "\" has ", first->tokens.size(),
                               " tokens, its slot ", first->length),
        .numbers = {{"tokens", static_cast<int64_t>(first->tokens.size())},
                    {"length", first->length}}}
        .ToStatus();
  }

  absl::Status Measure(SchemaModule* m) {
    int64_t offset = 0;
    for (const SchemaPart& part : m->parts) {
      const int32_t here = static_cast<int32_t>(offset);
      if (part.kind == SchemaPart::Kind::kText) {
        Piece& piece = m->pieces[static_cast<size_t>(part.index)];
        piece.offset = here;
        offset += static_cast<int64_t>(piece.tokens.size());
        m->num_tokens += static_cast<int32_t>(piece.tokens.size());
      } else if (part.kind == SchemaPart::Kind::kParam) {
        SchemaParam& param = m->params[static_cast<size_t>(part.index)];
        param.offset = here;
        offset += param.length;
      } else {
        int32_t longest = 0;
        for (const int32_t child : part.modules) {
          module(child).offset_in_parent = here;
          longest = std::max(longest, module(child).length);
        }
        offset += longest;
      }
      PC_RETURN_IF_ERROR(CheckLength(offset));
    }
    m->length = static_cast<int32_t>(offset);
    return absl::OkStatus();
  }

  static absl::Status CheckLength(int64_t length) {
    return CheckLimit(Source::kSchema, "tokens with all params full", length,
                      kMaxSchemaTokens);
  }

  // Places blocks and anonymous modules in the layout `schema`.
  absl::Status PlaceRoot() {
    int64_t position = tree_.modules.front().length;
    int32_t open = tree_.preamble_message;
    for (const RootItem& item : tree_.root) {
      const int32_t message = module(item.modules.front()).message;
      const bool leads =
          module(item.modules.front()).kind == ModuleKind::kHoldsMessages;
      if (message != open || leads) {
        PC_ASSIGN_OR_RETURN(const int64_t tokens,
                            CountMarkers(open, message, leads));
        position += tokens;
        open = message;
      }
      int32_t longest = 0;
      for (const int32_t index : item.modules) {
        module(index).schema_start = static_cast<int32_t>(position);
        longest = std::max(longest, module(index).length);
      }
      position += longest;
      PC_RETURN_IF_ERROR(CheckLength(position));
    }
    return absl::OkStatus();
  }

  // The most that may stand there, whatever messages come before.
  absl::StatusOr<int64_t> CountMarkers(int32_t from, int32_t to, bool leads) {
    MarkedText text;
    if (from >= 0) text.AppendMarkers(template_.End(RoleOf(from)));
    if (to >= 0 || leads) text.AppendMarkers(template_.rules().again);
    if (to >= 0) text.AppendMarkers(template_.UsualStart(RoleOf(to)));
    PC_ASSIGN_OR_RETURN(const std::vector<int32_t> tokens,
                        text.Tokens(tokenizer_));
    return static_cast<int64_t>(tokens.size());
  }

  Role RoleOf(int32_t message) const {
    return tree_.messages[static_cast<size_t>(message)];
  }

  const Tokenizer& tokenizer_;
  const ChatTemplate& template_;
  SchemaTree& tree_;
};

}  // namespace

absl::Status LayOutSchema(const Tokenizer& tokenizer,
                          const ChatTemplate& chat_template, SchemaTree* tree) {
  return LayOut(tokenizer, chat_template, tree).Run();
}

}  // namespace promptcache::pml
