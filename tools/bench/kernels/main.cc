// promptcache-bench-kernels: what the CPU kernels reach, beside what the
// machine can do at most, for the shapes of SmolLM2-135M.

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <functional>
#include <string>
#include <vector>

#include "CLI/CLI.hpp"
#include "absl/strings/str_format.h"
#include "inference_worker/cpu/kernels.h"
#include "nlohmann/json.hpp"
#include "tools/bench/conditions.h"
#include "tools/bench/kernels/floor.h"
#include "tools/bench/statistics.h"

namespace promptcache::bench {
namespace {

using worker::cpu::AttentionGroup;
using worker::cpu::AttentionShape;
using worker::cpu::Kernels;
using worker::cpu::PackedMatrix;
using worker::cpu::QuantFormat;
using worker::cpu::QuantizedMatrix;
using worker::cpu::RopeTable;

constexpr uint32_t kLayers = 30;
constexpr uint32_t kHeads = 9;
constexpr uint32_t kKvHeads = 3;
constexpr uint32_t kHeadDim = 64;

struct Shape {
  const char* name;
  uint32_t n;
  uint32_t k;
  uint32_t per_pass;    // how often a pass over the model uses it
  uint32_t out_stride;  // as the engine's buffers have it
};
// q, k and v, and gate and up, packed as one matrix each.
constexpr Shape kShapes[] = {{"qkv", 960, 576, kLayers, 960},
                             {"out", 576, 576, kLayers, 576},
                             {"gate+up", 3072, 576, kLayers, 3088},
                             {"down", 576, 1536, kLayers, 576},
                             {"head", 49152, 576, 1, 49152}};

// Of rows with quantised weights; but for tiles of bytes, against the peak of
// unquantised ones.
const std::string kQuantizedPrefix = "Q4_1 ";

struct Result {
  std::string kernels;
  std::string quant_kernels;
  uint32_t threads = 0;
  std::string what;
  uint32_t rows = 0;
  Spread seconds;
  double flops = 0;
  double bytes = 0;
  double floor_seconds = 0;
};

struct Settings {
  double seconds_per_point = 0.04;
  uint32_t rounds = 5;
  bool json = false;
  std::vector<std::string> kernels;
  std::vector<uint32_t> threads = {1, 0};
};

// Seconds of one call: of some rounds, after one to warm up.
Spread Time(uint32_t num_threads, const Settings& settings,
            const std::function<void(size_t)>& call) {
  call(0);
  std::vector<double> rounds;
  double spent = 0;
  for (size_t i = 1; spent < settings.seconds_per_point || i <= settings.rounds;
       ++i) {
    const Stopwatch watch(num_threads);
    call(i);
    rounds.push_back(watch.Seconds());
    spent += rounds.back();
  }
  return SpreadOf(rounds);
}

class Bench {
 public:
  Bench(Kernels* kernels, const Settings& settings)
      : kernels_(kernels),
        settings_(settings),
        floor_(MeasureFloor(kernels->name(), kernels->quant_name(),
                            kernels->pool())) {}

  void Run() {
    for (const Shape& shape : kShapes) RunGemm(shape);
    AddWholeModel("", floor_.gemm_flops_per_s);
    for (const Shape& shape : kShapes) RunQuantizedGemm(shape);
    AddWholeModel(kQuantizedPrefix, QuantFlops());
    RunAttention("attend decode, 2048 cached", 8, 256, 1);
    RunAttention("attend 64 fresh, 2048 cached", 8, 256, 64);
    RunAttention("attend prefill 512", 0, 0, 512);
    RunAttention("attend prefill 2048", 0, 0, 2048);
  }

  const Floor& floor() const { return floor_; }
  const char* quant_name() const { return kernels_->quant_name(); }
  double QuantFlops() const {
    return floor_.quant_flops_per_s > 0 ? floor_.quant_flops_per_s
                                        : floor_.gemm_flops_per_s;
  }
  const std::vector<Result>& results() const { return results_; }

 private:
  void Add(const std::string& what, uint32_t rows, Spread seconds, double flops,
           double bytes, double peak_flops) {
    results_.push_back(
        {.kernels = kernels_->name(),
         .quant_kernels = kernels_->quant_name(),
         .threads = kernels_->num_threads(),
         .what = what,
         .rows = rows,
         .seconds = seconds,
         .flops = flops,
         .bytes = bytes,
         .floor_seconds =
             std::max(flops / peak_flops, bytes / floor_.read_bytes_per_s)});
  }

  // Weights beyond the second-level cache, as a pass over a model finds them.
  static size_t NumCopies(size_t bytes) {
    return std::max<size_t>(1, (size_t{48} << 20) / bytes);
  }

  void RunGemm(const Shape& shape) {
    const size_t bytes = size_t{2} * shape.n * shape.k;
    std::vector<PackedMatrix> matrices;
    for (size_t i = 0; i < NumCopies(bytes); ++i) {
      matrices.push_back(*kernels_->Pack(
          shape.n, shape.k, [](uint64_t index, std::span<float> row) {
            for (size_t j = 0; j < row.size(); ++j) {
              row[j] = static_cast<float>((index * 31 + j * 17) % 64) * 0.01f;
            }
          }));
    }
    TimeGemm(shape, shape.name, matrices, bytes, floor_.gemm_flops_per_s);
  }

