#pragma once

#include <cstdint>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "common/pml/plan.h"

namespace promptcache::worker {

// Plans of every shape, without PML: modules with gaps, placeholders and
// contexts (states of earlier modules, whole or in part, and texts), spans in
// an order of their own, modules that are only context. The same seed gives
// the same plan.
class PlanBuilder {
 public:
  explicit PlanBuilder(uint32_t seed, int32_t vocab_size = 64)
      : random_(seed), vocab_size_(vocab_size) {}

  std::vector<int32_t> Tokens(int32_t count);
  // Between lo and hi, both included.
  int32_t Pick(int32_t lo, int32_t hi);
  // Adds a module with random pieces, seeing `context`.
  int32_t AddModule(std::vector<pml::ContextItem> context);
  // Places a module's pieces with its origin at `origin`.
  void PlaceModule(int32_t module, int32_t origin);
  void PlaceFresh(int32_t start, std::vector<int32_t> tokens);
  std::shared_ptr<const pml::Plan> Build();

  pml::Plan& plan() { return plan_; }

  // A random plan; `ends_cached`: its last span is a module's.
  static std::shared_ptr<const pml::Plan> Random(uint32_t seed,
                                                 bool ends_cached = false);
  // Preamble, one module after it that saw it, and a question: EXACT.
  static std::shared_ptr<const pml::Plan> Exact(uint32_t seed,
                                                int32_t module_tokens = 11);

 private:
  std::mt19937 random_;
  const int32_t vocab_size_;
  pml::Plan plan_;
  int32_t end_ = 0;  // one after the highest position used
};

}  // namespace promptcache::worker
