#include "inference_worker/serving/text_match.h"

#include <algorithm>
#include <utility>

#include "absl/memory/memory.h"
#include "absl/strings/match.h"
#include "common/pml/compiler.h"

namespace promptcache::worker {
namespace {

// Less is found by chance, and not worth a module's round trip.
constexpr size_t kMinBytes = 32;

// Nothing where a token is not text.
std::optional<std::string> TextOf(const std::vector<int32_t>& tokens,
                                  const Tokenizer& tokenizer) {
  std::string text;
  for (const int32_t id : tokens) {
    if (id == tokenizer.bos_id()) continue;
    const std::string piece = tokenizer.Decode(id);
    if (piece.empty()) return std::nullopt;
    text += piece;
  }
  return text;
}

bool IsOneText(const pml::PlanModule& module) {
  return module.pieces.size() == 1 && module.placeholders.empty() &&
         module.scaffold.empty() && module.length == module.num_tokens() &&
         !absl::StrContains(module.path, '/');
}

}  // namespace

std::shared_ptr<const SchemaTexts> SchemaTexts::Create(
    std::shared_ptr<const pml::Schema> schema) {
  const auto plan = pml::CompileWarm(*schema, {});
  if (!plan.ok()) return nullptr;
  auto texts = absl::WrapUnique(new SchemaTexts(std::move(schema)));
  const Tokenizer& tokenizer = texts->schema_->tokenizer();
  for (const pml::PlanModule& module : plan->modules) {
    if (module.path.starts_with('#')) return nullptr;
    if (!IsOneText(module)) continue;
    std::optional<std::string> text =
        TextOf(module.pieces[0].tokens, tokenizer);
    if (module.path.empty()) {
      if (!text.has_value()) return nullptr;
      texts->preamble_ = *std::move(text);
    } else if (text.has_value() && text->size() >= kMinBytes) {
      texts->modules_.push_back(
          {module.path, *std::move(text), texts->modules_.size()});
    }
  }
  if (texts->modules_.empty()) return nullptr;
  std::sort(texts->modules_.begin(), texts->modules_.end(),
            [](const Module& a, const Module& b) {
              return a.text.size() != b.text.size()
                         ? a.text.size() > b.text.size()
                         : a.order < b.order;
            });
  return texts;
}

std::optional<pml::StructuredPrompt> SchemaTexts::Find(
    std::string_view text) const {
  if (!text.starts_with(preamble_)) return std::nullopt;
  struct Place {
    size_t begin;
    const Module* module;
  };
  std::vector<Place> places;
  for (const Module& module : modules_) {
    for (size_t at = text.find(module.text, preamble_.size());
         at != std::string_view::npos; at = text.find(module.text, at + 1)) {
      const size_t end = at + module.text.size();
      const bool taken =
          std::any_of(places.begin(), places.end(), [&](const Place& p) {
            return at < p.begin + p.module->text.size() && p.begin < end;
          });
      if (taken) continue;
      places.push_back({at, &module});
      break;
    }
  }
  if (places.empty()) return std::nullopt;
  std::sort(places.begin(), places.end(),
            [](const Place& a, const Place& b) { return a.begin < b.begin; });
  pml::StructuredPrompt prompt;
  prompt.schema = schema_->name();
  size_t done = preamble_.size();
  const auto add_text = [&](size_t end) {
    if (end > done) {
      prompt.items.push_back({std::string(text.substr(done, end - done))});
    }
  };
  for (const Place& place : places) {
    add_text(place.begin);
    pml::StructuredImport import;
    import.path = place.module->path;
    prompt.items.push_back({std::move(import)});
    done = place.begin + place.module->text.size();
  }
  add_text(text.size());
  return prompt;
}

bool IsPlanOf(const pml::Plan& plan, std::string_view text,
              const Tokenizer& tokenizer) {
  std::vector<int32_t> tokens;
  for (const pml::PlanSpan& span : plan.spans) {
    tokens.insert(tokens.end(), span.tokens.begin(), span.tokens.end());
  }
  return TextOf(tokens, tokenizer) == text;
}

}  // namespace promptcache::worker
