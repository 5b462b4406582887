#include "tests/inference_worker/serving/plan_builder.h"

#include <algorithm>
#include <utility>

#include "common/digest.h"

namespace promptcache::worker {

using pml::ContextItem;
using pml::Plan;
using pml::PlanModule;
using pml::PlanSpan;
using pml::SpanKind;

int32_t PlanBuilder::Pick(int32_t lo, int32_t hi) {
  return lo +
         static_cast<int32_t>(random_() % static_cast<uint32_t>(hi - lo + 1));
}

std::vector<int32_t> PlanBuilder::Tokens(int32_t count) {
  std::vector<int32_t> tokens;
  for (int32_t i = 0; i < count; ++i)
    tokens.push_back(Pick(0, vocab_size_ - 1));
  return tokens;
}

int32_t PlanBuilder::AddModule(std::vector<ContextItem> context) {
  PlanModule m;
  m.path = "m" + std::to_string(plan_.modules.size());
  m.context = std::move(context);
  int32_t offset = Pick(0, 2);
  const int32_t pieces = Pick(1, 3);
  for (int32_t i = 0; i < pieces; ++i) {
    m.pieces.push_back({offset, Tokens(Pick(1, 7))});
    offset += static_cast<int32_t>(m.pieces.back().tokens.size());
    // Room of a param, with or without a scaffold text in it, or of a child.
    const int32_t room = Pick(0, 5);
    if (room > 0 && Pick(0, 1) == 1) {
      m.placeholders.push_back({offset, Tokens(Pick(1, room))});
    }
    offset += room;
  }
  m.length = offset;
  m.text_sha256 = Sha256Of(m.path);
  plan_.modules.push_back(std::move(m));
  return static_cast<int32_t>(plan_.modules.size()) - 1;
}

void PlanBuilder::PlaceModule(int32_t module, int32_t origin) {
  const PlanModule& m = plan_.modules[static_cast<size_t>(module)];
  for (size_t i = 0; i < m.pieces.size(); ++i) {
    PlanSpan span;
    span.kind = SpanKind::kCached;
    span.name = m.path;
    span.module = module;
    span.piece = static_cast<int32_t>(i);
    span.start = origin + m.pieces[i].offset;
    span.tokens = m.pieces[i].tokens;
    end_ = std::max(end_, span.start + span.num_tokens());
    plan_.num_cached_tokens += span.num_tokens();
    plan_.spans.push_back(std::move(span));
  }
}

void PlanBuilder::PlaceFresh(int32_t start, std::vector<int32_t> tokens) {
  PlanSpan span;
  span.start = start;
  span.tokens = std::move(tokens);
  end_ = std::max(end_, start + span.num_tokens());
  plan_.spans.push_back(std::move(span));
}

std::shared_ptr<const Plan> PlanBuilder::Build() {
  plan_.schema = "test";
  plan_.num_tokens = 0;
  for (const PlanSpan& span : plan_.spans)
    plan_.num_tokens += span.num_tokens();
  plan_.next_position = end_;
  return std::make_shared<const Plan>(std::move(plan_));
}

std::shared_ptr<const Plan> PlanBuilder::Random(uint32_t seed,
                                                bool ends_cached) {
  PlanBuilder b(seed);
  const int32_t preamble = b.AddModule({});
  const int32_t preamble_tokens = b.plan().modules[0].num_tokens();
  const int32_t preamble_length = b.plan().modules[0].length;
  const int32_t modules = b.Pick(1, 5);
  for (int32_t i = 0; i < modules; ++i) {
    std::vector<ContextItem> context;
    if (b.Pick(0, 3) > 0) {
      context.push_back({.module = preamble,
                         .num_tokens = preamble_tokens,
                         .offset = -preamble_length});
    }
    if (i > 0 && b.Pick(0, 1) == 1) {  // nested: a part of an earlier module
      const int32_t parent = b.Pick(1, i);
      const int32_t tokens =
          b.plan().modules[static_cast<size_t>(parent)].num_tokens();
      const int32_t first = b.Pick(0, tokens - 1);
      context.push_back({.module = parent,
                         .first_token = first,
                         .num_tokens = b.Pick(1, tokens - first),
                         .offset = -b.Pick(tokens, 30)});
    }
    if (b.Pick(0, 2) == 0) {  // an argument's scaffold text of a parent
      context.push_back({.offset = -b.Pick(5, 9), .tokens = b.Tokens(4)});
    }
    b.AddModule(std::move(context));
  }
  b.PlaceModule(preamble, 0);
  int32_t position = preamble_length;
  for (int32_t i = 0; i < modules; ++i) {
    if (b.Pick(0, 4) == 0) continue;  // only context, or not used at all
    if (b.Pick(0, 2) == 0) {
      const int32_t n = b.Pick(1, 6);
      b.PlaceFresh(position, b.Tokens(n));
      position += n + b.Pick(0, 1) * 3;
    }
    const int32_t module = 1 + i;
    b.PlaceModule(module, position);
    position += b.plan().modules[static_cast<size_t>(module)].length;
  }
  if (ends_cached) {
    b.PlaceModule(b.Pick(0, modules), position);
  } else {
    // Sometimes into a gap before positions that are used already.
    b.PlaceFresh(b.Pick(0, 4) == 0 ? preamble_length + 1 : position,
                 b.Tokens(b.Pick(1, 9)));
  }
  return b.Build();
}

std::shared_ptr<const Plan> PlanBuilder::Exact(uint32_t seed,
                                               int32_t module_tokens) {
  PlanBuilder b(seed);
  const auto add = [&](int32_t tokens, std::vector<ContextItem> context) {
    PlanModule m;
    m.path = b.plan().modules.empty() ? "" : "doc";
    m.context = std::move(context);
    m.pieces.push_back({0, b.Tokens(tokens)});
    m.length = tokens;
    m.text_sha256 = Sha256Of(m.path);
    b.plan().modules.push_back(std::move(m));
  };
  add(5, {});
  add(module_tokens, {{.module = 0, .num_tokens = 5, .offset = -5}});
  b.PlaceModule(0, 0);
  b.PlaceModule(1, 5);
  b.PlaceFresh(5 + module_tokens, b.Tokens(6));
  b.plan().exactness = pml::Exactness::kExact;
  return b.Build();
}

}  // namespace promptcache::worker
