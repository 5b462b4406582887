#include "common/available_memory.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>

#include "tests/support/status_matchers.h"
#include "tests/support/test_files.h"

namespace promptcache {
namespace {

using ::testing::HasSubstr;

constexpr uint64_t kGiB = uint64_t{1} << 30;

// A /proc and a /sys of our own.
class AvailableMemoryTest : public ::testing::Test {
 protected:
  AvailableMemoryTest() {
    Write("/proc/meminfo",
          "MemTotal:       24731184 kB\n"
          "MemFree:         1048576 kB\n"
          "MemAvailable:   20971520 kB\n");
  }
  void Write(const std::string& path, const std::string& text) {
    const std::filesystem::path file = dir_.path() + path;
    std::filesystem::create_directories(file.parent_path());
    WriteFileOrDie(file, text);
  }
  uint64_t Available() const { return AvailableMemoryBytes(dir_.path()); }

  TempDir dir_;
};

TEST_F(AvailableMemoryTest, IsWhatTheMachineHasWithoutAGroup) {
  EXPECT_EQ(Available(), 20 * kGiB);
  Write("/proc/self/cgroup", "0::/\n");
  EXPECT_EQ(Available(), 20 * kGiB);
}

TEST_F(AvailableMemoryTest, IsUnlimitedWhereNothingSays) {
  Write("/proc/meminfo", "");
  EXPECT_EQ(Available(), UINT64_MAX);
}

TEST_F(AvailableMemoryTest, VersionTwoLimitsWithWhatFilesLeave) {
  Write("/proc/self/cgroup", "0::/pod/box\n");
  Write("/sys/fs/cgroup/pod/box/memory.max", "4294967296\n");
  Write("/sys/fs/cgroup/pod/box/memory.current", "2147483648\n");
  Write("/sys/fs/cgroup/pod/box/memory.stat",
        "anon 1073741824\nactive_file 536870912\ninactive_file 536870912\n");
  EXPECT_EQ(Available(), 3 * kGiB);
  Write("/sys/fs/cgroup/pod/box/memory.max", "max\n");
  EXPECT_EQ(Available(), 20 * kGiB);
}

TEST_F(AvailableMemoryTest, AGroupAboveLimitsToo) {
  Write("/proc/self/cgroup", "0::/pod/box\n");
  Write("/sys/fs/cgroup/pod/box/memory.max", "4294967296\n");
  Write("/sys/fs/cgroup/pod/box/memory.current", "0\n");
  Write("/sys/fs/cgroup/pod/memory.max", "2147483648\n");
  Write("/sys/fs/cgroup/pod/memory.current", "1073741824\n");
  EXPECT_EQ(Available(), kGiB);
}

TEST_F(AvailableMemoryTest, VersionOneLimits) {
  Write("/proc/self/cgroup",
        "9:name=systemd:/\n4:cpu,memory:/box\n3:cpuset:/box\n0::/\n");
  Write("/sys/fs/cgroup/memory/box/memory.limit_in_bytes", "3221225472\n");
  Write("/sys/fs/cgroup/memory/box/memory.usage_in_bytes", "2147483648\n");
  Write("/sys/fs/cgroup/memory/box/memory.stat",
        "inactive_file 7\ntotal_inactive_file 1073741824\n");
  EXPECT_EQ(Available(), 2 * kGiB);
  // What no limit looks like.
  Write("/sys/fs/cgroup/memory/box/memory.limit_in_bytes",
        "9223372036854771712\n");
  EXPECT_EQ(Available(), 20 * kGiB);
}

// As in a container that does not see the groups above its own.
TEST_F(AvailableMemoryTest, AGroupThatIsTheMountsRootIsFound) {
  Write("/proc/self/cgroup", "4:memory:/docker/0123\n");
  Write("/sys/fs/cgroup/memory/memory.limit_in_bytes", "1073741824\n");
  Write("/sys/fs/cgroup/memory/memory.usage_in_bytes", "0\n");
  EXPECT_EQ(Available(), kGiB);
}

TEST_F(AvailableMemoryTest, AGroupBeyondItsLimitHasNothing) {
  Write("/proc/self/cgroup", "0::/box\n");
  Write("/sys/fs/cgroup/unified/box/memory.max", "1000\n");
  Write("/sys/fs/cgroup/unified/box/memory.current", "2000\n");
  EXPECT_EQ(Available(), 0u);
}

TEST_F(AvailableMemoryTest, FreeHugePagesAreThoseNotPromised) {
  EXPECT_EQ(FreeHugePageBytes(dir_.path()), 0u);
  const std::string folder = "/sys/kernel/mm/hugepages/hugepages-2048kB/";
  Write(folder + "free_hugepages", "512\n");
  Write(folder + "resv_hugepages", "256\n");
  EXPECT_EQ(FreeHugePageBytes(dir_.path()), kGiB / 2);
}

TEST(CheckMemoryTest, NamesBothNumbers) {
  EXPECT_THAT(CheckMemory("tiers", 21 * kGiB, 21 * kGiB), IsOk());
  EXPECT_THAT(CheckMemory("tiers", 900 * kGiB, 21 * kGiB + kGiB / 4),
              StatusIs(absl::StatusCode::kResourceExhausted,
                       "tiers: 900 GiB asked, 21.2 GiB available"));
}

TEST(CheckMemoryTest, ThisMachineHasSome) {
  EXPECT_GT(AvailableMemoryBytes(), uint64_t{1} << 20);
  EXPECT_LT(AvailableMemoryBytes(), uint64_t{1} << 50);
}

}  // namespace
}  // namespace promptcache
