// promptcache-bench-overhead: what reuse costs where it gains nothing.
//
//   promptcache-bench-overhead [--model FILE] [--pairs 51] [--tokens 2048]
//                              [--only relocation|miss] [--json]
//
// relocation: attention over modules that were moved against attention over
//   the same modules where they were encoded, in process, one thread, processor
//   time. Floor: 0, nothing else differs.
// miss: a prompt none of whose modules is cached (encoded into the daemon's
//   memory) against the same plan with cache_mode=bypass, through gRPC and real
//   processes. Floor: the sums of the pages and one more round trip. Two lines:
//   - by the clock, to the first token: all that a caller waits. Another guest
//     of the host shows in it too, several percent of a run.
//   - processor time of worker and daemon together, for the whole request:
//     steadier, since what others take is not in it. Blind to waiting: for a
//     reply, a lock, a disk, or with one core idle. So it says that a miss is
//     no more work, and only the clock that it is no longer.
//
// A pair is A B B A, the next one B A A B: what drifts at a steady rate cancels
// out.

#include <time.h>

#include <algorithm>
#include <cstdio>
#include <functional>
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
  double base_ms = 0;  // median run of what it is compared with
};

// One run; of several, their sum.
struct Times {
  double clock_ms = 0;
  double processor_ms = 0;
};

// Of what costs more and of what it is compared with, one a pair.
struct Pairs {
  std::vector<Times> a;
  std::vector<Times> b;
};

double Milliseconds(clockid_t clock) {
  timespec time = {};
  clock_gettime(clock, &time);
  return 1e3 * static_cast<double>(time.tv_sec) +
         1e-6 * static_cast<double>(time.tv_nsec);
}

// After one pair to warm up.
absl::StatusOr<Pairs> InTurn(uint32_t num_pairs,
                             const std::function<absl::StatusOr<Times>()>& a,
                             const std::function<absl::StatusOr<Times>()>& b) {
  Pairs pairs;
  for (uint32_t i = 0; i <= num_pairs; ++i) {
    Times sum_a;
    Times sum_b;
    for (const bool first : {true, false, false, true}) {
      const bool is_a = first == (i % 2 == 0);
      PC_ASSIGN_OR_RETURN(const Times times, is_a ? a() : b());
      Times& sum = is_a ? sum_a : sum_b;
      sum.clock_ms += times.clock_ms;
      sum.processor_ms += times.processor_ms;
    }
    if (i == 0) continue;
    pairs.a.push_back(sum_a);
    pairs.b.push_back(sum_b);
  }
  return pairs;
}

Measured Compare(std::string name, const Pairs& pairs, double Times::* time) {
  std::vector<double> a;
  std::vector<double> b;
  for (const Times& times : pairs.a) a.push_back(times.*time);
  for (const Times& times : pairs.b) b.push_back(times.*time);
  return {std::move(name), RatioOf(a, b), Median(b) / 2};
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

  Times Attend(bool moved) {
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
    const double start = Milliseconds(CLOCK_THREAD_CPUTIME_ID);
    for (uint32_t i = 0; i < calls; ++i) kernels_->Attend(shape_, {&group, 1});
    return {.processor_ms =
                (Milliseconds(CLOCK_THREAD_CPUTIME_ID) - start) / calls};
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
    PC_ASSIGN_OR_RETURN(const Pairs pairs,
                        InTurn(
                            options.pairs, [&] { return bench.Attend(true); },
                            [&] { return bench.Attend(false); }));
    all->push_back(
        Compare(absl::StrCat("relocation, ", rows, " new tokens over ", tokens),
                pairs, &Times::processor_ms));
  }
  return absl::OkStatus();
}

// --- miss --------------------------------------------------------------------

// One prompt over a schema of 8 modules.
class Miss {
 public:
  static constexpr uint32_t kModules = 8;

