// The stand-in for the runtime keeps CUDA's order, and shows what breaks it.
#include <cuda_runtime_api.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstring>
#include <string>
#include <vector>

#include "cuda/kernels/device.cuh"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace promptcache::gpu {
namespace {

using ::testing::Each;

constexpr size_t kCount = 1000;

class FakeCudartTest : public ::testing::Test {
 protected:
  void SetUp() override {
    ASSERT_EQ(cudaStreamCreateWithFlags(&compute_, cudaStreamNonBlocking),
              cudaSuccess);
    ASSERT_EQ(cudaStreamCreateWithFlags(&copy_, cudaStreamNonBlocking),
              cudaSuccess);
    ASSERT_EQ(cudaEventCreateWithFlags(&event_, cudaEventDisableTiming),
              cudaSuccess);
    ASSERT_EQ(cudaMalloc(reinterpret_cast<void**>(&data_), kCount * 4),
              cudaSuccess);
    cudaMemset(data_, 0, kCount * 4);
  }
  void TearDown() override {
    EXPECT_EQ(cudaFree(data_), cudaSuccess);
    EXPECT_EQ(cudaEventDestroy(event_), cudaSuccess);
    EXPECT_EQ(cudaStreamDestroy(copy_), cudaSuccess);
    EXPECT_EQ(cudaStreamDestroy(compute_), cudaSuccess);
    EXPECT_EQ(cudaGetLastError(), cudaSuccess);
  }
  // Of everything in data_, as `stream` sees it when it gets there.
  std::vector<float> ReadOn(cudaStream_t stream) {
    std::vector<float> host(kCount, -1.0f);
    EXPECT_EQ(cudaMemcpyAsync(host.data(), data_, kCount * 4,
                              cudaMemcpyDeviceToHost, stream),
              cudaSuccess);
    EXPECT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
    return host;
  }
  void WriteOnCopyStream(float value) {
    host_.assign(kCount, value);
    EXPECT_EQ(cudaMemcpyAsync(data_, host_.data(), kCount * 4,
                              cudaMemcpyHostToDevice, copy_),
              cudaSuccess);
    EXPECT_EQ(cudaEventRecord(event_, copy_), cudaSuccess);
  }

  cudaStream_t compute_ = nullptr, copy_ = nullptr;
  cudaEvent_t event_ = nullptr;
  float* data_ = nullptr;
  std::vector<float> host_;
};

TEST_F(FakeCudartTest, AStreamThatDoesNotWaitSeesStaleData) {
  WriteOnCopyStream(2);
  EXPECT_THAT(ReadOn(compute_), Each(0.0f));
  EXPECT_EQ(cudaStreamSynchronize(copy_), cudaSuccess);
  EXPECT_THAT(ReadOn(compute_), Each(2.0f));
}

TEST_F(FakeCudartTest, AStreamThatWaitsForAnEventSeesWhatWasBeforeIt) {
  WriteOnCopyStream(2);
  EXPECT_EQ(cudaStreamWaitEvent(compute_, event_, 0), cudaSuccess);
  EXPECT_THAT(ReadOn(compute_), Each(2.0f));
}

TEST_F(FakeCudartTest, AnEventIsReadyAfterSomebodyLooked) {
  WriteOnCopyStream(2);
  int looks = 0;
  while (cudaEventQuery(event_) == cudaErrorNotReady) ++looks;
  EXPECT_GT(looks, 0);
  EXPECT_THAT(ReadOn(compute_), Each(2.0f));
}

TEST_F(FakeCudartTest, CopiesRowsWithPitches) {
  const std::vector<float> rows = {1, 2, 3, 4, 5, 6};
  ASSERT_EQ(cudaMemcpy2DAsync(data_, 16, rows.data(), 12, 8, 2,
                              cudaMemcpyHostToDevice, compute_),
            cudaSuccess);
  const std::vector<float> seen = ReadOn(compute_);
  EXPECT_THAT(std::vector<float>(seen.begin(), seen.begin() + 6),
              ::testing::ElementsAre(1, 2, 0, 0, 4, 5));
  EXPECT_EQ(cudaMemcpy2DAsync(data_, 4, rows.data(), 12, 8, 2,
                              cudaMemcpyHostToDevice, compute_),
            cudaErrorInvalidPitchValue);
  cudaGetLastError();
}

TEST_F(FakeCudartTest, CopiesBeyondAnAllocationAreRefused) {
  EXPECT_EQ(cudaMemsetAsync(data_, 0, kCount * 4 + 1, compute_),
            cudaErrorInvalidValue);
  EXPECT_EQ(cudaMemcpy(data_ + 1, data_, kCount * 4, cudaMemcpyDeviceToDevice),
            cudaErrorInvalidValue);
  cudaGetLastError();
}

__global__ void AddKernel(float* data, float amount) {
  const unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < kCount) data[i] += amount;
}

TEST_F(FakeCudartTest, AGraphReplaysWhatWasCaptured) {
  cudaGraph_t graph;
  cudaGraphExec_t exec;
  ASSERT_EQ(cudaStreamBeginCapture(compute_, cudaStreamCaptureModeThreadLocal),
            cudaSuccess);
  EXPECT_EQ(Launch(AddKernel, dim3(8), dim3(128), 0, compute_, data_, 3.0f),
            cudaSuccess);
  void* refused = nullptr;
  EXPECT_EQ(cudaMalloc(&refused, 16), cudaErrorStreamCaptureUnsupported);
  cudaGetLastError();
  ASSERT_EQ(cudaStreamEndCapture(compute_, &graph), cudaSuccess);
  ASSERT_EQ(cudaGraphInstantiate(&exec, graph, 0), cudaSuccess);
  EXPECT_THAT(ReadOn(compute_), Each(0.0f));
  ASSERT_EQ(cudaGraphLaunch(exec, compute_), cudaSuccess);
  ASSERT_EQ(cudaGraphLaunch(exec, compute_), cudaSuccess);
  EXPECT_THAT(ReadOn(compute_), Each(6.0f));
  EXPECT_EQ(cudaGraphExecDestroy(exec), cudaSuccess);
  EXPECT_EQ(cudaGraphDestroy(graph), cudaSuccess);
}

