#include "tools/cli/terminal.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace promptcache::cli {
namespace {

TEST(TerminalTest, NumbersAreReadable) {
  EXPECT_EQ(WithCommas(0), "0");
  EXPECT_EQ(WithCommas(999), "999");
  EXPECT_EQ(WithCommas(1000), "1,000");
  EXPECT_EQ(WithCommas(1234567), "1,234,567");
  EXPECT_EQ(HumanBytes(12), "12 B");
  EXPECT_EQ(HumanBytes(1536), "1.5 KiB");
  EXPECT_EQ(HumanBytes(uint64_t{640} << 10), "640 KiB");
  EXPECT_EQ(HumanBytes(uint64_t{3} << 30), "3.0 GiB");
  EXPECT_EQ(HumanMs(2310), "2.31 s");
  EXPECT_EQ(HumanMs(61.44), "61.4 ms");
}

TEST(TerminalTest, ATablesNumbersStandUnderTheirHeads) {
  EXPECT_EQ(FormatTable({{"name", "n"}, {"a", "1"}, {"bcd", "1,000"}}, " "),
            " name      n\n"
            " a         1\n"
            " bcd   1,000\n");
}

TEST(TerminalTest, ATablesColumnsCountCharactersNotBytes) {
  EXPECT_EQ(FormatTable({{"x", "y"}, {"\u00e9\u00e9", "z"}, {"ab", "z"}}, ""),
            "x   y\n\u00e9\u00e9  z\nab  z\n");
}

TEST(TerminalTest, WrapKeepsWordsWhole) {
  const std::string text = Wrap(std::string(70, 'a') + " bbb ccccccc dd", "  ");
  EXPECT_EQ(text, "  " + std::string(70, 'a') + " bbb\n  ccccccc dd\n");
}

}  // namespace
}  // namespace promptcache::cli
