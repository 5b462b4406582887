// The emulator runs what CUDA C++ means, and ends what it does not allow.
#include <vector>

#include "cuda/kernels/device.cuh"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace promptcache::gpu {
namespace {

using ::testing::Each;
using ::testing::ElementsAreArray;

template <class T>
std::vector<T> FromDevice(const T* device, size_t count) {
  std::vector<T> host(count);
  EXPECT_EQ(cudaMemcpy(host.data(), device, count * sizeof(T),
                       cudaMemcpyDeviceToHost),
            cudaSuccess);
  return host;
}

// Device memory of a test, with what the test puts there.
template <class T>
class DeviceArray {
 public:
  explicit DeviceArray(size_t count) : count_(count) {
    void* p = nullptr;
    EXPECT_EQ(cudaMalloc(&p, count * sizeof(T)), cudaSuccess);
    data_ = static_cast<T*>(p);
  }
  explicit DeviceArray(const std::vector<T>& values)
      : DeviceArray(values.size()) {
    EXPECT_EQ(cudaMemcpy(data_, values.data(), values.size() * sizeof(T),
                         cudaMemcpyHostToDevice),
              cudaSuccess);
  }
  ~DeviceArray() { EXPECT_EQ(cudaFree(data_), cudaSuccess); }
  DeviceArray(const DeviceArray&) = delete;
  DeviceArray& operator=(const DeviceArray&) = delete;
  T* get() const { return data_; }
  std::vector<T> Read() const { return FromDevice(data_, count_); }

