#include "cache_daemon/core/worker_device.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "common/strings.h"

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

std::string CudaVersion(int version) {
  return absl::StrCat(version / 1000, ".", version % 1000 / 10);
}

absl::Status CheckUuid(const WorkerDevice& worker,
                       const gpu::DeviceInfo& daemon) {
  if (worker.uuid == daemon.uuid) return absl::OkStatus();
  const std::string where = absl::StrCat(
      "the worker computes on ", worker.uuid, ", this daemon's device tier is ",
      daemon.kind == gpu::DeviceKind::kCpu
          ? "memory of the CPU"
          : absl::StrCat("on ", daemon.uuid, " (", daemon.name, ")"));
  if (worker.uuid == "CPU") {
    return absl::FailedPreconditionError(
        absl::StrCat(where,
                     ": start the worker with --device=cuda, or the daemon "
                     "with --device=cpu"));
  }
  if (daemon.kind == gpu::DeviceKind::kCpu) {
    return absl::FailedPreconditionError(
        absl::StrCat(where,
                     ": start the daemon with --device=cuda, or the worker "
                     "with --device=cpu"));
  }
  return absl::FailedPreconditionError(
      absl::StrCat(where, ": start the worker with --device=", daemon.uuid,
                   ", or the daemon with --device=", worker.uuid));
}

}  // namespace

absl::Status CheckWorkerDevice(const WorkerDevice& worker,
                               const PagePool& pool) {
  const gpu::DeviceInfo& daemon = pool.device_info();
  if (absl::Status s = CheckUuid(worker, daemon); !s.ok()) return s;
  if (worker.driver_version != daemon.driver_version) {
    return absl::FailedPreconditionError(absl::StrCat(
        "the worker's driver speaks CUDA ", CudaVersion(worker.driver_version),
        ", the daemon's CUDA ", CudaVersion(daemon.driver_version),
        ": handles are good between equal drivers only; use the same driver "
        "libraries on both sides (the host's, no compatibility package)"));
  }
  for (const Tier tier : {Tier::kDevice, Tier::kHost}) {
    for (const gpu::HandleKind kind : pool.handle_kinds(tier)) {
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
  return absl::OkStatus();
}

}  // namespace promptcache::daemon
