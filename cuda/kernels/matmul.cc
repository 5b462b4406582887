#include "cuda/kernels/matmul.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/status_macros.h"

namespace promptcache::gpu {
namespace {

// Rows beyond which a pass's number of rows is rounded up further: the plans
// of long prefills stay few, and the padding below 12 %.
constexpr int32_t kExactRows = 16;
constexpr int32_t kSmallStep = 16;
constexpr int32_t kSmallRows = 256;
constexpr int32_t kLargeStep = 64;

// Of matrices, in bytes, that an algorithm may count on.
constexpr uint32_t kAlignmentBytes = 16;

int32_t RoundUp(int32_t value, int32_t step) {
  return (value + step - 1) / step * step;
}

}  // namespace

absl::StatusOr<std::unique_ptr<Matmul>> Matmul::Create(Device& device,
                                                       const Options& options) {
  if (options.invariant_rows <= 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("matmul: invariant_rows ", options.invariant_rows));
  }
  PC_ASSIGN_OR_RETURN(const CublasLt* lt, FindCublasLt());
  PC_RETURN_IF_ERROR(device.MakeCurrent());
  std::unique_ptr<Matmul> matmul(new Matmul(*lt, options));
  Matmul& m = *matmul;
  PC_ASSIGN_OR_RETURN(m.workspace_, device.Allocate(options.workspace_bytes));
  PC_RETURN_IF_ERROR(m.Check(lt->create(&m.handle_), "cublasLtCreate"));
  PC_RETURN_IF_ERROR(
      m.Check(lt->desc_create(&m.product_, CUBLAS_COMPUTE_32F, CUDA_R_32F),
              "cublasLtMatmulDescCreate"));
  // Column-major, as cuBLAS sees it: y^T = W x^T, W's rows being its columns.
  const cublasOperation_t transposed = CUBLAS_OP_T;
  PC_RETURN_IF_ERROR(
      m.Check(lt->desc_set(m.product_, CUBLASLT_MATMUL_DESC_TRANSA, &transposed,
                           sizeof(transposed)),
              "cublasLtMatmulDescSetAttribute"));
  PC_RETURN_IF_ERROR(m.Check(lt->preference_create(&m.preference_),
                             "cublasLtMatmulPreferenceCreate"));
  const uint64_t bytes = options.workspace_bytes;
  PC_RETURN_IF_ERROR(
      m.Check(lt->preference_set(m.preference_,
                                 CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
                                 &bytes, sizeof(bytes)),
              "cublasLtMatmulPreferenceSetAttribute"));
  // Blocks of rows of an odd width begin anywhere.
  const uint32_t alignment = kAlignmentBytes;
  for (const auto side : {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES,
                          CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
                          CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES,
                          CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES}) {
    PC_RETURN_IF_ERROR(m.Check(
        lt->preference_set(m.preference_, side, &alignment, sizeof(alignment)),
        "cublasLtMatmulPreferenceSetAttribute"));
  }
  if (options.batch_invariant) {
    const uint32_t no_split = CUBLASLT_REDUCTION_SCHEME_NONE;
    PC_RETURN_IF_ERROR(
        m.Check(lt->preference_set(m.preference_,
                                   CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK,
                                   &no_split, sizeof(no_split)),
                "cublasLtMatmulPreferenceSetAttribute"));
  }
  return matmul;
}

Matmul::~Matmul() {
  for (const auto& [shape, plan] : plans_) {
    for (cublasLtMatrixLayout_t layout : {plan.weights, plan.x, plan.y}) {
      if (layout != nullptr) lt_.layout_destroy(layout);
    }
  }
  if (preference_ != nullptr) lt_.preference_destroy(preference_);
  if (product_ != nullptr) lt_.desc_destroy(product_);
  if (handle_ != nullptr) lt_.destroy(handle_);
}

absl::Status Matmul::Check(cublasStatus_t status, const char* call) const {
  if (status == CUBLAS_STATUS_SUCCESS) return absl::OkStatus();
  return absl::InternalError(
      absl::StrCat(call, ": ", lt_.get_status_string(status)));
}

int32_t Matmul::PaddedRows(int32_t num_rows) const {
  if (options_.batch_invariant) {
    return RoundUp(num_rows, options_.invariant_rows);
  }
  if (num_rows <= kExactRows) return num_rows;
  return RoundUp(num_rows, num_rows <= kSmallRows ? kSmallStep : kLargeStep);
}

absl::Status Matmul::MakeLayouts(const Shape& shape, Plan& plan) const {
  const auto [rows, cols, depth] = shape;
  const auto make = [this](cublasLtMatrixLayout_t* layout, cudaDataType_t type,
                           int32_t height, int32_t width) {
    return Check(lt_.layout_create(layout, type, static_cast<uint64_t>(height),
                                   static_cast<uint64_t>(width), height),
                 "cublasLtMatrixLayoutCreate");
  };
  PC_RETURN_IF_ERROR(make(&plan.weights, CUDA_R_16BF, depth, cols));
  PC_RETURN_IF_ERROR(make(&plan.x, CUDA_R_16BF, depth, rows));
  return make(&plan.y, CUDA_R_32F, cols, rows);
}

absl::Status Matmul::ChooseAlgorithm(Plan& plan) const {
  cublasLtMatmulHeuristicResult_t best = {};
  int found = 0;
  PC_RETURN_IF_ERROR(
      Check(lt_.get_heuristic(handle_, product_, plan.weights, plan.x, plan.y,
                              plan.y, preference_, 1, &best, &found),
            "cublasLtMatmulAlgoGetHeuristic"));
  if (found == 0) {
    return absl::UnimplementedError(
        "cublasLtMatmulAlgoGetHeuristic: no algorithm");
  }
  plan.algorithm = best.algo;
  return absl::OkStatus();
}

absl::StatusOr<const Matmul::Plan*> Matmul::PlanOf(const Shape& shape) {
  if (const auto it = plans_.find(shape); it != plans_.end()) {
    return &it->second;
  }
  Plan& plan = plans_[shape];
  absl::Status status = MakeLayouts(shape, plan);
  if (status.ok()) status = ChooseAlgorithm(plan);
  if (status.ok()) return &plan;
  for (cublasLtMatrixLayout_t layout : {plan.weights, plan.x, plan.y}) {
    if (layout != nullptr) lt_.layout_destroy(layout);
  }
  plans_.erase(shape);
  const auto [rows, cols, depth] = shape;
  return absl::Status(
      status.code(),
      absl::StrCat(std::string(status.message()), " (matrix product of ", rows,
                   " rows, ", depth, " to ", cols, ")"));
}

absl::Status Matmul::Run(const MatmulParams& params, cudaStream_t stream) {
  const int32_t padded = PaddedRows(params.num_rows);
  if (padded == 0) return absl::OkStatus();
  const int32_t block =
      options_.batch_invariant ? options_.invariant_rows : padded;
  PC_ASSIGN_OR_RETURN(const Plan* plan,
                      PlanOf({block, params.num_cols, params.depth}));
  const float one = 1;
  const float beta = params.accumulate ? 1 : 0;
  for (int64_t row = 0; row < padded; row += block) {
    float* y = params.y + row * params.num_cols;
    PC_RETURN_IF_ERROR(
        Check(lt_.matmul(handle_, product_, &one, params.weights, plan->weights,
                         params.x + row * params.depth, plan->x, &beta, y,
                         plan->y, y, plan->y, &plan->algorithm,
                         workspace_.data(), workspace_.num_bytes(), stream),
              "cublasLtMatmul"));
  }
  return absl::OkStatus();
}

}  // namespace promptcache::gpu
