// promptcache-bench-gpu: what attention, a first token and decoding cost on
// this machine's GPU, each beside its floor. tools/gpu_check runs it.
//
//   promptcache-bench-gpu [--small] [--json FILE]
//
// --small: sizes for the emulator, whose times mean nothing.

#include <cstdio>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "common/status_macros.h"
#include "cuda/runtime/gpus.h"
#include "tools/bench/gpu/measure.h"

namespace promptcache::bench {
namespace {

absl::Status Run(const Sizes& sizes, gpu::Device& device,
                 std::vector<Figure>* figures) {
  PC_RETURN_IF_ERROR(device.MakeCurrent());
  PC_ASSIGN_OR_RETURN(const Limits limits,
                      MeasureLimits(device, sizes, figures));
  PC_RETURN_IF_ERROR(MeasureAttention(device, limits, sizes, figures));
  return MeasureModels(device, limits, sizes, figures);
}

void Print(const std::vector<Figure>& figures) {
  std::printf("| what | measured | floor |\n|---|---|---|\n");
  for (const Figure& f : figures) {
    std::printf("| %s: %s | %.4g %s |", f.group.c_str(), f.name.c_str(),
                f.value, f.unit.c_str());
    if (f.floor > 0) std::printf(" %.4g %s", f.floor, f.unit.c_str());
    std::printf(" |\n");
  }
}

nlohmann::json ToJson(const gpu::DeviceInfo& info,
                      const std::vector<Figure>& figures) {
  nlohmann::json out = {{"device", info.name}, {"figures", {}}};
  for (const Figure& f : figures) {
    nlohmann::json one = {{"group", f.group},
                          {"name", f.name},
                          {"value", f.value},
                          {"unit", f.unit}};
    if (f.floor > 0) one["floor"] = f.floor;
    out["figures"].push_back(std::move(one));
  }
  return out;
}

int Main(const std::vector<std::string>& arguments) {
  Sizes sizes;
  std::string json;
  for (size_t i = 0; i < arguments.size(); ++i) {
    if (arguments[i] == "--small") {
      sizes.small = true;
    } else if (arguments[i] == "--json" && i + 1 < arguments.size()) {
      json = arguments[++i];
    } else {
      std::fprintf(stderr,
                   "usage: promptcache-bench-gpu [--small] [--json "
                   "FILE]\n");
      return 2;
    }
  }
  const gpu::GpuSurvey survey = gpu::FindGpus();
  auto device = gpu::OpenGpu(survey, "");
  if (!device.ok()) {
    std::fprintf(stderr, "promptcache-bench-gpu: %s\n",
                 std::string(device.status().message()).c_str());
    return 77;  // skipped
  }
  std::printf("%s\n\n", (*device)->info().ToString().c_str());
  std::vector<Figure> figures;
  const absl::Status status = Run(sizes, **device, &figures);
  // What was measured until then is told, too.
  Print(figures);
  if (!json.empty()) {
    std::ofstream(json) << ToJson((*device)->info(), figures).dump(1) << "\n";
  }
  if (status.ok()) return 0;
  std::fprintf(stderr, "promptcache-bench-gpu: %s\n",
               status.ToString().c_str());
  return 1;
}

}  // namespace
}  // namespace promptcache::bench

int main(int argc, char** argv) {
  return promptcache::bench::Main({argv + 1, argv + argc});
}