  // Of the real model's Q4_1 file: the head is Q8_0.
  void RunQuantizedGemm(const Shape& shape) {
    const QuantFormat format =
        shape.per_pass == 1 ? QuantFormat::kBytes : QuantFormat::kNibblesMin;
    std::vector<QuantizedMatrix> matrices;
    do {
      matrices.push_back(*kernels_->PackQuantized(
          shape.n, shape.k, format,
          [](uint64_t index, const QuantizedMatrix::Row& row) {
            for (size_t j = 0; j < row.codes.size(); ++j) {
              row.codes[j] = static_cast<uint8_t>((index * 31 + j * 17) % 16);
            }
            std::ranges::fill(row.scales, uint16_t{0x2000});
            std::ranges::fill(row.minima, uint16_t{0xa800});
          }));
    } while (matrices.size() < NumCopies(matrices[0].num_bytes()));
    TimeGemm(shape, kQuantizedPrefix + std::string(shape.name), matrices,
             matrices[0].num_bytes(), QuantFlops());
  }

  template <class Matrix>
  void TimeGemm(const Shape& shape, const std::string& what,
                const std::vector<Matrix>& matrices, size_t bytes,
                double peak_flops) {
    for (uint32_t rows : {1u, 8u, 32u, 512u}) {
      if (shape.per_pass == 1 && rows > 8) continue;
      std::vector<float> a(size_t{rows} * shape.k);
      for (size_t i = 0; i < a.size(); ++i) {
        a[i] = static_cast<float>(i * 37 % 101) * 0.02f - 1.0f;
      }
      std::vector<float> c(size_t{rows} * shape.out_stride);
      const Spread seconds =
          Time(kernels_->num_threads(), settings_, [&](size_t i) {
            kernels_->Gemm(a.data(), shape.k, rows,
                           matrices[i % matrices.size()], c.data(),
                           shape.out_stride);
          });
      Add(what, rows, seconds, 2.0 * rows * shape.n * shape.k,
          static_cast<double>(bytes), peak_flops);
    }
  }

  // A pass's GEMMs; the head for one row.
  void AddWholeModel(const std::string& prefix, double peak_flops) {
    for (uint32_t rows : {1u, 8u, 32u, 512u}) {
      Result total = {.what = prefix + "all GEMMs of a pass", .rows = rows};
      for (const Result& result : results_) {
        for (const Shape& shape : kShapes) {
          if (result.what != prefix + shape.name) continue;
          if (result.rows != (shape.per_pass == 1 ? 1 : rows)) continue;
          total.seconds.median += shape.per_pass * result.seconds.median;
          total.seconds.low += shape.per_pass * result.seconds.low;
          total.seconds.high += shape.per_pass * result.seconds.high;
          total.flops += shape.per_pass * result.flops;
          total.bytes += shape.per_pass * result.bytes;
        }
      }
      Add(total.what, rows, total.seconds, total.flops, total.bytes,
          peak_flops);
    }
  }

  // One layer's attention of `rows` fresh tokens over `num_views` modules.
  void RunAttention(const char* what, uint32_t num_views, uint32_t view_tokens,
                    uint32_t rows) {
    const RopeTable rope = *RopeTable::Create(
        {.inv_freq = RopeTable::PlainFrequencies(100000.0, kHeadDim),
         .max_position = 8192});
    const AttentionShape shape = {.num_heads = kHeads,
                                  .layer = 3,
                                  .layout = {.num_layers = kLayers,
                                             .num_kv_heads = kKvHeads,
                                             .head_dim = kHeadDim},
                                  .scale = 0.125f,
                                  .rope = &rope};
    const uint32_t cached = num_views * view_tokens;
    const size_t num_pages =
        shape.layout.PagesFor(cached) + shape.layout.PagesFor(rows);
    auto memory = *worker::cpu::PopulatedMemory::Allocate(
        num_pages * shape.layout.page_bytes());
    std::vector<const std::byte*> pages;
    for (size_t i = 0; i < num_pages; ++i) {
      pages.push_back(memory.data() + i * shape.layout.page_bytes());
    }
    std::vector<KvView> views;
    for (uint32_t i = 0; i < num_views; ++i) {
      views.push_back(
          {.pages = pages.data() + i * (view_tokens / 16),
           .num_tokens = view_tokens,
           .position_offset = static_cast<int32_t>(i * view_tokens)});
    }
    const size_t row_floats = kHeads * kHeadDim;
    const std::vector<float> queries(rows * row_floats, 0.25f);
    std::vector<float> out(rows * row_floats);
    const AttentionGroup group = {
        .queries = queries.data(),
        .query_stride = row_floats,
        .out = out.data(),
        .out_stride = row_floats,
        .num_rows = rows,
        .position = static_cast<int32_t>(cached),
        .visible = views,
        .own = {.pages = pages.data() + shape.layout.PagesFor(cached),
                .num_tokens = rows,
                .position_offset = static_cast<int32_t>(cached)}};
    const Spread seconds =
        Time(kernels_->num_threads(), settings_,
             [&](size_t) { kernels_->Attend(shape, {&group, 1}); });
    const double seen = rows * (cached + (rows + 1) / 2.0);
    Add(what, rows, seconds, seen * kHeads * kHeadDim * 4.0,
        (cached + rows) * 4.0 * kKvHeads * kHeadDim,
        floor_.attention_flops_per_s);
  }

