#include <cuda_runtime_api.h>

#include <algorithm>
#include <memory>
#include <string>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "common/status_macros.h"
#include "common/strings.h"
#include "cuda/runtime/cuda_driver.h"
#include "cuda/runtime/cuda_segments.h"
#include "cuda/runtime/cuda_status.h"
#include "cuda/runtime/gpus.h"
#include "cuda/runtime/host_segments.h"
#include "glog/logging.h"

namespace promptcache::gpu {
namespace {

void LogIfBad(cudaError_t error, std::string_view call) {
  const absl::Status status = ToStatus(error, call);
  if (!status.ok()) LOG(ERROR) << status;
}

cudaMemcpyKind Native(CopyKind kind) {
  switch (kind) {
    case CopyKind::kToDevice:
      return cudaMemcpyHostToDevice;
    case CopyKind::kToHost:
      return cudaMemcpyDeviceToHost;
    case CopyKind::kOnDevice:
      return cudaMemcpyDeviceToDevice;
  }
  return cudaMemcpyDefault;
}

// True, false for cudaErrorNotReady, or what went wrong.
absl::StatusOr<bool> Ready(cudaError_t error, std::string_view call) {
  if (error == cudaErrorNotReady) {
    (void)cudaGetLastError();
    return false;
  }
  PC_RETURN_IF_ERROR(ToStatus(error, call));
  return true;
}

class CudaEvent final : public Event {
 public:
  explicit CudaEvent(cudaEvent_t event) : event_(event) {}
  ~CudaEvent() override {
    LogIfBad(cudaEventDestroy(event_), "cudaEventDestroy");
  }
  absl::Status Synchronize() override {
    return ToStatus(cudaEventSynchronize(event_), "cudaEventSynchronize");
  }
  absl::StatusOr<bool> Done() override {
    return Ready(cudaEventQuery(event_), "cudaEventQuery");
  }
  absl::StatusOr<float> MillisecondsSince(const Event& earlier) override {
    float ms = 0;
    PC_RETURN_IF_ERROR(
        ToStatus(cudaEventElapsedTime(&ms, earlier.native(), event_),
                 "cudaEventElapsedTime"));
    return ms;
  }
  CUevent_st* native() const override { return event_; }

 private:
  const cudaEvent_t event_;
};

class CudaStream final : public Stream {
 public:
  CudaStream(int ordinal, cudaStream_t stream)
      : ordinal_(ordinal), stream_(stream) {}
  ~CudaStream() override {
    LogIfBad(cudaSetDevice(ordinal_), "cudaSetDevice");
    LogIfBad(cudaStreamDestroy(stream_), "cudaStreamDestroy");
  }
  absl::Status Copy(void* to, const void* from, size_t num_bytes,
                    CopyKind kind) override {
    PC_RETURN_IF_ERROR(MakeCurrent());
    return ToStatus(cudaMemcpyAsync(to, from, num_bytes, Native(kind), stream_),
                    "cudaMemcpyAsync");
  }
  absl::Status Copy(const Copy2D& copy, CopyKind kind) override {
    PC_RETURN_IF_ERROR(MakeCurrent());
    return ToStatus(
        cudaMemcpy2DAsync(copy.to, copy.to_pitch, copy.from, copy.from_pitch,
                          copy.width, copy.height, Native(kind), stream_),
        "cudaMemcpy2DAsync");
  }
  absl::Status Zero(void* at, size_t num_bytes) override {
    PC_RETURN_IF_ERROR(MakeCurrent());
    return ToStatus(cudaMemsetAsync(at, 0, num_bytes, stream_),
                    "cudaMemsetAsync");
  }
  absl::Status Zero(void* at, size_t pitch, size_t width,
                    size_t height) override {
    PC_RETURN_IF_ERROR(MakeCurrent());
    return ToStatus(cudaMemset2DAsync(at, pitch, 0, width, height, stream_),
                    "cudaMemset2DAsync");
  }
  absl::Status Record(Event* event) override {
    PC_RETURN_IF_ERROR(MakeCurrent());
    return ToStatus(cudaEventRecord(event->native(), stream_),
                    "cudaEventRecord");
  }
  absl::Status Wait(const Event& event) override {
    return ToStatus(cudaStreamWaitEvent(stream_, event.native(), 0),
                    "cudaStreamWaitEvent");
  }
  absl::Status Synchronize() override {
    return ToStatus(cudaStreamSynchronize(stream_), "cudaStreamSynchronize");
  }
  absl::StatusOr<bool> Idle() override {
    return Ready(cudaStreamQuery(stream_), "cudaStreamQuery");
  }
  CUstream_st* native() const override { return stream_; }

