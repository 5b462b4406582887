// The CUDA implementation over the stand-in of tests/cuda_on_cpu. Segments are
// imported by a child process, since CUDA IPC refuses the exporter's own.
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "cuda/runtime/gpus.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/support/status_matchers.h"

namespace promptcache::gpu {
namespace {

using ::testing::AllOf;
using ::testing::ExitedWithCode;
using ::testing::HasSubstr;

constexpr uint64_t kSegmentBytes = uint64_t{4} << 20;
// A small GPU; the stand-in asks once, later than this.
const int kSmallGpu = ::setenv("PC_EMU_DEVICE_MIB", "64", /*overwrite=*/0);

std::unique_ptr<Device> Open() {
  auto device = OpenGpu(FindGpus(), "");
  EXPECT_THAT(device, IsOk());
  return device.ok() ? *std::move(device) : nullptr;
}

// In a child of its own: the stand-in reads its environment once.
int SurveySays(const char* name, const char* value,
               const std::string& expected) {
  ::setenv(name, value, 1);
  const std::string text = FindGpus().ToString();
  if (text.find(expected) != std::string::npos) return 0;
  std::fprintf(stderr, "%s\n", text.c_str());
  return 1;
}

TEST(CudaSurveyDeathTest, SaysWhatIsThereAndWhyItIsRefused) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  const auto says = [](const char* name, const char* value,
                       const char* expected) {
    EXPECT_EXIT(std::exit(SurveySays(name, value, expected)), ExitedWithCode(0),
                "");
  };
  says("PC_EMU_DEVICES", "0,1", "2 GPUs: GPU-");
  says("PC_EMU_DEVICES", "", "no GPU that the NVIDIA driver shows");
  says("PC_EMU_DEVICES", "none", "no NVIDIA driver on this machine");
  says("PC_EMU_DEVICES", "old",
       "(cudaErrorInsufficientDriver, 35); the driver speaks CUDA 11.4, this "
       "program CUDA 13.0");
  says("PC_EMU_NO_VMM", "1", "1 GPU: GPU-");
  says("PC_EMU_MIG", "1", "a MIG instance cannot share memory");
}

// Each in a process of its own, which prints what it logs.
TEST(CudaSurveyDeathTest, WarnsOfFaultsAndNotOfMachinesWithoutAGpu) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  const auto logs = [](const char* name, const char* value, const char* line) {
    const auto run = [=] {
      ::setenv(name, value, 1);
      FindGpus().LogNoGpu("on the CPU");
      std::exit(0);
    };
    EXPECT_EXIT(run(), ExitedWithCode(0), line);
  };
  logs("PC_EMU_DEVICES", "none", "I[0-9]+ .*no NVIDIA driver.*: on the CPU");
  logs("PC_EMU_DEVICES", "", "I[0-9]+ .*no GPU that.*: on the CPU");
  logs("PC_EMU_DEVICES", "old", "W[0-9]+ .*11.4.*13.0: on the CPU");
  logs("PC_EMU_MIG", "1", "W[0-9]+ .*refused: .*MIG.*: on the CPU");
}

TEST(CudaDeviceTest, CopiesAreInOrderOfTheirStreamAndAnEventCarriesIt) {
  const auto device = Open();
  const auto copies = *device->NewStream();
  const auto compute = *device->NewStream(StreamPriority::kHigh);
  const auto ready = *device->NewEvent();
  std::vector<uint8_t> in(1000, 7);
  std::vector<uint8_t> out(1000);
  const DeviceBuffer buffer = *device->Allocate(in.size());
  PC_ASSERT_OK(
      copies->Copy(buffer.data(), in.data(), in.size(), CopyKind::kToDevice));
  PC_ASSERT_OK(copies->Record(ready.get()));
  PC_ASSERT_OK(compute->Wait(*ready));
  PC_ASSERT_OK(
      compute->Copy(out.data(), buffer.data(), out.size(), CopyKind::kToHost));
  PC_ASSERT_OK(compute->Synchronize());
  EXPECT_EQ(out, in);
  EXPECT_THAT(compute->Idle(), IsOkAndHolds(true));
}

