#include <gtest/gtest.h>

#include <random>
#include <string>
#include <string_view>

#include "common/utf8.h"
#include "inference_worker/tokenizer/bpe_tokenizer.h"

namespace promptcache::worker {
namespace {

TEST(Utf8StreamTest, HoldsBackWhatMayBecomeACharacter) {
  Utf8Stream stream;
  EXPECT_EQ(stream.Push("a\xF0"), "a");
  EXPECT_EQ(stream.Push("\x9F\x99"), "");
  EXPECT_EQ(stream.Push("\x82 b"), "\U0001F642 b");
  EXPECT_EQ(stream.Finish(), "");
}

TEST(Utf8StreamTest, ReplacesAtOnceWhatCannotBecomeOne) {
  Utf8Stream stream;
  EXPECT_EQ(stream.Push("\xF0\x9F"), "");
  EXPECT_EQ(stream.Push("x\xFFy"), "\uFFFDx\uFFFDy");
}

TEST(Utf8StreamTest, TheEndReplacesAnIncompleteRestOnce) {
  Utf8Stream stream;
  EXPECT_EQ(stream.Push("end\xE4\xB8"), "end");
  EXPECT_EQ(stream.Finish(), "\uFFFD");
  EXPECT_EQ(stream.Finish(), "");
  EXPECT_EQ(stream.Push("again"), "again");
}

TEST(Utf8StreamTest, AnyCutGivesTheWholeTextReplaced) {
  std::mt19937 random(5);
  for (int i = 0; i < 2000; ++i) {
    std::string bytes;
    for (auto n = random() % 24; n > 0; --n) {
      // Mostly bytes above ASCII, so that characters occur by chance.
      constexpr char kSome[] = "\xC3\xA9\xE2\x82\xAC\xF0\x9F\x98\x80\xED\xF4";
      bytes.push_back(random() % 4 == 0
                          ? static_cast<char>(random())
                          : kSome[random() % (sizeof(kSome) - 1)]);
    }
    Utf8Stream stream;
    std::string shown;
    for (size_t at = 0; at < bytes.size();) {
      const size_t n = 1 + random() % 4;
      const std::string part =
          stream.Push(std::string_view(bytes).substr(at, n));
      EXPECT_TRUE(IsValidUtf8(part));
      shown += part;
      at += n;
    }
    shown += stream.Finish();
    ASSERT_EQ(shown, ReplaceInvalidUtf8(bytes));
  }
}

}  // namespace
}  // namespace promptcache::worker
