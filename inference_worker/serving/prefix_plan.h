#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "common/pml/plan.h"

namespace promptcache::worker {

// Tokens of an anonymous module: small, since a prompt shares whole ones only;
// a multiple of any sensible page.
inline constexpr int32_t kPrefixChunkTokens = 64;
// The schema that anonymous modules are listed under; no document has such a
// name.
inline constexpr char kPrefixSchema[] = "~prefix";

// The first `count` chunks of `tokens` as modules, each of which saw all before
// it. All have their origin at the sequence's beginning, so that keys rest
// rotated to the places where a plain sequence has them: states that a request
// computed as fresh or generated tokens are the module's as they lie. A path
// names the tokens up to the chunk's end.
std::vector<pml::PlanModule> PrefixModules(std::span<const int32_t> tokens,
                                           size_t count);

// Makes whole chunks of a prompt without schema modules; its last token, and
// what is short of a chunk, stay fresh. Changes nothing in a plan that is not
// one fresh span from position 0, and returns false. EXACT stays EXACT: a
// prefix chain is full attention.
bool CutPrefix(pml::Plan* plan);

}  // namespace promptcache::worker