TEST(CudaDeviceTest, RowsAreCopiedAndZeroedWithTheirPitch) {
  const auto device = Open();
  const auto stream = *device->NewStream();
  const DeviceBuffer buffer = *device->Allocate(4 * 8);
  const std::vector<uint8_t> ones(4 * 8, 1);
  std::vector<uint8_t> out(4 * 8);
  PC_ASSERT_OK(stream->Copy(buffer.data(), ones.data(), ones.size(),
                            CopyKind::kToDevice));
  PC_ASSERT_OK(stream->Zero(buffer.data() + 2, 8, 3, 4));
  PC_ASSERT_OK(stream->Copy({.to = out.data(),
                             .to_pitch = 8,
                             .from = buffer.data(),
                             .from_pitch = 8,
                             .width = 8,
                             .height = 4},
                            CopyKind::kToHost));
  PC_ASSERT_OK(stream->Synchronize());
  for (size_t i = 0; i < out.size(); ++i) {
    EXPECT_EQ(out[i], i % 8 >= 2 && i % 8 < 5 ? 0 : 1) << i;
  }
}

TEST(CudaDeviceTest, AnAllocationThatIsTooLargeNamesTheCallAndWhatIsFree) {
  const auto device = Open();
  EXPECT_THAT(device->Allocate(size_t{1} << 50),
              StatusIs(absl::StatusCode::kResourceExhausted,
                       AllOf(HasSubstr("cudaMalloc(1125899906842624)"),
                             HasSubstr("cudaErrorMemoryAllocation"),
                             HasSubstr("are free"))));
  // Nobody else is blamed for it.
  EXPECT_THAT(device->Allocate(100), IsOk());
}

TEST(CudaDeviceTest, APinnedMemfdIsCopiedFrom) {
  const auto device = Open();
  const auto stream = *device->NewStream();
  const auto host = *device->NewSegment("test", 1 << 20, HandleKind::kMemfd);
  std::memset(host->base(), 5, host->num_bytes());
  const auto imported = *device->Import({.kind = HandleKind::kMemfd,
                                         .num_bytes = host->num_bytes(),
                                         .fd = UniqueFd(::dup(host->fd()))});
  const DeviceBuffer buffer = *device->Allocate(1 << 20);
  std::vector<uint8_t> out(1 << 20);
  PC_ASSERT_OK(stream->Copy(buffer.data(), imported->read_base(), out.size(),
                            CopyKind::kToDevice));
  PC_ASSERT_OK(
      stream->Copy(out.data(), buffer.data(), out.size(), CopyKind::kToHost));
  PC_ASSERT_OK(stream->Synchronize());
  EXPECT_EQ(out, std::vector<uint8_t>(1 << 20, 5));
}

