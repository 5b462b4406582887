#include "cuda/runtime/device.h"

#include <unistd.h>

#include <cstring>
#include <memory>
#include <numeric>
#include <string>
#include <vector>

#include "cuda/runtime/gpus.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/support/status_matchers.h"

namespace promptcache::gpu {
namespace {

using ::testing::HasSubstr;

TEST(GpuSurveyTest, NamesTheGpusOrSaysWhyThereIsNone) {
  const GpuSurvey survey = FindGpus();
  if (survey.gpus.empty()) {
    EXPECT_THAT(survey.ToString(), testing::StartsWith("no "));
    EXPECT_THAT(OpenGpu(survey, ""), StatusIs(absl::StatusCode::kNotFound,
                                              HasSubstr(survey.ToString())));
  } else {
    EXPECT_THAT(survey.ToString(), HasSubstr(survey.gpus[0].uuid));
    EXPECT_THAT(survey.gpus[0].uuid, testing::StartsWith("GPU-"));
  }
}

TEST(GpuSurveyTest, AnotherUuidIsRefusedWithWhatIsThere) {
  GpuSurvey survey;
  survey.gpus.push_back(
      {.kind = DeviceKind::kCuda, .uuid = "GPU-1", .name = "one"});
  EXPECT_THAT(OpenGpu(survey, "GPU-2"),
              StatusIs(absl::StatusCode::kNotFound,
                       testing::AllOf(HasSubstr("GPU-2 is not here"),
                                      HasSubstr("1 GPU: GPU-1 one"))));
}

TEST(HostDeviceTest, CopiesRowsWithTheirPitches) {
  const std::unique_ptr<Device> device = NewHostDevice();
  const auto stream = *device->NewStream();
  DeviceBuffer buffer = *device->Allocate(4 * 8);
  std::vector<uint8_t> rows(4 * 4);
  std::iota(rows.begin(), rows.end(), uint8_t{1});
  PC_ASSERT_OK(stream->Zero(buffer.data(), buffer.num_bytes()));
  PC_ASSERT_OK(stream->Copy({.to = buffer.data() + 2,
                             .to_pitch = 8,
                             .from = rows.data(),
                             .from_pitch = 4,
                             .width = 3,
                             .height = 4},
                            CopyKind::kToDevice));
  std::vector<uint8_t> got(buffer.num_bytes());
  PC_ASSERT_OK(
      stream->Copy(got.data(), buffer.data(), got.size(), CopyKind::kToHost));
  PC_ASSERT_OK(stream->Synchronize());
  for (size_t i = 0; i < got.size(); ++i) {
    const size_t column = i % 8;
    const size_t due =
        column >= 2 && column < 5 ? 1 + i / 8 * 4 + column - 2 : 0;
    EXPECT_EQ(got[i], due) << i;
  }
}

TEST(HostDeviceTest, MemoryMovesAndIsFreedOnce) {
  const std::unique_ptr<Device> device = NewHostDevice();
  DeviceBuffer first = *device->Allocate(100);
  std::byte* const data = first.data();
  DeviceBuffer second = std::move(first);
  EXPECT_EQ(second.data(), data);
  EXPECT_EQ(second.num_bytes(), 100u);
  second.Reset();
  second.Reset();
  EXPECT_EQ(second.data(), nullptr);
}

TEST(HostDeviceTest, RefusesSegmentsOfAGpu) {
  const std::unique_ptr<Device> device = NewHostDevice();
  EXPECT_FALSE(device->CanImport(HandleKind::kCudaFd));
  EXPECT_THAT(
      device->NewSegment("x", 4096, HandleKind::kCudaIpc),
      StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("not ipc")));
  EXPECT_THAT(
      device->Import({.kind = HandleKind::kCudaFd, .num_bytes = 4096}),
      StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("not fd")));
}

TEST(HostDeviceTest, AnImportedSegmentShowsTheExportersBytes) {
  const std::unique_ptr<Device> device = NewHostDevice();
  const auto segment =
      *device->NewSegment("promptcache-test", 8192, HandleKind::kMemfd);
  std::memset(segment->base(), 7, segment->num_bytes());
  auto imported = device->Import({.kind = segment->kind(),
                                  .num_bytes = segment->num_bytes(),
                                  .fd = UniqueFd(dup(segment->fd()))});
  PC_ASSERT_OK(imported.status());
  EXPECT_TRUE((*imported)->read_only());
  EXPECT_EQ((*imported)->read_base()[8191], std::byte{7});
  (*imported)->write_base()[0] = std::byte{9};
  EXPECT_EQ(segment->base()[0], std::byte{9});
}

TEST(HandleKindTest, NamesAreReadBack) {
  for (const HandleKind kind :
       {HandleKind::kMemfd, HandleKind::kCudaIpc, HandleKind::kCudaFd}) {
    EXPECT_EQ(ParseHandleKind(HandleKindName(kind)), kind);
  }
  EXPECT_EQ(ParseHandleKind("unknown"), std::nullopt);
}

}  // namespace
}  // namespace promptcache::gpu
