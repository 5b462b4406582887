#include "cuda/runtime/layered_copy.h"

#include <cstring>
#include <memory>
#include <vector>

#include "cuda/runtime/gpus.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/support/status_matchers.h"

namespace promptcache::gpu {
namespace {

constexpr size_t kMiB = size_t{1} << 20;

TEST(LayersAtOnceTest, AreEightMiBOrAllOfASmallModule) {
  EXPECT_EQ(LayersAtOnce(/*num_pages=*/1, 4096, 32), 32u);
  EXPECT_EQ(LayersAtOnce(64, 2 * kMiB, 32), 2u);  // 4 MiB a layer
  EXPECT_EQ(LayersAtOnce(65, 2 * kMiB, 32), 2u);
  EXPECT_EQ(LayersAtOnce(63, 2 * kMiB, 32), 3u);
  EXPECT_EQ(LayersAtOnce(1024, 2 * kMiB, 32), 1u);
  EXPECT_EQ(LayersAtOnce(0, 4096, 4), 4u);
}

// On the CPU, and on the stand-in, whose copies land when they are waited for.
class LayeredCopyTest : public ::testing::TestWithParam<DeviceKind> {
 protected:
  LayeredCopyTest() {
    device_ = GetParam() == DeviceKind::kCpu ? NewHostDevice()
                                             : *OpenGpu(FindGpus(), "");
    stream_ = *device_->NewStream();
  }
  std::vector<uint8_t> Read(const DeviceBuffer& buffer) {
    const auto reader = *device_->NewStream();
    std::vector<uint8_t> bytes(buffer.num_bytes());
    PC_EXPECT_OK(reader->Copy(bytes.data(), buffer.data(), bytes.size(),
                              CopyKind::kToHost));
    PC_EXPECT_OK(reader->Synchronize());
    return bytes;
  }

  std::unique_ptr<Device> device_;
  std::unique_ptr<Stream> stream_;
};

TEST_P(LayeredCopyTest, LayersBeforeAnEventHaveArrivedInAllPages) {
  constexpr size_t kPages = 9;
  constexpr size_t kPageBytes = 4 * kMiB;
  constexpr uint32_t kLayers = 4;  // 9 MiB each
  const auto from = *device_->AllocatePinned(kPages * kPageBytes);
  const auto to = *device_->Allocate(kPages * kPageBytes);
  for (size_t i = 0; i < from.num_bytes(); ++i) {
    from.data()[i] = static_cast<std::byte>(i / 65536 % 251 + 1);
  }
  // Pages 0 to 5 in their order, 6 to 8 behind each other's.
  const std::vector<PageStretch> stretches = {
      {to.data() + 3 * kPageBytes, from.data(), 6},
      {to.data(), from.data() + 6 * kPageBytes, 3}};
  const auto groups =
      QueueLayeredCopy(*device_, *stream_, stretches, kPageBytes, kLayers);
  PC_ASSERT_OK(groups);
  ASSERT_EQ(groups->size(), 4u);
  for (const LayerGroup& group : *groups) {
    PC_ASSERT_OK(group.done->Synchronize());
    const std::vector<uint8_t> bytes = Read(to);
    const size_t there = group.end_layer * kPageBytes / kLayers;
    for (size_t page = 0; page < kPages; ++page) {
      const size_t source = (page + 6) % 9 * kPageBytes;
      ASSERT_EQ(std::memcmp(bytes.data() + page * kPageBytes,
                            from.data() + source, there),
                0)
          << page << ", layers before " << group.end_layer;
    }
  }
  EXPECT_EQ(groups->back().end_layer, kLayers);
}

INSTANTIATE_TEST_SUITE_P(Devices, LayeredCopyTest,
                         ::testing::Values(DeviceKind::kCpu,
                                           DeviceKind::kCuda));

}  // namespace
}  // namespace promptcache::gpu
