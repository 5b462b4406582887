#include "common/utf8.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace promptcache {
namespace {

std::string Encode(uint32_t c) {
  const auto byte = [](uint32_t b) { return static_cast<char>(b); };
  if (c < 0x80) return {byte(c)};
  if (c < 0x800) return {byte(0xC0 | c >> 6), byte(0x80 | (c & 63))};
  if (c < 0x10000) {
    return {byte(0xE0 | c >> 12), byte(0x80 | (c >> 6 & 63)),
            byte(0x80 | (c & 63))};
  }
  return {byte(0xF0 | c >> 18), byte(0x80 | (c >> 12 & 63)),
          byte(0x80 | (c >> 6 & 63)), byte(0x80 | (c & 63))};
}

TEST(Utf8Test, EveryScalarValueIsACharacterAndItsBeginningsAreIncomplete) {
  for (uint32_t c = 0; c < 0x110000; ++c) {
    if (c >= 0xD800 && c < 0xE000) continue;
    const std::string text = Encode(c);
    const Utf8Step step = NextUtf8(text + "\x80");
    ASSERT_TRUE(step.valid) << c;
    ASSERT_EQ(step.num_bytes, text.size()) << c;
    for (size_t n = 1; n < text.size(); ++n) {
      const Utf8Step part = NextUtf8(std::string_view(text).substr(0, n));
      ASSERT_TRUE(part.incomplete) << c;
      ASSERT_EQ(part.num_bytes, n) << c;
    }
  }
}

TEST(Utf8Test, SurrogatesOverlongFormsAndWhatIsTooLargeAreBytesOfTheirOwn) {
  for (uint32_t c = 0xD800; c < 0xE000; ++c) {
    ASSERT_EQ(NextUtf8(Encode(c)).num_bytes, 1u);
    ASSERT_FALSE(NextUtf8(Encode(c)).valid);
    ASSERT_FALSE(NextUtf8(Encode(c)).incomplete);
  }
  for (const char* text :
       {"\x80", "\xBF", "\xC0\x80", "\xC1\xBF", "\xE0\x9F\xBF",
        "\xF0\x8F\xBF\xBF", "\xF4\x90\x80\x80", "\xF5\x80\x80\x80", "\xFF"}) {
    const Utf8Step step = NextUtf8(text);
    EXPECT_FALSE(step.valid);
    EXPECT_FALSE(step.incomplete);
    EXPECT_EQ(step.num_bytes, 1u);
  }
}

TEST(Utf8Test, EachMaximalInvalidPartBecomesOneReplacement) {
  struct Case {
    std::string_view bytes;
    std::string_view text;
  };
  // The Unicode Standard's own example (3.9, table 3-11) comes first.
  const std::vector<Case> cases = {
      {"\x61\xF1\x80\x80\xE1\x80\xC2\x62\x80\x63\x80\xBF\x64",
       "a\uFFFD\uFFFD\uFFFDb\uFFFDc\uFFFD\uFFFDd"},
      {"", ""},
      {"plain ascii, long enough for words",
       "plain ascii, long enough for words"},
      {"end\xE4\xB8", "end\uFFFD"},
      {"\xF0\x80\x80\xAF four", "\uFFFD\uFFFD\uFFFD\uFFFD four"},
      {"\xED\xA0\x80", "\uFFFD\uFFFD\uFFFD"},
      {"\xC2\xA9\xC2", "\u00A9\uFFFD"},
  };
  for (const Case& c : cases) {
    EXPECT_EQ(ReplaceInvalidUtf8(c.bytes), c.text);
    EXPECT_EQ(IsValidUtf8(c.bytes), c.bytes == c.text);
    EXPECT_TRUE(IsValidUtf8(ReplaceInvalidUtf8(c.bytes)));
  }
}

TEST(Utf8Test, AnEmptyTextHasNoStep) {
  EXPECT_EQ(NextUtf8("").num_bytes, 0u);
  EXPECT_TRUE(IsValidUtf8(""));
}

TEST(Utf8Test, CodePointsGoThereAndBack) {
  for (const char32_t c :
       {U'\0', U'a', U'\u007F', U'\u0080', U'\u07FF', U'\u0800', U'\uFFFF',
        U'\U00010000', U'\U0010FFFF'}) {
    std::string text;
    AppendUtf8(c, &text);
    EXPECT_TRUE(IsValidUtf8(text));
    EXPECT_EQ(CodePointOf(text), c);
  }
}

}  // namespace
}  // namespace promptcache
