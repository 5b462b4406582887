#include "inference_worker/serving/prompt_compiler.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "common/status_macros.h"
#include "inference_worker/serving/prefix_plan.h"
#include "inference_worker/serving/segment_plan.h"
#include "inference_worker/serving/warm_plan.h"

namespace promptcache::worker {
namespace {

void HashItems(const std::vector<pml::StructuredItem>& items, Sha256* sha);

void HashImports(const std::vector<pml::StructuredImport>& imports,
                 Sha256* sha) {
  sha->Add("imports", uint64_t{imports.size()});
  for (const pml::StructuredImport& import : imports) {
    sha->Add("path", import.path);
    sha->Add("arguments", uint64_t{import.arguments.size()});
    for (const auto& [name, value] : import.arguments) {
      sha->Add("name", name).Add("value", value);
    }
    HashImports(import.imports, sha);
  }
}

void HashItems(const std::vector<pml::StructuredItem>& items, Sha256* sha) {
  sha->Add("items", uint64_t{items.size()});
  for (const pml::StructuredItem& item : items) {
    if (const auto* text = std::get_if<std::string>(&item.item)) {
      sha->Add("text", *text);
    } else if (const auto* import =
                   std::get_if<pml::StructuredImport>(&item.item)) {
      HashImports({*import}, sha);
    } else {
      const auto& message = std::get<pml::StructuredMessage>(item.item);
      sha->Add("role", message.role);
      HashItems(message.items, sha);
    }
  }
}

Digest KeyOf(const PromptForm& form, pml::Layout layout, MatchMode match) {
  Sha256 sha;
  sha.Add("match", static_cast<uint64_t>(match));
  sha.Add("layout", static_cast<uint64_t>(layout));
  sha.Add("form", uint64_t{form.index()});
  if (const auto* pml_text = std::get_if<PmlText>(&form)) {
    sha.Add("pml", pml_text->text);
  } else if (const auto* plain = std::get_if<PlainText>(&form)) {
    sha.Add("text", plain->text);
  } else if (const auto* structured =
                 std::get_if<pml::StructuredPrompt>(&form)) {
    sha.Add("schema", structured->schema);
    HashItems(structured->items, &sha);
  } else {
    for (const auto& message : std::get<std::vector<pml::ChatMessage>>(form)) {
      sha.Add("role", message.role).Add("content", message.content);
    }
  }
  return sha.Finish();
}

uint64_t NumBytes(const std::vector<pml::Piece>& pieces) {
  uint64_t bytes = 0;
  for (const pml::Piece& piece : pieces) {
    bytes += sizeof(piece) + piece.tokens.size() * sizeof(int32_t);
  }
  return bytes;
}

// Of all that grows with a prompt.
uint64_t NumBytes(const CompiledPrompt& prompt) {
  uint64_t bytes = sizeof(prompt) + sizeof(pml::Plan);
  if (prompt.as_prefix != nullptr) bytes += NumBytes(*prompt.as_prefix);
  for (const pml::PlanSpan& span : prompt.plan->spans) {
    bytes +=
        sizeof(span) + span.name.size() + span.tokens.size() * sizeof(int32_t);
  }
  pml::ContextWalk walk;
  // From the last: lists that are shared grow.
  for (size_t i = prompt.plan->modules.size(); i-- > 0;) {
    const pml::PlanModule& module = prompt.plan->modules[i];
    bytes += sizeof(module) + module.path.size() + NumBytes(module.pieces) +
             NumBytes(module.placeholders) + sizeof(ModuleIdentity) +
             sizeof(ModulePolicy);
    for (const pml::ContextItem& item : walk.New(module.context)) {
      bytes += sizeof(item) + item.tokens.size() * sizeof(int32_t);
    }
  }
  return bytes;
}

// A listed schema that is gone, or that this model cannot have; else it could
// not be looked at.
bool SaysThereIsNone(const absl::Status& status) {
  return absl::IsNotFound(status) || absl::IsInvalidArgument(status) ||
         absl::IsFailedPrecondition(status);
}

}  // namespace

PromptCompiler::PromptCompiler(const Options& options,
                               const Tokenizer* tokenizer,
                               const ChatTemplate& chat_template,
                               SchemaSource* source)
    : options_(options),
      identity_base_(std::make_shared<IdentityBase>(options.identity)),
      tokenizer_(tokenizer),
      chat_template_(chat_template),
      source_(source) {}

absl::StatusOr<std::shared_ptr<const pml::Schema>> PromptCompiler::Judge(
    std::string_view text) const {
  return pml::CompileSchema(text, *tokenizer_, chat_template_, options_.limits);
}

absl::StatusOr<std::shared_ptr<const PromptCompiler::CompiledSchema>>
PromptCompiler::GetSchema(const std::string& name) {
  PC_ASSIGN_OR_RETURN(Found found, FindSchema(name));
  return std::move(found.schema);
}

absl::StatusOr<PromptCompiler::Found> PromptCompiler::FindSchema(
    const std::string& name) {
  if (static_cast<int64_t>(name.size()) > options_.limits.name_chars * 4) {
    return absl::NotFoundError("there is no schema of a name that long");
  }
  std::shared_ptr<const CompiledSchema> known;
  uint64_t invalidations = 0, all_invalidations = 0;
  {
    MutexLock lock(&mu_);
    all_invalidations = all_invalidations_;
    const auto it = schemas_.find(name);
    if (it != schemas_.end()) {
      if (it->second.compiled != nullptr && !it->second.stale) {
        return Found{it->second.compiled};
      }
      known = it->second.compiled;
      invalidations = it->second.invalidations;
    }
  }
  if (source_ == nullptr) {
    return absl::NotFoundError(absl::StrCat("no schema \"", name, "\""));
  }
  auto record = source_->Fetch(name);
  if (!record.ok()) {
    if (absl::IsNotFound(record.status())) {
      MutexLock lock(&mu_);
      schemas_.erase(name);
      return absl::NotFoundError(absl::StrCat("no schema \"", name, "\""));
    }
    // Better what was current when the daemon went than no answer.
    if (known != nullptr) return Found{known, /*current=*/false};
    return record.status();
  }
  auto compiled = std::make_shared<CompiledSchema>();
  if (known != nullptr && known->record.revision == record->revision &&
      known->record.text == record->text) {
    compiled->schema = known->schema;
  } else {
    PC_ASSIGN_OR_RETURN(compiled->schema, Judge(record->text));
  }
  compiled->record = *std::move(record);
  MutexLock lock(&mu_);
  SchemaEntry& entry = schemas_[name];
  entry.compiled = compiled;
  // Stays stale when it changed while it was fetched.
  entry.stale = entry.invalidations != invalidations ||
                all_invalidations_ != all_invalidations;
  return Found{std::move(compiled)};
}

void PromptCompiler::Invalidate(const std::string& name) {
  MutexLock lock(&mu_);
  ++changes_;
  look_again_ = absl::InfinitePast();
  const auto it = schemas_.find(name);
  if (it == schemas_.end()) {
    // It may be on its way here.
    ++all_invalidations_;
    return;
  }
  it->second.stale = true;
  ++it->second.invalidations;
}

void PromptCompiler::InvalidateAll() {
  MutexLock lock(&mu_);
  ++changes_;
  look_again_ = absl::InfinitePast();
  ++all_invalidations_;
  for (auto& [name, entry] : schemas_) entry.stale = true;
}

int32_t PromptCompiler::EndId() const {
  return options_.separate_segments ? tokenizer_->text_end_id() : -1;
}

std::shared_ptr<const CompiledPrompt> PromptCompiler::WithKeys(
    pml::Plan plan, const CompiledSchema* schema, int32_t chunk_tokens) const {
  auto prompt = std::make_shared<CompiledPrompt>();
  prompt->chunk_tokens = chunk_tokens;
  prompt->identity_base = identity_base_;
  if (options_.separate_segments) SeparateSegments(EndId(), &plan);
  prompt->identities = ModuleIdentities(plan, options_.identity);
  prompt->policies.resize(plan.modules.size());
  if (schema != nullptr) {
    for (size_t i = 0; i < plan.modules.size(); ++i) {
      const auto& by_path = schema->record.module_policies;
      const auto it = by_path.find(plan.modules[i].path);
      prompt->policies[i] =
          it != by_path.end() ? it->second : schema->record.policy;
    }
  }
  prompt->plan = std::make_shared<const pml::Plan>(std::move(plan));
  return prompt;
}

absl::StatusOr<PromptCompiler::PromptEntry> PromptCompiler::CompileSchemaPrompt(
    const PromptForm& form, const pml::CompileOptions& options) {
  PromptEntry entry;
  std::shared_ptr<const pml::Prompt> prompt;
  if (const auto* text = std::get_if<PmlText>(&form)) {
    PC_ASSIGN_OR_RETURN(prompt, pml::ParsePrompt(text->text, options_.limits));
  } else {
    PC_ASSIGN_OR_RETURN(prompt,
                        pml::MakePrompt(std::get<pml::StructuredPrompt>(form),
                                        options_.limits));
  }
  entry.schema = prompt->schema;
  PC_ASSIGN_OR_RETURN(entry.compiled_schema, GetSchema(prompt->schema));
  PC_ASSIGN_OR_RETURN(
      pml::Plan plan,
      pml::Compile(*entry.compiled_schema->schema, *prompt, options));
  if (plan.spans.empty()) {
    return absl::InvalidArgumentError("the prompt has no tokens");
  }
  entry.prompt = WithKeys(std::move(plan), entry.compiled_schema.get());
  return entry;
}

PromptCompiler::TextsFound PromptCompiler::RegisteredTexts() {
  uint64_t changes = 0;
  {
    MutexLock lock(&mu_);
    if (texts_ != nullptr && texts_changes_ == changes_) return {texts_};
    if (absl::Now() < look_again_) return {partial_texts_, /*complete=*/false};
    changes = changes_;
  }
  TextsFound found = LookAtTexts();
  MutexLock lock(&mu_);
  if (found.complete) {
    texts_ = found.texts;
    texts_changes_ = changes;
  } else {
    // What was known, when nothing could be seen.
    if (found.texts == nullptr) found.texts = texts_;
    if (found.texts == nullptr) found.texts = std::make_shared<Texts>();
    partial_texts_ = found.texts;
    look_again_ = absl::Now() + options_.look_again_after;
  }
  return found;
}

PromptCompiler::TextsFound PromptCompiler::LookAtTexts() {
  auto texts = std::make_shared<Texts>();
  if (source_ == nullptr) return {texts};
  const auto names = source_->List(options_.max_matched_schemas);
  if (!names.ok()) return {nullptr, /*complete=*/false};
  bool complete = true;
  for (const std::string& name : *names) {
    const auto found = FindSchema(name);
    complete = complete &&
               (found.ok() ? found->current : SaysThereIsNone(found.status()));
    if (!found.ok()) continue;
    if (auto of_schema = pml::SchemaTexts::Create(found->schema->schema)) {
      texts->emplace_back(found->schema, std::move(of_schema));
    }
  }
  return {texts, complete};
}

PromptCompiler::PromptEntry PromptCompiler::MatchTexts(
    const pml::SchemaTexts::Rendered& rendered,
    const pml::CompileOptions& options) {
  std::optional<pml::Plan> best;
  PromptEntry entry;
  const TextsFound registered = RegisteredTexts();
  entry.complete = registered.complete;
  for (const auto& [schema, texts] : *registered.texts) {
    auto plan = texts->Find(rendered, options);
    if (!plan.has_value() ||
        (best.has_value() &&
         best->num_cached_tokens >= plan->num_cached_tokens)) {
      continue;
    }
    best = std::move(plan);
    entry.compiled_schema = schema;
  }
  if (!best.has_value()) return entry;
  entry.schema = best->schema;
  entry.prompt = WithKeys(*std::move(best), entry.compiled_schema.get());
  return entry;
}

absl::StatusOr<PromptCompiler::PromptEntry> PromptCompiler::CompileForm(
    const PromptForm& form, pml::Layout layout, MatchMode match) {
  const int32_t room_for_end = EndId() >= 0 ? 1 : 0;
  const pml::CompileOptions options{
      .layout = layout,
      .context_length = options_.context_length - room_for_end,
      .limits = options_.limits};
  const auto* plain = std::get_if<PlainText>(&form);
  const auto* messages = std::get_if<std::vector<pml::ChatMessage>>(&form);
  if (plain == nullptr && messages == nullptr) {
    return CompileSchemaPrompt(form, options);
  }
  PC_ASSIGN_OR_RETURN(pml::Plan plan,
                      plain != nullptr
                          ? pml::CompileText(plain->text, *tokenizer_, options)
                          : pml::CompileMessages(*messages, *tokenizer_,
                                                 chat_template_, options));
  if (plan.spans.empty()) {
    return absl::InvalidArgumentError("the prompt has no tokens");
  }
  PromptEntry entry;
  if (match == MatchMode::kAuto && !options_.separate_segments) {
    pml::SchemaTexts::Rendered rendered{.messages = messages != nullptr,
                                        .plan = &plan};
    if (plain != nullptr) {
      rendered.text.AppendText(plain->text);
    } else {
      PC_ASSIGN_OR_RETURN(rendered.text,
                          pml::MarkConversation(*messages, chat_template_));
    }
    entry = MatchTexts(rendered, options);
  }
  const bool cut = match != MatchMode::kNone && !options_.separate_segments &&
                   CutPrefix(&plan);
  auto plain_prompt =
      WithKeys(std::move(plan), nullptr, cut ? kPrefixChunkTokens : 0);
  if (entry.prompt == nullptr) {
    entry.prompt = std::move(plain_prompt);
  } else if (!plain_prompt->plan->modules.empty()) {
    auto matched = std::make_shared<CompiledPrompt>(*entry.prompt);
    matched->as_prefix = std::move(plain_prompt);
    entry.prompt = std::move(matched);
  }
  return entry;
}

absl::StatusOr<pml::Layout> PromptCompiler::ChooseLayout(
    std::optional<pml::Layout> wanted) const {
  if (!options_.identity.absolute_positions) {
    return wanted.value_or(pml::Layout::kCompact);
  }
  if (wanted == pml::Layout::kCompact) {
    return absl::InvalidArgumentError(
        "layout compact moves modules, and this model has learned absolute "
        "positions: a module's states hold where its schema has it. Use the "
        "layout schema, which is the default with this model");
  }
  return pml::Layout::kSchema;
}

absl::StatusOr<std::shared_ptr<const CompiledPrompt>> PromptCompiler::Compile(
    const PromptForm& form, std::optional<pml::Layout> wanted_layout,
    MatchMode match) {
  PC_ASSIGN_OR_RETURN(const pml::Layout layout, ChooseLayout(wanted_layout));
  const Digest key = KeyOf(form, layout, match);
  PromptEntry found;
  uint64_t changes = 0;
  {
    MutexLock lock(&mu_);
    changes = changes_;
    const auto it = by_key_.find(key);
    if (it != by_key_.end()) {
      prompts_.splice(prompts_.begin(), prompts_, it->second);
      found = *it->second;
    }
  }
  // Another schema may hold more of a text than what was found.
  const bool known = match != MatchMode::kAuto || found.changes == changes;
  if (found.prompt != nullptr && known) {
    if (found.compiled_schema == nullptr) return found.prompt;
    PC_ASSIGN_OR_RETURN(const auto schema, GetSchema(found.schema));
    if (schema == found.compiled_schema) return found.prompt;
  }
  PC_ASSIGN_OR_RETURN(PromptEntry entry, CompileForm(form, layout, match));
  entry.key = key;
  entry.changes = changes;
  std::shared_ptr<const CompiledPrompt> prompt = entry.prompt;
  if (entry.complete) Keep(std::move(entry));
  return prompt;
}

void PromptCompiler::Keep(PromptEntry entry) {
  entry.num_bytes = NumBytes(*entry.prompt);
  MutexLock lock(&mu_);
  const auto it = by_key_.find(entry.key);
  if (it != by_key_.end()) Drop(it->second);
  kept_bytes_ += entry.num_bytes;
  const Digest key = entry.key;
  prompts_.push_front(std::move(entry));
  by_key_[key] = prompts_.begin();
  while (prompts_.size() > options_.max_prompts ||
         (kept_bytes_ > options_.max_prompt_bytes && prompts_.size() > 1)) {
    Drop(std::prev(prompts_.end()));
  }
}

void PromptCompiler::Drop(PromptList::iterator it) {
  kept_bytes_ -= it->num_bytes;
  by_key_.erase(it->key);
  prompts_.erase(it);
}

absl::StatusOr<std::vector<std::shared_ptr<const CompiledPrompt>>>
PromptCompiler::CompileWarm(const std::string& name,
                            const std::vector<std::string>& paths,
                            const ModulePolicy* policy) {
  PC_ASSIGN_OR_RETURN(const auto schema, GetSchema(name));
  PC_ASSIGN_OR_RETURN(pml::Plan plan, pml::CompileWarm(*schema->schema, paths));
  const auto whole = WithKeys(std::move(plan), schema.get());
  // What named modules saw (the preamble, say) is shared with others and keeps
  // its own policy.
  const auto named = [&](size_t m) {
    return policy != nullptr &&
           (paths.empty() ||
            std::ranges::find(paths, whole->plan->modules[m].path) !=
                paths.end());
  };
  std::vector<std::shared_ptr<const CompiledPrompt>> prompts;
  for (size_t i = 0; i < whole->plan->modules.size(); ++i) {
    const std::vector<size_t> members = WithContext(*whole->plan, i);
    auto prompt = std::make_shared<CompiledPrompt>();
    prompt->plan =
        std::make_shared<const pml::Plan>(ModulesOnly(*whole->plan, members));
    for (size_t m : members) {
      prompt->identities.push_back(whole->identities[m]);
      prompt->policies.push_back(named(m) ? *policy : whole->policies[m]);
    }
    prompt->replace_policy = named(i);
    prompts.push_back(std::move(prompt));
  }
  return prompts;
}

}  // namespace promptcache::worker
