// promptcache-bench-engine: tokens per second of prefill and decoding on a
// GGUF file, nothing cached, no server.
//
//   promptcache-bench-engine MODEL.gguf [--threads N] [--kernels NAME]
//                            [--prefill 512 2048] [--repeat 3] [--json]

#include <malloc.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <iostream>
#include <nlohmann/json.hpp>
#include <random>
#include <string>
#include <vector>

#include "common/status_macros.h"
#include "inference_worker/engine/cpu_backend.h"
#include "inference_worker/engine/private_span.h"
#include "inference_worker/engine/sampler.h"

namespace promptcache::worker {
namespace {

struct Options {
  std::string model;
  uint32_t threads = 0;
  std::string kernels = "auto";
  std::vector<uint32_t> prefill = {512, 2048};
  uint32_t decode = 64;
  uint32_t decode_after = 512;
  uint32_t repeat = 3;
  bool json = false;
};

struct Measurement {
  std::string name;
  uint32_t num_tokens = 0;
  std::vector<double> tokens_per_s;  // one a repetition, ascending

  double median() const { return tokens_per_s[tokens_per_s.size() / 2]; }
};

double Seconds() {
  return std::chrono::duration<double>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

std::vector<int32_t> RandomIds(size_t count, uint32_t vocab) {
  std::mt19937 random(1);
  std::vector<int32_t> ids(count);
  for (int32_t& id : ids) id = static_cast<int32_t>(random() % vocab);
  return ids;
}

class Bench {
 public:
  Bench(const Options& options, Backend& backend, PrivatePages& pool)
      : options_(options), backend_(backend), pool_(pool) {}

  absl::StatusOr<Measurement> Prefill(uint32_t num_tokens) {
    const std::vector<int32_t> ids =
        RandomIds(num_tokens, backend_.vocab_size());
    return Repeat("prefill " + std::to_string(num_tokens), num_tokens,
                  [&]() -> absl::StatusOr<double> {
                    PrivateSpan span(pool_, 0);
                    const double start = Seconds();
                    PC_RETURN_IF_ERROR(span.Run(backend_, ids, {},
                                                LogitsWanted::kLast, &logits_));
                    return Seconds() - start;
                  });
  }

  absl::StatusOr<Measurement> Decode() {
    const std::vector<int32_t> ids =
        RandomIds(options_.decode_after, backend_.vocab_size());
    PrivateSpan span(pool_, 0);
    PC_RETURN_IF_ERROR(
        span.Run(backend_, ids, {}, LogitsWanted::kLast, &logits_));
    return Repeat("decode " + std::to_string(options_.decode) + " after " +
                      std::to_string(options_.decode_after),
                  options_.decode, [&]() -> absl::StatusOr<double> {
                    const double start = Seconds();
                    PC_RETURN_IF_ERROR(DecodeAfter(span));
                    return Seconds() - start;
                  });
  }

 private:
  // Sees `prompt` and keeps what is generated in a span of its own, so that
  // every repetition does the same.
  absl::Status DecodeAfter(const PrivateSpan& prompt) {
    const KvView seen = prompt.PlacedAt(0);
    PrivateSpan tail(pool_, prompt.next_position());
    int32_t token = 1;
    for (uint32_t i = 0; i < options_.decode; ++i) {
      PC_RETURN_IF_ERROR(tail.Run(backend_, {&token, 1}, {&seen, 1},
                                  LogitsWanted::kLast, &logits_));
      token = Argmax(logits_);
    }
    return absl::OkStatus();
  }

  // One run to warm up, then the timed ones.
  template <typename Body>
  absl::StatusOr<Measurement> Repeat(std::string name, uint32_t num_tokens,
                                     Body body) {
    Measurement m = {std::move(name), num_tokens, {}};
    for (uint32_t i = 0; i <= options_.repeat; ++i) {
      PC_ASSIGN_OR_RETURN(const double seconds, body());
      if (i > 0) m.tokens_per_s.push_back(num_tokens / seconds);
    }
    std::ranges::sort(m.tokens_per_s);
    return m;
  }

  const Options& options_;
  Backend& backend_;
  PrivatePages& pool_;
  std::vector<float> logits_;
};

void Print(const Options& options, const Backend& backend, double load_s,
           const std::vector<Measurement>& all) {
  if (options.json) {
    nlohmann::json json = {{"model", options.model},
                           {"numerics", backend.numerics()},
                           {"threads", backend.num_threads()},
                           {"load_s", load_s}};
    for (const Measurement& m : all) {
      json["results"].push_back({{"name", m.name},
                                 {"num_tokens", m.num_tokens},
                                 {"median_tokens_per_s", m.median()},
                                 {"min_tokens_per_s", m.tokens_per_s.front()},
                                 {"max_tokens_per_s", m.tokens_per_s.back()}});
    }
    std::cout << json.dump(2) << "\n";
    return;
  }
  std::printf("%s\n%s, %u threads, loaded in %.2f s\n", options.model.c_str(),
              backend.numerics().c_str(), backend.num_threads(), load_s);
  for (const Measurement& m : all) {
    std::printf("%-24s %8.1f tokens/s  (%.1f to %.1f, %zu runs)\n",
                m.name.c_str(), m.median(), m.tokens_per_s.front(),
                m.tokens_per_s.back(), m.tokens_per_s.size());
  }
}

absl::Status Run(const Options& options) {
  const double start = Seconds();
  PC_ASSIGN_OR_RETURN(const auto file, OpenModelFile(options.model, {}));
  PC_ASSIGN_OR_RETURN(const auto backend,
                      CreateCpuBackend(*file, {.num_threads = options.threads,
                                               .kernels = options.kernels}));
  const double load_s = Seconds() - start;
  uint32_t longest = options.decode_after + options.decode;
  for (const uint32_t n : options.prefill) longest = std::max(longest, n);
  const KvLayout& layout = backend->layout();
  PC_ASSIGN_OR_RETURN(
      const auto pool,
      PrivatePages::Create(
          layout, (layout.PagesFor(longest) + 2) * (layout.page_bytes() + 64)));
  Bench bench(options, *backend, *pool);
  std::vector<Measurement> all;
  for (const uint32_t n : options.prefill) {
    PC_ASSIGN_OR_RETURN(Measurement m, bench.Prefill(n));
    all.push_back(std::move(m));
  }
  if (options.decode > 0) {
    PC_ASSIGN_OR_RETURN(Measurement m, bench.Decode());
    all.push_back(std::move(m));
  }
  Print(options, *backend, load_s, all);
  return absl::OkStatus();
}

}  // namespace
}  // namespace promptcache::worker

int main(int argc, char** argv) {
  // As the worker does: large blocks are kept, not faulted in anew.
  mallopt(M_MMAP_THRESHOLD, 1 << 30);
  mallopt(M_TRIM_THRESHOLD, 1 << 30);
  promptcache::worker::Options options;
  CLI::App app("Prefill and decode speed of a model on this processor");
  app.add_option("model", options.model, "GGUF file")->required();
  app.add_option("--threads", options.threads, "0: all cores");
  app.add_option("--kernels", options.kernels,
                 "auto, portable, avx2 or avx512bf16");
  app.add_option("--prefill", options.prefill, "lengths in tokens");
  app.add_option("--decode", options.decode, "tokens to generate; 0: none");
  app.add_option("--decode-after", options.decode_after, "prompt length")
      ->check(CLI::PositiveNumber);
  app.add_option("--repeat", options.repeat, "timed runs of each")
      ->check(CLI::PositiveNumber);
  app.add_flag("--json", options.json);
  CLI11_PARSE(app, argc, argv);
  const absl::Status status = promptcache::worker::Run(options);
  if (!status.ok()) std::cerr << status << "\n";
  return status.ok() ? 0 : 1;
}
