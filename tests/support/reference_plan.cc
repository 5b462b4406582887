#include "tests/support/reference_plan.h"

#include <algorithm>
#include <iterator>
#include <utility>

namespace promptcache::worker {
namespace {

using States = ReferenceModel::States;
using Seen = ReferenceModel::Seen;
using Token = ReferenceModel::Token;

bool Holds(const std::vector<pml::Piece>& pieces, int32_t position) {
  return std::ranges::any_of(pieces, [position](const pml::Piece& piece) {
    return position >= piece.offset &&
           position - piece.offset < static_cast<int32_t>(piece.tokens.size());
  });
}

States Select(const States& all, const std::vector<size_t>& tokens) {
  States some;
  for (const size_t t : tokens) some.positions.push_back(all.positions[t]);
  const auto pick = [&](const std::vector<std::vector<double>>& from) {
    std::vector<std::vector<double>> to;
    for (const std::vector<double>& layer : from) {
      const size_t dim = layer.size() / all.positions.size();
      std::vector<double>& picked = to.emplace_back();
      for (const size_t t : tokens) {
        const auto row = std::span(layer).subspan(t * dim, dim);
        picked.insert(picked.end(), row.begin(), row.end());
      }
    }
    return to;
  };
  some.keys = pick(all.keys);
  some.values = pick(all.values);
  return some;
}

// The states of a plan's module, without those of its placeholders, at
// positions counted from its origin.
States EncodeModule(const ReferenceModel& model, const pml::PlanModule& module,
                    const std::vector<States>& encoded) {
  std::vector<States> scaffolds;
  scaffolds.reserve(module.context.size());
  std::vector<Seen> seen;
  for (const pml::ContextItem& item : module.context) {
    if (item.module >= 0) {
      seen.push_back({&encoded[static_cast<size_t>(item.module)],
                      static_cast<size_t>(item.first_token),
                      static_cast<size_t>(item.num_tokens), item.offset});
      continue;
    }
    scaffolds.push_back(
        model.Run(TokensAt(item.tokens, item.offset), seen).states);
    seen.push_back(Seen::All(scaffolds.back(), 0));
  }
  std::vector<Token> tokens;
  for (const auto* pieces : {&module.pieces, &module.placeholders}) {
    for (const pml::Piece& piece : *pieces) {
      std::ranges::copy(TokensAt(piece.tokens, piece.offset),
                        std::back_inserter(tokens));
    }
  }
  std::ranges::sort(tokens, {}, &Token::position);
  const States all = model.Run(tokens, seen).states;

  std::vector<size_t> kept;
  for (size_t t = 0; t < tokens.size(); ++t) {
    if (Holds(module.pieces, tokens[t].position)) kept.push_back(t);
  }
  return Select(all, kept);
}

// Where the first token of a piece lies among its module's.
size_t FirstToken(const pml::PlanModule& module, int32_t piece) {
  size_t first = 0;
  for (int32_t p = 0; p < piece; ++p) {
    first += module.pieces[static_cast<size_t>(p)].tokens.size();
  }
  return first;
}

}  // namespace

std::vector<std::vector<double>> RunReferencePlan(
    const ReferenceModel& model, std::span<const ReferenceSegment> segments,
    std::span<const ReferenceItem> items) {
  std::vector<States> encoded;
  encoded.reserve(segments.size());
  for (const ReferenceSegment& segment : segments) {
    std::vector<Seen> context;
    for (const size_t c : segment.context) {
      context.push_back(Seen::All(encoded[c], 0));
    }
    encoded.push_back(
        model.Run(TokensAt(segment.tokens, segment.encode_start), context)
            .states);
  }
  std::vector<std::vector<double>> logits;
  std::vector<States> fresh;
  fresh.reserve(items.size());
  std::vector<Seen> seen;
  for (const ReferenceItem& item : items) {
    if (item.segment >= 0) {
      const auto s = static_cast<size_t>(item.segment);
      seen.push_back(
          Seen::All(encoded[s], item.start - segments[s].encode_start));
      continue;
    }
    auto result = model.Run(TokensAt(item.tokens, item.start), seen);
    std::ranges::move(result.logits, std::back_inserter(logits));
    fresh.push_back(std::move(result.states));
    seen.push_back(Seen::All(fresh.back(), 0));
  }
  return logits;
}

std::vector<std::vector<double>> RunReferencePlan(const ReferenceModel& model,
                                                  const pml::Plan& plan) {
  std::vector<States> encoded;
  encoded.reserve(plan.modules.size());
  for (const pml::PlanModule& module : plan.modules) {
    encoded.push_back(EncodeModule(model, module, encoded));
  }
  std::vector<std::vector<double>> logits;
  std::vector<States> fresh;
  fresh.reserve(plan.spans.size());
  std::vector<Seen> seen;
  for (const pml::PlanSpan& span : plan.spans) {
    std::vector<Token> tokens = TokensAt(span.tokens, span.start);
    if (span.kind == pml::SpanKind::kCached) {
      const auto m = static_cast<size_t>(span.module);
      const pml::PlanModule& module = plan.modules[m];
      const auto p = static_cast<size_t>(span.piece);
      seen.push_back({&encoded[m], FirstToken(module, span.piece),
                      tokens.size(), span.start - module.pieces[p].offset});
      if (&span != &plan.spans.back()) continue;
      --seen.back().num_tokens;
      tokens = {tokens.back()};
    }
    auto result = model.Run(tokens, seen);
    std::ranges::move(result.logits, std::back_inserter(logits));
    fresh.push_back(std::move(result.states));
    seen.push_back(Seen::All(fresh.back(), 0));
  }
  return logits;
}

}  // namespace promptcache::worker
