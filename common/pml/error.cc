#include "common/pml/error.h"

#include <charconv>

#include "absl/strings/cord.h"
#include "absl/strings/str_cat.h"
#include "common/strings.h"

namespace promptcache::pml {
namespace {

constexpr char kPayloadUrl[] = "promptcache/pml-error";

// The payload is a list of strings, each with its length before it: the same
// process writes and reads it, so that it needs no more.
void PutString(std::string_view value, std::string* out) {
  absl::StrAppend(out, value.size(), ":", ToAbsl(value));
}

bool TakeString(std::string_view* in, std::string* out) {
  size_t size = 0;
  const auto [end, ec] =
      std::from_chars(in->data(), in->data() + in->size(), size);
  if (ec != std::errc()) return false;
  const size_t used = static_cast<size_t>(end - in->data());
  if (used >= in->size() || (*in)[used] != ':') return false;
  in->remove_prefix(used + 1);
  if (size > in->size()) return false;
  out->assign(in->substr(0, size));
  in->remove_prefix(size);
  return true;
}

template <typename T>
bool TakeNumber(std::string_view* in, T* out) {
  std::string digits;
  if (!TakeString(in, &digits)) return false;
  const char* last = digits.data() + digits.size();
  return std::from_chars(digits.data(), last, *out).ptr == last;
}

std::string Payload(const PmlError& error) {
  std::string out;
  PutString(error.reason, &out);
  PutString(SourceName(error.source), &out);
  PutString(std::to_string(error.place.line), &out);
  PutString(std::to_string(error.place.column), &out);
  PutString(error.detail, &out);
  for (const auto& [name, number] : error.numbers) {
    PutString(name, &out);
    PutString(std::to_string(number), &out);
  }
  return out;
}

}  // namespace

std::string_view SourceName(Source source) {
  return source == Source::kSchema ? "schema" : "prompt";
}

absl::Status PmlError::ToStatus() const {
  std::string message =
      absl::StrCat(reason, " in ", ToAbsl(SourceName(source)));
  if (place.line > 0) absl::StrAppend(&message, ", line ", place.line);
  if (place.column > 0) absl::StrAppend(&message, ", column ", place.column);
  if (!detail.empty()) absl::StrAppend(&message, ": ", detail);
  absl::Status status = absl::InvalidArgumentError(message);
  // From a view: Cord's constructor from a string does not link with clang
  // against Debian's library.
  const std::string payload = Payload(*this);
  status.SetPayload(kPayloadUrl, absl::Cord(absl::string_view(payload)));
  return status;
}

std::vector<std::pair<std::string, std::string>> PmlError::Metadata() const {
  std::vector<std::pair<std::string, std::string>> out;
  out.emplace_back("source", SourceName(source));
  if (place.line > 0) out.emplace_back("line", std::to_string(place.line));
  if (place.column > 0) {
    out.emplace_back("column", std::to_string(place.column));
  }
  if (!detail.empty()) out.emplace_back("detail", detail);
  for (const auto& [name, number] : numbers) {
    out.emplace_back(name, std::to_string(number));
  }
  return out;
}

std::optional<PmlError> PmlErrorOf(const absl::Status& status) {
  const auto payload = status.GetPayload(kPayloadUrl);
  if (!payload.has_value()) return std::nullopt;
  const std::string bytes(*payload);
  std::string_view in = bytes;
  PmlError error;
  std::string source;
  if (!TakeString(&in, &error.reason) || !TakeString(&in, &source) ||
      !TakeNumber(&in, &error.place.line) ||
      !TakeNumber(&in, &error.place.column) ||
      !TakeString(&in, &error.detail)) {
    return std::nullopt;
  }
  error.source = source == "schema" ? Source::kSchema : Source::kPrompt;
  while (!in.empty()) {
    std::pair<std::string, int64_t> number;
    if (!TakeString(&in, &number.first) || !TakeNumber(&in, &number.second)) {
      return std::nullopt;
    }
    error.numbers.push_back(std::move(number));
  }
  return error;
}

}  // namespace promptcache::pml
