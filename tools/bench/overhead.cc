// promptcache-bench-overhead: what reuse costs where it gains nothing.
//
//   promptcache-bench-overhead [--model FILE] [--pairs 51] [--tokens 2048]
//                              [--only relocation|miss] [--json]
//
// relocation: attention over modules that were moved against attention over
//   the same modules where they were encoded, in process, one thread, processor
//   time. Floor: 0, nothing else differs.
// miss: first token of a prompt none of whose modules is cached (encoded into
//   the daemon's memory) against the same plan with cache_mode=bypass, through
//   gRPC and real processes, clock time. Floor: the sums and one more round
//   trip.
// Each from pairs in turn, the order within a pair alternating.

#include <time.h>

#include <algorithm>
#include <cstdio>
#include <nlohmann/json.hpp>
#include <random>
#include <string>
#include <vector>

#include "CLI/CLI.hpp"
#include "absl/strings/str_cat.h"
#include "common/status_macros.h"
#include "inference_worker/cpu/kernels.h"
#include "tools/bench/bench_main.h"
#include "tools/bench/bench_node.h"
#include "tools/bench/conditions.h"
#include "tools/bench/statistics.h"

namespace promptcache::bench {
namespace {

using worker::cpu::AttentionGroup;
using worker::cpu::AttentionShape;
using worker::cpu::Kernels;
using worker::cpu::RopeTable;

struct Options {
  std::string model;
  uint32_t pairs = 51;
  uint32_t tokens = 2048;
  std::string only;
  bool json = false;
};

struct Measured {
  std::string name;
  PairedRatio ratio;
  double base_ms = 0;  // median of what it is compared with
};

double ThreadCpuMs() {
  timespec time;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
  return 1e3 * static_cast<double>(time.tv_sec) +
         1e-6 * static_cast<double>(time.tv_nsec);
}

// Runs both in turn, `pairs` times after one to warm up; milliseconds.
template <typename First, typename Second>
absl::StatusOr<Measured> InTurn(std::string name, uint32_t pairs, First first,
                                Second second) {
  std::vector<double> a;
  std::vector<double> b;
  for (uint32_t i = 0; i <= pairs; ++i) {
    absl::StatusOr<double> ms_a;
    absl::StatusOr<double> ms_b;
    if (i % 2 == 0) ms_a = first();
    ms_b = second();
    if (i % 2 == 1) ms_a = first();
    PC_RETURN_IF_ERROR(ms_a.status());
    PC_RETURN_IF_ERROR(ms_b.status());
    if (i == 0) continue;
    a.push_back(*ms_a);
    b.push_back(*ms_b);
  }
  return Measured{std::move(name), RatioOf(a, b), Median(std::move(b))};
}

// --- relocation --------------------------------------------------------------

// One layer of SmolLM2-135M's attention of `rows` fresh tokens over `tokens`
// cached ones in modules of 256.
class Relocation {
 public:
  static constexpr uint32_t kModuleTokens = 256;

  Relocation(uint32_t tokens, uint32_t rows)
      : rows_(rows), num_modules_(tokens / kModuleTokens) {
    kernels_ = *Kernels::Create({.num_threads = 1});
    const uint64_t pages =
        shape_.layout.PagesFor(tokens) + 1 + shape_.layout.PagesFor(rows);
    memory_.assign(pages * shape_.layout.page_bytes() / sizeof(uint16_t),
                   0x3c00);
    std::mt19937 random(1);
    for (uint16_t& value : memory_) {  // bf16 between -1 and 1
      value = static_cast<uint16_t>((random() & 0x80ff) | 0x3e00);
    }
    for (uint64_t i = 0; i < pages; ++i) {
      pages_.push_back(reinterpret_cast<const std::byte*>(memory_.data()) +
                       i * shape_.layout.page_bytes());
    }
    queries_.assign(rows * kRowFloats, 0.25f);
    out_.resize(queries_.size());
  }

  // Milliseconds of the processor for one call.
  double Attend(bool moved) {
    const uint32_t tokens = num_modules_ * kModuleTokens;
    std::vector<KvView> views;
    for (uint32_t i = 0; i < num_modules_; ++i) {
      const auto begin = static_cast<int32_t>(i * kModuleTokens);
      // Equal positions; moved modules have a frame each, the others one.
      views.push_back({.pages = pages_.data() + i * (kModuleTokens / 16),
                       .num_tokens = kModuleTokens,
                       .position_offset = moved ? begin : 0,
                       .local_position = moved ? 0 : begin});
    }
    const AttentionGroup group = {
        .queries = queries_.data(),
        .query_stride = kRowFloats,
        .out = out_.data(),
        .out_stride = kRowFloats,
        .num_rows = rows_,
        .position = static_cast<int32_t>(tokens),
        .visible = views,
        .own = {.pages = pages_.data() + tokens / 16,
                .num_tokens = rows_,
                .position_offset = 0,
                .local_position = static_cast<int32_t>(tokens)}};
    // Enough calls for a time that can be measured.
    const uint32_t calls = std::max(1u, 64 / rows_);
    const double start = ThreadCpuMs();
    for (uint32_t i = 0; i < calls; ++i) kernels_->Attend(shape_, {&group, 1});
    return (ThreadCpuMs() - start) / calls;
  }

 private:
  static constexpr uint32_t kHeads = 9;
  static constexpr uint32_t kHeadDim = 64;
  static constexpr size_t kRowFloats = kHeads * kHeadDim;

