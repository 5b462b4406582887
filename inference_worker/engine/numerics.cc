#include "inference_worker/engine/numerics.h"

#include "absl/strings/str_cat.h"
#include "common/strings.h"

namespace promptcache::worker {

absl::StatusOr<Numerics> ParseNumerics(std::string_view name) {
  if (name == "auto") return Numerics::kAuto;
  if (name == "exact") return Numerics::kExact;
  if (name == "fast") return Numerics::kFast;
  return absl::InvalidArgumentError(
      absl::StrCat("numerics \"", ToAbsl(name), "\": use auto, exact or fast"));
}

}  // namespace promptcache::worker
