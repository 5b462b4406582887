// Damaged files: whatever they say, they are refused or read within their
// bounds. The address sanitizer is the judge of the latter: the parser sees
// buffers of exactly the file's length.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "inference_worker/model/gguf.h"
#include "inference_worker/model/model_file.h"
#include "tests/support/gguf_writer.h"
#include "tests/support/status_matchers.h"
#include "tests/support/test_files.h"

namespace promptcache::worker {
namespace {

using ::testing::Not;

GgufWriter SmallModel() {
  return TinyLlama({.layers = 1,
                    .heads = 2,
                    .kv_heads = 1,
                    .hidden = 32,
                    .ffn = 32,
                    .vocab = 262,
                    .type = TensorType::kQ4_0,
                    .embedding_type = TensorType::kQ8_0});
}

// Reads all that a successful parse offers.
void ReadAll(const GgufFile& file) {
  for (const auto& [key, value] : file.metadata()) {
    DescribeGgufValue(value);
    file.Strings(key).status().IgnoreError();
    file.Int32s(key).status().IgnoreError();
    file.Floats(key).status().IgnoreError();
    file.String(key).status().IgnoreError();
  }
}

absl::Status Parse(const std::string& bytes) {
  const std::unique_ptr<std::byte[]> exact(new std::byte[bytes.size()]);
  std::memcpy(exact.get(), bytes.data(), bytes.size());
  const auto file = GgufFile::Parse({exact.get(), bytes.size()});
  if (file.ok()) ReadAll(*file);
  return file.status();
}

class DamageTest : public ::testing::Test {
 protected:
  // Opens `bytes` as a file and reads every weight of what opens.
  absl::Status Open(const std::string& bytes) {
    const std::string path = dir_.path() + "/model.gguf";
    WriteFileOrDie(path, bytes);
    const auto model = OpenModelFile(path, {});
    if (!model.ok()) return model.status();
    for (int role = 0; role <= static_cast<int>(TensorRole::kFfnDown); ++role) {
      const auto view = (*model)->Tensor(static_cast<TensorRole>(role), 0);
      if (!view.ok()) continue;
      std::vector<float> row(view->cols);
      for (uint64_t i = 0; i < view->rows; ++i) DequantizeRow(*view, i, row);
    }
    return absl::OkStatus();
  }

  TempDir dir_;
};

TEST_F(DamageTest, AFileCutAnywhereInItsStructureIsRefused) {
  std::vector<size_t> boundaries;
  const std::string bytes = SmallModel().Serialize(&boundaries);
  PC_ASSERT_OK(Open(bytes));
  ASSERT_EQ(boundaries.back(), bytes.size());
  boundaries.pop_back();  // a file cut there is whole
  const size_t structure_end = boundaries.back();
  for (const size_t boundary : boundaries) {
    EXPECT_THAT(Open(bytes.substr(0, boundary)), Not(IsOk())) << boundary;
    for (const size_t end : {boundary - 1, boundary, boundary + 1}) {
      EXPECT_EQ(Parse(bytes.substr(0, end)).ok(), end >= structure_end) << end;
    }
  }
  EXPECT_THAT(Open(bytes.substr(0, bytes.size() - 1)), Not(IsOk()));
}

TEST_F(DamageTest, EveryFlippedBitOfAFieldIsSurvived) {
  std::vector<size_t> boundaries;
  const std::string bytes = SmallModel().Serialize(&boundaries);
  size_t refused = 0;
  for (const size_t boundary : boundaries) {
    for (size_t bit = 0; bit < 64 && boundary + bit / 8 < bytes.size(); ++bit) {
      std::string damaged = bytes;
      damaged[boundary + bit / 8] ^= static_cast<char>(1 << bit % 8);
      refused += Parse(damaged).ok() ? 0 : 1;
    }
  }
  // Lengths, counts and types take up about half of these bits.
  EXPECT_GT(refused, boundaries.size() * 16);
}

TEST_F(DamageTest, EveryFlippedBitOfTheHeaderIsRefused) {
  const std::string bytes = SmallModel().Serialize();
  for (size_t bit = 0; bit < 24 * 8; ++bit) {
    std::string damaged = bytes;
    damaged[bit / 8] ^= static_cast<char>(1 << bit % 8);
    if (bit == 32) continue;  // version 3 becomes 2, which is as good
    EXPECT_THAT(Open(damaged), Not(IsOk())) << "bit " << bit;
  }
}

TEST_F(DamageTest, RandomDamageIsSurvived) {
  std::mt19937 random(2026);
  const std::string bytes = SmallModel().Serialize();
  const size_t structure_bytes =
      GgufFile::Parse(std::as_bytes(std::span(bytes.data(), bytes.size())))
          ->data()
          .size();
  const size_t data_begin = bytes.size() - structure_bytes;
  for (int i = 0; i < 5000; ++i) {
    std::string damaged = bytes;
    for (uint32_t n = random() % 4 + 1; n > 0; --n) {
      const size_t at = random() % data_begin;
      switch (random() % 4) {
        case 0:
          damaged[at] = static_cast<char>(random());
          break;
        case 1:
          damaged.erase(at, random() % 16);
          break;
        case 2:
          damaged.insert(at, random() % 16, static_cast<char>(random()));
          break;
        default: {
          const uint64_t number = uint64_t{1} << random() % 64;
          const size_t fits = std::min(sizeof(number), damaged.size() - at);
          std::memcpy(damaged.data() + at, &number, fits);
        }
      }
    }
    Parse(damaged).IgnoreError();
    if (i % 5 == 0) Open(damaged).IgnoreError();  // files are slow
  }
}

TEST_F(DamageTest, DeepNestingIsRefused) {
  // An array of one array of one array ...: 12 bytes a level.
  std::string nested;
  for (int depth = 0; depth < 100'000; ++depth) {
    nested.append(std::string("\x09\0\0\0\1\0\0\0\0\0\0\0", 12));
  }
  const absl::Status status =
      Parse(GgufWriter().SetRaw("deep", 9, nested).Serialize());
  EXPECT_THAT(status, StatusIs(absl::StatusCode::kInvalidArgument,
                               ::testing::HasSubstr(
                                   "metadata \"deep\": arrays nested more "
                                   "than 4 deep")));
}

}  // namespace
}  // namespace promptcache::worker