  const uint32_t rows_;
  const uint32_t num_modules_;
  const RopeTable rope_ = *RopeTable::Create(
      {.inv_freq = RopeTable::PlainFrequencies(100000.0, kHeadDim),
       .max_position = 32768});
  const AttentionShape shape_ = {
      .num_heads = kHeads,
      .layout = {.num_layers = 1, .num_kv_heads = 3, .head_dim = kHeadDim},
      .scale = 0.125f,
      .rope = &rope_};
  std::unique_ptr<Kernels> kernels_;
  std::vector<uint16_t> memory_;
  std::vector<const std::byte*> pages_;
  std::vector<float> queries_;
  std::vector<float> out_;
};

absl::Status MeasureRelocation(const Options& options,
                               std::vector<Measured>* all) {
  const uint32_t tokens =
      std::max(1u, options.tokens / Relocation::kModuleTokens) *
      Relocation::kModuleTokens;
  for (const uint32_t rows : {1u, 16u, 64u}) {
    Relocation bench(tokens, rows);
    PC_ASSIGN_OR_RETURN(
        all->emplace_back(),
        InTurn(
            absl::StrCat("relocation, ", rows, " new tokens over ", tokens),
            options.pairs,
            [&]() -> absl::StatusOr<double> { return bench.Attend(true); },
            [&]() -> absl::StatusOr<double> { return bench.Attend(false); }));
  }
  return absl::OkStatus();
}

// --- miss --------------------------------------------------------------------

// One prompt over a schema of 8 modules.
class Miss {
 public:
  static constexpr uint32_t kModules = 8;

  static absl::StatusOr<std::unique_ptr<Miss>> Start(const Options& options) {
    PC_ASSIGN_OR_RETURN(
        auto node,
        BenchNode::Start({.model = options.model,
                          .daemon_args = {"--device_bytes=512MiB"}}));
    PC_ASSIGN_OR_RETURN(const std::vector<std::string> modules,
                        node->text().Several(
                            kModules, std::max(4u, options.tokens / kModules)));
    PC_RETURN_IF_ERROR(node->PutSchema("overhead", modules));
    return std::make_unique<Miss>(std::move(node));
  }
  explicit Miss(std::unique_ptr<BenchNode> node) : node_(std::move(node)) {}

  // To the first token, of a prompt whose modules are all missing.
  absl::StatusOr<double> Created() {
    v1::EvictModulesRequest all;
    all.mutable_filter()->set_schema("overhead");
    PC_RETURN_IF_ERROR(node_->daemon().EvictModules(all).status());
    return FirstTokenMs(v1::CACHE_MODE_READ_WRITE);
  }
  absl::StatusOr<double> Bypassed() {
    return FirstTokenMs(v1::CACHE_MODE_BYPASS);
  }

 private:
  absl::StatusOr<double> FirstTokenMs(v1::CacheMode mode) {
    v1::GenerateRequest request =
        PromptOver("overhead", kModules, " What next?", /*max_tokens=*/1);
    request.set_cache_mode(mode);
    PC_ASSIGN_OR_RETURN(const FirstToken first, node_->TimeFirstToken(request));
    if (first.completed.usage().cached_tokens() == 0) return first.ms;
    return absl::InternalError(
        absl::StrCat(first.completed.usage().cached_tokens(),
                     " tokens were cached already"));
  }

  std::unique_ptr<BenchNode> node_;
};

absl::Status MeasureMiss(const Options& options, std::vector<Measured>* all) {
  PC_ASSIGN_OR_RETURN(const auto miss, Miss::Start(options));
  PC_ASSIGN_OR_RETURN(
      all->emplace_back(),
      InTurn(
          absl::StrCat("miss, ", options.tokens, " tokens"), options.pairs,
          [&] { return miss->Created(); }, [&] { return miss->Bypassed(); }));
  return absl::OkStatus();
}

void Print(const Options& options, const Conditions& conditions,
           const std::vector<Measured>& all) {
  nlohmann::json json;
  if (!options.json) std::printf("%s", ToText(conditions).c_str());
  for (const Measured& m : all) {
    const double percent = 100 * (m.ratio.median - 1);
    const double low = 100 * (m.ratio.low - 1);
    const double high = 100 * (m.ratio.high - 1);
    if (options.json) {
      json["results"].push_back({{"name", m.name},
                                 {"pairs", m.ratio.num_pairs},
                                 {"overhead_percent", percent},
                                 {"low_percent", low},
                                 {"high_percent", high},
                                 {"base_ms", m.base_ms}});
    } else {
      std::printf(
          "%-40s %+6.2f %%  (95 %%: %+.2f to %+.2f), %zu pairs, of "
          "%.3f ms\n",
          m.name.c_str(), percent, low, high, m.ratio.num_pairs, m.base_ms);
    }
  }
  if (options.json) PrintJson(conditions, std::move(json));
}

absl::Status Run(const Options& options) {
  const Conditions conditions =
      ReadConditions("relocation <= 2 %, a miss <= 1 %");
  std::vector<Measured> all;
  if (options.only != "miss") {
    PC_RETURN_IF_ERROR(MeasureRelocation(options, &all));
  }
  if (options.only != "relocation") {
    PC_RETURN_IF_ERROR(MeasureMiss(options, &all));
  }
  Print(options, conditions, all);
  return absl::OkStatus();
}

}  // namespace
}  // namespace promptcache::bench

int main(int argc, char** argv) {
  promptcache::bench::Options options;
  CLI::App app("What relocation and misses cost");
  app.add_option("--model", options.model,
                 "a GGUF file or a folder; the small model otherwise");
  app.add_option("--pairs", options.pairs, "measured in turn")
      ->check(CLI::Range(10, 100000));
  app.add_option("--tokens", options.tokens, "cached, or to be encoded")
      ->check(CLI::PositiveNumber);
  app.add_option("--only", options.only)
      ->check(CLI::IsMember({"relocation", "miss"}));
  app.add_flag("--json", options.json);
  return promptcache::bench::BenchMain(
      argc, argv, app, [&] { return promptcache::bench::Run(options); });
}