  Kernels* const kernels_;
  const Settings settings_;
  const Floor floor_;
  std::vector<Result> results_;
};

void PrintTable(const Bench& bench, const std::string& name, uint32_t threads) {
  const Floor& floor = bench.floor();
  std::printf(
      "\n%s, %u thread%s, at most: read %.1f GB/s, GEMM %.0f GFLOP/s, "
      "attention "
      "%.0f GFLOP/s; quantised by %s, %.0f GOP/s\n",
      name.c_str(), threads, threads == 1 ? "" : "s",
      floor.read_bytes_per_s * 1e-9, floor.gemm_flops_per_s * 1e-9,
      floor.attention_flops_per_s * 1e-9, bench.quant_name(),
      bench.QuantFlops() * 1e-9);
  std::printf("%-30s %5s %12s %24s %9s %8s %10s %7s\n", "operation", "rows",
              "us", "(range)", "GFLOP/s", "GB/s", "rows/s", "floor");
  for (const Result& r : bench.results()) {
    const double seconds = r.seconds.median;
    const std::string range = absl::StrFormat(
        "(%.1f to %.1f)", r.seconds.low * 1e6, r.seconds.high * 1e6);
    std::printf("%-30s %5u %12.1f %24s %9.1f %8.1f %10.0f %6.0f%%\n",
                r.what.c_str(), r.rows, seconds * 1e6, range.c_str(),
                r.flops / seconds * 1e-9, r.bytes / seconds * 1e-9,
                r.rows / seconds, 100 * r.floor_seconds / seconds);
  }
}

nlohmann::json ToJson(const Result& r) {
  const double seconds = r.seconds.median;
  return {{"name", absl::StrFormat("%s, %u rows, %s, %u threads", r.what,
                                   r.rows, r.kernels, r.threads)},
          {"kernels", r.kernels},
          {"quant_kernels", r.quant_kernels},
          {"threads", r.threads},
          {"operation", r.what},
          {"rows", r.rows},
          {"microseconds", seconds * 1e6},
          {"min_microseconds", r.seconds.low * 1e6},
          {"max_microseconds", r.seconds.high * 1e6},
          {"gflops", r.flops / seconds * 1e-9},
          {"gigabytes_per_s", r.bytes / seconds * 1e-9},
          {"rows_per_s", r.rows / seconds},
          {"share_of_floor", r.floor_seconds / seconds}};
}

int Run(const Settings& settings) {
  const Conditions conditions = ReadConditions(
      "memory bandwidth and the arithmetic peak, measured first: the column "
      "\"floor\"");
  nlohmann::json json = {{"conditions", ToJson(conditions)}};
  if (!settings.json) std::printf("%s", ToText(conditions).c_str());
  for (const std::string& name : settings.kernels) {
    uint32_t last = 0;
    for (uint32_t threads : settings.threads) {
      auto kernels = Kernels::Create({.name = name, .num_threads = threads});
      if (!kernels.ok()) {
        std::fprintf(stderr, "%s\n", kernels.status().ToString().c_str());
        return 1;
      }
      if ((*kernels)->num_threads() == last) continue;
      last = (*kernels)->num_threads();
      Bench bench(kernels->get(), settings);
      bench.Run();
      if (settings.json) {
        for (const Result& r : bench.results()) {
          json["results"].push_back(ToJson(r));
        }
      } else {
        PrintTable(bench, name, last);
      }
    }
  }
  if (settings.json) std::printf("%s\n", json.dump(1).c_str());
  return 0;
}

}  // namespace
}  // namespace promptcache::bench

int main(int argc, char** argv) {
  promptcache::bench::Settings settings;
  settings.kernels = promptcache::worker::cpu::Kernels::Runnable();
  CLI::App app(
      "GEMM and attention of the CPU kernels for the shapes of SmolLM2-135M. "
      "\"floor\": the time that memory bandwidth or the arithmetic peak allow, "
      "both measured first, as a share of the time taken. With one thread, "
      "times are of the processor; with more, of the clock.");
  app.add_option("--kernels", settings.kernels,
                 "instruction sets (default: all that run here)")
      ->delimiter(',');
  app.add_option("--threads", settings.threads, "0: all cores (default: 1,0)")
      ->delimiter(',');
  app.add_option("--seconds", settings.seconds_per_point,
                 "spent on each figure, a median (default: 0.04)");
  app.add_option("--rounds", settings.rounds,
                 "of each figure at least (default: 5)")
      ->check(CLI::PositiveNumber);
  app.add_flag("--json", settings.json, "print JSON");
  CLI11_PARSE(app, argc, argv);
  return promptcache::bench::Run(settings);
}
