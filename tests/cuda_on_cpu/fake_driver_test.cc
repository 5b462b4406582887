// Virtual memory management of the stand-in: allocations that travel as file
// descriptors.
#include <cuda.h>
#include <cuda_runtime_api.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstring>

#include "gtest/gtest.h"

namespace promptcache::gpu {
namespace {

template <class F>
F EntryPoint(const char* name) {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult status;
  EXPECT_EQ(cudaGetDriverEntryPointByVersion(name, &function, 12000,
                                             cudaEnableDefault, &status),
            cudaSuccess);
  EXPECT_EQ(status, cudaDriverEntryPointSuccess) << name;
  return reinterpret_cast<F>(function);
}

struct Driver {
  decltype(&cuMemGetAllocationGranularity) granularity =
      EntryPoint<decltype(&cuMemGetAllocationGranularity)>(
          "cuMemGetAllocationGranularity");
  decltype(&cuMemCreate) create =
      EntryPoint<decltype(&cuMemCreate)>("cuMemCreate");
  decltype(&cuMemRelease) release =
      EntryPoint<decltype(&cuMemRelease)>("cuMemRelease");
  decltype(&cuMemExportToShareableHandle) export_handle =
      EntryPoint<decltype(&cuMemExportToShareableHandle)>(
          "cuMemExportToShareableHandle");
  decltype(&cuMemImportFromShareableHandle) import_handle =
      EntryPoint<decltype(&cuMemImportFromShareableHandle)>(
          "cuMemImportFromShareableHandle");
  decltype(&cuMemAddressReserve) reserve =
      EntryPoint<decltype(&cuMemAddressReserve)>("cuMemAddressReserve");
  decltype(&cuMemAddressFree) free =
      EntryPoint<decltype(&cuMemAddressFree)>("cuMemAddressFree");
  decltype(&cuMemMap) map = EntryPoint<decltype(&cuMemMap)>("cuMemMap");
  decltype(&cuMemUnmap) unmap = EntryPoint<decltype(&cuMemUnmap)>("cuMemUnmap");
  decltype(&cuMemSetAccess) set_access =
      EntryPoint<decltype(&cuMemSetAccess)>("cuMemSetAccess");
};

class FakeDriverTest : public ::testing::Test {
 protected:
  void SetUp() override {
    properties_.type = CU_MEM_ALLOCATION_TYPE_PINNED;
    properties_.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
    properties_.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    properties_.location.id = 0;
    ASSERT_EQ(driver_.granularity(&bytes_, &properties_,
                                  CU_MEM_ALLOC_GRANULARITY_MINIMUM),
              CUDA_SUCCESS);
    ASSERT_EQ(driver_.create(&handle_, bytes_, &properties_, 0), CUDA_SUCCESS);
  }
  void TearDown() override {
    EXPECT_EQ(driver_.release(handle_), CUDA_SUCCESS);
  }
  // Maps `handle` with `flags`; null when that fails.
  void* Map(CUmemGenericAllocationHandle handle, CUmemAccess_flags flags) {
    CUdeviceptr p = 0;
    const CUmemAccessDesc access = {properties_.location, flags};
    if (driver_.reserve(&p, bytes_, 0, 0, 0) != CUDA_SUCCESS ||
        driver_.map(p, bytes_, 0, handle, 0) != CUDA_SUCCESS ||
        driver_.set_access(p, bytes_, &access, 1) != CUDA_SUCCESS) {
      return nullptr;
    }
    return reinterpret_cast<void*>(p);
  }
  void Unmap(void* p) {
    const auto address = reinterpret_cast<CUdeviceptr>(p);
    EXPECT_EQ(driver_.unmap(address, bytes_), CUDA_SUCCESS);
    EXPECT_EQ(driver_.free(address, bytes_), CUDA_SUCCESS);
  }

  Driver driver_;
  CUmemAllocationProp properties_ = {};
  CUmemGenericAllocationHandle handle_ = 0;
  size_t bytes_ = 0;
};

TEST_F(FakeDriverTest, AnotherProcessReadsThroughADescriptorAndMayNotWrite) {
  void* const p = Map(handle_, CU_MEM_ACCESS_FLAGS_PROT_READWRITE);
  ASSERT_NE(p, nullptr);
  ASSERT_EQ(cudaMemset(p, 0x2a, bytes_), cudaSuccess);
  int fd = -1;
  ASSERT_EQ(driver_.export_handle(&fd, handle_,
                                  CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0),
            CUDA_SUCCESS);
  const pid_t child = fork();
  if (child == 0) {
    CUmemGenericAllocationHandle imported;
    if (driver_.import_handle(&imported, reinterpret_cast<void*>(intptr_t{fd}),
                              CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) !=
        CUDA_SUCCESS) {
      _exit(1);
    }
    void* const theirs = Map(imported, CU_MEM_ACCESS_FLAGS_PROT_READ);
    driver_.release(imported);  // the mapping keeps it
    uint32_t word = 0;
    if (theirs == nullptr) _exit(2);
    cudaMemcpy(&word, theirs, 4, cudaMemcpyDeviceToHost);
    if (word != 0x2a2a2a2a) _exit(3);
    _exit(cudaMemset(theirs, 0, 4) == cudaErrorInvalidValue ? 0 : 4);
  }
  int status = -1;
  waitpid(child, &status, 0);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << status;
  close(fd);
  Unmap(p);
}

TEST_F(FakeDriverTest, MemoryIsBackWhenHandleAndMappingsAreGone) {
  size_t free_before = 0;
  size_t free_after = 0;
  size_t total = 0;
  cudaMemGetInfo(&free_before, &total);
  CUmemGenericAllocationHandle handle;
  ASSERT_EQ(driver_.create(&handle, bytes_, &properties_, 0), CUDA_SUCCESS);
  void* const p = Map(handle, CU_MEM_ACCESS_FLAGS_PROT_READWRITE);
  ASSERT_NE(p, nullptr);
  EXPECT_EQ(driver_.release(handle), CUDA_SUCCESS);
  cudaMemGetInfo(&free_after, &total);
  EXPECT_EQ(free_after, free_before - bytes_);
  Unmap(p);
  cudaMemGetInfo(&free_after, &total);
  EXPECT_EQ(free_after, free_before);
}

TEST_F(FakeDriverTest, OddSizesAndUnknownHandlesAreRefused) {
  CUmemGenericAllocationHandle handle;
  CUdeviceptr p = 0;
  EXPECT_EQ(driver_.create(&handle, bytes_ + 1, &properties_, 0),
            CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(driver_.release(987654), CUDA_ERROR_INVALID_VALUE);
  ASSERT_EQ(driver_.reserve(&p, bytes_, 0, 0, 0), CUDA_SUCCESS);
  EXPECT_EQ(driver_.map(p, bytes_, 0, 987654, 0), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(driver_.free(p, bytes_), CUDA_SUCCESS);
}

TEST(FakeEntryPointsTest, AnUnknownNameIsNotFound) {
  void* function = &function;
  cudaDriverEntryPointQueryResult status;
  EXPECT_EQ(cudaGetDriverEntryPointByVersion("cuNoSuchThing", &function, 12000,
                                             cudaEnableDefault, &status),
            cudaSuccess);
  EXPECT_EQ(status, cudaDriverEntryPointSymbolNotFound);
  EXPECT_EQ(function, nullptr);
}

}  // namespace
}  // namespace promptcache::gpu
