#include <cstdlib>
#include <cstring>
#include <new>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/status_macros.h"
#include "common/strings.h"
#include "cuda/runtime/device.h"
#include "cuda/runtime/gpus.h"
#include "cuda/runtime/host_segments.h"
#include "glog/logging.h"

namespace promptcache::gpu {
namespace {

constexpr std::align_val_t kAlignment{256};

class HostEvent final : public Event {
 public:
  absl::Status Synchronize() override { return absl::OkStatus(); }
  absl::StatusOr<bool> Done() override { return true; }
  absl::StatusOr<float> MillisecondsSince(const Event&) override {
    return absl::UnimplementedError("events of the CPU carry no time");
  }
  CUevent_st* native() const override { return nullptr; }
};

class HostStream final : public Stream {
 public:
  absl::Status Copy(void* to, const void* from, size_t num_bytes,
                    CopyKind) override {
    std::memcpy(to, from, num_bytes);
    return absl::OkStatus();
  }
  absl::Status Copy(const Copy2D& copy, CopyKind) override {
    for (size_t row = 0; row < copy.height; ++row) {
      std::memcpy(
          static_cast<std::byte*>(copy.to) + row * copy.to_pitch,
          static_cast<const std::byte*>(copy.from) + row * copy.from_pitch,
          copy.width);
    }
    return absl::OkStatus();
  }
  absl::Status Zero(void* at, size_t num_bytes) override {
    std::memset(at, 0, num_bytes);
    return absl::OkStatus();
  }
  absl::Status Zero(void* at, size_t pitch, size_t width,
                    size_t height) override {
    for (size_t row = 0; row < height; ++row) {
      std::memset(static_cast<std::byte*>(at) + row * pitch, 0, width);
    }
    return absl::OkStatus();
  }
  absl::Status Record(Event*) override { return absl::OkStatus(); }
  absl::Status Wait(const Event&) override { return absl::OkStatus(); }
  absl::Status Synchronize() override { return absl::OkStatus(); }
  absl::StatusOr<bool> Idle() override { return true; }
  CUstream_st* native() const override { return nullptr; }
};

class HostDevice final : public Device {
 public:
  HostDevice() {
    info_.uuid = "CPU";
    info_.name = "CPU";
  }
  const DeviceInfo& info() const override { return info_; }
  absl::Status MakeCurrent() const override { return absl::OkStatus(); }
  absl::StatusOr<std::unique_ptr<Stream>> NewStream(StreamPriority) override {
    return std::make_unique<HostStream>();
  }
  absl::StatusOr<std::unique_ptr<Event>> NewEvent(bool) override {
    return std::make_unique<HostEvent>();
  }
  absl::StatusOr<std::unique_ptr<SharedSegment>> NewSegment(
      const char* name, uint64_t num_bytes, HandleKind kind) override {
    if (kind != HandleKind::kMemfd) return NotOfTheCpu(kind);
    return NewMemfdSegment(name, num_bytes);
  }
  bool CanImport(HandleKind kind) const override {
    return kind == HandleKind::kMemfd;
  }
  absl::StatusOr<std::unique_ptr<ImportedSegment>> Import(
      SegmentHandle handle) override {
    if (!CanImport(handle.kind)) return NotOfTheCpu(handle.kind);
    return ImportMemfd(std::move(handle));
  }

 private:
  static absl::Status NotOfTheCpu(HandleKind kind) {
    return absl::InvalidArgumentError(
        absl::StrCat("the CPU knows segments of kind memfd, not ",
                     ToAbsl(HandleKindName(kind))));
  }
  absl::StatusOr<void*> AllocateRaw(MemoryUse, size_t num_bytes) override {
    void* data = ::operator new(num_bytes, kAlignment, std::nothrow);
    if (data == nullptr) {
      return absl::ResourceExhaustedError(
          absl::StrCat("allocating ", num_bytes, " bytes"));
    }
    return data;
  }
  absl::Status PinRaw(void*, size_t, bool) override { return absl::OkStatus(); }
  absl::Status FreeRaw(MemoryUse use, void* data) override {
    if (use != MemoryUse::kRegistered) ::operator delete(data, kAlignment);
    return absl::OkStatus();
  }

  DeviceInfo info_;
};

}  // namespace

std::unique_ptr<Device> NewHostDevice() {
  return std::make_unique<HostDevice>();
}

std::string DeviceInfo::ToString() const {
  if (kind == DeviceKind::kCpu) return "CPU";
  return absl::StrCat(uuid, " ", name, ", sm_", compute_capability, ", ",
                      total_bytes >> 20, " MiB, driver for CUDA ",
                      CudaVersion(driver_version));
}

void DeviceMemory::Reset() {
  if (device_ != nullptr && data_ != nullptr) {
    const absl::Status freed = device_->FreeRaw(use_, data_);
    if (!freed.ok()) LOG(ERROR) << freed;
  }
  device_ = nullptr;
  data_ = nullptr;
  num_bytes_ = 0;
}

absl::StatusOr<DeviceBuffer> Device::Allocate(size_t num_bytes) {
  PC_ASSIGN_OR_RETURN(void* data, AllocateRaw(MemoryUse::kDevice, num_bytes));
  return DeviceMemory(this, MemoryUse::kDevice, data, num_bytes);
}

absl::StatusOr<PinnedBuffer> Device::AllocatePinned(size_t num_bytes) {
  PC_ASSIGN_OR_RETURN(void* data,
                      AllocateRaw(MemoryUse::kPinnedHost, num_bytes));
  return DeviceMemory(this, MemoryUse::kPinnedHost, data, num_bytes);
}

absl::StatusOr<Pinning> Device::Pin(void* base, size_t num_bytes,
                                    bool read_only) {
  PC_RETURN_IF_ERROR(PinRaw(base, num_bytes, read_only));
  return DeviceMemory(this, MemoryUse::kRegistered, base, num_bytes);
}

}  // namespace promptcache::gpu
