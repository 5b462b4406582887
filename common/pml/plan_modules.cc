#include "common/pml/plan_modules.h"

#include <utility>

namespace promptcache::pml {
namespace {

// All but the context.
PlanModule States(const SchemaModule& m) {
  PlanModule out;
  out.path = m.path;
  out.length = m.length;
  out.schema_start = m.schema_start;
  out.text_sha256 = m.text_sha256;
  for (const Piece& piece : m.pieces) {
    if (!piece.tokens.empty()) out.pieces.push_back(piece);
  }
  for (const SchemaParam& param : m.params) {
    if (param.tokens.empty()) continue;
    out.placeholders.push_back(
        {.offset = param.offset, .tokens = param.tokens});
  }
  return out;
}

}  // namespace

PlanModules::PlanModules(const SchemaTree& tree, Plan* plan)
    : tree_(tree), plan_(*plan), index_(tree.modules.size(), -1) {}

int32_t PlanModules::Add(int32_t index) {
  const SchemaModule& m = module(index);
  if (m.num_tokens == 0) return -1;
  int32_t& known = index_[static_cast<size_t>(index)];
  if (known >= 0) return known;
  PlanModule added = States(m);
  std::vector<ContextItem> context = tree_.ContextOf(index);
  for (ContextItem& item : context) {
    if (item.module >= 0) item.module = Add(item.module);
  }
  added.context = std::move(context);
  return known = Push(std::move(added));
}

std::vector<int32_t> PlanModules::AddScaffold(const SchemaScaffold& scaffold) {
  std::vector<int32_t> members;
  int32_t before = 0;  // tokens of the members before
  for (const int32_t index : scaffold.modules) {
    const SchemaModule& m = module(index);
    if (before == 0) {
      members.push_back(Add(index));
    } else if (m.num_tokens == 0) {
      members.push_back(-1);
    } else {
      PlanModule added = States(m);
      // The preamble, directly before the first member.
      std::vector<ContextItem> context = tree_.ContextOf(index);
      for (ContextItem& item : context) {
        item.module = Add(item.module);
        item.offset -= before;
      }
      int32_t offset = -before;
      for (size_t i = 0; i < members.size(); ++i) {
        const SchemaModule& other = module(scaffold.modules[i]);
        if (members[i] < 0) continue;
        context.push_back({.module = members[i],
                           .num_tokens = other.num_tokens,
                           .offset = offset});
        offset += other.length;
      }
      added.context = std::move(context);
      members.push_back(Push(std::move(added)));
    }
    before += m.length;
  }
  return members;
}

int32_t PlanModules::Push(PlanModule added) {
  plan_.modules.push_back(std::move(added));
  return static_cast<int32_t>(plan_.modules.size()) - 1;
}

}  // namespace promptcache::pml
