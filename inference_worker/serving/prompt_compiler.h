#pragma once

#include <cstdint>
#include <list>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "common/chat_template.h"
#include "common/module_key.h"
#include "common/mutex.h"
#include "common/pml/compiler.h"
#include "common/pml/limits.h"
#include "common/pml/schema_texts.h"
#include "common/tokenizer.h"
#include "inference_worker/serving/generation.h"

namespace promptcache::worker {

// A schema as the registry has it.
struct SchemaRecord {
  std::string name;
  uint64_t revision = 0;
  std::string text;
  ModulePolicy policy;
  std::map<std::string, ModulePolicy> module_policies;  // by path
};

// Where schemas come from. Thread-safe; may wait for the daemon.
class SchemaSource {
 public:
  virtual ~SchemaSource() = default;
  // The current revision. NotFound; Unavailable without a daemon.
  virtual absl::StatusOr<SchemaRecord> Fetch(const std::string& name) = 0;
  // Names of at most `max_names` schemas, for MatchMode::kAuto: those that were
  // registered last. A source that cannot tell has none.
  virtual absl::StatusOr<std::vector<std::string>> List(uint32_t) {
    return std::vector<std::string>();
  }
};

// A prompt in one of its forms.
struct PmlText {
  std::string text;
};
struct PlainText {
  std::string text;
};
// What of a prompt without schema is looked for in the cache.
enum class MatchMode {
  kNone,    // nothing
  kPrefix,  // its beginning, as far as some request left it there
  // Texts of the registered modules: a text, or messages as rendered, that
  // contains some, behind all that they saw, becomes a prompt of their schema,
  // and what kPrefix makes of it its `as_prefix`. Else as kPrefix.
  kAuto,
};
using PromptForm = std::variant<PmlText, pml::StructuredPrompt, PlainText,
                                std::vector<pml::ChatMessage>>;

// Schemas and prompts to plans with their keys. Both compiled forms are kept:
// a schema until the registry says that it has changed, prompts by least
// recent use within bounds. While the daemon is away what is known goes on
// being served. Thread-safe.
class PromptCompiler {
 public:
  struct Options {
    IdentityBase identity;
    int32_t context_length = 0;
    // An encoder-decoder model: segment_plan.h.
    bool separate_segments = false;
    // Schemas that MatchMode::kAuto looks at.
    uint32_t max_matched_schemas = 256;
    // After a look at them that failed: a daemon that is away holds up one
    // prompt in this time, not each.
    absl::Duration look_again_after = absl::Seconds(1);
    pml::Limits limits;
    size_t max_prompts = 512;
    // Of all prompts that are kept, together: plans and keys.
    uint64_t max_prompt_bytes = uint64_t{128} << 20;
  };
  struct CompiledSchema {
    SchemaRecord record;
    std::shared_ptr<const pml::Schema> schema;
  };

  // None may be outlived. `source` may be null: no schema is ever found.
  PromptCompiler(const Options& options, const Tokenizer* tokenizer,
                 const ChatTemplate& chat_template, SchemaSource* source);

  // Without a layout: `compact`, or `schema` where positions are absolute;
  // there `compact` is an InvalidArgument. A PmlError, or NotFound for an
  // unknown schema, or Unavailable when it is not known here and there is no
  // daemon to ask.
  absl::StatusOr<std::shared_ptr<const CompiledPrompt>> Compile(
      const PromptForm& form, std::optional<pml::Layout> layout,
      MatchMode match = MatchMode::kPrefix) ABSL_LOCKS_EXCLUDED(mu_);
  absl::StatusOr<std::shared_ptr<const CompiledSchema>> GetSchema(
      const std::string& name) ABSL_LOCKS_EXCLUDED(mu_);
  // The modules of `paths` (empty: all) with all that they see, one prompt for
  // each, in an order in which what a module sees comes before it. `policy`
  // replaces the schema's when not null.
  absl::StatusOr<std::vector<std::shared_ptr<const CompiledPrompt>>>
  CompileWarm(const std::string& schema, const std::vector<std::string>& paths,
              const ModulePolicy* policy) ABSL_LOCKS_EXCLUDED(mu_);
  // Judges a document without keeping anything.
  absl::StatusOr<std::shared_ptr<const pml::Schema>> Judge(
      std::string_view text) const;

