#include <cublasLt.h>
#include <cuda_bf16.h>
#include <cuda_runtime_api.h>

#include <vector>

#include "gtest/gtest.h"

namespace promptcache::gpu {
namespace {

// y[M][N] = x[M][K] w[N][K]^T as the engine calls it: row-major matrices seen
// as column-major ones.
TEST(FakeCublasLtTest, MultipliesLikeALinearLayer) {
  constexpr int kM = 5;
  constexpr int kN = 7;
  constexpr int kK = 37;
  std::vector<__nv_bfloat16> x(kM * kK);
  std::vector<__nv_bfloat16> w(kN * kK);
  for (size_t i = 0; i < x.size(); ++i) {
    x[i] = __float2bfloat16(static_cast<float>(i % 9) - 4);
  }
  for (size_t i = 0; i < w.size(); ++i) {
    w[i] = __float2bfloat16(static_cast<float>(i % 5) - 2);
  }
  void* dx = nullptr;
  void* dw = nullptr;
  void* dy = nullptr;
  ASSERT_EQ(cudaMalloc(&dx, x.size() * 2), cudaSuccess);
  ASSERT_EQ(cudaMalloc(&dw, w.size() * 2), cudaSuccess);
  ASSERT_EQ(cudaMalloc(&dy, kM * kN * sizeof(float)), cudaSuccess);
  cudaMemcpy(dx, x.data(), x.size() * 2, cudaMemcpyHostToDevice);
  cudaMemcpy(dw, w.data(), w.size() * 2, cudaMemcpyHostToDevice);

  cublasLtHandle_t handle;
  cublasLtMatmulDesc_t matmul;
  cublasLtMatrixLayout_t lw;
  cublasLtMatrixLayout_t lx;
  cublasLtMatrixLayout_t ly;
  ASSERT_EQ(cublasLtCreate(&handle), CUBLAS_STATUS_SUCCESS);
  cublasLtMatmulDescCreate(&matmul, CUBLAS_COMPUTE_32F, CUDA_R_32F);
  const cublasOperation_t transposed = CUBLAS_OP_T;
  cublasLtMatmulDescSetAttribute(matmul, CUBLASLT_MATMUL_DESC_TRANSA,
                                 &transposed, sizeof transposed);
  cublasLtMatrixLayoutCreate(&lw, CUDA_R_16BF, kK, kN, kK);
  cublasLtMatrixLayoutCreate(&lx, CUDA_R_16BF, kK, kM, kK);
  cublasLtMatrixLayoutCreate(&ly, CUDA_R_32F, kN, kM, kN);
  const float one = 1;
  const float zero = 0;
  ASSERT_EQ(cublasLtMatmul(handle, matmul, &one, dw, lw, dx, lx, &zero, dy, ly,
                           dy, ly, nullptr, nullptr, 0, nullptr),
            CUBLAS_STATUS_SUCCESS);
  std::vector<float> y(kM * kN);
  cudaMemcpy(y.data(), dy, y.size() * sizeof(float), cudaMemcpyDeviceToHost);
  for (int i = 0; i < kM; ++i) {
    for (int j = 0; j < kN; ++j) {
      float sum = 0;
      for (int k = 0; k < kK; ++k) {
        sum += __bfloat162float(x[static_cast<size_t>(i * kK + k)]) *
               __bfloat162float(w[static_cast<size_t>(j * kK + k)]);
      }
      EXPECT_EQ(y[static_cast<size_t>(i * kN + j)], sum) << i << " " << j;
    }
  }
  // A shape that does not fit is refused.
  EXPECT_EQ(cublasLtMatmul(handle, matmul, &one, dx, lx, dw, lw, &zero, dy, ly,
                           dy, ly, nullptr, nullptr, 0, nullptr),
            CUBLAS_STATUS_INVALID_VALUE);
  cublasLtMatrixLayoutDestroy(lw);
  cublasLtMatrixLayoutDestroy(lx);
  cublasLtMatrixLayoutDestroy(ly);
  cublasLtMatmulDescDestroy(matmul);
  cublasLtDestroy(handle);
  for (void* p : {dx, dw, dy}) EXPECT_EQ(cudaFree(p), cudaSuccess);
}

}  // namespace
}  // namespace promptcache::gpu
