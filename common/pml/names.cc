#include "common/pml/names.h"

#include <algorithm>
#include <array>

namespace promptcache::pml {
namespace {

constexpr std::array<std::string_view, 8> kElements = {
    "schema", "prompt",    "module",   "union",
    "param",  "parameter", "scaffold", "import"};

bool IsLetter(char c) {
  return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '_';
}
bool IsDigit(char c) { return c >= '0' && c <= '9'; }

}  // namespace

bool IsName(std::string_view text) {
  if (text.empty() || !IsLetter(text[0])) return false;
  const bool plain = std::all_of(text.begin(), text.end(), [](char c) {
    return IsLetter(c) || IsDigit(c) || c == '.' || c == '-';
  });
  return plain && !RoleOf(text).has_value() &&
         std::find(kElements.begin(), kElements.end(), text) == kElements.end();
}

std::optional<Role> RoleOf(std::string_view element) {
  for (const Role role : {Role::kSystem, Role::kUser, Role::kAssistant}) {
    if (element == RoleName(role)) return role;
  }
  return std::nullopt;
}

int32_t ParseLength(std::string_view text) {
  if (text.empty() || !std::all_of(text.begin(), text.end(), IsDigit)) {
    return 0;
  }
  text.remove_prefix(std::min(text.find_first_not_of('0'), text.size()));
  if (text.size() > 9) return 0;
  int32_t value = 0;
  for (const char c : text) value = value * 10 + (c - '0');
  return value;
}

}  // namespace promptcache::pml
