#include "tools/cli/check_runner.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>

#include "tests/support/gguf_writer.h"
#include "tests/support/test_files.h"

namespace promptcache::cli {
namespace {

using ::testing::HasSubstr;

// The tiny vocabulary: byte b is id 3 + its place; what matters here is that
// the first line is right and the second is not.
constexpr char kDecodesNothing[] =
    "{\"decode_ids\": [1, 2], \"bytes_hex\": \"\"}";
constexpr char kWrong[] = "{\"decode_ids\": [1, 2], \"bytes_hex\": \"41\"}";

class CheckRunnerTest : public ::testing::Test {
 protected:
  CheckRunnerTest() {
    model_ = dir_.path() + "/tiny.bin";  // not *.gguf: not found by itself
    worker::WriteTinyLlama(model_);
    std::filesystem::create_directory(dir_.path() + "/v");
  }
  std::string Write(const std::string& name, const std::string& text) {
    const std::string path = dir_.path() + "/v/" + name;
    std::ofstream(path) << text;
    return path;
  }
  // Differences of the cases that failed, with their names; counts both.
  void Run(const std::vector<std::string>& paths, const std::string& model) {
    CheckRunner runner(model);
    runner.Run(
        paths, [](const std::string&) {},
        [&](const std::string&, const CaseResult& result) {
          if (result.difference.empty()) {
            ++passed_;
          } else {
            failures_.push_back(result.name + ": " + result.difference);
          }
        });
  }
  TempDir dir_;
  std::string model_;
  size_t passed_ = 0;
  std::vector<std::string> failures_;
};

TEST_F(CheckRunnerTest, CountsWhatPassesAndNamesWhatFails) {
  Write("t.jsonl", std::string(kDecodesNothing) + "\n" + kWrong + "\n");
  Run({dir_.path() + "/v"}, model_);
  EXPECT_EQ(passed_, 1u);
  ASSERT_EQ(failures_.size(), 1u);
  EXPECT_THAT(failures_[0], HasSubstr("2"));
}

TEST_F(CheckRunnerTest, OneBadLineDoesNotStopTheRest) {
  Write("t.jsonl",
        std::string(kDecodesNothing) + "\nnot json\n" + kDecodesNothing + "\n");
  Run({dir_.path() + "/v"}, model_);
  EXPECT_EQ(passed_, 2u);
  EXPECT_EQ(failures_.size(), 1u);
}

TEST_F(CheckRunnerTest, OneBadFileDoesNotStopTheRest) {
  Write("a.json", "{\"cases\": [");
  Write("b.json", "{\"something\": 1}");
  Write("c.jsonl", kDecodesNothing);
  Write("notes.md", "not looked at");
  Run({dir_.path() + "/v", dir_.path() + "/none.json"}, model_);
  EXPECT_EQ(passed_, 1u);
  EXPECT_EQ(failures_.size(), 3u);
}

TEST_F(CheckRunnerTest, WithoutItsModelEveryCaseFails) {
  Write("t.jsonl", std::string(kDecodesNothing) + "\n" + kDecodesNothing);
  Run({dir_.path() + "/v"}, dir_.path() + "/none.gguf");
  EXPECT_EQ(passed_, 0u);
  ASSERT_EQ(failures_.size(), 2u);
  EXPECT_THAT(failures_[0], HasSubstr("none.gguf"));
}

TEST_F(CheckRunnerTest, AFoldersOwnModelIsUsed) {
  worker::WriteTinyLlama(dir_.path() + "/v/tiny.gguf");
  Write("t.jsonl", kDecodesNothing);
  Run({dir_.path() + "/v"}, dir_.path() + "/none.gguf");
  EXPECT_EQ(passed_, 1u);
  EXPECT_EQ(failures_.size(), 0u);
}

TEST_F(CheckRunnerTest, AnEmptyFolderHasNotPassed) {
  Run({dir_.path() + "/v"}, model_);
  EXPECT_EQ(passed_, 0u);
  EXPECT_EQ(failures_.size(), 1u);
}

}  // namespace
}  // namespace promptcache::cli
