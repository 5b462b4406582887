#include "common/port_file.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <iterator>

#include "gmock/gmock.h"
#include "tests/support/status_matchers.h"
#include "tests/support/test_files.h"

namespace promptcache {
namespace {

using ::testing::HasSubstr;

std::string Content(const std::string& path) {
  std::ifstream in(path);
  return {std::istreambuf_iterator<char>(in), std::istreambuf_iterator<char>()};
}

TEST(PortFileTest, HoldsOneLineAndReplacesWhatWasThere) {
  const TempDir dir;
  const std::string path = dir.path() + "/port";
  PC_EXPECT_OK(WritePortFile(path, 65535));
  EXPECT_EQ(Content(path), "65535\n");
  PC_EXPECT_OK(WritePortFile(path, 7));
  EXPECT_EQ(Content(path), "7\n");
  // Nothing else is left.
  const std::filesystem::directory_iterator files(dir.path());
  EXPECT_EQ(std::distance(begin(files), end(files)), 1);
}

TEST(PortFileTest, NoPathNoFile) { PC_EXPECT_OK(WritePortFile("", 7)); }

TEST(PortFileTest, AFailureNamesTheFile) {
  const TempDir dir;
  EXPECT_THAT(WritePortFile(dir.path() + "/no/port", 7),
              StatusIs(absl::StatusCode::kNotFound, HasSubstr("/no/port")));
  // A folder in its place.
  EXPECT_FALSE(WritePortFile(dir.path(), 7).ok());
}

}  // namespace
}  // namespace promptcache
