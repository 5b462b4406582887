#pragma once

// Inside common/pml: what a schema is once it is read (schema_reader) and laid
// out (schema_layout); the compiler walks it. Everyone else uses schema.h.

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/chat_template.h"
#include "common/digest.h"
#include "common/pml/error.h"
#include "common/pml/limits.h"
#include "common/pml/marked_text.h"
#include "common/pml/plan.h"
#include "common/tokenizer.h"

namespace promptcache::pml {

struct SchemaParam {
  std::string name;
  int32_t length = 0;
  bool has_scaffold = false;  // an empty scaffold text is one
  std::string scaffold;
  Place place;
  // Laid out:
  std::vector<int32_t> tokens;  // of the scaffold text
  int32_t offset = 0;           // from the module's origin
};

// What comes before a message: a message of `role`, or none; or it is not
// known, since modules may or may not stand between.
struct MessageBefore {
  bool known = false;
  std::optional<Role> role;

  friend bool operator==(const MessageBefore&, const MessageBefore&) = default;
};

// The messages that begin in one text.
struct TextMessages {
  MessageBefore before;  // as the first one's start marker has it
  Role first = Role::kUser;
  Role last = Role::kUser;
};

// A module's content in document order.
struct SchemaPart {
  enum class Kind { kText, kParam, kModules };
  Kind kind = Kind::kText;
  int32_t index = -1;                    // kText: of texts; kParam: of params
  std::optional<TextMessages> messages;  // kText: those that begin in it
  std::vector<int32_t> modules;          // kModules: one, or a union's members
};

enum class ModuleKind {
  kFree,           // neither stands in a message nor holds any
  kInMessage,      // stands in a message
  kHoldsMessages,  // holds whole messages, itself or in its modules
};

// A module, the preamble ("", always the tree's first) or an anonymous module.
struct SchemaModule {
  std::string name;
  std::string path;
  int32_t parent = -1;    // -1: stands at the root (in a message or not)
  int32_t union_id = -1;  // the union that it is a member of
  int32_t message = -1;   // the root's message that it or its block stands in
  bool cached = true;
  bool named = false;        // false: preamble and anonymous modules
  bool has_message = false;  // a role element stands in its own text
  ModuleKind kind = ModuleKind::kFree;
  std::vector<SchemaPart> parts;
  std::vector<MarkedText> texts;
  std::vector<SchemaParam> params;

  // Laid out. Offsets count from the module's own origin.
  int32_t offset_in_parent = 0;
  int32_t length = 0;
  int32_t schema_start = 0;
  // Per text, with its offset; pieces without tokens are kept here.
  std::vector<Piece> pieces;
  int32_t num_tokens = 0;
  Digest text_sha256;
};

// What stands at the root in document order: a union's members, or one module.
struct RootItem {
  std::vector<int32_t> modules;
};

struct SchemaScaffold {
  std::string list;   // as written
  std::string names;  // joined by one space
  std::vector<int32_t> modules;
  Place place;
};

struct SchemaTree {
  std::string name;
  // Document order: a module's index is also its place among all; parents
  // before children. [0] is the preamble.
  std::vector<SchemaModule> modules;
  std::vector<RootItem> root;             // without the preamble
  std::vector<Role> messages;             // of the root
  std::vector<SchemaScaffold> scaffolds;  // in the order of declaration
  int32_t num_unions = 0;
  absl::flat_hash_map<std::string, int32_t> by_path;  // named modules
  absl::flat_hash_map<std::string, int32_t> params;   // by "path?name"
  int32_t preamble_message = -1;  // the message open where the preamble ends
  bool preamble_has_message = false;
  std::optional<Role> preamble_last;  // its last message's
  bool has_roles = false;
  // Root text where there are no roles: something other than white space, and
  // any at all.
  bool has_plain_text = false;
  bool has_plain_space = false;

  // -1: none.
  int32_t Find(std::string_view path) const;
  int32_t FindParam(int32_t module, std::string_view param) const;

  // What a module's tokens see besides its own, as PlanModule::context, but
  // with indices into `modules`. Made when asked for: kept for all modules it
  // would grow with the square of a hostile document.
  std::vector<ContextItem> ContextOf(int32_t module) const;
};

struct SchemaSource {
  std::string_view text;
  const ChatTemplate* chat_template;
  const Limits* limits;
  // White space at the root vanishes even where the schema has no roles: the
  // prompt has.
  bool drop_root_space = false;
};

// Reads and judges a document, all but lengths in tokens.
absl::StatusOr<SchemaTree> ReadSchema(const SchemaSource& source);

// The lists of the scaffolds, which name modules by what the whole tree holds.
absl::Status JudgeScaffolds(SchemaTree* tree);

// Tokenises and places. PML_ARGUMENT_TOO_LONG for a scaffold
// text that does not fit its slot.
absl::Status LayOutSchema(const Tokenizer& tokenizer,
                          const ChatTemplate& chat_template, SchemaTree* tree);

}  // namespace promptcache::pml
