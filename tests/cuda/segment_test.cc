#include "cuda/runtime/segment.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <fstream>
#include <string>
#include <utility>

#include "gtest/gtest.h"
#include "tests/support/status_matchers.h"

namespace promptcache::gpu {
namespace {

using ::testing::HasSubstr;

constexpr uint64_t kBytes = 1 << 20;

UniqueFd Dup(int fd) { return UniqueFd(::fcntl(fd, F_DUPFD_CLOEXEC, 0)); }

HostSegment NewSegment(uint64_t bytes = kBytes) {
  absl::StatusOr<HostSegment> segment = HostSegment::Create("test", bytes);
  EXPECT_THAT(segment, IsOk());
  return *std::move(segment);
}

// Resident kilobytes of the mapping that begins at `base`.
uint64_t ResidentKb(const void* base) {
  char address[32];
  std::snprintf(address, sizeof(address), "%lx-",
                reinterpret_cast<unsigned long>(base));
  std::ifstream in("/proc/self/smaps");
  bool found = false;
  for (std::string line; std::getline(in, line);) {
    if (line.rfind(address, 0) == 0) found = true;
    if (found && line.rfind("Rss:", 0) == 0) return std::stoull(line.substr(4));
  }
  return 0;
}

TEST(HostSegmentTest, IsZeroedAndWritable) {
  HostSegment segment = NewSegment();
  EXPECT_EQ(segment.bytes(), kBytes);
  EXPECT_TRUE(std::all_of(segment.base(), segment.base() + kBytes,
                          [](std::byte b) { return b == std::byte{0}; }));
  segment.base()[kBytes - 1] = std::byte{7};
  EXPECT_EQ(segment.base()[kBytes - 1], std::byte{7});
}

TEST(HostSegmentTest, IsPopulatedBeforeFirstUse) {
  HostSegment segment = NewSegment();
  const uint64_t resident_kb = ResidentKb(segment.base());
  if (resident_kb == 0) GTEST_SKIP() << "no smaps on this kernel";
  EXPECT_EQ(resident_kb, kBytes / 1024);
}

TEST(HostSegmentTest, CannotBeResized) {
  HostSegment segment = NewSegment();
  EXPECT_NE(::ftruncate(segment.fd(), kBytes / 2), 0);
  EXPECT_EQ(errno, EPERM);
  EXPECT_NE(::ftruncate(segment.fd(), kBytes * 2), 0);
  EXPECT_EQ(errno, EPERM);
}

TEST(HostSegmentTest, WholeHugePagesWorkWithWhateverTheMachineHas) {
  HostSegment segment = NewSegment(uint64_t{4} << 20);
  segment.base()[(4 << 20) - 1] = std::byte{1};
  EXPECT_NE(HostPagesName(segment.pages()), "");
}

TEST(HostSegmentTest, OddSizesAreKeptAsAsked) {
  HostSegment segment = NewSegment(5000);
  EXPECT_EQ(segment.bytes(), 5000u);
  PC_EXPECT_OK(MappedSegment::Map(Dup(segment.fd()), 5000, /*writable=*/false));
}

TEST(HostSegmentTest, NothingIsRefused) {
  EXPECT_THAT(HostSegment::Create("test", 0),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("byte")));
}

TEST(HostSegmentTest, MoreThanTheMachineHasIsResourceExhausted) {
  EXPECT_THAT(HostSegment::Create("test", uint64_t{1} << 46),
              StatusIs(absl::StatusCode::kResourceExhausted,
                       HasSubstr("64 TiB asked, ")));
}

TEST(HostSegmentTest, MoveLeavesAnEmptyOne) {
  HostSegment a = NewSegment();
  std::byte* base = a.base();
  HostSegment b = std::move(a);
  EXPECT_EQ(a.base(), nullptr);  // NOLINT(bugprone-use-after-move): the test
  EXPECT_EQ(a.fd(), -1);
  EXPECT_EQ(b.base(), base);
  b = HostSegment();
  EXPECT_EQ(b.base(), nullptr);
  EXPECT_EQ(b.bytes(), 0u);
}

TEST(HostSegmentTest, SealFutureWritesKeepsOnlyTheOldMappingWritable) {
  HostSegment segment = NewSegment();
  PC_ASSERT_OK(segment.SealFutureWrites());
  segment.base()[0] = std::byte{9};
  EXPECT_FALSE(
      MappedSegment::Map(Dup(segment.fd()), kBytes, /*writable=*/true).ok());
  absl::StatusOr<MappedSegment> reader =
      MappedSegment::Map(Dup(segment.fd()), kBytes, /*writable=*/false);
  PC_ASSERT_OK(reader);
  EXPECT_EQ(reader->read_base()[0], std::byte{9});
}

TEST(MappedSegmentTest, SharesTheMemoryThroughBothMappings) {
  HostSegment segment = NewSegment();
  absl::StatusOr<MappedSegment> mapped =
      MappedSegment::Map(Dup(segment.fd()), kBytes, /*writable=*/true);
  PC_ASSERT_OK(mapped);
  mapped->write_base()[12345] = std::byte{42};
  EXPECT_EQ(mapped->read_base()[12345], std::byte{42});
  EXPECT_EQ(segment.base()[12345], std::byte{42});
}

TEST(MappedSegmentTest, WithoutWritableThereIsNoAlias) {
  HostSegment segment = NewSegment();
  absl::StatusOr<MappedSegment> mapped =
      MappedSegment::Map(Dup(segment.fd()), kBytes, /*writable=*/false);
  PC_ASSERT_OK(mapped);
  EXPECT_EQ(mapped->write_base(), nullptr);
}

TEST(MappedSegmentDeathTest, TheReadMappingCannotBeWritten) {
  HostSegment segment = NewSegment();
  absl::StatusOr<MappedSegment> mapped =
      MappedSegment::Map(Dup(segment.fd()), kBytes, /*writable=*/true);
  PC_ASSERT_OK(mapped);
  EXPECT_DEATH(*const_cast<std::byte*>(mapped->read_base()) = std::byte{1}, "");
}

TEST(MappedSegmentTest, AnotherSizeThanToldIsRefused) {
  HostSegment segment = NewSegment();
  for (uint64_t told : {uint64_t{0}, kBytes - 1, kBytes + 4096}) {
    EXPECT_THAT(MappedSegment::Map(Dup(segment.fd()), told, /*writable=*/false),
                StatusIs(absl::StatusCode::kInvalidArgument,
                         HasSubstr("1048576 bytes")));
  }
}

TEST(MappedSegmentTest, AnUnsealedMemfdIsRefused) {
  UniqueFd fd(::memfd_create("unsealed", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  ASSERT_EQ(::ftruncate(fd.get(), kBytes), 0);
  EXPECT_THAT(
      MappedSegment::Map(std::move(fd), kBytes, /*writable=*/false),
      StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("sealed")));
}

TEST(MappedSegmentTest, APipeIsRefused) {
  int ends[2];
  ASSERT_EQ(::pipe(ends), 0);
  UniqueFd read_end(ends[0]);
  UniqueFd write_end(ends[1]);
  EXPECT_THAT(
      MappedSegment::Map(std::move(read_end), kBytes, /*writable=*/false),
      StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("")));
}

TEST(MappedSegmentTest, OutlivesTheExporter) {
  absl::StatusOr<MappedSegment> mapped = absl::InternalError("not mapped");
  {
    HostSegment segment = NewSegment();
    segment.base()[3] = std::byte{5};
    mapped = MappedSegment::Map(Dup(segment.fd()), kBytes, /*writable=*/false);
  }
  PC_ASSERT_OK(mapped);
  EXPECT_EQ(mapped->read_base()[3], std::byte{5});
}

}  // namespace
}  // namespace promptcache::gpu
