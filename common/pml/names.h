#pragma once

#include <cstdint>
#include <optional>
#include <string_view>

#include "common/chat_template.h"

namespace promptcache::pml {

// [A-Za-z_][A-Za-z0-9_.-]*, and no element's name.
bool IsName(std::string_view text);

// The role of a role element.
std::optional<Role> RoleOf(std::string_view element);

// Digits, from 1; 0 when it is no length (or more than nine digits: no model
// has such a context).
int32_t ParseLength(std::string_view text);

}  // namespace promptcache::pml
