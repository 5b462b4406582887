#pragma once

// Inside common/pml: fills Plan::modules from a schema's tree.

#include <cstdint>
#include <vector>

#include "common/pml/plan.h"
#include "common/pml/schema_tree.h"

namespace promptcache::pml {

// The modules of one plan: each once, after those that its context names.
// Thread-compatible. Must not outlive the tree nor the plan.
class PlanModules {
 public:
  PlanModules(const SchemaTree& tree, Plan* plan);

  // The index of a module's own states in the plan, which are added when they
  // are not there yet; -1 when it has no tokens. The module is a cached one.
  int32_t Add(int32_t module);
  // The members' co-encoded states, in the scaffold's order. The first one's
  // are its own: it saw nothing of the others. PlanModule::scaffold is the
  // caller's to set.
  std::vector<int32_t> AddScaffold(const SchemaScaffold& scaffold);

 private:
  const SchemaModule& module(int32_t index) const {
    return tree_.modules[static_cast<size_t>(index)];
  }
  int32_t Push(PlanModule module);

  const SchemaTree& tree_;
  Plan& plan_;
  std::vector<int32_t> index_;  // by module of the tree; -1: not added
};

}  // namespace promptcache::pml