 private:
  size_t count_;
  T* data_ = nullptr;
};

// out[block] = sum of that block's values. Block: any number of threads.
__global__ void SumKernel(const float* values, int count, float* out) {
  PC_DYNAMIC_SHARED(memory);
  float* const partial = reinterpret_cast<float*>(memory);
  float sum = 0;
  const float* mine = values + static_cast<size_t>(blockIdx.x) * count;
  for (int i = static_cast<int>(threadIdx.x); i < count;
       i += static_cast<int>(blockDim.x)) {
    sum += mine[i];
  }
  for (int offset = 16; offset > 0; offset /= 2) {
    sum += __shfl_down_sync(kAllLanes, sum, static_cast<unsigned>(offset));
  }
  if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = sum;
  __syncthreads();
  if (threadIdx.x != 0) return;
  float total = 0;
  for (unsigned w = 0; w < blockDim.x / 32; ++w) total += partial[w];
  out[blockIdx.x] = total;
}

TEST(EmulatorTest, BlocksReduceThroughShufflesBarriersAndSharedMemory) {
  constexpr int kBlocks = 5;
  constexpr int kCount = 1000;
  std::vector<float> values(kBlocks * kCount);
  std::vector<float> sums(kBlocks);
  for (size_t i = 0; i < values.size(); ++i) {
    values[i] = static_cast<float>(i % 7);
    sums[i / kCount] += values[i];
  }
  const DeviceArray<float> in(values);
  const DeviceArray<float> out(kBlocks);
  ASSERT_EQ(Launch(SumKernel, dim3(kBlocks), dim3(256), 8 * sizeof(float),
                   nullptr, in.get(), kCount, out.get()),
            cudaSuccess);
  EXPECT_THAT(out.Read(), ElementsAreArray(sums));
}

// One warp: out[16][8] = a[16][16] b[8][16]^T through ldmatrix and mma.
template <class T>
__global__ void ProductKernel(const T* a, const T* b, float* out) {
  PC_DYNAMIC_SHARED(memory);
  T* const tile = reinterpret_cast<T*>(memory);  // a, then b padded to 16 rows
  const unsigned lane = threadIdx.x;
  for (unsigned c = lane; c < 64; c += 32) {
    const bool in_b = c >= 32;
    const unsigned chunk = c % 32;
    const bool there = !in_b || chunk < 16;
    CpAsync16(tile + c * 8, there ? (in_b ? b : a) + chunk * 8 : a, there);
  }
  CpAsyncCommit();
  CpAsyncWait<0>();
  __syncthreads();
  uint32_t fa[4];
  uint32_t fb[4];
  LoadMatrix(fa, tile + (lane % 16) * 16 + lane / 16 * 8);
  LoadMatrix(fb, tile + 256 + (lane % 8) * 16 + (lane / 8 % 2) * 8);
  float d[4] = {};
  Mma16816(d, fa, fb[0], fb[1], T());
  for (unsigned i = 0; i < 4; ++i) {
    out[(lane / 4 + 8 * (i / 2)) * 8 + lane % 4 * 2 + i % 2] = d[i];
  }
}

template <class T>
class EmulatedProductTest : public ::testing::Test {};
using OperandTypes = ::testing::Types<__nv_bfloat16, __half>;
TYPED_TEST_SUITE(EmulatedProductTest, OperandTypes);

TYPED_TEST(EmulatedProductTest, MultipliesSmallIntegersExactly) {
  std::vector<TypeParam> a(256);
  std::vector<TypeParam> b(128);
  for (size_t i = 0; i < a.size(); ++i) {
    a[i] = TypeParam(static_cast<float>(i * 5 % 11) - 5);
  }
  for (size_t i = 0; i < b.size(); ++i) {
    b[i] = TypeParam(static_cast<float>(i * 3 % 13) - 6);
  }
  std::vector<float> product(128);
  for (size_t i = 0; i < 16; ++i) {
    for (size_t j = 0; j < 8; ++j) {
      for (size_t k = 0; k < 16; ++k) {
        product[i * 8 + j] += static_cast<float>(a[i * 16 + k]) *
                              static_cast<float>(b[j * 16 + k]);
      }
    }
  }
  const DeviceArray<TypeParam> in_a(a);
  const DeviceArray<TypeParam> in_b(b);
  const DeviceArray<float> out(128);
  const uint64_t before = emu::ReadCounters().bank_conflicts;
  ASSERT_EQ(Launch(ProductKernel<TypeParam>, dim3(1), dim3(32), 1024, nullptr,
                   in_a.get(), in_b.get(), out.get()),
            cudaSuccess);
  EXPECT_THAT(out.Read(), ElementsAreArray(product));
  // Rows of 32 bytes without a swizzle: two of 8 rows share a bank twice over.
  EXPECT_GT(emu::ReadCounters().bank_conflicts, before);
}

__global__ void CopyTooEarlyKernel(const float* in, float* out) {
  PC_DYNAMIC_SHARED(memory);
  float* const mine = reinterpret_cast<float*>(memory) + threadIdx.x * 4;
  CpAsync16(mine, in + threadIdx.x * 4, true);
  CpAsyncCommit();
  out[2 * threadIdx.x] = mine[0];
  CpAsyncWait<0>();
  out[2 * threadIdx.x + 1] = mine[0];
}

TEST(EmulatorTest, AsyncCopiesAreNotThereBeforeTheWait) {
  const DeviceArray<float> in(std::vector<float>(128, 3.0f));
  const DeviceArray<float> out(64);
  ASSERT_EQ(Launch(CopyTooEarlyKernel, dim3(1), dim3(32), 512, nullptr,
                   in.get(), out.get()),
            cudaSuccess);
  const std::vector<float> seen = out.Read();
  for (size_t i = 0; i < 32; ++i) {
    EXPECT_TRUE(std::isnan(seen[2 * i]));
    EXPECT_EQ(seen[2 * i + 1], 3.0f);
  }
}

TEST(EmulatorTest, FreshMemoryIsNaN) {
  const DeviceArray<float> fresh(100);
  EXPECT_THAT(fresh.Read(), Each(::testing::IsNan()));
}

__global__ void DivergentBarrierKernel() {
  if (threadIdx.x < 16) __syncwarp(0xffffu);
  if (threadIdx.x < 16) __shfl_sync(kAllLanes, 1, 0);
  __syncthreads();
}

TEST(EmulatorDeathTest, DivergentWarpOperationEndsTheProcess) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_DEATH(
      {
        Launch(DivergentBarrierKernel, dim3(1), dim3(32), 0, nullptr);
        cudaDeviceSynchronize();
      },
      "divergent barrier or warp operation");
}

__global__ void NothingKernel() {}

TEST(EmulatorTest, LaunchesBeyondTheDevicesLimitsFail) {
  EXPECT_EQ(Launch(NothingKernel, dim3(1), dim3(1025), 0, nullptr),
            cudaErrorInvalidConfiguration);
  EXPECT_EQ(Launch(NothingKernel, dim3(1, 65536), dim3(1), 0, nullptr),
            cudaErrorInvalidConfiguration);
  EXPECT_EQ(
      Launch(NothingKernel, dim3(1), dim3(1), kMaxSharedBytes + 16, nullptr),
      cudaErrorInvalidValue);
  cudaGetLastError();
  EXPECT_EQ(Launch(NothingKernel, dim3(1), dim3(1), kMaxSharedBytes, nullptr),
            cudaSuccess);
}

}  // namespace
}  // namespace promptcache::gpu
