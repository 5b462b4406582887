#pragma once

#include <cudaTypedefs.h>

#include <string_view>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace promptcache::gpu {

// Entry points of the driver, looked up at run time: a program that links
// libcuda does not start without a driver. A value.
struct CudaDriver {
  // Unavailable without a driver, Unimplemented names what an old one lacks;
  // virtual memory management may be lacking (vmm).
  static absl::StatusOr<CudaDriver> Load();

  absl::Status Check(CUresult result, std::string_view call) const;

  PFN_cuGetErrorName_v6000 get_error_name = nullptr;
  PFN_cuDeviceGet_v2000 device_get = nullptr;
  PFN_cuDeviceGetAttribute_v2000 device_get_attribute = nullptr;
  // Of the whole GPU and of what is visible: they differ under MIG. The first
  // may be null.
  PFN_cuDeviceGetUuid_v9020 device_get_uuid_v1 = nullptr;
  PFN_cuDeviceGetUuid_v11040 device_get_uuid_v2 = nullptr;
  bool vmm = false;  // all of the following are there
  PFN_cuMemCreate_v10020 mem_create = nullptr;
  PFN_cuMemRelease_v10020 mem_release = nullptr;
  PFN_cuMemAddressReserve_v10020 mem_address_reserve = nullptr;
  PFN_cuMemAddressFree_v10020 mem_address_free = nullptr;
  PFN_cuMemMap_v10020 mem_map = nullptr;
  PFN_cuMemUnmap_v10020 mem_unmap = nullptr;
  PFN_cuMemSetAccess_v10020 mem_set_access = nullptr;
  PFN_cuMemExportToShareableHandle_v10020 mem_export = nullptr;
  PFN_cuMemImportFromShareableHandle_v10020 mem_import = nullptr;
  PFN_cuMemGetAllocationGranularity_v10020 mem_granularity = nullptr;
};

}  // namespace promptcache::gpu
