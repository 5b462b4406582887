#include "cache_daemon/core/worker_device.h"

#include <algorithm>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "common/status_macros.h"
#include "common/strings.h"
#include "cuda/runtime/gpus.h"

namespace promptcache::daemon {
namespace {

std::string Names(const std::vector<gpu::HandleKind>& kinds) {
  return absl::StrJoin(kinds, ", ", [](std::string* out, gpu::HandleKind kind) {
    absl::StrAppend(out, ToAbsl(gpu::HandleKindName(kind)));
  });
}

// What --gpu_handles can name; every GPU knows CUDA IPC.
std::string OfGpus(std::vector<gpu::HandleKind> kinds) {
  std::erase(kinds, gpu::HandleKind::kMemfd);
  return kinds.empty() ? "ipc" : Names(kinds);
}

// "on GPU-1 (NVIDIA H200) and GPU-2 (NVIDIA H200)".
std::string Devices(const PagePool& pool) {
  if (!pool.on_gpu()) return "memory of the CPU";
  std::string out = "on ";
  for (uint32_t i = 0; i < pool.num_devices(); ++i) {
    const gpu::DeviceInfo& info = pool.device_info(i);
    absl::StrAppend(&out, i == 0 ? "" : " and ", info.uuid, " (", info.name,
                    ")");
  }
  return out;
}

std::string Uuids(const PagePool& pool, const char* separator) {
  std::vector<std::string> uuids;
  for (uint32_t i = 0; i < pool.num_devices(); ++i) {
    uuids.push_back(pool.device_info(i).uuid);
  }
  return absl::StrJoin(uuids, separator);
}

absl::StatusOr<uint32_t> FindUuid(const WorkerDevice& worker,
                                  const PagePool& pool) {
  for (uint32_t i = 0; i < pool.num_devices(); ++i) {
    if (worker.uuid == pool.device_info(i).uuid) return i;
  }
  const std::string where = absl::StrCat(
      "the worker computes on ", worker.uuid, ", this daemon's device ",
      pool.num_devices() == 1 ? "tier is " : "tiers are ", Devices(pool));
  if (worker.uuid == "CPU") {
    return absl::FailedPreconditionError(
        absl::StrCat(where,
                     ": start the worker with --device=cuda, or the daemon "
                     "with --device=cpu"));
  }
  if (!pool.on_gpu()) {
    return absl::FailedPreconditionError(
        absl::StrCat(where,
                     ": start the daemon with --device=cuda, or the worker "
                     "with --device=cpu"));
  }
  return absl::FailedPreconditionError(absl::StrCat(
      where, ": start the worker with --device=", Uuids(pool, " or "),
      ", or the daemon with --device=", Uuids(pool, ","), ",", worker.uuid));
}

}  // namespace

absl::StatusOr<uint32_t> FindWorkerDevice(const WorkerDevice& worker,
                                          const PagePool& pool) {
  PC_ASSIGN_OR_RETURN(const uint32_t device, FindUuid(worker, pool));
  const gpu::DeviceInfo& daemon = pool.device_info(device);
  if (worker.driver_version != daemon.driver_version) {
    return absl::FailedPreconditionError(absl::StrCat(
        "the worker's driver speaks CUDA ",
        gpu::CudaVersion(worker.driver_version), ", the daemon's CUDA ",
        gpu::CudaVersion(daemon.driver_version),
        ": handles are good between equal drivers only; use the same driver "
        "libraries on both sides (the host's, no compatibility package)"));
  }
  for (const Tier tier : {Tier::kDevice, Tier::kHost}) {
    for (const gpu::HandleKind kind : pool.handle_kinds(tier, device)) {
      if (std::ranges::find(worker.importable, kind) !=
          worker.importable.end()) {
        continue;
      }
      return absl::FailedPreconditionError(absl::StrCat(
          "this daemon's memory comes by handles of kind ",
          ToAbsl(gpu::HandleKindName(kind)), ", the worker can import ",
          Names(worker.importable),
          ": start the daemon with --gpu_handles=", OfGpus(worker.importable)));
    }
  }
  return device;
}

}  // namespace promptcache::daemon