 private:
  absl::Status MakeCurrent() const {
    return ToStatus(cudaSetDevice(ordinal_), "cudaSetDevice");
  }
  const int ordinal_;
  const cudaStream_t stream_;
};

// Pinned while it is mapped.
class PinnedImport final : public ImportedSegment {
 public:
  PinnedImport(std::unique_ptr<ImportedSegment> mapped, Pinning pinning)
      : mapped_(std::move(mapped)), pinning_(std::move(pinning)) {}
  const std::byte* read_base() const override { return pinning_.data(); }
  std::byte* write_base() const override { return mapped_->write_base(); }
  uint64_t num_bytes() const override { return mapped_->num_bytes(); }
  HandleKind kind() const override { return mapped_->kind(); }

 private:
  const std::unique_ptr<ImportedSegment> mapped_;
  const Pinning pinning_;
};

class CudaDevice final : public Device {
 public:
  CudaDevice(DeviceInfo info, const CudaDriver& driver)
      : info_(std::move(info)), driver_(driver) {}

  const DeviceInfo& info() const override { return info_; }
  absl::Status MakeCurrent() const override {
    return ToStatus(cudaSetDevice(info_.ordinal), "cudaSetDevice");
  }
  absl::StatusOr<std::unique_ptr<Stream>> NewStream(
      StreamPriority priority) override {
    PC_RETURN_IF_ERROR(MakeCurrent());
    int least = 0;
    int greatest = 0;
    PC_RETURN_IF_ERROR(
        ToStatus(cudaDeviceGetStreamPriorityRange(&least, &greatest),
                 "cudaDeviceGetStreamPriorityRange"));
    cudaStream_t stream = nullptr;
    PC_RETURN_IF_ERROR(
        ToStatus(cudaStreamCreateWithPriority(
                     &stream, cudaStreamNonBlocking,
                     priority == StreamPriority::kHigh ? greatest : least),
                 "cudaStreamCreateWithPriority"));
    return std::make_unique<CudaStream>(info_.ordinal, stream);
  }
  absl::StatusOr<std::unique_ptr<Event>> NewEvent(bool timing) override {
    PC_RETURN_IF_ERROR(MakeCurrent());
    cudaEvent_t event = nullptr;
    PC_RETURN_IF_ERROR(ToStatus(
        cudaEventCreateWithFlags(
            &event, timing ? cudaEventDefault : cudaEventDisableTiming),
        "cudaEventCreateWithFlags"));
    return std::make_unique<CudaEvent>(event);
  }
  absl::StatusOr<std::unique_ptr<SharedSegment>> NewSegment(
      const char* name, uint64_t num_bytes, HandleKind kind) override;
  bool CanImport(HandleKind kind) const override {
    return kind != HandleKind::kCudaFd || info_.vmm_fds;
  }
  absl::StatusOr<std::unique_ptr<ImportedSegment>> Import(
      SegmentHandle handle) override;

 private:
  absl::Status NoVmm() const {
    return absl::InvalidArgumentError(
        absl::StrCat(info_.uuid,
                     " cannot export or import memory as descriptors here: use "
                     "handles of kind ipc"));
  }
  absl::StatusOr<std::unique_ptr<ImportedSegment>> ImportHost(
      SegmentHandle handle);
  absl::StatusOr<void*> AllocateRaw(MemoryUse use, size_t num_bytes) override;
  absl::Status PinRaw(void* base, size_t num_bytes, bool read_only) override {
    PC_RETURN_IF_ERROR(MakeCurrent());
    return ToStatus(
        cudaHostRegister(base, num_bytes,
                         cudaHostRegisterPortable |
                             (read_only ? cudaHostRegisterReadOnly : 0u)),
        absl::StrCat("cudaHostRegister(", num_bytes, ")"));
  }
  absl::Status FreeRaw(MemoryUse use, void* data) override;