  static absl::StatusOr<Miss> Start(const Options& options) {
    Miss miss;
    PC_ASSIGN_OR_RETURN(
        miss.node_,
        BenchNode::Start({.model = options.model,
                          .daemon_args = {"--device_bytes=512MiB"}}));
    const cli::LocalNode& servers = miss.node_->servers();
    if (clock_getcpuclockid(servers.worker_pid(), &miss.worker_clock_) != 0 ||
        clock_getcpuclockid(servers.daemon_pid(), &miss.daemon_clock_) != 0) {
      return absl::InternalError("the servers' processor time is not known");
    }
    PC_ASSIGN_OR_RETURN(const std::vector<std::string> modules,
                        miss.node_->text().Several(
                            kModules, std::max(4u, options.tokens / kModules)));
    PC_RETURN_IF_ERROR(miss.node_->PutSchema("overhead", modules));
    return miss;
  }

  absl::StatusOr<Times> Run(v1::CacheMode mode) {
    // Before a bypass too, so that both come after the same.
    v1::EvictModulesRequest all;
    all.mutable_filter()->set_schema("overhead");
    PC_RETURN_IF_ERROR(node_->daemon().EvictModules(all).status());
    v1::GenerateRequest request =
        PromptOver("overhead", kModules, " What next?", /*max_tokens=*/1);
    request.set_cache_mode(mode);
    const double start = ProcessorMs();
    PC_ASSIGN_OR_RETURN(const FirstToken first, node_->TimeFirstToken(request));
    // What servers do after the answer (leases end) is work of the request.
    absl::SleepFor(absl::Milliseconds(20));
    const v1::Usage& usage = first.completed.usage();
    const bool creates = mode == v1::CACHE_MODE_READ_WRITE;
    if (usage.cached_tokens() != 0 ||
        (usage.created_tokens() != 0) != creates) {
      return absl::InternalError(
          absl::StrCat(usage.cached_tokens(), " tokens were cached already, ",
                       usage.created_tokens(), " were encoded into the cache"));
    }
    return Times{.clock_ms = first.ms, .processor_ms = ProcessorMs() - start};
  }

 private:
  double ProcessorMs() const {
    return Milliseconds(worker_clock_) + Milliseconds(daemon_clock_);
  }

  std::unique_ptr<BenchNode> node_;
  clockid_t worker_clock_ = 0;
  clockid_t daemon_clock_ = 0;
};

absl::Status MeasureMiss(const Options& options, std::vector<Measured>* all) {
  PC_ASSIGN_OR_RETURN(Miss miss, Miss::Start(options));
  PC_ASSIGN_OR_RETURN(
      const Pairs pairs,
      InTurn(
          options.pairs, [&] { return miss.Run(v1::CACHE_MODE_READ_WRITE); },
          [&] { return miss.Run(v1::CACHE_MODE_BYPASS); }));
  const std::string name = absl::StrCat("miss, ", options.tokens, " tokens");
  all->push_back(Compare(name, pairs, &Times::clock_ms));
  all->push_back(
      Compare(name + ", processor time", pairs, &Times::processor_ms));
  return absl::OkStatus();
}

void Print(const Options& options, const Conditions& conditions,
           const std::vector<Measured>& all) {
  nlohmann::json json;
  std::vector<Bar> bars;
  if (!options.json) std::printf("%s", ToText(conditions).c_str());
  for (const Measured& m : all) {
    const double percent = 100 * (m.ratio.estimate - 1);
    const double low = 100 * (m.ratio.low - 1);
    const double high = 100 * (m.ratio.high - 1);
    bars.push_back({.name = m.name + ", %",
                    .value = percent,
                    .limit = m.name.starts_with("miss") ? 1.0 : 2.0});
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
  if (!options.json) {
    std::printf("%s", ToText(bars).c_str());
    return;
  }
  json["bars"] = ToJson(bars);
  PrintJson(conditions, std::move(json));
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
      ->check(CLI::Range(10, 5000));
  app.add_option("--tokens", options.tokens, "cached, or to be encoded")
      ->check(CLI::PositiveNumber);
  app.add_option("--only", options.only)
      ->check(CLI::IsMember({"relocation", "miss"}));
  app.add_flag("--json", options.json);
  return promptcache::bench::BenchMain(
      argc, argv, app, [&] { return promptcache::bench::Run(options); });
}
