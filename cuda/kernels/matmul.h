#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <tuple>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "cuda/kernels/cublas_lt.h"
#include "cuda/runtime/device.h"

namespace promptcache::gpu {

// y = x W^T, or y += x W^T, with fp32 sums. Pointers are aligned to 16 bytes.
struct MatmulParams {
  const uint16_t* x = nullptr;        // bf16 [PaddedRows(num_rows)][depth]
  const uint16_t* weights = nullptr;  // bf16 [num_cols][depth]
  float* y = nullptr;                 // [PaddedRows(num_rows)][num_cols]
  int32_t num_rows = 0;
  int32_t num_cols = 0;
  int32_t depth = 0;
  bool accumulate = false;
};

// The matrix products of one device and stream, by cuBLASLt. Rows are padded,
// so that few shapes need a plan: what the padding rows hold is computed with
// and read by nobody.
//
// With `batch_invariant` every product runs as blocks of exactly
// `invariant_rows` rows with one algorithm for each weight matrix's shape,
// chosen without split-K. What that guarantees: whatever else is in the pass,
// a row goes through the same kernel at the same shape. What it relies on: that
// kernel sums every element of its output over the depth in one order, wherever
// the element lies. Without it, the algorithm follows the number of rows, and
// a row's last bits with it.
//
// Thread-compatible. Must not outlive the device.
class Matmul {
 public:
  struct Options {
    bool batch_invariant = false;
    // A pass over weights costs the same up to about 180 rows on an H200.
    int32_t invariant_rows = 128;
    size_t workspace_bytes = size_t{32} << 20;
  };
  static absl::StatusOr<std::unique_ptr<Matmul>> Create(Device& device,
                                                        const Options& options);
  ~Matmul();
  Matmul(const Matmul&) = delete;
  Matmul& operator=(const Matmul&) = delete;

  // Never falls when num_rows grows.
  int32_t PaddedRows(int32_t num_rows) const;

  // Queues the product. Can be captured in a graph once a product of the same
  // shape has been queued. Errors name the call and the shape.
  absl::Status Run(const MatmulParams& params, cudaStream_t stream);

 private:
  // Rows, columns, depth; of a block.
  using Shape = std::tuple<int32_t, int32_t, int32_t>;
  struct Plan {
    cublasLtMatrixLayout_t weights = nullptr;
    cublasLtMatrixLayout_t x = nullptr;
    cublasLtMatrixLayout_t y = nullptr;
    cublasLtMatmulAlgo_t algorithm = {};
  };

  Matmul(const CublasLt& lt, const Options& options)
      : lt_(lt), options_(options) {}
  absl::Status Check(cublasStatus_t status, const char* call) const;
  absl::StatusOr<const Plan*> PlanOf(const Shape& shape);
  absl::Status MakeLayouts(const Shape& shape, Plan& plan) const;
  absl::Status ChooseAlgorithm(Plan& plan) const;

  const CublasLt& lt_;
  const Options options_;
  cublasLtHandle_t handle_ = nullptr;
  cublasLtMatmulDesc_t product_ = nullptr;
  cublasLtMatmulPreference_t preference_ = nullptr;
  DeviceBuffer workspace_;
  std::map<Shape, Plan> plans_;
};

}  // namespace promptcache::gpu