  const DeviceInfo info_;
  const CudaDriver driver_;
};

absl::StatusOr<std::unique_ptr<SharedSegment>> CudaDevice::NewSegment(
    const char* name, uint64_t num_bytes, HandleKind kind) {
  PC_RETURN_IF_ERROR(MakeCurrent());
  switch (kind) {
    case HandleKind::kMemfd:
      return NewMemfdSegment(name, num_bytes);
    case HandleKind::kCudaIpc:
      return NewIpcSegment(info_.ordinal, num_bytes);
    case HandleKind::kCudaFd:
      if (!info_.vmm_fds) return NoVmm();
      return NewVmmSegment(driver_, info_.ordinal, num_bytes);
  }
  return absl::InvalidArgumentError("a segment of an unknown kind");
}

absl::StatusOr<std::unique_ptr<ImportedSegment>> CudaDevice::Import(
    SegmentHandle handle) {
  PC_RETURN_IF_ERROR(MakeCurrent());
  switch (handle.kind) {
    case HandleKind::kMemfd:
      return ImportHost(std::move(handle));
    case HandleKind::kCudaIpc:
      return ImportIpc(info_.ordinal, std::move(handle));
    case HandleKind::kCudaFd:
      if (!info_.vmm_fds) return NoVmm();
      return ImportVmm(driver_, info_.ordinal, std::move(handle));
  }
  return absl::InvalidArgumentError("a segment of an unknown kind");
}

absl::StatusOr<std::unique_ptr<ImportedSegment>> CudaDevice::ImportHost(
    SegmentHandle handle) {
  PC_ASSIGN_OR_RETURN(std::unique_ptr<ImportedSegment> mapped,
                      ImportMemfd(std::move(handle)));
  // Copies come from the read-only mapping where it can be pinned, else from
  // the writable one: read_only() tells.
  absl::StatusOr<Pinning> pinning =
      Pin(const_cast<std::byte*>(mapped->read_base()), mapped->num_bytes(),
          /*read_only=*/true);
  if (!pinning.ok()) {
    VLOG(1) << "not pinned read-only: " << pinning.status();
    pinning = Pin(mapped->write_base(), mapped->num_bytes(),
                  /*read_only=*/false);
  }
  PC_RETURN_IF_ERROR(pinning.status());
  return std::make_unique<PinnedImport>(std::move(mapped), *std::move(pinning));
}

absl::StatusOr<void*> CudaDevice::AllocateRaw(MemoryUse use, size_t num_bytes) {
  PC_RETURN_IF_ERROR(MakeCurrent());
  void* data = nullptr;
  const size_t asked = std::max<size_t>(num_bytes, 1);
  if (use == MemoryUse::kPinnedHost) {
    PC_RETURN_IF_ERROR(
        ToStatus(cudaHostAlloc(&data, asked, cudaHostAllocPortable),
                 absl::StrCat("cudaHostAlloc(", num_bytes, ")")));
    return data;
  }
  absl::Status status = ToStatus(cudaMalloc(&data, asked),
                                 absl::StrCat("cudaMalloc(", num_bytes, ")"));
  if (status.ok()) return data;
  size_t free_bytes = 0;
  size_t total_bytes = 0;
  if (cudaMemGetInfo(&free_bytes, &total_bytes) != cudaSuccess) return status;
  return absl::Status(
      status.code(),
      absl::StrCat(status.message(), "; ", free_bytes, " of ", total_bytes,
                   " bytes of ", info_.uuid, " are free"));
}

absl::Status CudaDevice::FreeRaw(MemoryUse use, void* data) {
  PC_RETURN_IF_ERROR(MakeCurrent());
  switch (use) {
    case MemoryUse::kDevice:
      return ToStatus(cudaFree(data), "cudaFree");
    case MemoryUse::kPinnedHost:
      return ToStatus(cudaFreeHost(data), "cudaFreeHost");
    case MemoryUse::kRegistered:
      return ToStatus(cudaHostUnregister(data), "cudaHostUnregister");
  }
  return absl::OkStatus();
}

// ---- what is there ----------------------------------------------------------

std::string UuidText(const char (&bytes)[16]) {
  std::string out = "GPU";
  for (int i = 0; i < 16; ++i) {
    if (i == 0 || i == 4 || i == 6 || i == 8 || i == 10) out += "-";
    absl::StrAppendFormat(&out, "%02x", static_cast<unsigned char>(bytes[i]));
  }
  return out;
}

absl::StatusOr<bool> IsMig(const CudaDriver& driver, CUdevice device,
                           std::string_view name) {
  if (absl::StrContains(ToAbsl(name), "MIG ")) return true;
  if (driver.device_get_uuid_v1 == nullptr) return false;
  CUuuid whole;
  CUuuid visible;
  PC_RETURN_IF_ERROR(driver.Check(driver.device_get_uuid_v1(&whole, device),
                                  "cuDeviceGetUuid"));
  PC_RETURN_IF_ERROR(driver.Check(driver.device_get_uuid_v2(&visible, device),
                                  "cuDeviceGetUuid_v2"));
  return !std::equal(std::begin(whole.bytes), std::end(whole.bytes),
                     std::begin(visible.bytes));
}

absl::StatusOr<DeviceInfo> Describe(const CudaDriver& driver, int ordinal,
                                    int driver_version) {
  cudaDeviceProp properties;
  PC_RETURN_IF_ERROR(ToStatus(cudaGetDeviceProperties(&properties, ordinal),
                              "cudaGetDeviceProperties"));
  DeviceInfo info{
      .kind = DeviceKind::kCuda,
      .ordinal = ordinal,
      .uuid = UuidText(properties.uuid.bytes),
      .name = properties.name,
      .compute_capability = properties.major * 10 + properties.minor,
      .num_multiprocessors = properties.multiProcessorCount,
      .total_bytes = properties.totalGlobalMem,
      .driver_version = driver_version};
  CUdevice device = 0;
  PC_RETURN_IF_ERROR(
      driver.Check(driver.device_get(&device, ordinal), "cuDeviceGet"));
  PC_ASSIGN_OR_RETURN(const bool mig, IsMig(driver, device, info.name));
  if (mig) {
    return absl::FailedPreconditionError(absl::StrCat(
        info.uuid, " ", info.name,
        ": a MIG instance cannot share memory between processes by handle; "
        "use a GPU that is not partitioned (nvidia-smi -mig 0)"));
  }
  if (info.compute_capability < kMinComputeCapability) {
    return absl::FailedPreconditionError(absl::StrCat(
        info.uuid, " ", info.name, ": sm_", info.compute_capability,
        " is too old, sm_", kMinComputeCapability, " and newer are supported"));
  }
  int vmm = 0;
  int fds = 0;
  PC_RETURN_IF_ERROR(driver.Check(
      driver.device_get_attribute(
          &vmm, CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED,
          device),
      "cuDeviceGetAttribute"));
  PC_RETURN_IF_ERROR(driver.Check(
      driver.device_get_attribute(
          &fds, CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED,
          device),
      "cuDeviceGetAttribute"));
  info.vmm_fds = driver.vmm && vmm != 0 && fds != 0;
  return info;
}

// By what cudaGetDeviceCount said.
GpuSurvey NoGpus(cudaError_t error) {
  // Clears the thread's last error, too.
  const absl::Status status = ToStatus(error, "cudaGetDeviceCount");
  if (status.ok() || error == cudaErrorNoDevice) {
    return {.none =
                "no GPU that the NVIDIA driver shows this process (see "
                "CUDA_VISIBLE_DEVICES)"};
  }
  GpuSurvey survey{
      .none = absl::StrCat("no GPU can be used: ", status.message()),
      .fault = true};
  int driver = 0;
  int runtime = 0;
  if (error == cudaErrorInsufficientDriver &&
      cudaDriverGetVersion(&driver) == cudaSuccess &&
      cudaRuntimeGetVersion(&runtime) == cudaSuccess) {
    if (driver == 0) return {.none = "no NVIDIA driver on this machine"};
    absl::StrAppend(&survey.none, "; the driver speaks CUDA ",
                    CudaVersion(driver), ", this program CUDA ",
                    CudaVersion(runtime));
  }
  return survey;
}

}  // namespace

GpuSurvey FindGpus() {
  GpuSurvey survey;
  int count = 0;
  const cudaError_t counted = cudaGetDeviceCount(&count);
  if (counted != cudaSuccess || count == 0) return NoGpus(counted);
  int driver_version = 0;
  const absl::Status version =
      ToStatus(cudaDriverGetVersion(&driver_version), "cudaDriverGetVersion");
  const absl::StatusOr<CudaDriver> driver = CudaDriver::Load();
  if (!driver.ok() || !version.ok()) {
    survey.none =
        absl::StrCat("no GPU can be used: ",
                     (driver.ok() ? version : driver.status()).message());
    survey.fault = true;
    return survey;
  }
  for (int i = 0; i < count; ++i) {
    absl::StatusOr<DeviceInfo> info = Describe(*driver, i, driver_version);
    if (info.ok()) {
      survey.gpus.push_back(*std::move(info));
    } else {
      survey.refused.emplace_back(info.status().message());
    }
  }
  return survey;
}

absl::StatusOr<std::unique_ptr<Device>> OpenGpu(const GpuSurvey& survey,
                                                const std::string& uuid) {
  for (const DeviceInfo& info : survey.gpus) {
    if (!uuid.empty() && info.uuid != uuid) continue;
    PC_ASSIGN_OR_RETURN(const CudaDriver driver, CudaDriver::Load());
    auto device = std::make_unique<CudaDevice>(info, driver);
    PC_RETURN_IF_ERROR(device->MakeCurrent());
    // Makes the device's context: later calls of the driver need one.
    PC_RETURN_IF_ERROR(ToStatus(cudaFree(nullptr), "cudaFree"));
    return device;
  }
  return absl::NotFoundError(
      uuid.empty() ? survey.ToString()
                   : absl::StrCat(uuid, " is not here: ", survey.ToString()));
}

}  // namespace promptcache::gpu
