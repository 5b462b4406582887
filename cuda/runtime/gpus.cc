#include "cuda/runtime/gpus.h"

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

namespace promptcache::gpu {

std::string CudaVersion(int version) {
  return absl::StrCat(version / 1000, ".", version % 1000 / 10);
}

std::string GpuSurvey::ToString() const {
  std::string out = none;
  if (!gpus.empty()) {
    out = absl::StrCat(
        gpus.size(), gpus.size() == 1 ? " GPU: " : " GPUs: ",
        absl::StrJoin(gpus, "; ", [](std::string* to, const DeviceInfo& i) {
          absl::StrAppend(to, i.ToString());
        }));
  }
  for (const std::string& words : refused) {
    absl::StrAppend(&out, out.empty() ? "" : "; ", "refused: ", words);
  }
  return out;
}

}  // namespace promptcache::gpu
