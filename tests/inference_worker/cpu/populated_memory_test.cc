#include "inference_worker/cpu/populated_memory.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/support/status_matchers.h"

namespace promptcache::worker::cpu {
namespace {

using ::testing::HasSubstr;

constexpr size_t kBytes = size_t{4} << 20;

TEST(PopulatedMemoryTest, IsZeroed) {
  auto memory = PopulatedMemory::Allocate(kBytes);
  PC_ASSERT_OK(memory);
  EXPECT_EQ(memory->num_bytes(), kBytes);
  EXPECT_EQ(memory->data()[kBytes - 1], std::byte{0});
}

TEST(PopulatedMemoryTest, MoreThanIsLeftIsRefused) {
  EXPECT_THAT(PopulatedMemory::Allocate(kBytes, kBytes), IsOk());
  EXPECT_THAT(PopulatedMemory::Allocate(kBytes, kBytes - 1),
              StatusIs(absl::StatusCode::kResourceExhausted,
                       HasSubstr("4 MiB asked, 4.0 MiB available")));
}

}  // namespace
}  // namespace promptcache::worker::cpu