// Runs `child` in another process, which opens the GPU for itself.
int InChild(const std::function<int(Device&)>& child) {
  const pid_t pid = ::fork();
  if (pid == 0) {
    auto device = OpenGpu(FindGpus(), "");
    ::_exit(device.ok() ? child(**device) : 99);
  }
  int status = 0;
  ::waitpid(pid, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

// First byte of `base`, through the device.
int FirstByte(Device& device, const std::byte* base) {
  uint8_t value = 0;
  const auto stream = *device.NewStream();
  if (!stream->Copy(&value, base, 1, CopyKind::kToHost).ok()) return -1;
  return stream->Synchronize().ok() ? value : -1;
}

absl::Status Fill(Device& device, std::byte* base, uint8_t value) {
  const std::vector<uint8_t> bytes(kSegmentBytes, value);
  const auto stream = *device.NewStream();
  if (absl::Status s =
          stream->Copy(base, bytes.data(), bytes.size(), CopyKind::kToDevice);
      !s.ok()) {
    return s;
  }
  return stream->Synchronize();
}

class SharedGpuSegmentTest : public ::testing::TestWithParam<HandleKind> {
 protected:
  void SetUp() override {
    device_ = Open();
    auto segment = device_->NewSegment("test", kSegmentBytes, GetParam());
    PC_ASSERT_OK(segment);
    segment_ = *std::move(segment);
  }
  SegmentHandle Handle() const {
    SegmentHandle handle{.kind = segment_->kind(),
                         .num_bytes = segment_->num_bytes(),
                         .ipc_handle = segment_->ipc_handle()};
    if (segment_->fd() >= 0) handle.fd = UniqueFd(::dup(segment_->fd()));
    return handle;
  }
  bool by_fd() const { return GetParam() == HandleKind::kCudaFd; }

  std::unique_ptr<Device> device_;
  std::unique_ptr<SharedSegment> segment_;
};

TEST_P(SharedGpuSegmentTest, IsZeroAndOfTheKindAskedFor) {
  EXPECT_EQ(FirstByte(*device_, segment_->base() + kSegmentBytes - 1), 0);
  EXPECT_EQ(segment_->kind(), GetParam());
  EXPECT_EQ(segment_->fd() >= 0, by_fd());
  EXPECT_EQ(segment_->ipc_handle().size(), by_fd() ? 0u : kIpcHandleBytes);
  EXPECT_EQ(segment_->importable_read_only(), by_fd());
  EXPECT_FALSE(segment_->on_host());
}

TEST_P(SharedGpuSegmentTest, AnotherProcessReadsAndWritesItInPlace) {
  PC_ASSERT_OK(Fill(*device_, segment_->base(), 42));
  SegmentHandle handle = Handle();
  EXPECT_EQ(InChild([&](Device& device) {
              auto imported = device.Import(std::move(handle));
              if (!imported.ok()) return 1;
              if ((*imported)->read_only() != by_fd()) return 2;
              if (FirstByte(device, (*imported)->read_base()) != 42) return 3;
              if (!Fill(device, (*imported)->write_base(), 17).ok()) return 4;
              return FirstByte(device, (*imported)->read_base()) == 17 ? 0 : 5;
            }),
            0);
  EXPECT_EQ(FirstByte(*device_, segment_->base()), 17);
}

TEST_P(SharedGpuSegmentTest, AReadingAddressOfAnFdCannotBeWrittenThrough) {
  SegmentHandle handle = Handle();
  EXPECT_EQ(InChild([&](Device& device) {
              auto imported = device.Import(std::move(handle));
              if (!imported.ok()) return 1;
              auto* base = const_cast<std::byte*>((*imported)->read_base());
              return Fill(device, base, 1).ok() == !by_fd() ? 0 : 2;
            }),
            0);
}

TEST_P(SharedGpuSegmentTest, AGarbageHandleIsRefusedWithTheCallsName) {
  SegmentHandle handle{.kind = GetParam(), .num_bytes = kSegmentBytes};
  const char* call = by_fd() ? "without a descriptor" : "IPC handle of 0 bytes";
  EXPECT_THAT(device_->Import(std::move(handle)),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr(call)));
  SegmentHandle garbage{.kind = GetParam(),
                        .num_bytes = kSegmentBytes,
                        .ipc_handle = std::string(kIpcHandleBytes, 'x')};
  int ends[2];
  ASSERT_EQ(::pipe(ends), 0);
  const UniqueFd write_end(ends[1]);
  garbage.fd = UniqueFd(ends[0]);
  EXPECT_THAT(device_->Import(std::move(garbage)).status().message(),
              HasSubstr(by_fd() ? "cuMemImportFromShareableHandle"
                                : "cudaIpcOpenMemHandle"));
}

TEST_P(SharedGpuSegmentTest, ItsMemoryGoesBackWithIt) {
  segment_.reset();
  ASSERT_EQ(kSmallGpu, 0);
  // More than the GPU has in total: each must be freed.
  for (int i = 0; i < 3; ++i) {
    auto large = device_->NewSegment("test", uint64_t{40} << 20, GetParam());
    PC_ASSERT_OK(large);
  }
}

INSTANTIATE_TEST_SUITE_P(Kinds, SharedGpuSegmentTest,
                         ::testing::Values(HandleKind::kCudaIpc,
                                           HandleKind::kCudaFd),
                         [](const auto& test) {
                           return std::string(HandleKindName(test.param));
                         });

TEST(CudaSegmentDeathTest, WithoutReadOnlyMappingsItIsMappedOnceAndSaysSo) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_EXIT(
      {
        ::setenv("PC_EMU_NO_READ_ONLY", "1", 1);
        const auto device = OpenGpu(FindGpus(), "");
        if (!device.ok()) std::exit(1);
        const auto segment =
            (*device)->NewSegment("t", kSegmentBytes, HandleKind::kCudaFd);
        if (!segment.ok() || (*segment)->importable_read_only()) std::exit(2);
        const auto imported =
            (*device)->Import({.kind = HandleKind::kCudaFd,
                               .num_bytes = kSegmentBytes,
                               .fd = UniqueFd(::dup((*segment)->fd()))});
        std::exit(imported.ok() && !(*imported)->read_only() ? 0 : 3);
      },
      ExitedWithCode(0), "");
}

TEST(CudaSegmentTest, AnOddSizeIsRefusedWithTheGranularity) {
  const auto device = Open();
  EXPECT_THAT(
      device->NewSegment("t", kSegmentBytes + 4096, HandleKind::kCudaFd),
      StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("2097152")));
}

}  // namespace
}  // namespace promptcache::gpu
