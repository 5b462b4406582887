#include "cuda/runtime/cuda_segments.h"

#include <cuda_runtime_api.h>

#include <bit>
#include <cstring>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/status_macros.h"
#include "cuda/runtime/cuda_status.h"
#include "glog/logging.h"

namespace promptcache::gpu {
namespace {

// Destructors cannot fail: they say what went wrong.
void LogIfBad(const absl::Status& status) {
  if (!status.ok()) LOG(ERROR) << status;
}

// A device's memory is current only for the thread that frees it.
void MakeCurrent(int ordinal) {
  LogIfBad(ToStatus(cudaSetDevice(ordinal), "cudaSetDevice"));
}

absl::Status ZeroAll(void* base, uint64_t num_bytes) {
  PC_RETURN_IF_ERROR(ToStatus(cudaMemset(base, 0, num_bytes), "cudaMemset"));
  return ToStatus(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
}

// ---- CUDA IPC ---------------------------------------------------------------

class IpcSegment final : public SharedSegment {
 public:
  static absl::StatusOr<std::unique_ptr<SharedSegment>> Create(
      int ordinal, uint64_t num_bytes) {
    std::unique_ptr<IpcSegment> out(new IpcSegment(ordinal, num_bytes));
    void* base = nullptr;
    PC_RETURN_IF_ERROR(ToStatus(cudaMalloc(&base, num_bytes),
                                absl::StrCat("cudaMalloc(", num_bytes, ")")));
    out->base_ = static_cast<std::byte*>(base);
    PC_RETURN_IF_ERROR(ZeroAll(base, num_bytes));
    cudaIpcMemHandle_t handle;
    PC_RETURN_IF_ERROR(
        ToStatus(cudaIpcGetMemHandle(&handle, base), "cudaIpcGetMemHandle"));
    static_assert(sizeof(handle) == kIpcHandleBytes);
    out->handle_.assign(reinterpret_cast<const char*>(&handle), sizeof(handle));
    return out;
  }
  ~IpcSegment() override {
    if (base_ == nullptr) return;
    MakeCurrent(ordinal_);
    LogIfBad(ToStatus(cudaFree(base_), "cudaFree"));
  }
  std::byte* base() const override { return base_; }
  uint64_t num_bytes() const override { return num_bytes_; }
  HandleKind kind() const override { return HandleKind::kCudaIpc; }
  std::string description() const override { return "cuda ipc"; }
  int fd() const override { return -1; }
  const std::string& ipc_handle() const override { return handle_; }
  bool importable_read_only() const override { return false; }

 private:
  IpcSegment(int ordinal, uint64_t num_bytes)
      : ordinal_(ordinal), num_bytes_(num_bytes) {}

  const int ordinal_;
  const uint64_t num_bytes_;
  std::byte* base_ = nullptr;
  std::string handle_;
};

class ImportedIpc final : public ImportedSegment {
 public:
  ImportedIpc(int ordinal, std::byte* base, uint64_t num_bytes)
      : ordinal_(ordinal), base_(base), num_bytes_(num_bytes) {}
  ~ImportedIpc() override {
    MakeCurrent(ordinal_);
    LogIfBad(ToStatus(cudaIpcCloseMemHandle(base_), "cudaIpcCloseMemHandle"));
  }
  const std::byte* read_base() const override { return base_; }
  std::byte* write_base() const override { return base_; }
  uint64_t num_bytes() const override { return num_bytes_; }
  HandleKind kind() const override { return HandleKind::kCudaIpc; }

 private:
  const int ordinal_;
  std::byte* const base_;
  const uint64_t num_bytes_;
};

// ---- CUDA VMM ---------------------------------------------------------------

CUmemLocation Location(int ordinal) {
  CUmemLocation location{};
  location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  location.id = ordinal;
  return location;
}

CUmemAllocationProp Properties(int ordinal) {
  CUmemAllocationProp properties{};
  properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  properties.location = Location(ordinal);
  properties.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
  return properties;
}

// Owns one reference to an allocation.
class VmmAllocation {
 public:
  VmmAllocation(const CudaDriver& driver, CUmemGenericAllocationHandle handle)
      : driver_(driver), handle_(handle) {}
  VmmAllocation(const VmmAllocation&) = delete;
  VmmAllocation& operator=(const VmmAllocation&) = delete;
  ~VmmAllocation() {
    LogIfBad(driver_.Check(driver_.mem_release(handle_), "cuMemRelease"));
  }
  CUmemGenericAllocationHandle get() const { return handle_; }

 private:
  const CudaDriver driver_;
  const CUmemGenericAllocationHandle handle_;
};

// One mapping of an allocation. Move-only; empty when default-constructed.
class VmmMapping {
 public:
  static absl::StatusOr<VmmMapping> Map(const CudaDriver& driver, int ordinal,
                                        const VmmAllocation& allocation,
                                        uint64_t num_bytes, bool writable) {
    VmmMapping out;
    out.driver_ = driver;
    out.ordinal_ = ordinal;
    PC_RETURN_IF_ERROR(
        driver.Check(driver.mem_address_reserve(&out.address_, num_bytes,
                                                /*alignment=*/0, /*addr=*/0,
                                                /*flags=*/0),
                     "cuMemAddressReserve"));
    out.num_bytes_ = num_bytes;
    PC_RETURN_IF_ERROR(driver.Check(
        driver.mem_map(out.address_, num_bytes, /*offset=*/0, allocation.get(),
                       /*flags=*/0),
        "cuMemMap"));
    out.mapped_ = true;
    CUmemAccessDesc access{};
    access.location = Location(ordinal);
    access.flags = writable ? CU_MEM_ACCESS_FLAGS_PROT_READWRITE
                            : CU_MEM_ACCESS_FLAGS_PROT_READ;
    PC_RETURN_IF_ERROR(driver.Check(
        driver.mem_set_access(out.address_, num_bytes, &access, /*count=*/1),
        "cuMemSetAccess"));
    return out;
  }
  VmmMapping() = default;
  VmmMapping(VmmMapping&& other) noexcept { *this = std::move(other); }
  VmmMapping& operator=(VmmMapping&& other) noexcept {
    if (this != &other) {
      Reset();
      driver_ = other.driver_;
      ordinal_ = other.ordinal_;
      address_ = std::exchange(other.address_, 0);
      num_bytes_ = std::exchange(other.num_bytes_, 0);
      mapped_ = std::exchange(other.mapped_, false);
    }
    return *this;
  }
  ~VmmMapping() { Reset(); }
  std::byte* base() const { return std::bit_cast<std::byte*>(address_); }

 private:
  void Reset() {
    if (num_bytes_ == 0) return;
    MakeCurrent(ordinal_);
    if (mapped_) {
      LogIfBad(
          driver_.Check(driver_.mem_unmap(address_, num_bytes_), "cuMemUnmap"));
    }
    LogIfBad(driver_.Check(driver_.mem_address_free(address_, num_bytes_),
                           "cuMemAddressFree"));
    num_bytes_ = 0;
    mapped_ = false;
  }

  CudaDriver driver_;
  int ordinal_ = 0;
  CUdeviceptr address_ = 0;
  uint64_t num_bytes_ = 0;
  bool mapped_ = false;
};

class VmmSegment final : public SharedSegment {
 public:
  VmmSegment(std::unique_ptr<VmmAllocation> allocation, VmmMapping mapping,
             UniqueFd fd, uint64_t num_bytes, bool read_only)
      : allocation_(std::move(allocation)),
        mapping_(std::move(mapping)),
        fd_(std::move(fd)),
        num_bytes_(num_bytes),
        read_only_(read_only) {}
  std::byte* base() const override { return mapping_.base(); }
  uint64_t num_bytes() const override { return num_bytes_; }
  HandleKind kind() const override { return HandleKind::kCudaFd; }
  std::string description() const override { return "cuda fd"; }
  int fd() const override { return fd_.get(); }
  const std::string& ipc_handle() const override { return no_handle_; }
  bool importable_read_only() const override { return read_only_; }

 private:
  // Released after the mapping is gone.
  const std::unique_ptr<VmmAllocation> allocation_;
  const VmmMapping mapping_;
  const UniqueFd fd_;
  const uint64_t num_bytes_;
  const bool read_only_;
  const std::string no_handle_;
};

class ImportedVmm final : public ImportedSegment {
 public:
  ImportedVmm(std::unique_ptr<VmmAllocation> allocation, VmmMapping writable,
              VmmMapping readable, uint64_t num_bytes)
      : allocation_(std::move(allocation)),
        writable_(std::move(writable)),
        readable_(std::move(readable)),
        num_bytes_(num_bytes) {}
  const std::byte* read_base() const override {
    return readable_.base() != nullptr ? readable_.base() : writable_.base();
  }
  std::byte* write_base() const override { return writable_.base(); }
  uint64_t num_bytes() const override { return num_bytes_; }
  HandleKind kind() const override { return HandleKind::kCudaFd; }

 private:
  const std::unique_ptr<VmmAllocation> allocation_;
  const VmmMapping writable_;
  const VmmMapping readable_;
  const uint64_t num_bytes_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<SharedSegment>> NewIpcSegment(
    int ordinal, uint64_t num_bytes) {
  return IpcSegment::Create(ordinal, num_bytes);
}

absl::StatusOr<std::unique_ptr<ImportedSegment>> ImportIpc(
    int ordinal, SegmentHandle handle) {
  cudaIpcMemHandle_t raw;
  if (handle.ipc_handle.size() != sizeof(raw)) {
    return absl::InvalidArgumentError(
        absl::StrCat("a CUDA IPC handle of ", handle.ipc_handle.size(),
                     " bytes, ", sizeof(raw), " are due"));
  }
  std::memcpy(&raw, handle.ipc_handle.data(), sizeof(raw));
  void* base = nullptr;
  PC_RETURN_IF_ERROR(
      ToStatus(cudaIpcOpenMemHandle(&base, raw, cudaIpcMemLazyEnablePeerAccess),
               "cudaIpcOpenMemHandle"));
  return std::make_unique<ImportedIpc>(ordinal, static_cast<std::byte*>(base),
                                       handle.num_bytes);
}

absl::StatusOr<std::unique_ptr<SharedSegment>> NewVmmSegment(
    const CudaDriver& driver, int ordinal, uint64_t num_bytes) {
  const CUmemAllocationProp properties = Properties(ordinal);
  size_t granularity = 0;
  PC_RETURN_IF_ERROR(
      driver.Check(driver.mem_granularity(&granularity, &properties,
                                          CU_MEM_ALLOC_GRANULARITY_MINIMUM),
                   "cuMemGetAllocationGranularity"));
  if (granularity == 0 || num_bytes % granularity != 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("a GPU segment of ", num_bytes,
                     " bytes: segments are multiples of ", granularity));
  }
  CUmemGenericAllocationHandle handle = 0;
  PC_RETURN_IF_ERROR(driver.Check(
      driver.mem_create(&handle, num_bytes, &properties, /*flags=*/0),
      absl::StrCat("cuMemCreate(", num_bytes, ")")));
  auto allocation = std::make_unique<VmmAllocation>(driver, handle);
  int fd = -1;
  PC_RETURN_IF_ERROR(driver.Check(
      driver.mem_export(&fd, handle, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
                        /*flags=*/0),
      "cuMemExportToShareableHandle"));
  UniqueFd owned(fd);
  PC_ASSIGN_OR_RETURN(VmmMapping mapping,
                      VmmMapping::Map(driver, ordinal, *allocation, num_bytes,
                                      /*writable=*/true));
  PC_RETURN_IF_ERROR(ZeroAll(mapping.base(), num_bytes));
  // Importers will ask the same of the same driver.
  const bool read_only = VmmMapping::Map(driver, ordinal, *allocation,
                                         num_bytes, /*writable=*/false)
                             .ok();
  return std::make_unique<VmmSegment>(std::move(allocation), std::move(mapping),
                                      std::move(owned), num_bytes, read_only);
}

absl::StatusOr<std::unique_ptr<ImportedSegment>> ImportVmm(
    const CudaDriver& driver, int ordinal, SegmentHandle handle) {
  if (!handle.fd) {
    return absl::InvalidArgumentError(
        "a CUDA segment of kind fd came without a descriptor");
  }
  CUmemGenericAllocationHandle raw = 0;
  PC_RETURN_IF_ERROR(driver.Check(
      driver.mem_import(
          &raw, std::bit_cast<void*>(static_cast<uintptr_t>(handle.fd.get())),
          CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR),
      "cuMemImportFromShareableHandle"));
  auto allocation = std::make_unique<VmmAllocation>(driver, raw);
  PC_ASSIGN_OR_RETURN(VmmMapping writable,
                      VmmMapping::Map(driver, ordinal, *allocation,
                                      handle.num_bytes, /*writable=*/true));
  // Not every driver knows read-only access; told by read_only().
  absl::StatusOr<VmmMapping> readable = VmmMapping::Map(
      driver, ordinal, *allocation, handle.num_bytes, /*writable=*/false);
  VLOG_IF(1, !readable.ok()) << "no read-only mapping: " << readable.status();
  return std::make_unique<ImportedVmm>(
      std::move(allocation), std::move(writable),
      readable.ok() ? *std::move(readable) : VmmMapping(), handle.num_bytes);
}

}  // namespace promptcache::gpu
