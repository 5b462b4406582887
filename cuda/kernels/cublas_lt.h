#pragma once

#include <cublasLt.h>

#include "absl/status/statusor.h"

namespace promptcache::gpu {

// The functions of cuBLASLt that are called. The library has half a gigabyte
// and is there only where a GPU is: programs look it up when they open one, and
// start without it.
struct CublasLt {
  decltype(&cublasLtCreate) create = nullptr;
  decltype(&cublasLtDestroy) destroy = nullptr;
  decltype(&cublasLtGetVersion) get_version = nullptr;
  decltype(&cublasLtGetStatusString) get_status_string = nullptr;
  decltype(&cublasLtMatmul) matmul = nullptr;
  decltype(&cublasLtMatmulAlgoGetHeuristic) get_heuristic = nullptr;
  decltype(&cublasLtMatmulDescCreate) desc_create = nullptr;
  decltype(&cublasLtMatmulDescDestroy) desc_destroy = nullptr;
  decltype(&cublasLtMatmulDescSetAttribute) desc_set = nullptr;
  decltype(&cublasLtMatrixLayoutCreate) layout_create = nullptr;
  decltype(&cublasLtMatrixLayoutDestroy) layout_destroy = nullptr;
  decltype(&cublasLtMatmulPreferenceCreate) preference_create = nullptr;
  decltype(&cublasLtMatmulPreferenceDestroy) preference_destroy = nullptr;
  decltype(&cublasLtMatmulPreferenceSetAttribute) preference_set = nullptr;
};

// The library of this process, looked up once. NotFound, with what the loader
// said and what to install, when there is none. Emulated programs link another
// implementation (tests/cuda_on_cpu).
absl::StatusOr<const CublasLt*> FindCublasLt();

}  // namespace promptcache::gpu
