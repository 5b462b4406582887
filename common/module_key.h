#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "common/digest.h"
#include "common/kv_layout.h"
#include "common/pml/plan.h"

namespace promptcache {

using ModuleKey = Digest;

// What every module of one model and tenant has in common.
struct IdentityBase {
  Digest model_fingerprint;  // tensors, architecture, RoPE geometry, numerics
  Digest tokenizer_digest;
  KvLayout layout;
  std::string isolation_domain = "default";
  bool absolute_positions = false;
};

// The fields of an identity in the order in which they are compared when the
// daemon says why a module of the same name was not found.
enum class IdentityField : uint32_t {
  kNone = 0,
  kModel = 1,
  kTokenizer = 2,
  kLayout = 3,
  kIsolationDomain = 4,
  kContext = 5,
  kPieces = 6,
  kStart = 7,
};
inline constexpr size_t kNumIdentityFields = 7;
std::string_view IdentityFieldName(IdentityField field);

// The first eight bytes of each field's SHA-256, IdentityField order from
// kModel: enough to say which field differs; never used as an identity.
using IdentityParts = std::array<uint64_t, kNumIdentityFields>;

struct ModuleIdentity {
  ModuleKey key;
  Digest context_key;
  IdentityParts parts{};
};

// Keys of all modules of a plan, in the order of plan.modules (ARCHITECTURE
// section 5). Deterministic across processes and machines of one byte order.
std::vector<ModuleIdentity> ModuleIdentities(const pml::Plan& plan,
                                             const IdentityBase& base);

}  // namespace promptcache
