#include "common/file_lock.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include "absl/strings/str_cat.h"
#include "tests/support/status_matchers.h"
#include "tests/support/test_files.h"

namespace promptcache {
namespace {

constexpr absl::StatusCode kHeld = absl::StatusCode::kFailedPrecondition;

TEST(FileLockTest, IsHeldOnceAndGoesWithItsHolder) {
  const TempDir dir;
  const std::string path = dir.path() + "/x.lock";
  const FileLock::Words words{.who = "another one", .does = "has x"};
  {
    const auto lock = FileLock::Take(path, words);
    PC_ASSERT_OK(lock);
    EXPECT_THAT(FileLock::Take(path, words),
                StatusIs(kHeld, absl::StrCat("another one (process ",
                                             ::getpid(), ") has x")));
  }
  PC_EXPECT_OK(FileLock::Take(path, words));
}

TEST(FileLockTest, AFolderThatIsNotThereIsNamed) {
  const TempDir dir;
  EXPECT_THAT(FileLock::Take(dir.path() + "/none/x.lock", {}),
              StatusIs(absl::StatusCode::kNotFound,
                       ::testing::HasSubstr(dir.path() + "/none/x.lock")));
}

}  // namespace
}  // namespace promptcache