  // The registry has, or may have, something else under that name, or any.
  // Cheap: looked at when the schema is next used.
  void Invalidate(const std::string& name) ABSL_LOCKS_EXCLUDED(mu_);
  void InvalidateAll() ABSL_LOCKS_EXCLUDED(mu_);

 private:
  struct SchemaEntry {
    std::shared_ptr<const CompiledSchema> compiled;
    bool stale = true;
    uint64_t invalidations = 0;
  };
  struct PromptEntry {
    Digest key;
    std::string schema;    // "" without one
    uint64_t changes = 0;  // of the registry, known when it was compiled
    std::shared_ptr<const CompiledSchema> compiled_schema;
    std::shared_ptr<const CompiledPrompt> prompt;
    uint64_t num_bytes = 0;  // of the prompt, about
    // False: schemas that it may hold more of could not be looked at, and
    // nothing will tell when they can.
    bool complete = true;
  };
  struct Found {
    std::shared_ptr<const CompiledSchema> schema;
    bool current = true;  // false: what was known, the registry did not answer
  };
  using PromptList = std::list<PromptEntry>;  // most recent first

  absl::StatusOr<pml::Layout> ChooseLayout(
      std::optional<pml::Layout> wanted) const;
  absl::StatusOr<PromptEntry> CompileForm(const PromptForm& form,
                                          pml::Layout layout, MatchMode match);
  absl::StatusOr<PromptEntry> CompileSchemaPrompt(
      const PromptForm& form, const pml::CompileOptions& options);
  absl::StatusOr<Found> FindSchema(const std::string& name)
      ABSL_LOCKS_EXCLUDED(mu_);
  // As a prompt of the schema of which it holds most; no prompt: none.
  PromptEntry MatchTexts(const pml::SchemaTexts::Rendered& rendered,
                         const pml::CompileOptions& options)
      ABSL_LOCKS_EXCLUDED(mu_);
  using Texts = std::vector<std::pair<std::shared_ptr<const CompiledSchema>,
                                      std::shared_ptr<const pml::SchemaTexts>>>;
  struct TextsFound {
    std::shared_ptr<const Texts> texts;
    bool complete = true;
  };
  TextsFound RegisteredTexts() ABSL_LOCKS_EXCLUDED(mu_);
  TextsFound LookAtTexts() ABSL_LOCKS_EXCLUDED(mu_);
  // What ends a prompt; -1: nothing does.
  int32_t EndId() const;
  std::shared_ptr<const CompiledPrompt> WithKeys(
      pml::Plan plan, const CompiledSchema* schema,
      int32_t chunk_tokens = 0) const;
  void Keep(PromptEntry entry) ABSL_LOCKS_EXCLUDED(mu_);
  void Drop(PromptList::iterator it) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  const Options options_;
  const std::shared_ptr<const IdentityBase> identity_base_;
  const Tokenizer* const tokenizer_;
  const ChatTemplate chat_template_;
  SchemaSource* const source_;

  mutable Mutex mu_;
  std::map<std::string, SchemaEntry> schemas_ ABSL_GUARDED_BY(mu_);
  uint64_t all_invalidations_ ABSL_GUARDED_BY(mu_) = 0;
  // Of any kind; and texts_ is what there was when there were so many.
  uint64_t changes_ ABSL_GUARDED_BY(mu_) = 0;
  uint64_t texts_changes_ ABSL_GUARDED_BY(mu_) = 0;
  std::shared_ptr<const Texts> texts_ ABSL_GUARDED_BY(mu_);
  // What the last look that failed came to, and until when it serves.
  std::shared_ptr<const Texts> partial_texts_ ABSL_GUARDED_BY(mu_);
  absl::Time look_again_ ABSL_GUARDED_BY(mu_) = absl::InfinitePast();
  PromptList prompts_ ABSL_GUARDED_BY(mu_);
  absl::flat_hash_map<Digest, PromptList::iterator> by_key_
      ABSL_GUARDED_BY(mu_);
  uint64_t kept_bytes_ ABSL_GUARDED_BY(mu_) = 0;
};

}  // namespace promptcache::worker
