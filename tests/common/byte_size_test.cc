#include "common/byte_size.h"

#include <gtest/gtest.h>

#include "tests/support/status_matchers.h"

namespace promptcache {
namespace {

TEST(ByteSizeTest, ReadsNumbersWithUnits) {
  EXPECT_THAT(ParseByteSize("0"), IsOkAndHolds(0u));
  EXPECT_THAT(ParseByteSize("4096"), IsOkAndHolds(4096u));
  EXPECT_THAT(ParseByteSize("64KiB"), IsOkAndHolds(65536u));
  EXPECT_THAT(ParseByteSize(" 3 mib "), IsOkAndHolds(3u << 20));
  EXPECT_THAT(ParseByteSize("2G"), IsOkAndHolds(uint64_t{2} << 30));
  EXPECT_THAT(ParseByteSize("1TiB"), IsOkAndHolds(uint64_t{1} << 40));
  EXPECT_THAT(ParseByteSize("7b"), IsOkAndHolds(7u));
}

TEST(ByteSizeTest, RefusesEverythingElse) {
  for (const char* text : {"", "KiB", "-1", "1.5GiB", "1KB", "1 2", "0x10",
                           "18446744073709551616", "17179869184GiB"}) {
    EXPECT_FALSE(ParseByteSize(text).ok()) << text;
  }
}

TEST(ByteSizeTest, WhatIsWrittenIsReadBack) {
  for (const uint64_t size :
       {uint64_t{0}, uint64_t{1023}, uint64_t{1024}, uint64_t{1} << 20,
        (uint64_t{3} << 30) + 1024, uint64_t{5} << 40, UINT64_MAX}) {
    EXPECT_THAT(ParseByteSize(FormatByteSize(size)), IsOkAndHolds(size));
  }
  EXPECT_EQ(FormatByteSize(uint64_t{8} << 30), "8GiB");
}

TEST(ByteSizeTest, IsRoundedForPeople) {
  EXPECT_EQ(RoundedByteSize(12), "12 B");
  EXPECT_EQ(RoundedByteSize(640 << 10), "640 KiB");
  EXPECT_EQ(RoundedByteSize(uint64_t{3} << 29), "1.5 GiB");
  EXPECT_EQ(RoundedByteSize(uint64_t{900} << 30), "900 GiB");
  EXPECT_EQ(RoundedByteSize((uint64_t{900} << 30) + 1), "900 GiB");
  EXPECT_EQ(RoundedByteSize(UINT64_MAX), "16777216 TiB");
}

}  // namespace
}  // namespace promptcache
