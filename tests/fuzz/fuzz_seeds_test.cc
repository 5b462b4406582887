// The fuzz targets over their seeds and some damage, with any compiler: they
// build, they return, and the seeds are what they should be, valid.

#include <gtest/gtest.h>

#include <random>

#include "inference_worker/model/model_file.h"
#include "tests/fuzz/fuzz_targets.h"
#include "tests/support/status_matchers.h"
#include "tests/support/test_files.h"

namespace promptcache::worker {
namespace {

using Target = void (*)(std::span<const std::byte>);

void RunDamaged(Target target, const std::vector<std::string>& seeds) {
  std::mt19937 random(20261130);
  for (const std::string& seed : seeds) {
    target(std::as_bytes(std::span(seed)));
    for (int i = 0; i < 20; ++i) {
      std::string damaged = seed;
      for (int n = 0; n < 3; ++n) {
        damaged[random() % damaged.size()] = static_cast<char>(random());
      }
      damaged.resize(damaged.size() - random() % 2 * (random() % 64));
      target(std::as_bytes(std::span(damaged)));
    }
  }
}

TEST(FuzzTargetsTest, SurviveDamagedSeeds) {
  RunDamaged(FuzzGguf, GgufSeeds());
  RunDamaged(FuzzHfFolder, HfFolderSeeds());
  RunDamaged(FuzzTokenizer, HfFolderSeeds());
  RunDamaged(FuzzPml, PmlSeeds());
}

TEST(FuzzTargetsTest, SeedsAreValidModels) {
  const TempDir dir;
  for (const std::string& seed : GgufSeeds()) {
    WriteFileOrDie(dir.path() + "/model.gguf", seed);
    PC_EXPECT_OK(OpenModelFile(dir.path() + "/model.gguf", {}));
  }
  // The last two of the folders are whole.
  const std::string seed = HfFolderSeeds().back();
  const std::string separator = kFolderSeparator;
  const size_t weights = seed.find(separator) + separator.size();
  const size_t tokenizer = seed.find(separator, weights);
  WriteFileOrDie(dir.path() + "/config.json", seed.substr(0, seed.find('\n')));
  WriteFileOrDie(dir.path() + "/model.safetensors",
                 seed.substr(weights, tokenizer - weights));
  PC_EXPECT_OK(OpenModelFile(dir.path(), {}));
}

}  // namespace
}  // namespace promptcache::worker
