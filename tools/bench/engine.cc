// promptcache-bench-engine: tokens per second of prefill and decoding of a
// model, nothing cached, no server.
//
//   promptcache-bench-engine MODEL [--threads N] [--kernels NAME]
//                            [--numerics NAME] [--prefill 512 2048] [--repeat
//                            5] [--batch 16 --batch-after 2000] [--json]
//
// On a busy machine look at the second figure, which counts processor time
// instead of time: tokens / (processor seconds / threads).

#include <malloc.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <ctime>
#include <nlohmann/json.hpp>
#include <random>
#include <string>
#include <vector>

#include "CLI/CLI.hpp"
#include "common/status_macros.h"
#include "inference_worker/engine/cpu_backend.h"
#include "inference_worker/engine/private_span.h"
#include "inference_worker/engine/sampler.h"
#include "tools/bench/bench_main.h"
#include "tools/bench/conditions.h"

namespace promptcache::worker {
namespace {

struct Options {
  std::string model;
  uint32_t threads = 0;
  std::string kernels = "auto";
  std::string numerics = "auto";
  std::vector<uint32_t> prefill = {512, 2048};
  uint32_t decode = 64;
  uint32_t decode_after = 512;
  uint32_t fresh = 64;
  uint32_t fresh_after = 2048;
  uint32_t batch = 0;
  uint32_t batch_after = 2000;
  uint32_t repeat = 5;
  bool json = false;
};

struct Measurement {
  std::string name;
  uint32_t num_tokens = 0;
  // One a repetition, ascending.
  std::vector<double> tokens_per_s;
  std::vector<double> tokens_per_cpu_s;

  double median() const { return tokens_per_s[tokens_per_s.size() / 2]; }
  double cpu_median() const {
    return tokens_per_cpu_s[tokens_per_cpu_s.size() / 2];
  }
};

double Seconds() {
  return std::chrono::duration<double>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

// Of all threads of the process.
double CpuSeconds() {
  timespec t = {};
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
  return static_cast<double>(t.tv_sec) + 1e-9 * static_cast<double>(t.tv_nsec);
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
    return Repeat("prefill " + std::to_string(num_tokens), num_tokens, [&] {
      PrivateSpan span(pool_, 0);
      return span.Run(backend_, ids, {}, LogitsWanted::kLast, &logits_);
    });
  }

  // What a prompt whose modules are all cached costs.
  absl::StatusOr<Measurement> Fresh(const PrivateSpan& prompt) {
    const std::vector<int32_t> ids =
        RandomIds(options_.fresh, backend_.vocab_size());
    const KvView seen = prompt.PlacedAt(0);
    return Repeat(Name("fresh", options_.fresh, prompt), options_.fresh, [&] {
      PrivateSpan span(pool_, prompt.next_position());
      return span.Run(backend_, ids, {&seen, 1}, LogitsWanted::kLast, &logits_);
    });
  }

  absl::StatusOr<Measurement> Decode(const PrivateSpan& prompt) {
    return Repeat(Name("decode", options_.decode, prompt), options_.decode,
                  [&] { return DecodeAfter(prompt); });
  }

  // Sequences that all see one prompt, a token of each in a pass: requests
  // that import the same modules.
  absl::StatusOr<Measurement> DecodeBatch(const PrivateSpan& prompt) {
    return Repeat(std::to_string(options_.batch) + " x " +
                      Name("decode", options_.decode, prompt),
                  options_.batch * options_.decode,
                  [&] { return DecodeTogether(prompt); });
  }

  absl::StatusOr<PrivateSpan> Prompt(uint32_t num_tokens) {
    PrivateSpan span(pool_, 0);
    PC_RETURN_IF_ERROR(span.Run(backend_,
                                RandomIds(num_tokens, backend_.vocab_size()),
                                {}, LogitsWanted::kNone, &logits_));
    return span;
  }

 private:
  static std::string Name(const char* what, uint32_t num_tokens,
                          const PrivateSpan& prompt) {
    return std::string(what) + " " + std::to_string(num_tokens) + " after " +
           std::to_string(prompt.num_tokens());
  }

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

  absl::Status DecodeTogether(const PrivateSpan& prompt) {
    const KvView seen = prompt.PlacedAt(0);
    std::vector<PrivateSpan> tails;
    std::vector<int32_t> tokens;
    for (uint32_t i = 0; i < options_.batch; ++i) {
      tails.emplace_back(pool_, prompt.next_position());
      tokens.push_back(static_cast<int32_t>(i));
    }
    std::vector<RowGroup> groups(options_.batch);
    for (uint32_t step = 0; step < options_.decode; ++step) {
      for (uint32_t i = 0; i < options_.batch; ++i) {
        PC_ASSIGN_OR_RETURN(groups[i],
                            tails[i].Append(std::span(tokens).subspan(i, 1),
                                            {&seen, 1}, LogitsWanted::kLast));
      }
      PC_RETURN_IF_ERROR(backend_.Forward(groups, &logits_));
      for (uint32_t i = 0; i < options_.batch; ++i) {
        const size_t vocab = backend_.vocab_size();
        tokens[i] = Argmax(std::span(logits_).subspan(i * vocab, vocab));
      }
    }
    return absl::OkStatus();
  }

  // One run to warm up, then the timed ones.
  template <typename Body>
  absl::StatusOr<Measurement> Repeat(std::string name, uint32_t num_tokens,
                                     Body body) {
    Measurement m = {std::move(name), num_tokens, {}, {}};
    PC_RETURN_IF_ERROR(body());
    for (uint32_t i = 0; i < options_.repeat; ++i) {
      const double start = Seconds();
      const double cpu_start = CpuSeconds();
      PC_RETURN_IF_ERROR(body());
      m.tokens_per_cpu_s.push_back(num_tokens * backend_.num_threads() /
                                   (CpuSeconds() - cpu_start));
      m.tokens_per_s.push_back(num_tokens / (Seconds() - start));
    }
    std::ranges::sort(m.tokens_per_s);
    std::ranges::sort(m.tokens_per_cpu_s);
    return m;
  }

  const Options& options_;
  Backend& backend_;
  PrivatePages& pool_;
  std::vector<float> logits_;
};

void Print(const Options& options, const bench::Conditions& conditions,
           const Backend& backend, double load_s,
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
                                 {"median_tokens_per_cpu_s", m.cpu_median()},
                                 {"min_tokens_per_s", m.tokens_per_s.front()},
                                 {"max_tokens_per_s", m.tokens_per_s.back()},
                                 {"runs", m.tokens_per_s.size()}});
    }
    bench::PrintJson(conditions, std::move(json));
    return;
  }
  std::printf("%s%s\n%s, %u threads, loaded in %.2f s\n",
              bench::ToText(conditions).c_str(), options.model.c_str(),
              backend.numerics().c_str(), backend.num_threads(), load_s);
  for (const Measurement& m : all) {
    std::printf("%-22s %8.1f tokens/s  (%.1f to %.1f, %zu runs; cpu %.1f)\n",
                m.name.c_str(), m.median(), m.tokens_per_s.front(),
                m.tokens_per_s.back(), m.tokens_per_s.size(), m.cpu_median());
  }
}

