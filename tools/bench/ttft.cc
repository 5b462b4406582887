// promptcache-bench-ttft: the first token of a prompt whose module is cached,
// through gRPC against a daemon and a worker of their own.
//
//   promptcache-bench-ttft [--model FILE] [--cached 3000 ...]
//       [--fresh 8 16 32] [--repeat 9] [--full-repeat 5] [--json]
//
// For each number of cached tokens and each of new ones (tools/bench/plot draws
// both): from the call to the first token at the client, with the module read
// from the cache, and with attention=full. Beside
// them, measured alone in this process with the worker idle, what nobody can do
// without: the new tokens prefilled with no context, and their attention over
// the cached ones in every layer. Floors: full / cached >= 60 with 8 new
// tokens, cached / (alone + attention) <= 1.15. Medians after one run to warm
// up, cached and in-process runs in turn.

#include <malloc.h>

#include <algorithm>
#include <cstdio>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "CLI/CLI.hpp"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/time/clock.h"
#include "common/status_macros.h"
#include "inference_worker/cpu/kernels.h"
#include "inference_worker/engine/cpu_backend.h"
#include "inference_worker/engine/families/positions.h"
#include "inference_worker/engine/private_span.h"
#include "tools/bench/bench_main.h"
#include "tools/bench/bench_node.h"
#include "tools/bench/conditions.h"
#include "tools/bench/statistics.h"

namespace promptcache::bench {
namespace {

struct Options {
  std::string model;
  std::vector<uint32_t> cached = {3000};
  std::vector<uint32_t> fresh = {8, 16, 32};
  uint32_t repeat = 9;
  uint32_t full_repeat = 5;
  bool json = false;
};

struct Line {
  uint32_t cached = 0;
  uint32_t fresh = 0;
  std::vector<double> cached_ms;
  std::vector<double> server_ms;  // the worker's own clock
  std::vector<double> full_ms;
  std::vector<double> alone_ms;
  std::vector<double> attention_ms;

  double Sum() const { return Median(alone_ms) + Median(attention_ms); }
  double Speedup() const { return Median(full_ms) / Median(cached_ms); }
};

// The terms that are measured without a server.
class InProcess {
 public:
  absl::Status Load(const std::string& model, uint32_t cached,
                    uint32_t most_fresh) {
    PC_ASSIGN_OR_RETURN(const auto file, worker::OpenModelFile(model, {}));
    // As the worker chooses it.
    PC_ASSIGN_OR_RETURN(const worker::Numerics numerics,
                        worker::ParseNumerics("auto"));
    PC_ASSIGN_OR_RETURN(
        backend_, worker::CreateCpuBackend(*file, {.numerics = numerics}));
    const KvLayout& layout = backend_->layout();
    PC_ASSIGN_OR_RETURN(pool_, worker::PrivatePages::Create(
                                   layout, (layout.PagesFor(cached) +
                                            layout.PagesFor(most_fresh) + 2) *
                                               (layout.page_bytes() + 64)));
    context_.emplace(*pool_, 0);
    ids_.resize(std::max(cached, most_fresh));
    for (size_t i = 0; i < ids_.size(); ++i) {
      ids_[i] = static_cast<int32_t>(i * 7919 % backend_->vocab_size());
    }
    PC_RETURN_IF_ERROR(context_->Run(*backend_, std::span(ids_).first(cached),
                                     {}, worker::LogitsWanted::kNone,
                                     &logits_));
    return PrepareAttention(file->config(), most_fresh);
  }

  absl::StatusOr<double> Alone(uint32_t fresh) {
    worker::PrivateSpan span(*pool_, 0);
    const absl::Time start = absl::Now();
    PC_RETURN_IF_ERROR(span.Run(*backend_, std::span(ids_).first(fresh), {},
                                worker::LogitsWanted::kLast, &logits_));
    return absl::ToDoubleMilliseconds(absl::Now() - start);
  }

  double Attention(uint32_t cached, uint32_t fresh) {
    KvView seen = context_->PlacedAt(0);
    seen.num_tokens = cached;
    const size_t row_floats = size_t{shape_.num_heads} * shape_.layout.head_dim;
    const worker::cpu::AttentionGroup group = {
        .queries = queries_.data(),
        .query_stride = row_floats,
        .out = out_.data(),
        .out_stride = row_floats,
        .num_rows = fresh,
        .position = static_cast<int32_t>(cached),
        .visible = {&seen, 1},
        .own = {}};
    const absl::Time start = absl::Now();
    for (uint32_t layer = 0; layer < shape_.layout.num_layers; ++layer) {
      shape_.layer = layer;
      kernels_->Attend(shape_, {&group, 1});
    }
    return absl::ToDoubleMilliseconds(absl::Now() - start);
  }

  const worker::Backend& backend() const { return *backend_; }

