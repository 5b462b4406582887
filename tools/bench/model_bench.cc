// What a start costs before the first weight is packed, and what a byte of
// prompt costs:
//   build/bin/model_bench MODEL TEXT [--benchmark_...]
// MODEL is a GGUF file or a folder; TEXT any text file, repeated up to 1 MiB.

#include <benchmark/benchmark.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <iterator>
#include <memory>
#include <string>

#include "glog/logging.h"
#include "inference_worker/model/model_file.h"
#include "inference_worker/tokenizer/bpe_tokenizer.h"

namespace promptcache::worker {
namespace {

std::unique_ptr<ModelFile> Open(const std::string& path,
                                const OpenOptions& options = {}) {
  auto model = OpenModelFile(path, options);
  CHECK(model.ok()) << model.status();
  return *std::move(model);
}

std::unique_ptr<Tokenizer> TokenizerOf(const std::string& path) {
  const auto model = Open(path, {.vocabulary_only = true});
  auto tokenizer = CreateTokenizer(*model);
  CHECK(tokenizer.ok()) << tokenizer.status();
  return *std::move(tokenizer);
}

void OpenBench(benchmark::State& state, const std::string& path) {
  for (auto _ : state) benchmark::DoNotOptimize(Open(path));
}

void FingerprintBench(benchmark::State& state, const std::string& path,
                      const std::string& cache_dir) {
  const auto model = Open(path, {.fingerprint_cache_dir = cache_dir});
  CHECK(model->Fingerprint().ok());  // fills the cache, if there is one
  for (auto _ : state) benchmark::DoNotOptimize(model->Fingerprint());
}

void CreateTokenizerBench(benchmark::State& state, const std::string& path) {
  const auto model = Open(path, {.vocabulary_only = true});
  for (auto _ : state) {
    benchmark::DoNotOptimize(CreateTokenizer(*model));
  }
}

void EncodeBench(benchmark::State& state, const Tokenizer* tokenizer,
                 const std::string& text) {
  size_t num_tokens = 0;
  for (auto _ : state) num_tokens = tokenizer->Encode(text).size();
  state.SetBytesProcessed(static_cast<int64_t>(text.size()) *
                          state.iterations());
  state.counters["tokens"] = static_cast<double>(num_tokens);
}

std::string RepeatedToMebibyte(const std::string& unit) {
  std::string text;
  while (text.size() < (1 << 20)) text += unit;
  return text;
}

std::string ReadText(const char* path) {
  std::ifstream in(path, std::ios::binary);
  std::string text{std::istreambuf_iterator<char>(in), {}};
  CHECK(!text.empty()) << "cannot read " << path;
  return text;
}

}  // namespace
}  // namespace promptcache::worker

int main(int argc, char** argv) {
  using namespace promptcache::worker;  // NOLINT(google-build-using-namespace)
  benchmark::Initialize(&argc, argv);
  if (argc != 3) {
    std::cerr << "usage: model_bench MODEL TEXT [--benchmark_...]\n";
    return EXIT_FAILURE;
  }
  const std::string path = argv[1];
  const std::string text = RepeatedToMebibyte(ReadText(argv[2]));
  const std::string letters = RepeatedToMebibyte("a");
  std::string cache = std::filesystem::temp_directory_path() / "bench.XXXXXX";
  CHECK(::mkdtemp(cache.data()) != nullptr) << cache;
  const auto tokenizer = TokenizerOf(path);

  const auto add = [](const char* name, const auto& run) {
    return benchmark::RegisterBenchmark(name, run)->Unit(
        benchmark::kMillisecond);
  };
  add("open", [&](auto& s) { OpenBench(s, path); });
  add("fingerprint, hashed", [&](auto& s) { FingerprintBench(s, path, ""); });
  add("fingerprint, kept", [&](auto& s) { FingerprintBench(s, path, cache); });
  add("create tokenizer", [&](auto& s) { CreateTokenizerBench(s, path); });
  add("encode 1 MiB of text",
      [&](auto& s) { EncodeBench(s, tokenizer.get(), text); });
  add("encode 1 MiB of text, two threads",
      [&](auto& s) { EncodeBench(s, tokenizer.get(), text); })
      ->Threads(2)
      ->UseRealTime();
  add("encode 1 MiB of one letter",
      [&](auto& s) { EncodeBench(s, tokenizer.get(), letters); });
  benchmark::RunSpecifiedBenchmarks();
  std::filesystem::remove_all(cache);
  return EXIT_SUCCESS;
}