absl::StatusOr<std::vector<Measurement>> MeasureAll(const Options& options,
                                                    Backend& backend) {
  uint32_t longest = std::max(options.decode_after + options.decode,
                              options.fresh_after + options.fresh);
  if (options.batch > 0) longest = std::max(longest, options.batch_after);
  for (const uint32_t n : options.prefill) longest = std::max(longest, n);
  const KvLayout& layout = backend.layout();
  PC_ASSIGN_OR_RETURN(
      const auto pool,
      PrivatePages::Create(
          layout, (layout.PagesFor(longest) + 2 +
                   options.batch * (layout.PagesFor(options.decode) + 1)) *
                      (layout.page_bytes() + 64)));
  Bench bench(options, backend, *pool);
  std::vector<Measurement> all;
  for (const uint32_t n : options.prefill) {
    PC_ASSIGN_OR_RETURN(Measurement m, bench.Prefill(n));
    all.push_back(std::move(m));
  }
  if (options.fresh > 0) {
    PC_ASSIGN_OR_RETURN(const PrivateSpan prompt,
                        bench.Prompt(options.fresh_after));
    PC_ASSIGN_OR_RETURN(Measurement m, bench.Fresh(prompt));
    all.push_back(std::move(m));
  }
  if (options.decode > 0) {
    PC_ASSIGN_OR_RETURN(const PrivateSpan prompt,
                        bench.Prompt(options.decode_after));
    PC_ASSIGN_OR_RETURN(Measurement m, bench.Decode(prompt));
    all.push_back(std::move(m));
  }
  if (options.batch > 0 && options.decode > 0) {
    PC_ASSIGN_OR_RETURN(const PrivateSpan prompt,
                        bench.Prompt(options.batch_after));
    PC_ASSIGN_OR_RETURN(Measurement m, bench.DecodeBatch(prompt));
    all.push_back(std::move(m));
  }
  return all;
}

absl::Status Run(const Options& options) {
  const bench::Conditions conditions = bench::ReadConditions(
      "llama.cpp on the same file (tools/bench/peers), memory and arithmetic "
      "(promptcache-bench-kernels)");
  const double start = Seconds();
  PC_ASSIGN_OR_RETURN(const Numerics numerics, ParseNumerics(options.numerics));
  PC_ASSIGN_OR_RETURN(const auto file, OpenModelFile(options.model, {}));
  PC_ASSIGN_OR_RETURN(const auto backend,
                      CreateCpuBackend(*file, {.num_threads = options.threads,
                                               .kernels = options.kernels,
                                               .numerics = numerics}));
  const double load_s = Seconds() - start;
  PC_ASSIGN_OR_RETURN(const auto all, MeasureAll(options, *backend));
  Print(options, conditions, *backend, load_s, all);
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
  app.add_option("model", options.model, "a GGUF file or a folder")->required();
  app.add_option("--threads", options.threads, "0: all cores");
  app.add_option("--kernels", options.kernels,
                 "auto, or a name of inference_worker/cpu/kernels.h");
  app.add_option("--numerics", options.numerics, "auto, exact or fast");
  app.add_option("--prefill", options.prefill, "lengths in tokens");
  app.add_option("--decode", options.decode, "tokens to generate; 0: none");
  app.add_option("--decode-after", options.decode_after, "prompt length")
      ->check(CLI::PositiveNumber);
  app.add_option("--fresh", options.fresh, "new tokens of a cached prompt");
  app.add_option("--fresh-after", options.fresh_after, "cached tokens")
      ->check(CLI::PositiveNumber);
  app.add_option("--batch", options.batch,
                 "sequences that decode together after one prompt; 0: none");
  app.add_option("--batch-after", options.batch_after, "that prompt's length")
      ->check(CLI::PositiveNumber);
  app.add_option("--repeat", options.repeat, "timed runs of each")
      ->check(CLI::PositiveNumber);
  app.add_flag("--json", options.json);
  return promptcache::bench::BenchMain(
      argc, argv, app, [&] { return promptcache::worker::Run(options); });
}
