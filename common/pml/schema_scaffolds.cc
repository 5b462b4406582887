#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_set.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "common/pml/schema_tree.h"
#include "common/status_macros.h"

namespace promptcache::pml {
namespace {

absl::Status Fault(const SchemaScaffold& at, std::string reason,
                   std::string detail) {
  return PmlError{.reason = std::move(reason),
                  .source = Source::kSchema,
                  .place = at.place,
                  .detail = std::move(detail)}
      .ToStatus();
}

bool IsLeaf(const SchemaModule& m) {
  return std::none_of(m.parts.begin(), m.parts.end(), [](const auto& part) {
    return part.kind != SchemaPart::Kind::kText;
  });
}

absl::Status Judge(const SchemaTree& tree, SchemaScaffold* scaffold) {
  const std::vector<std::string> names = absl::StrSplit(
      scaffold->list, absl::ByAnyChar(" \t\n"), absl::SkipEmpty());
  for (const std::string& name : names) {
    const int32_t index = tree.Find(name);
    if (index < 0 || tree.modules[static_cast<size_t>(index)].parent >= 0) {
      return Fault(*scaffold, "PML_UNKNOWN_MODULE",
                   absl::StrCat("no module \"", name, "\" at the root"));
    }
    scaffold->modules.push_back(index);
  }
  if (names.size() < 2) {
    return Fault(*scaffold, "PML_BAD_SCAFFOLD",
                 "a scaffold names two or more modules");
  }
  absl::flat_hash_set<int32_t> seen;
  absl::flat_hash_set<int32_t> unions;
  for (const int32_t index : scaffold->modules) {
    const SchemaModule& m = tree.modules[static_cast<size_t>(index)];
    const bool alone_of_union =
        m.union_id < 0 || unions.insert(m.union_id).second;
    if (m.cached && IsLeaf(m) && alone_of_union && seen.insert(index).second) {
      continue;
    }
    return Fault(
        *scaffold, "PML_BAD_SCAFFOLD",
        absl::StrCat("module \"", m.name,
                     "\": a scaffold's modules are different cached ones of "
                     "the root, without params and modules of their own, no "
                     "two of one union"));
  }
  scaffold->names = absl::StrJoin(names, " ");
  return absl::OkStatus();
}

}  // namespace

absl::Status JudgeScaffolds(SchemaTree* tree) {
  for (SchemaScaffold& scaffold : tree->scaffolds) {
    PC_RETURN_IF_ERROR(Judge(*tree, &scaffold));
  }
  return absl::OkStatus();
}

}  // namespace promptcache::pml
