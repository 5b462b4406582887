#include "inference_worker/model/fingerprint.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <filesystem>
#include <string>
#include <vector>

#include "inference_worker/model/model_file.h"
#include "tests/support/gguf_writer.h"
#include "tests/support/status_matchers.h"
#include "tests/support/test_files.h"

namespace promptcache::worker {
namespace {

namespace fs = std::filesystem;

class FingerprintTest : public ::testing::Test {
 protected:
  Digest Of(const TinyLlamaSpec& spec) { return OfWriter(TinyLlama(spec)); }
  Digest OfWriter(const GgufWriter& writer) {
    writer.Write(path_);
    return OfFile();
  }
  Digest OfFile() {
    const auto model =
        OpenModelFile(path_, {.fingerprint_cache_dir = cache_dir_});
    EXPECT_THAT(model, IsOk());
    const auto fingerprint = (*model)->Fingerprint();
    EXPECT_THAT(fingerprint, IsOk());
    return *fingerprint;
  }
  // The only entry of the cache.
  fs::path Entry() {
    const auto begin = fs::directory_iterator(cache_dir_);
    EXPECT_EQ(std::distance(begin, fs::directory_iterator()), 1);
    return fs::directory_iterator(cache_dir_)->path();
  }

  TempDir dir_;
  const std::string path_ = dir_.path() + "/model.gguf";
  std::string cache_dir_;  // none
};

TEST_F(FingerprintTest, TellsModelsApartByAllThatStatesDependOn) {
  const TinyLlamaSpec base{.layers = 1};
  const Digest digest = Of(base);
  EXPECT_EQ(Of(base), digest);

  TinyLlamaSpec other = base;
  other.seed = 2;
  EXPECT_NE(Of(other), digest);
  other = base;
  other.type = TensorType::kF16;
  EXPECT_NE(Of(other), digest);
  other = base;
  other.rope_theta = 10001.0f;
  EXPECT_NE(Of(other), digest);
  other = base;
  other.rope_dims = 8;
  EXPECT_NE(Of(other), digest);
  other = base;
  other.norm_epsilon = 2e-5f;
  EXPECT_NE(Of(other), digest);
}

TEST_F(FingerprintTest, DependsOnEveryBitOfEveryTensor) {
  const Digest digest = Of({.layers = 1});
  GgufWriter writer = TinyLlama({.layers = 1});
  writer.tensor("output_norm.weight").bytes.back() ^= 1;
  EXPECT_NE(OfWriter(writer), digest);
}

TEST_F(FingerprintTest, IgnoresWhatStatesDoNotDependOn) {
  const Digest digest = Of({.layers = 1});
  GgufWriter writer = TinyLlama({.layers = 1});
  writer.SetString("general.name", "another")
      .SetUint32("llama.context_length", 4096)
      .SetUint32("general.alignment", 32);
  // The order in the file is no property of the model either.
  const GgufWriter::Tensor moved = writer.tensor("blk.0.attn_k.weight");
  writer.RemoveTensor(moved.name);
  writer.AddRawTensor(moved.name, moved.dims, moved.type, moved.bytes);
  EXPECT_EQ(OfWriter(writer), digest);
}

TEST_F(FingerprintTest, IsKeptAndFoundAgain) {
  const Digest digest = Of({.layers = 1});
  cache_dir_ = dir_.path() + "/cache/fingerprints";
  EXPECT_EQ(OfFile(), digest);
  // A forged entry is the proof that the second start does not hash.
  const auto identity = IdentifyFile(path_);
  PC_ASSERT_OK(identity);
  Digest forged = digest;
  forged.bytes[0] ^= 1;
  const std::vector<IdentifiedFile> files = {{path_, *identity}};
  FingerprintCache(cache_dir_).Keep(files, forged);
  EXPECT_EQ(OfFile(), forged);
}

TEST_F(FingerprintTest, AnEntryOfAnotherStateOfTheFileIsIgnored) {
  cache_dir_ = dir_.path() + "/cache";
  const Digest before = Of({.layers = 1});
  struct stat st{};
  ASSERT_EQ(::stat(path_.c_str(), &st), 0);
  // The same path, inode and size, and the time of modification set back.
  const Digest after = Of({.layers = 1, .seed = 2});
  const timespec times[2] = {st.st_atim, st.st_mtim};
  ASSERT_EQ(::utimensat(AT_FDCWD, path_.c_str(), times, 0), 0);
  EXPECT_NE(after, before);
  EXPECT_EQ(OfFile(), after);
}

TEST_F(FingerprintTest, ADamagedEntryIsIgnoredAndReplaced) {
  cache_dir_ = dir_.path() + "/cache";
  const Digest digest = Of({.layers = 1});
  const std::string entry = ReadFileOrDie(Entry());
  for (size_t i = 0; i < entry.size(); i += 5) {
    std::string damaged = entry;
    damaged[i] ^= 1;
    WriteFileOrDie(Entry(), damaged);
    ASSERT_EQ(OfFile(), digest) << "byte " << i;
    ASSERT_EQ(ReadFileOrDie(Entry()), entry);
  }
  for (const size_t end : {size_t{0}, size_t{1}, entry.size() - 1}) {
    WriteFileOrDie(Entry(), entry.substr(0, end));
    EXPECT_EQ(OfFile(), digest) << "cut at " << end;
  }
}

TEST_F(FingerprintTest, AFolderThatCannotBeWrittenIsNoFault) {
  cache_dir_ = path_ + "/below-a-file";
  const Digest digest = Of({.layers = 1});
  cache_dir_.clear();
  EXPECT_EQ(OfFile(), digest);
}

TEST_F(FingerprintTest, AVocabularyHasNone) {
  TinyLlama({}).Write(path_);
  const auto model = OpenModelFile(path_, {.vocabulary_only = true});
  PC_ASSERT_OK(model);
  EXPECT_THAT((*model)->Fingerprint(),
              StatusIs(absl::StatusCode::kFailedPrecondition,
                       ::testing::HasSubstr("vocabulary only")));
}

}  // namespace
}  // namespace promptcache::worker
