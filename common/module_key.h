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

// Keys of all modules of a plan, in the order of plan.modules. Deterministic
// across processes and machines of one byte order.
//
// A key is the SHA-256 of all that a module's states depend on, as tagged
// fields: the version of this format; `base` (of the layout not the page size);
// the context key; the module's pieces and the slots of its params, each with
// its distance from the module's origin; with absolute_positions where it
// starts in its schema. Where it stands in a prompt is no part of it. The
// context key is the SHA-256 of what the module saw, in order: states (key of
// their module, which tokens, distance) and scaffold texts (tokens, distance);
// zeros when it saw nothing.
std::vector<ModuleIdentity> ModuleIdentities(const pml::Plan& plan,
                                             const IdentityBase& base);

}  // namespace promptcache
