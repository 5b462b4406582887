#include "common/pml/exactness.h"

#include <algorithm>
#include <span>

namespace promptcache::pml {
namespace {

// The plan's tokens up to a span, at positions from 0 without a gap.
class Prefix {
 public:
  explicit Prefix(std::span<const int32_t> tokens) : tokens_(tokens) {}

  // What a module saw next: `tokens`, the first at `position`.
  bool Takes(int64_t position, std::span<const int32_t> tokens) {
    if (position != static_cast<int64_t>(seen_) ||
        tokens.size() > tokens_.size() - seen_ ||
        !std::equal(tokens.begin(), tokens.end(),
                    tokens_.begin() + static_cast<ptrdiff_t>(seen_))) {
      return false;
    }
    seen_ += tokens.size();
    return true;
  }
  bool AllTaken() const { return seen_ == tokens_.size(); }

 private:
  std::span<const int32_t> tokens_;
  size_t seen_ = 0;
};

// Tokens [first, first + count) of a module's pieces taken together.
bool TakesStates(const PlanModule& module, int64_t origin, int64_t first,
                 int64_t count, Prefix* prefix) {
  for (const Piece& piece : module.pieces) {
    const int64_t n = static_cast<int64_t>(piece.tokens.size());
    if (first < n && count > 0) {
      const int64_t part = std::min(n - first, count);
      if (!prefix->Takes(origin + piece.offset + first,
                         std::span(piece.tokens)
                             .subspan(static_cast<size_t>(first),
                                      static_cast<size_t>(part)))) {
        return false;
      }
      count -= part;
    }
    first = std::max<int64_t>(0, first - n);
  }
  return true;
}

// The module's own text and scaffold texts before the piece, by position.
bool TakesOwn(const PlanModule& module, int64_t origin, size_t before,
              Prefix* prefix) {
  auto slot = module.placeholders.begin();
  const auto take_slots = [&](int32_t end) {
    for (; slot != module.placeholders.end() && slot->offset < end; ++slot) {
      if (!prefix->Takes(origin + slot->offset, slot->tokens)) return false;
    }
    return true;
  };
  for (size_t i = 0; i < before; ++i) {
    const Piece& piece = module.pieces[i];
    if (!take_slots(piece.offset) ||
        !prefix->Takes(origin + piece.offset, piece.tokens)) {
      return false;
    }
  }
  return take_slots(module.pieces[before].offset);
}

bool SawThePrefix(const Plan& plan, const PlanSpan& span,
                  std::span<const int32_t> tokens) {
  const PlanModule& module = plan.modules[static_cast<size_t>(span.module)];
  const size_t piece = static_cast<size_t>(span.piece);
  const int64_t origin = span.start - module.pieces[piece].offset;
  Prefix prefix(tokens);
  for (const ContextItem& item : module.context) {
    const int64_t at = origin + item.offset;
    const bool same =
        item.module < 0
            ? prefix.Takes(at, item.tokens)
            : TakesStates(plan.modules[static_cast<size_t>(item.module)], at,
                          item.first_token, item.num_tokens, &prefix);
    if (!same) return false;
  }
  return TakesOwn(module, origin, piece, &prefix) && prefix.AllTaken();
}

}  // namespace

Exactness ExactnessOf(const Plan& plan) {
  std::vector<int32_t> tokens;
  tokens.reserve(static_cast<size_t>(plan.num_tokens));
  for (const PlanSpan& span : plan.spans) {
    if (static_cast<size_t>(span.start) != tokens.size()) {
      return Exactness::kModular;
    }
    if (span.kind == SpanKind::kCached && !SawThePrefix(plan, span, tokens)) {
      return Exactness::kModular;
    }
    tokens.insert(tokens.end(), span.tokens.begin(), span.tokens.end());
  }
  return Exactness::kExact;
}

}  // namespace promptcache::pml
