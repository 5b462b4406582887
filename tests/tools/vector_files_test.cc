#include "tools/cli/vector_files.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/support/test_files.h"

namespace promptcache::cli {
namespace {

VectorFile ParseData(const std::string& relative) {
  return ParseVectorFile(relative, ReadFileOrDie(TestDataPath(relative)));
}

TEST(VectorFilesTest, FormatsAreToldByTheirFields) {
  EXPECT_EQ(ParseData("pml/cases.json").kind, VectorKind::kPml);
  EXPECT_EQ(ParseData("tokenizer/smollm.jsonl").kind, VectorKind::kTokenizer);
  EXPECT_EQ(ParseData("smollm2/vectors.json").kind, VectorKind::kLogits);
  EXPECT_EQ(ParseData("smollm2/modular.json").kind, VectorKind::kLogits);
  EXPECT_EQ(ParseVectorFile("config.json", "{\"hidden_size\": 3}").kind,
            VectorKind::kNone);
  EXPECT_EQ(ParseVectorFile("x.json", "{\"cases\": [").kind,
            VectorKind::kDamaged);
}

TEST(VectorFilesTest, EveryCaseIsAFileOfItsOwn) {
  const VectorFile file = ParseData("pml/cases.json");
  ASSERT_GT(file.parts.size(), 100u);
  const VectorFile one = ParseVectorFile("x.json", file.parts[3].text);
  EXPECT_EQ(one.kind, VectorKind::kPml);
  ASSERT_EQ(one.parts.size(), 1u);
  EXPECT_EQ(one.parts[0].name, file.parts[3].name);
}

TEST(VectorFilesTest, ALineThatIsNoCaseCounts) {
  const VectorFile file = ParseVectorFile(
      "x.jsonl", "{\"text\": \"a\", \"ids\": [1]}\n\nnot json\n");
  EXPECT_EQ(file.kind, VectorKind::kTokenizer);
  ASSERT_EQ(file.parts.size(), 2u);
  EXPECT_EQ(file.parts[1].name, "line 3");
}

TEST(VectorFilesTest, VectorsBesideAModelAreCounted) {
  const VectorFile file = ParseVectorFile(
      "vectors.json",
      "{\"inputs\": [[1], [2]], \"greedy\": [{}], \"positions_test\": {}}");
  EXPECT_EQ(file.kind, VectorKind::kFolderLogits);
  EXPECT_EQ(file.parts.size(), 4u);
}

}  // namespace
}  // namespace promptcache::cli
