#include "common/byte_size.h"

#include <array>
#include <cmath>
#include <limits>

#include "absl/strings/ascii.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "common/strings.h"

namespace promptcache {
namespace {

struct Unit {
  const char* name;
  int shift;
};
constexpr std::array<Unit, 4> kUnits = {
    {{"TiB", 40}, {"GiB", 30}, {"MiB", 20}, {"KiB", 10}}};

}  // namespace

absl::StatusOr<uint64_t> ParseByteSize(std::string_view text) {
  absl::Status error = absl::InvalidArgumentError(
      absl::StrCat("\"", ToAbsl(text),
                   "\" is not a number of bytes such as 4096, 64KiB, "
                   "256MiB or 8GiB"));
  const absl::string_view trimmed = absl::StripAsciiWhitespace(ToAbsl(text));
  size_t digits = 0;
  while (digits < trimmed.size() &&
         absl::ascii_isdigit(static_cast<uint8_t>(trimmed[digits]))) {
    ++digits;
  }
  uint64_t number = 0;
  if (!absl::SimpleAtoi(trimmed.substr(0, digits), &number)) return error;
  const std::string unit =
      absl::AsciiStrToLower(absl::StripAsciiWhitespace(trimmed.substr(digits)));
  if (unit.empty() || unit == "b") return number;
  for (const Unit& known : kUnits) {
    const std::string name = absl::AsciiStrToLower(known.name);
    if (unit != name && unit != name.substr(0, 1)) continue;
    if (number > std::numeric_limits<uint64_t>::max() >> known.shift) {
      return error;
    }
    return number << known.shift;
  }
  return error;
}

std::string FormatByteSize(uint64_t num_bytes) {
  for (const Unit& unit : kUnits) {
    const uint64_t whole = num_bytes >> unit.shift;
    if (whole != 0 && whole << unit.shift == num_bytes) {
      return absl::StrCat(whole, unit.name);
    }
  }
  return absl::StrCat(num_bytes);
}

std::string RoundedByteSize(uint64_t num_bytes) {
  for (const Unit& unit : kUnits) {
    if (num_bytes >> unit.shift == 0) continue;
    const double value =
        std::ldexp(static_cast<double>(num_bytes), -unit.shift);
    const bool whole = value >= 100 || value == std::floor(value);
    return whole ? absl::StrFormat("%.0f %s", value, unit.name)
                 : absl::StrFormat("%.1f %s", value, unit.name);
  }
  return absl::StrCat(num_bytes, " B");
}

bool AbslParseFlag(absl::string_view text, ByteSize* size, std::string* error) {
  const absl::StatusOr<uint64_t> parsed = ParseByteSize(ToStd(text));
  if (!parsed.ok()) {
    *error = std::string(parsed.status().message());
    return false;
  }
  size->num_bytes = *parsed;
  return true;
}

std::string AbslUnparseFlag(ByteSize size) {
  return FormatByteSize(size.num_bytes);
}

}  // namespace promptcache
