#include "tests/inference_worker/engine/tiny_model.h"

#include <cstring>
#include <random>
#include <utility>

#include "tests/support/status_matchers.h"
#include "tests/support/test_files.h"

namespace promptcache::worker {

std::unique_ptr<ModelFile> TinyModelFile(const TinyLlamaSpec& spec) {
  TempDir dir;
  const std::string path = dir.path() + "/tiny.gguf";
  WriteTinyLlama(path, spec);
  auto file = OpenModelFile(path, {});
  PC_EXPECT_OK(file);
  return *std::move(file);
}

std::unique_ptr<Backend> TinyBackend(const TinyBackendOptions& options) {
  auto backend = MakeTestBackend(*TinyModelFile(options.spec),
                                 {.name = options.kernels,
                                  .threads = options.threads,
                                  .page_tokens = options.page_tokens,
                                  .numerics = options.numerics});
  PC_EXPECT_OK(backend);
  return *std::move(backend);
}

std::vector<int32_t> RandomIds(size_t count, uint32_t seed, uint32_t vocab) {
  std::mt19937 random(seed);
  std::vector<int32_t> ids(count);
  for (int32_t& id : ids) id = static_cast<int32_t>(random() % vocab);
  return ids;
}

bool SameBits(std::span<const float> a, std::span<const float> b) {
  return a.size() == b.size() &&
         std::memcmp(a.data(), b.data(), a.size_bytes()) == 0;
}

}  // namespace promptcache::worker
