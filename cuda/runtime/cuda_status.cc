#include "cuda/runtime/cuda_status.h"

#include <string>

#include "absl/strings/str_cat.h"
#include "common/strings.h"

namespace promptcache::gpu {

absl::Status ToStatus(cudaError_t error, std::string_view call) {
  if (error == cudaSuccess) return absl::OkStatus();
  (void)cudaGetLastError();
  const std::string message =
      absl::StrCat(ToAbsl(call), ": ", cudaGetErrorString(error), " (",
                   cudaGetErrorName(error), ", ", static_cast<int>(error), ")");
  switch (error) {
    case cudaErrorMemoryAllocation:
      return absl::ResourceExhaustedError(message);
    case cudaErrorNoDevice:
    case cudaErrorInsufficientDriver:
    case cudaErrorSystemDriverMismatch:
    case cudaErrorDevicesUnavailable:
      return absl::UnavailableError(message);
    case cudaErrorInvalidValue:
      return absl::InvalidArgumentError(message);
    case cudaErrorNotSupported:
    case cudaErrorHostMemoryAlreadyRegistered:
      return absl::UnimplementedError(message);
    default:
      return absl::InternalError(message);
  }
}

}  // namespace promptcache::gpu