 private:
  absl::Status PrepareAttention(const worker::ModelConfig& config,
                                uint32_t most_fresh) {
    const std::string& numerics = backend_->numerics();
    PC_ASSIGN_OR_RETURN(kernels_,
                        worker::cpu::Kernels::Create(
                            {.name = numerics.substr(numerics.find('/') + 1)}));
    if (config.positions == worker::PositionKind::kRope) {
      PC_ASSIGN_OR_RETURN(worker::Rotation rotation,
                          worker::RotationOf(config, /*local=*/false));
      PC_ASSIGN_OR_RETURN(rope_, worker::cpu::RopeTable::Create(
                                     {.inv_freq = std::move(rotation.inv_freq),
                                      .factor = rotation.factor,
                                      .max_position = static_cast<int32_t>(
                                          backend_->context_length())}));
    }
    shape_ = {.num_heads = config.num_heads,
              .layout = backend_->layout(),
              .scale = worker::AttentionScale(config),
              .rope = rope_.has_value() ? &*rope_ : nullptr};
    const size_t floats =
        size_t{most_fresh} * config.num_heads * config.head_dim;
    queries_.assign(floats, 0.25f);
    out_.resize(floats);
    return absl::OkStatus();
  }

  std::unique_ptr<worker::Backend> backend_;
  std::unique_ptr<worker::PrivatePages> pool_;
  std::optional<worker::PrivateSpan> context_;
  std::unique_ptr<worker::cpu::Kernels> kernels_;
  std::optional<worker::cpu::RopeTable> rope_;
  worker::cpu::AttentionShape shape_;
  std::vector<int32_t> ids_;
  std::vector<float> logits_, queries_, out_;
};

std::string SchemaOf(uint32_t cached) { return absl::StrCat("ttft-", cached); }

// A module of so many tokens, in a schema of its own.
absl::Status Cache(uint32_t cached, BenchNode* node) {
  PC_ASSIGN_OR_RETURN(const std::string module, node->text().Of(cached));
  PC_RETURN_IF_ERROR(node->PutSchema(SchemaOf(cached), {&module, 1}));
  v1::WarmModulesRequest warm;
  warm.set_schema(SchemaOf(cached));
  return node->worker().WarmModules(warm,
                                    [](const v1::WarmModulesResponse&) {});
}

absl::StatusOr<FirstToken> FirstOf(uint32_t cached, uint32_t fresh, bool full,
                                   BenchNode* node) {
  PC_ASSIGN_OR_RETURN(const std::string words, node->text().Of(fresh));
  v1::GenerateRequest request =
      PromptOver(SchemaOf(cached), 1, words, /*max_tokens=*/1);
  if (full) request.set_attention(v1::ATTENTION_MODE_FULL);
  PC_ASSIGN_OR_RETURN(FirstToken first, node->TimeFirstToken(request));
  const uint32_t read = first.completed.usage().cached_tokens();
  if (full || read == cached) return first;
  return absl::InternalError(
      absl::StrCat(read, " tokens were cached, not ", cached));
}

absl::StatusOr<Line> Measure(const Options& options, uint32_t cached,
                             uint32_t fresh, InProcess* alone,
                             BenchNode* node) {
  Line line = {.cached = cached, .fresh = fresh};
  for (uint32_t i = 0; i <= options.repeat; ++i) {
    PC_ASSIGN_OR_RETURN(const FirstToken first,
                        FirstOf(cached, fresh, /*full=*/false, node));
    PC_ASSIGN_OR_RETURN(const double alone_ms, alone->Alone(fresh));
    const double attention_ms = alone->Attention(cached, fresh);
    if (i == 0) continue;
    line.cached_ms.push_back(first.ms);
    line.server_ms.push_back(first.completed.timings().ttft_ms());
    line.alone_ms.push_back(alone_ms);
    line.attention_ms.push_back(attention_ms);
  }
  for (uint32_t i = 0; i < options.full_repeat; ++i) {
    PC_ASSIGN_OR_RETURN(const FirstToken first,
                        FirstOf(cached, fresh, /*full=*/true, node));
    line.full_ms.push_back(first.ms);
  }
  return line;
}

std::string Range(const std::vector<double>& ms) {
  const auto [low, high] = std::ranges::minmax_element(ms);
  return absl::StrFormat("(%.1f to %.1f)", *low, *high);
}

// Of each line the sum of its terms; of the one that the bar names, the
// speed-up.
std::vector<Bar> BarsOf(const std::vector<Line>& lines) {
  std::vector<Bar> bars;
  for (const Line& line : lines) {
    const std::string name =
        absl::StrCat("ttft ", line.fresh, " over ", line.cached);
    if (line.fresh == 8 && line.cached == 3000) {
      bars.push_back({.name = name + ", full by cached",
                      .value = line.Speedup(),
                      .limit = 60,
                      .at_least = true});
    }
    bars.push_back({.name = name + ", cached by its terms",
                    .value = Median(line.cached_ms) / line.Sum(),
                    .limit = 1.15});
  }
  return bars;
}

void Print(const Options& options, const Conditions& conditions,
           const worker::Backend& backend, const std::vector<Line>& lines) {
  if (options.json) {
    nlohmann::json json = {{"numerics", backend.numerics()},
                           {"threads", backend.num_threads()},
                           {"repeat", options.repeat}};
    for (const Line& line : lines) {
      json["results"].push_back(
          {{"name", absl::StrCat("ttft ", line.fresh, " over ", line.cached)},
           {"cached_tokens", line.cached},
           {"fresh_tokens", line.fresh},
           {"cached_ms", Median(line.cached_ms)},
           {"cached_min_ms", *std::ranges::min_element(line.cached_ms)},
           {"cached_max_ms", *std::ranges::max_element(line.cached_ms)},
           {"server_ms", Median(line.server_ms)},
           {"full_ms", Median(line.full_ms)},
           {"full_min_ms", *std::ranges::min_element(line.full_ms)},
           {"full_max_ms", *std::ranges::max_element(line.full_ms)},
           {"speedup", line.Speedup()},
           {"alone_ms", Median(line.alone_ms)},
           {"attention_ms", Median(line.attention_ms)},
           {"over_floor", Median(line.cached_ms) / line.Sum()}});
    }
    json["bars"] = ToJson(BarsOf(lines));
    PrintJson(conditions, std::move(json));
    return;
  }
  std::printf("%s%s, %u threads; medians of %u, full of %u\n",
              ToText(conditions).c_str(), backend.numerics().c_str(),
              backend.num_threads(), options.repeat, options.full_repeat);
  std::printf("%7s %6s %11s %16s %11s %10s %18s %8s %9s %9s %11s\n", "cached",
              "fresh", "cached ms", "(range)", "at worker", "full ms",
              "(range)", "full/c", "alone", "attention", "c/(a+a)");
  for (const Line& line : lines) {
    std::printf(
        "%7u %6u %11.2f %16s %11.2f %10.1f %18s %7.1fx %9.2f %9.2f %10.2fx\n",
        line.cached, line.fresh, Median(line.cached_ms),
        Range(line.cached_ms).c_str(), Median(line.server_ms),
        Median(line.full_ms), Range(line.full_ms).c_str(), line.Speedup(),
        Median(line.alone_ms), Median(line.attention_ms),
        Median(line.cached_ms) / line.Sum());
  }
  std::printf("%s", ToText(BarsOf(lines)).c_str());
}

absl::Status Run(const Options& options) {
  const Conditions conditions = ReadConditions(
      "attention=full of the same prompt: >= 60 times below with 8 fresh "
      "tokens over 3000; the fresh tokens alone and their attention: <= 1.15");
  PC_ASSIGN_OR_RETURN(
      const auto node,
      BenchNode::Start(
          {.model = options.model, .daemon_args = {"--device_bytes=1GiB"}}));
  InProcess alone;
  PC_RETURN_IF_ERROR(alone.Load(node->model(),
                                *std::ranges::max_element(options.cached),
                                *std::ranges::max_element(options.fresh)));
  std::vector<Line> lines;
  for (const uint32_t cached : options.cached) {
    PC_RETURN_IF_ERROR(Cache(cached, node.get()));
    for (const uint32_t fresh : options.fresh) {
      PC_ASSIGN_OR_RETURN(lines.emplace_back(),
                          Measure(options, cached, fresh, &alone, node.get()));
    }
  }
  Print(options, conditions, alone.backend(), lines);
  return absl::OkStatus();
}

}  // namespace
}  // namespace promptcache::bench

int main(int argc, char** argv) {
  // As the worker does: large blocks are kept, not faulted in anew.
  mallopt(M_MMAP_THRESHOLD, 1 << 30);
  mallopt(M_TRIM_THRESHOLD, 1 << 30);
  promptcache::bench::Options options;
  CLI::App app("The first token of a cached prompt, and what it could be");
  app.add_option("--model", options.model,
                 "a GGUF file or a folder; the small model otherwise");
  app.add_option("--cached", options.cached)->check(CLI::Range(4, 1000000));
  app.add_option("--fresh", options.fresh)->check(CLI::Range(4, 100000));
  app.add_option("--repeat", options.repeat)->check(CLI::PositiveNumber);
  app.add_option("--full-repeat", options.full_repeat)
      ->check(CLI::PositiveNumber);
  app.add_flag("--json", options.json);
  return promptcache::bench::BenchMain(
      argc, argv, app, [&] { return promptcache::bench::Run(options); });
}
