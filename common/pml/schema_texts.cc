#include "common/pml/schema_texts.h"

#include <algorithm>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>

#include "absl/memory/memory.h"
#include "common/pml/plan_builder.h"
#include "common/pml/schema_tree.h"

namespace promptcache::pml {
namespace {

// Less is found by chance, and not worth a module's round trip.
constexpr size_t kMinBytes = 32;

using Parts = std::vector<MarkerPart>;

// A byte of a part; the end of one is the beginning of the next.
struct Spot {
  size_t part = 0;
  size_t byte = 0;

  friend bool operator<(const Spot& a, const Spot& b) {
    return std::tie(a.part, a.byte) < std::tie(b.part, b.byte);
  }
};

struct Stretch {
  Spot begin, end;
  int32_t module = -1;
};

// Where `what` ends when it stands at `at`.
std::optional<Spot> EndOf(const Parts& text, Spot at, const Parts& what) {
  for (size_t i = 0; i < what.size(); ++i) {
    if (at.part == text.size()) return std::nullopt;
    const MarkerPart& there = text[at.part];
    const bool last = i + 1 == what.size();
    const std::string_view rest = std::string_view(there.text).substr(at.byte);
    if (there.control != what[i].control || !rest.starts_with(what[i].text)) {
      return std::nullopt;
    }
    if (rest.size() == what[i].text.size()) {
      at = {at.part + 1, 0};
    } else if (last && !there.control) {
      at.byte += what[i].text.size();
    } else {
      return std::nullopt;
    }
  }
  return at;
}

// The first byte of `text[part]`, from `byte` on, where `what` may begin.
size_t MayBegin(const MarkerPart& part, size_t byte, const Parts& what) {
  if (what.size() == 1) return part.text.find(what[0].text, byte);
  // A marker follows: it is the part's end.
  if (!part.text.ends_with(what[0].text)) return std::string::npos;
  const size_t begin = part.text.size() - what[0].text.size();
  return begin < byte ? std::string::npos : begin;
}

// The first stretch from `from` on that is `what` and overlaps none of `taken`.
std::optional<Stretch> FindFree(const Parts& text, Spot from, const Parts& what,
                                const std::vector<Stretch>& taken) {
  const auto is_free = [&](const Stretch& s) {
    return std::none_of(taken.begin(), taken.end(), [&](const Stretch& t) {
      return s.begin < t.end && t.begin < s.end;
    });
  };
  for (; from.part < text.size(); from = {from.part + 1, 0}) {
    for (size_t at = MayBegin(text[from.part], from.byte, what);
         at != std::string::npos;
         at = MayBegin(text[from.part], at + 1, what)) {
      const auto end = EndOf(text, {from.part, at}, what);
      if (!end.has_value()) continue;
      const Stretch stretch{.begin = {from.part, at}, .end = *end};
      if (is_free(stretch)) return stretch;
    }
  }
  return std::nullopt;
}

void AppendFresh(const Parts& text, Spot begin, Spot end,
                 std::vector<PlanItem>* items) {
  MarkedText fresh;
  for (; begin < end; begin = {begin.part + 1, 0}) {
    const MarkerPart& part = text[begin.part];
    const size_t count =
        begin.part == end.part ? end.byte - begin.byte : std::string::npos;
    if (part.control) {
      fresh.AppendMarkers({part});
    } else {
      fresh.AppendText(std::string_view(part.text).substr(begin.byte, count));
    }
  }
  if (!fresh.empty()) items->push_back({.text = std::move(fresh)});
}

// What a model reads: bytes, and the tokens that stand for none.
std::pair<std::string, std::vector<std::pair<size_t, int32_t>>> ReadText(
    const Plan& plan, const Tokenizer& tokenizer) {
  std::pair<std::string, std::vector<std::pair<size_t, int32_t>>> read;
  for (const PlanSpan& span : plan.spans) {
    for (const int32_t id : span.tokens) {
      const std::string piece = tokenizer.Decode(id);
      if (piece.empty()) read.second.emplace_back(read.first.size(), id);
      read.first += piece;
    }
  }
  return read;
}

// One text, all of whose tokens saw the preamble and nothing else.
bool IsOneText(const SchemaModule& module) {
  return module.cached && module.parent < 0 && module.params.empty() &&
         module.parts.size() == 1 && module.texts.size() == 1 &&
         module.num_tokens > 0;
}

size_t NumBytes(const SchemaModule& module) {
  size_t bytes = 0;
  for (const MarkerPart& part : module.texts[0].parts()) {
    if (!part.control) bytes += part.text.size();
  }
  return bytes;
}

std::vector<int32_t> LongestFirst(const SchemaTree& tree) {
  std::vector<int32_t> found;
  if (tree.modules.front().texts.size() > 1) return found;
  for (size_t i = 1; i < tree.modules.size(); ++i) {
    const SchemaModule& module = tree.modules[i];
    if (IsOneText(module) && NumBytes(module) >= kMinBytes) {
      found.push_back(static_cast<int32_t>(i));
    }
  }
  std::sort(found.begin(), found.end(), [&](int32_t a, int32_t b) {
    const size_t bytes_a = NumBytes(tree.modules[static_cast<size_t>(a)]);
    const size_t bytes_b = NumBytes(tree.modules[static_cast<size_t>(b)]);
    return bytes_a != bytes_b ? bytes_a > bytes_b : a < b;
  });
  return found;
}

}  // namespace

SchemaTexts::SchemaTexts(std::shared_ptr<const Schema> schema)
    : schema_(std::move(schema)) {
  for (const bool messages : {false, true}) {
    modules_[messages ? 1 : 0] = LongestFirst(schema_->tree(messages));
  }
}

std::shared_ptr<const SchemaTexts> SchemaTexts::Create(
    std::shared_ptr<const Schema> schema) {
  auto texts = absl::WrapUnique(new SchemaTexts(std::move(schema)));
  if (texts->modules_[0].empty() && texts->modules_[1].empty()) return nullptr;
  return texts;
}

std::optional<Plan> SchemaTexts::Find(const Rendered& rendered,
                                      const CompileOptions& options) const {
  const SchemaTree& tree = schema_->tree(rendered.messages);
  const Parts& text = rendered.text.parts();
  Spot begin;
  if (const SchemaModule& preamble = tree.modules.front();
      !preamble.texts.empty()) {
    const auto end = EndOf(text, begin, preamble.texts[0].parts());
    if (!end.has_value()) return std::nullopt;
    begin = *end;
  }
  std::vector<Stretch> found;
  for (const int32_t module : modules_[rendered.messages ? 1 : 0]) {
    const SchemaModule& m = tree.modules[static_cast<size_t>(module)];
    const auto is_sibling = [&](const Stretch& other) {
      return tree.modules[static_cast<size_t>(other.module)].union_id ==
             m.union_id;
    };
    if (m.union_id >= 0 && std::ranges::any_of(found, is_sibling)) continue;
    auto stretch = FindFree(text, begin, m.texts[0].parts(), found);
    if (!stretch.has_value()) continue;
    stretch->module = module;
    found.push_back(*stretch);
  }
  if (found.empty()) return std::nullopt;
  std::sort(found.begin(), found.end(), [](const Stretch& a, const Stretch& b) {
    return a.begin < b.begin;
  });

  std::vector<PlanItem> items;
  for (const Stretch& stretch : found) {
    AppendFresh(text, begin, stretch.begin, &items);
    items.push_back({.module = stretch.module});
    begin = stretch.end;
  }
  AppendFresh(text, begin, {text.size(), 0}, &items);
  auto plan = BuildPlan(*schema_, tree, std::move(items), options);
  if (!plan.ok() || ReadText(*plan, schema_->tokenizer()) !=
                        ReadText(*rendered.plan, schema_->tokenizer())) {
    return std::nullopt;
  }
  return *std::move(plan);
}

}  // namespace promptcache::pml
