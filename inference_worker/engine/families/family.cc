#include "inference_worker/engine/families/family.h"

#include "absl/strings/str_cat.h"

namespace promptcache::worker {
namespace {

constexpr Family kFamilies[] = {
    {.architecture = "llama",
     .norm = NormKind::kRms,
     .feed_forward = FeedForward::kSwiGlu},
};

}  // namespace

absl::StatusOr<Family> FamilyOf(const ModelConfig& config) {
  std::string known;
  for (const Family& family : kFamilies) {
    if (family.architecture == config.architecture) return family;
    absl::StrAppend(&known, known.empty() ? "" : ", ",
                    std::string(family.architecture));
  }
  return absl::InvalidArgumentError(
      absl::StrCat("architecture \"", config.architecture,
                   "\" is not supported; known: ", known));
}

}  // namespace promptcache::worker
