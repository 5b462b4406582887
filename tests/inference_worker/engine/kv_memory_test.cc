// Pages on a GPU, over the stand-in of tests/cuda_on_cpu; what is read back
// goes through streams.
#include "inference_worker/engine/kv_memory.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <vector>

#include "common/page_sum.h"
#include "cuda/runtime/gpus.h"
#include "inference_worker/engine/gpu_backend.h"
#include "inference_worker/engine/private_pages.h"
#include "tests/support/status_matchers.h"

namespace promptcache::worker {
namespace {

constexpr KvLayout kLayout{.num_layers = 2, .num_kv_heads = 2, .head_dim = 16};
const size_t kPageBytes = kLayout.page_bytes();

class KvMemoryTest : public ::testing::Test {
 protected:
  void SetUp() override {
    auto device = gpu::OpenGpu(gpu::FindGpus(), "");
    PC_ASSERT_OK(device);
    device_ = *std::move(device);
    stream_ = *device_->NewStream();
    memory_ = *KvMemory::Create({.device = device_.get()});
    auto pages = PrivatePages::Create(kLayout, 16 * kPageBytes, memory_.get());
    PC_ASSERT_OK(pages);
    pages_ = *std::move(pages);
  }
  void Write(std::byte* page, uint8_t value) {
    const std::vector<uint8_t> bytes(kPageBytes, value);
    PC_ASSERT_OK(stream_->Copy(page, bytes.data(), bytes.size(),
                               gpu::CopyKind::kToDevice));
    PC_ASSERT_OK(stream_->Synchronize());
  }
  std::vector<uint8_t> Read(const std::byte* page) {
    std::vector<uint8_t> bytes(kPageBytes);
    PC_EXPECT_OK(stream_->Copy(bytes.data(), page, bytes.size(),
                               gpu::CopyKind::kToHost));
    PC_EXPECT_OK(stream_->Synchronize());
    return bytes;
  }

  std::unique_ptr<gpu::Device> device_;
  std::unique_ptr<gpu::Stream> stream_;
  std::unique_ptr<KvMemory> memory_;
  std::unique_ptr<PrivatePages> pages_;
};

TEST_F(KvMemoryTest, PrivatePagesAreOnTheGpuAndZeroAtEveryHandOut) {
  for (int round = 0; round < 2; ++round) {
    const auto pages = *pages_->Allocate(16);
    for (std::byte* page : pages) {
      EXPECT_EQ(Read(page), std::vector<uint8_t>(kPageBytes, 0));
      Write(page, 7);
    }
    pages_->Free(pages);
  }
}

TEST_F(KvMemoryTest, SumsAreThoseOfTheBytesByKernelAndByCopy) {
  const auto by_kernel =
      *KvMemory::Create({.device = device_.get(), .sum_pages = GpuPageSums()});
  const auto pages = *pages_->Allocate(3);
  std::vector<uint64_t> due;
  for (size_t i = 0; i < pages.size(); ++i) {
    const auto value = static_cast<uint8_t>(i + 1);
    Write(pages[i], value);
    due.push_back(
        PageSum(std::vector<std::byte>(kPageBytes, std::byte{value})));
  }
  const std::vector<const std::byte*> read(pages.begin(), pages.end());
  for (KvMemory* memory : {memory_.get(), by_kernel.get()}) {
    EXPECT_THAT(memory->Sums(read, kPageBytes, /*on_host=*/false),
                IsOkAndHolds(due));
  }
  pages_->Free(pages);
}

TEST_F(KvMemoryTest, CopiesComeFromTheHostTierAndAreSummedThere) {
  const auto host =
      *device_->NewSegment("test", 4 * kPageBytes, gpu::HandleKind::kMemfd);
  const auto pinned =
      *device_->Pin(host->base(), host->num_bytes(), /*read_only=*/false);
  std::vector<const std::byte*> from;
  std::vector<uint64_t> due;
  for (const size_t page : {2, 3, 0}) {
    std::byte* at = host->base() + page * kPageBytes;
    std::memset(at, static_cast<int>(page + 5), kPageBytes);
    from.push_back(at);
    due.push_back(PageSum({at, kPageBytes}));
  }
  const auto to = *pages_->Allocate(3);
  const auto arrival = memory_->StartCopyFromHost(from, to, kLayout);
  PC_ASSERT_OK(arrival);
  EXPECT_TRUE((*arrival)->AwaitLayers(1));
  EXPECT_TRUE((*arrival)->AwaitVerified());
  EXPECT_EQ(Read(to[0]), std::vector<uint8_t>(kPageBytes, 7));
  EXPECT_EQ(Read(to[1]), std::vector<uint8_t>(kPageBytes, 8));
  EXPECT_EQ(Read(to[2]), std::vector<uint8_t>(kPageBytes, 5));
  const auto copies = *pages_->Allocate(3);
  PC_ASSERT_OK(memory_->Copy(
      std::vector<const std::byte*>(to.begin(), to.end()), copies, kPageBytes));
  EXPECT_EQ(Read(copies[1]), std::vector<uint8_t>(kPageBytes, 8));
  pages_->Free(copies);
  EXPECT_THAT(memory_->Sums(from, kPageBytes, /*on_host=*/true),
              IsOkAndHolds(due));
  pages_->Free(to);
}

TEST_F(KvMemoryTest, ACopyThatIsLetGoHasEnded) {
  const auto host = *device_->AllocatePinned(kPageBytes);
  std::memset(host.data(), 9, kPageBytes);
  const std::vector<const std::byte*> from = {host.data()};
  const auto to = *pages_->Allocate(1);
  *memory_->StartCopyFromHost(from, to, kLayout);
  // What comes later is not overtaken.
  Write(to[0], 3);
  EXPECT_EQ(Read(to[0]), std::vector<uint8_t>(kPageBytes, 3));
  pages_->Free(to);
}

TEST_F(KvMemoryTest, OnlyTheRowsAskedForAreZeroed) {
  const auto pages = *pages_->Allocate(1);
  Write(pages[0], 1);
  // The last three slots of every head.
  const size_t stride = kLayout.token_stride_bytes();
  PC_ASSERT_OK(memory_->Zero({.first = pages[0] + 13 * stride,
                              .pitch = kLayout.head_stride_bytes(),
                              .width = 3 * stride,
                              .height = 8}));
  const std::vector<uint8_t> bytes = Read(pages[0]);
  for (size_t i = 0; i < bytes.size(); ++i) {
    ASSERT_EQ(bytes[i], i / stride % 16 < 13 ? 1 : 0) << i;
  }
  pages_->Free(pages);
}

TEST_F(KvMemoryTest, APoolThatIsTooLargeNamesTheCall) {
  EXPECT_THAT(PrivatePages::Create(kLayout, uint64_t{1} << 42, memory_.get()),
              StatusIs(absl::StatusCode::kResourceExhausted,
                       testing::HasSubstr("cudaMalloc")));
}

}  // namespace
}  // namespace promptcache::worker
