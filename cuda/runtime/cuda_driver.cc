#include "cuda/runtime/cuda_driver.h"

#include <cuda_runtime_api.h>

#include <string>

#include "absl/strings/str_cat.h"
#include "common/status_macros.h"
#include "common/strings.h"
#include "cuda/runtime/cuda_status.h"

namespace promptcache::gpu {
namespace {

// `version`: the CUDA version whose prototype is meant (10020: 10.2).
template <typename Function>
absl::Status Find(const char* symbol, unsigned version, Function* out) {
  void* found = nullptr;
  cudaDriverEntryPointQueryResult result = cudaDriverEntryPointSymbolNotFound;
  PC_RETURN_IF_ERROR(
      ToStatus(cudaGetDriverEntryPointByVersion(symbol, &found, version,
                                                cudaEnableDefault, &result),
               absl::StrCat("cudaGetDriverEntryPointByVersion(", symbol, ")")));
  if (result != cudaDriverEntryPointSuccess || found == nullptr) {
    return absl::UnimplementedError(
        absl::StrCat("the driver has no ", symbol, " of CUDA ", version / 1000,
                     ".", version % 1000 / 10, ": a newer driver is needed"));
  }
  *out = reinterpret_cast<Function>(found);
  return absl::OkStatus();
}

absl::Status FindVmm(CudaDriver* d) {
  PC_RETURN_IF_ERROR(Find("cuMemCreate", 10020, &d->mem_create));
  PC_RETURN_IF_ERROR(Find("cuMemRelease", 10020, &d->mem_release));
  PC_RETURN_IF_ERROR(
      Find("cuMemAddressReserve", 10020, &d->mem_address_reserve));
  PC_RETURN_IF_ERROR(Find("cuMemAddressFree", 10020, &d->mem_address_free));
  PC_RETURN_IF_ERROR(Find("cuMemMap", 10020, &d->mem_map));
  PC_RETURN_IF_ERROR(Find("cuMemUnmap", 10020, &d->mem_unmap));
  PC_RETURN_IF_ERROR(Find("cuMemSetAccess", 10020, &d->mem_set_access));
  PC_RETURN_IF_ERROR(
      Find("cuMemExportToShareableHandle", 10020, &d->mem_export));
  PC_RETURN_IF_ERROR(
      Find("cuMemImportFromShareableHandle", 10020, &d->mem_import));
  return Find("cuMemGetAllocationGranularity", 10020, &d->mem_granularity);
}

}  // namespace

absl::StatusOr<CudaDriver> CudaDriver::Load() {
  CudaDriver d;
  PC_RETURN_IF_ERROR(Find("cuGetErrorName", 6000, &d.get_error_name));
  PC_RETURN_IF_ERROR(Find("cuDeviceGet", 2000, &d.device_get));
  PC_RETURN_IF_ERROR(
      Find("cuDeviceGetAttribute", 2000, &d.device_get_attribute));
  // Drivers may stop to offer it; then the device's name tells of MIG.
  Find("cuDeviceGetUuid", 9020, &d.device_get_uuid_v1).IgnoreError();
  PC_RETURN_IF_ERROR(Find("cuDeviceGetUuid", 11040, &d.device_get_uuid_v2));
  d.vmm = FindVmm(&d).ok();
  return d;
}

absl::Status CudaDriver::Check(CUresult result, std::string_view call) const {
  if (result == CUDA_SUCCESS) return absl::OkStatus();
  const char* name = nullptr;
  if (get_error_name(result, &name) != CUDA_SUCCESS) name = "unknown error";
  const std::string message = absl::StrCat(ToAbsl(call), ": ", name, " (",
                                           static_cast<int>(result), ")");
  switch (result) {
    case CUDA_ERROR_OUT_OF_MEMORY:
      return absl::ResourceExhaustedError(message);
    case CUDA_ERROR_NOT_SUPPORTED:
      return absl::UnimplementedError(message);
    case CUDA_ERROR_INVALID_VALUE:
    case CUDA_ERROR_INVALID_HANDLE:
      return absl::InvalidArgumentError(message);
    default:
      return absl::InternalError(message);
  }
}

}  // namespace promptcache::gpu
