#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "common/digest.h"
#include "common/kv_layout.h"
#include "common/module_identity.h"
#include "common/pml/plan.h"

namespace promptcache {

// What every module of one model and tenant has in common.
struct IdentityBase {
  Digest model_fingerprint;  // tensors, architecture, RoPE geometry, numerics
  Digest tokenizer_digest;
  KvLayout layout;
  std::string isolation_domain = "default";
  bool absolute_positions = false;
};

// Keys of all modules of a plan, in the order of plan.modules (ARCHITECTURE
// section 5). Deterministic across processes and machines of one byte order.
std::vector<ModuleIdentity> ModuleIdentities(const pml::Plan& plan,
                                             const IdentityBase& base);

}  // namespace promptcache
