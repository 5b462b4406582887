#pragma once

#include <memory>
#include <string>
#include <string_view>

#include "absl/functional/function_ref.h"
#include "absl/status/statusor.h"

namespace promptcache::worker {

// A compiled pattern over UTF-8, with Unicode classes, or over bytes. Immutable
// and thread-safe.
class Regex {
 public:
  enum class Unit { kCharacter, kByte };

  // InvalidArgument when the pattern is wrong or could match nothing at all,
  // which would not split anything.
  static absl::StatusOr<std::unique_ptr<Regex>> Compile(
      const std::string& pattern, Unit unit = Unit::kCharacter);
  ~Regex();
  Regex(const Regex&) = delete;
  Regex& operator=(const Regex&) = delete;

  // Calls `visit` with each match and with what lies between matches, in
  // order: together they are `text`. REQUIRES: text is valid UTF-8, unless
  // the unit is the byte.
  void Split(std::string_view text,
             absl::FunctionRef<void(std::string_view)> visit) const;

 private:
  struct Impl;
  explicit Regex(std::unique_ptr<Impl> impl);

  const std::unique_ptr<Impl> impl_;
};

}  // namespace promptcache::worker
