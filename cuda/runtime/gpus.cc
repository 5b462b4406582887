#include "cuda/runtime/gpus.h"

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "glog/logging.h"

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

void GpuSurvey::LogNoGpu(std::string_view instead) const {
  const bool warn = fault || !refused.empty();
  LOG_AT_LEVEL(warn ? google::GLOG_WARNING : google::GLOG_INFO)
      << ToString() << ": " << instead;
}

}  // namespace promptcache::gpu
