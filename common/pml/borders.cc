#include "common/pml/borders.h"

#include <algorithm>
#include <span>
#include <string_view>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/pml/schema_tree.h"
#include "common/pml/white_space.h"
#include "common/strings.h"
#include "common/utf8.h"

namespace promptcache::pml {
namespace {

// A word's tokens depend on what is nearby only.
constexpr size_t kWindowTokens = 8;
constexpr size_t kMaxWarnings = 20;
// What an argument that is not known yet may begin and end with.
constexpr std::string_view kSampleArgument = "word";

// One side of a border.
struct Side {
  std::string name;  // for people
  std::string text;  // near the border; "" at a control token
};

// Whole characters before (or after) the border, up to a control token.
std::string TextBefore(std::span<const int32_t> tokens,
                       const Tokenizer& tokenizer) {
  std::string text;
  for (size_t n = 0; n < std::min(tokens.size(), kWindowTokens); ++n) {
    const std::string bytes = tokenizer.Decode(tokens[tokens.size() - 1 - n]);
    if (bytes.empty()) break;
    text.insert(0, bytes);
  }
  size_t start = 0;
  while (start < text.size() &&
         !NextUtf8(std::string_view(text).substr(start)).valid) {
    ++start;
  }
  return text.substr(start);
}

std::string TextAfter(std::span<const int32_t> tokens,
                      const Tokenizer& tokenizer) {
  std::string text;
  for (size_t n = 0; n < std::min(tokens.size(), kWindowTokens); ++n) {
    const std::string bytes = tokenizer.Decode(tokens[n]);
    if (bytes.empty()) break;
    text += bytes;
  }
  size_t end = 0;
  for (;;) {
    const Utf8Step step = NextUtf8(std::string_view(text).substr(end));
    if (!step.valid) return text.substr(0, end);
    end += step.num_bytes;
  }
}

bool Joins(const std::string& before, const std::string& after,
           const Tokenizer& tokenizer) {
  if (before.empty() || after.empty()) return false;
  std::vector<int32_t> apart = tokenizer.Encode(before);
  const std::vector<int32_t> right = tokenizer.Encode(after);
  apart.insert(apart.end(), right.begin(), right.end());
  return tokenizer.Encode(before + after) != apart;
}

std::string Quoted(const std::string& text, bool tail) {
  constexpr size_t kShown = 12;
  size_t from = tail && text.size() > kShown ? text.size() - kShown : 0;
  size_t end = tail ? text.size() : std::min(text.size(), kShown);
  const auto continues = [&](size_t i) {
    return i < text.size() &&
           (static_cast<unsigned char>(text[i]) & 0xC0) == 0x80;
  };
  while (continues(from)) ++from;
  while (continues(end)) ++end;
  std::string out = "\"";
  for (const char c : text.substr(from, end - from)) {
    if (c == '\n') {
      out += "\\n";
    } else {
      out += c;
    }
  }
  return out + "\"";
}

class Warnings {
 public:
  explicit Warnings(const Tokenizer& tokenizer) : tokenizer_(tokenizer) {}

  void Check(const Side& before, const Side& after) {
    if (!Joins(before.text, after.text, tokenizer_)) return;
    if (++count_ > kMaxWarnings) return;
    const bool space = before.text.back() == ' ';
    out_.push_back(absl::StrCat(
        "the border between ", before.name, " (", Quoted(before.text, true),
        ") and ", after.name, " (", Quoted(after.text, false),
        ") splits what the tokenizer would have joined: ",
        space ? "begin the second with the space that ends the first"
              : "end the first, or begin the second, with a line break or a "
                "space"));
  }

  std::vector<std::string> Take() && {
    if (count_ > kMaxWarnings) {
      out_.push_back(absl::StrCat(count_ - kMaxWarnings, " more such borders"));
    }
    return std::move(out_);
  }

 private:
  const Tokenizer& tokenizer_;
  size_t count_ = 0;
  std::vector<std::string> out_;
};

// Walks a schema in document order; `before_` is what may stand before the
// next text (several after a union).
class SchemaWalk {
 public:
  SchemaWalk(const SchemaTree& tree, const Tokenizer& tokenizer)
      : tree_(tree), tokenizer_(tokenizer), warnings_(tokenizer) {}

  std::vector<std::string> Run() {
    Walk(0);
    int32_t message = tree_.preamble_message;
    for (const RootItem& item : tree_.root) {
      const int32_t next = module(item.modules.front()).message;
      if (next != message) before_.clear();  // markers between
      message = next;
      WalkAlternatives(item.modules);
    }
    return std::move(warnings_).Take();
  }

 private:
  const SchemaModule& module(int32_t index) const {
    return tree_.modules[static_cast<size_t>(index)];
  }

  void WalkAlternatives(const std::vector<int32_t>& modules) {
    constexpr size_t kMaxSides = 16;  // a product of unions has no end
    const std::vector<Side> start = before_;
    std::vector<Side> ends;
    for (const int32_t index : modules) {
      before_ = start;
      Walk(index);
      for (Side& side : before_) {
        if (ends.size() < kMaxSides) ends.push_back(std::move(side));
      }
    }
    before_ = std::move(ends);
  }

  void Walk(int32_t index) {
    const SchemaModule& m = module(index);
    const std::string name = index == 0 ? std::string("the preamble")
                                        : absl::StrCat("module ", m.path);
    for (const SchemaPart& part : m.parts) {
      switch (part.kind) {
        case SchemaPart::Kind::kText: {
          const auto& tokens = m.pieces[static_cast<size_t>(part.index)].tokens;
          Pass(name, TextAfter(tokens, tokenizer_),
               TextBefore(tokens, tokenizer_));
          break;
        }
        case SchemaPart::Kind::kParam: {
          const SchemaParam& param = m.params[static_cast<size_t>(part.index)];
          const std::string text = param.scaffold.empty()
                                       ? std::string(kSampleArgument)
                                       : param.scaffold;
          Pass(absl::StrCat("an argument of param ", m.path, ".", param.name),
               text, text);
          break;
        }
        case SchemaPart::Kind::kModules:
          WalkAlternatives(part.modules);
          break;
      }
    }
  }

  void Pass(const std::string& name, const std::string& begins,
            const std::string& ends) {
    for (const Side& side : before_) {
      warnings_.Check(side, {.name = name, .text = begins});
    }
    before_ = {{.name = name, .text = ends}};
  }

  const SchemaTree& tree_;
  const Tokenizer& tokenizer_;
  Warnings warnings_;
  std::vector<Side> before_;
};

std::string SpanName(const PlanSpan& span) {
  if (span.kind == SpanKind::kFresh) {
    return span.name.empty() ? "the prompt's text"
                             : absl::StrCat("fresh ", span.name);
  }
  return span.name.empty() ? "the preamble"
                           : absl::StrCat("module ", span.name);
}

}  // namespace

std::vector<std::string> SchemaBorders(const SchemaTree& tree,
                                       const Tokenizer& tokenizer) {
  return SchemaWalk(tree, tokenizer).Run();
}

std::vector<std::string> PlanBorders(const Plan& plan,
                                     const Tokenizer& tokenizer) {
  Warnings warnings(tokenizer);
  for (size_t i = 1; i < plan.spans.size(); ++i) {
    const PlanSpan& before = plan.spans[i - 1];
    const PlanSpan& after = plan.spans[i];
    warnings.Check(
        {.name = SpanName(before),
         .text = TextBefore(before.tokens, tokenizer)},
        {.name = SpanName(after), .text = TextAfter(after.tokens, tokenizer)});
  }
  return std::move(warnings).Take();
}

}  // namespace promptcache::pml
