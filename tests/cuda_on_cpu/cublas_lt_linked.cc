// In place of cublas_lt_dlopen.cc in emulated programs, which have the
// stand-in linked (fake_cublaslt.cc).
#include "cuda/kernels/cublas_lt.h"

namespace promptcache::gpu {

absl::StatusOr<const CublasLt*> FindCublasLt() {
  static constexpr CublasLt kLinked = {
      .create = cublasLtCreate,
      .destroy = cublasLtDestroy,
      .get_version = cublasLtGetVersion,
      .get_status_string = cublasLtGetStatusString,
      .matmul = cublasLtMatmul,
      .get_heuristic = cublasLtMatmulAlgoGetHeuristic,
      .desc_create = cublasLtMatmulDescCreate,
      .desc_destroy = cublasLtMatmulDescDestroy,
      .desc_set = cublasLtMatmulDescSetAttribute,
      .layout_create = cublasLtMatrixLayoutCreate,
      .layout_destroy = cublasLtMatrixLayoutDestroy,
      .preference_create = cublasLtMatmulPreferenceCreate,
      .preference_destroy = cublasLtMatmulPreferenceDestroy,
      .preference_set = cublasLtMatmulPreferenceSetAttribute,
  };
  return &kLinked;
}

}  // namespace promptcache::gpu