TEST_F(FakeCudartTest, WaitingForACapturingStreamSpoilsTheCapture) {
  cudaGraph_t graph;
  ASSERT_EQ(cudaStreamBeginCapture(compute_, cudaStreamCaptureModeThreadLocal),
            cudaSuccess);
  EXPECT_EQ(cudaStreamSynchronize(compute_), cudaErrorStreamCaptureUnsupported);
  EXPECT_EQ(cudaStreamEndCapture(compute_, &graph),
            cudaErrorStreamCaptureInvalidated);
  cudaGetLastError();
}

TEST_F(FakeCudartTest, RegistersWritableHostMemoryOnce) {
  constexpr size_t kBytes = 8192;
  void* const p = mmap(nullptr, kBytes, PROT_READ | PROT_WRITE,
                       MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  EXPECT_EQ(cudaHostRegister(p, kBytes, 0), cudaSuccess);
  EXPECT_EQ(cudaHostRegister(p, 4096, 0), cudaErrorHostMemoryAlreadyRegistered);
  EXPECT_EQ(cudaHostUnregister(p), cudaSuccess);
  EXPECT_EQ(cudaHostUnregister(p), cudaErrorHostMemoryNotRegistered);
  mprotect(p, kBytes, PROT_READ);
  EXPECT_EQ(cudaHostRegister(p, kBytes, 0), cudaErrorInvalidValue);
  munmap(p, kBytes);
  cudaGetLastError();
}

TEST_F(FakeCudartTest, DeviceMemoryIsLimited) {
  size_t free_bytes = 0;
  size_t total_bytes = 0;
  ASSERT_EQ(cudaMemGetInfo(&free_bytes, &total_bytes), cudaSuccess);
  void* p = nullptr;
  EXPECT_EQ(cudaMalloc(&p, free_bytes + 1), cudaErrorMemoryAllocation);
  EXPECT_EQ(cudaGetLastError(), cudaErrorMemoryAllocation);
}

// The exit status of `body` in a child process.
template <class Body>
int InChild(Body body) {
  const pid_t child = fork();
  if (child == 0) _exit(body());
  int status = -1;
  waitpid(child, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

TEST_F(FakeCudartTest, AnotherProcessReadsAndWritesThroughAHandle) {
  cudaIpcMemHandle_t handle;
  ASSERT_EQ(cudaIpcGetMemHandle(&handle, data_), cudaSuccess);
  void* own = nullptr;
  EXPECT_EQ(cudaIpcOpenMemHandle(&own, handle, 0), cudaErrorInvalidValue);
  EXPECT_EQ(cudaIpcGetMemHandle(&handle, data_ + 64), cudaErrorInvalidValue);
  cudaGetLastError();
  cudaMemset(data_, 0x40, kCount * 4);
  const int status = InChild([&] {
    void* p = nullptr;
    void* again = nullptr;
    uint32_t word = 0;
    if (cudaIpcOpenMemHandle(&p, handle, 1) != cudaSuccess) return 1;
    if (cudaIpcOpenMemHandle(&again, handle, 1) != cudaSuccess) return 2;
    if (again != p) return 3;
    cudaMemcpy(&word, p, 4, cudaMemcpyDeviceToHost);
    if (word != 0x40404040) return 4;
    cudaMemset(p, 0, kCount * 4);
    return cudaIpcCloseMemHandle(p) == cudaSuccess &&
                   cudaIpcCloseMemHandle(p) == cudaSuccess &&
                   cudaIpcCloseMemHandle(p) != cudaSuccess
               ? 0
               : 5;
  });
  EXPECT_EQ(status, 0);
  EXPECT_THAT(ReadOn(compute_), Each(0.0f));
}

TEST_F(FakeCudartTest, ALaterAllocationMayHaveTheHandleOfAFreedOne) {
  void* first = nullptr;
  void* second = nullptr;
  cudaIpcMemHandle_t before;
  cudaIpcMemHandle_t after;
  ASSERT_EQ(cudaMalloc(&first, 123456), cudaSuccess);
  cudaIpcGetMemHandle(&before, first);
  ASSERT_EQ(cudaFree(first), cudaSuccess);
  ASSERT_EQ(cudaMalloc(&second, 123456), cudaSuccess);
  cudaIpcGetMemHandle(&after, second);
  EXPECT_EQ(std::memcmp(&before, &after, sizeof before), 0);
  EXPECT_EQ(cudaFree(second), cudaSuccess);
}

TEST(FakeDevicesTest, TheDeviceNamesItself) {
  int count = 0;
  cudaDeviceProp properties;
  ASSERT_EQ(cudaGetDeviceCount(&count), cudaSuccess);
  EXPECT_EQ(count, 1);
  ASSERT_EQ(cudaGetDeviceProperties(&properties, 0), cudaSuccess);
  EXPECT_EQ(std::string(properties.name), "Emulated GPU 0");
  EXPECT_EQ(cudaSetDevice(1), cudaErrorInvalidDevice);
  EXPECT_STREQ(cudaGetErrorName(cudaGetLastError()), "cudaErrorInvalidDevice");
}

}  // namespace
}  // namespace promptcache::gpu
