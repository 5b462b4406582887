#pragma once

#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/pml/compiler.h"
#include "common/pml/error.h"
#include "common/strings.h"
#include "tests/support/fake_tokenizer.h"
#include "tests/support/status_matchers.h"

namespace promptcache::pml {

inline const FakeTokenizer& Fake() {
  static const FakeTokenizer tokenizer;
  return tokenizer;
}

inline ChatTemplate ChatMl() { return *ChatTemplate::FromName("chatml"); }

inline std::shared_ptr<const Schema> SchemaOf(std::string_view text) {
  auto schema = CompileSchema(text, Fake(), ChatMl());
  EXPECT_THAT(schema, IsOk());
  return schema.ok() ? *schema : nullptr;
}

inline absl::StatusOr<Plan> TryCompile(std::string_view schema_text,
                                       std::string_view prompt_text,
                                       const CompileOptions& options = {},
                                       const Limits& limits = {}) {
  auto schema = CompileSchema(schema_text, Fake(), ChatMl(), limits);
  if (!schema.ok()) return schema.status();
  auto prompt = ParsePrompt(prompt_text, limits);
  if (!prompt.ok()) return prompt.status();
  return Compile(**schema, **prompt, options);
}

inline Plan PlanOf(std::string_view schema, std::string_view prompt,
                   const CompileOptions& options = {}) {
  auto plan = TryCompile(schema, prompt, options);
  EXPECT_THAT(plan, IsOk());
  return plan.ok() ? *plan : Plan();
}

// The error of a prompt or schema that must be refused.
inline PmlError ErrorOf(std::string_view schema, std::string_view prompt,
                        const CompileOptions& options = {},
                        const Limits& limits = {}) {
  const auto plan = TryCompile(schema, prompt, options, limits);
  EXPECT_FALSE(plan.ok());
  return PmlErrorOf(plan.status()).value_or(PmlError());
}

// "REASON source line:column"
inline std::string Refusal(std::string_view schema, std::string_view prompt) {
  const PmlError error = ErrorOf(schema, prompt);
  return absl::StrCat(error.reason, " ", ToAbsl(SourceName(error.source)), " ",
                      error.place.line, ":", error.place.column);
}

// "cached a@4 'Alpha'", "fresh @9 'text'"
inline std::vector<std::string> Spans(const Plan& plan) {
  std::vector<std::string> out;
  for (const PlanSpan& span : plan.spans) {
    out.push_back(absl::StrCat(
        span.kind == SpanKind::kCached ? "cached " : "fresh ", span.name, "@",
        span.start, " '", Fake().Text(span.tokens), "'"));
  }
  return out;
}

// What the plan reads as, from its first to its last token.
inline std::string TextOf(const Plan& plan) {
  std::string out;
  for (const PlanSpan& span : plan.spans) out += Fake().Text(span.tokens);
  return out;
}

inline std::string TextOf(const PlanModule& module) {
  std::string out;
  for (const Piece& piece : module.pieces) out += Fake().Text(piece.tokens);
  return out;
}

inline const PlanModule& ModuleOf(const Plan& plan, std::string_view path) {
  static const PlanModule none;
  for (const PlanModule& module : plan.modules) {
    if (module.path == path) return module;
  }
  ADD_FAILURE() << "no module " << path;
  return none;
}

// A module's context as "a[0,5)@-9" for states and "'text'@-3" for scaffold
// texts.
inline std::vector<std::string> ContextOf(const Plan& plan,
                                          std::string_view path) {
  std::vector<std::string> out;
  for (const ContextItem& item : ModuleOf(plan, path).context) {
    if (item.module < 0) {
      out.push_back(
          absl::StrCat("'", Fake().Text(item.tokens), "'@", item.offset));
      continue;
    }
    const PlanModule& seen = plan.modules[static_cast<size_t>(item.module)];
    out.push_back(absl::StrCat(seen.path, "[", item.first_token, ",",
                               item.first_token + item.num_tokens, ")@",
                               item.offset));
  }
  return out;
}

}  // namespace promptcache::pml
