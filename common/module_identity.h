#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string_view>

#include "common/digest.h"

// What a module's identity is made of, as the daemon sees it: digests, no
// tokens. How keys are computed: common/module_key.h.
namespace promptcache {

using ModuleKey = Digest;

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

}  // namespace promptcache
