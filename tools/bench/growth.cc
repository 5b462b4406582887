// promptcache-bench-growth: what a long life adds to both processes.
//
//   promptcache-bench-growth [--model FILE] [--requests 2000] [--samples 20]
//                            [--json]
//
// Every request brings a schema of its own (two modules that nobody has seen;
// one of eight names, so that revisions pass and schemas are deleted) and is
// answered over it, in a device tier of a few modules: each commit evicts. The
// memory, descriptors and threads of daemon and worker are looked at while
// requests go on. What is wanted: nothing grows once the tier is full. Growth
// is the slope of a line through the second half of the samples, whose median,
// lowest and highest are told.

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "CLI/CLI.hpp"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "common/status_macros.h"
#include "tools/bench/bench_main.h"
#include "tools/bench/bench_node.h"
#include "tools/bench/conditions.h"
#include "tools/bench/statistics.h"

namespace promptcache::bench {
namespace {

struct Options {
  std::string model;
  uint32_t requests = 2000;
  uint32_t samples = 20;
  bool json = false;
};

struct ProcessSample {
  double anon_kib = 0;  // private memory: segments are shared, and not in it
  double descriptors = 0;
  double threads = 0;
};

struct Sample {
  double requests = 0;
  double ttft_ms = 0;  // median since the sample before
  uint64_t used_bytes = 0;
  uint64_t evictions = 0;
  ProcessSample daemon;
  ProcessSample worker;
};

ProcessSample Look(pid_t pid) {
  ProcessSample sample;
  const std::string proc = absl::StrCat("/proc/", pid);
  std::ifstream status(proc + "/status");
  for (std::string key; status >> key;) {
    if (key == "RssAnon:") status >> sample.anon_kib;
    if (key == "Threads:") status >> sample.threads;
  }
  std::error_code ignored;
  for (const auto& entry :
       std::filesystem::directory_iterator(proc + "/fd", ignored)) {
    static_cast<void>(entry);
    ++sample.descriptors;
  }
  return sample;
}

class Growth {
 public:
  explicit Growth(BenchNode& node) : node_(node) {}

  absl::StatusOr<std::vector<Sample>> Run(const Options& options) {
    std::vector<Sample> samples;
    const uint32_t between = std::max(1u, options.requests / options.samples);
    for (uint32_t i = 0; i < options.requests; ++i) {
      PC_RETURN_IF_ERROR(Answer(i));
      if ((i + 1) % between != 0) continue;
      PC_ASSIGN_OR_RETURN(samples.emplace_back(), Take(i + 1));
    }
    return samples;
  }

 private:
  static constexpr uint32_t kNames = 8;
  static constexpr uint32_t kModuleTokens = 96;

  absl::Status Answer(uint32_t index) {
    const std::string name = absl::StrCat("growth", index % kNames);
    PC_ASSIGN_OR_RETURN(const std::vector<std::string> modules,
                        node_.text().Several(2, kModuleTokens));
    PC_RETURN_IF_ERROR(node_.PutSchema(name, modules));
    PC_ASSIGN_OR_RETURN(const FirstToken first,
                        node_.TimeFirstToken(PromptOver(name, 2, " What next?",
                                                        /*max_tokens=*/2)));
    ttfts_.push_back(first.completed.timings().ttft_ms());
    if (index % (4 * kNames) != 0) return absl::OkStatus();
    v1::DeleteSchemaRequest gone;
    gone.set_name(name);
    return node_.worker().DeleteSchema(gone);
  }

  absl::StatusOr<Sample> Take(uint32_t requests) {
    PC_ASSIGN_OR_RETURN(const v1::CacheStats stats, node_.daemon().GetStats());
    Sample sample = {.requests = static_cast<double>(requests),
                     .daemon = Look(node_.servers().daemon_pid()),
                     .worker = Look(node_.servers().worker_pid())};
    for (const auto& tier : stats.tiers()) {
      sample.used_bytes += tier.used_bytes();
      for (const auto& evictions : tier.evictions()) {
        sample.evictions += evictions.num_modules();
      }
    }
    sample.ttft_ms = Median(std::exchange(ttfts_, {}));
    return sample;
  }

  BenchNode& node_;
  std::vector<double> ttfts_;
};

// Of the least-squares line through the second half, per 1,000 requests.
template <typename Get>
double GrowthOf(const std::vector<Sample>& samples, Get get) {
  const size_t begin = samples.size() / 2;
  const auto n = static_cast<double>(samples.size() - begin);
  double x = 0, y = 0, xx = 0, xy = 0;
  for (size_t i = begin; i < samples.size(); ++i) {
    x += samples[i].requests;
    y += get(samples[i]);
    xx += samples[i].requests * samples[i].requests;
    xy += samples[i].requests * get(samples[i]);
  }
  const double spread = n * xx - x * x;
  return spread == 0 ? 0 : 1000 * (n * xy - x * y) / spread;
}

std::vector<double> SecondHalf(const std::vector<double>& values) {
  return {values.begin() + static_cast<ptrdiff_t>(values.size() / 2),
          values.end()};
}

void Print(const Options& options, const Conditions& conditions,
           const std::vector<Sample>& samples) {
  struct Line {
    const char* name;
    double (*get)(const Sample&);
    bool as_at_first = false;  // is not to grow after the first sample
  };
  const Line lines[] = {
      {"daemon_anon_kib", [](const Sample& s) { return s.daemon.anon_kib; }},
      {"worker_anon_kib", [](const Sample& s) { return s.worker.anon_kib; }},
      {"daemon_descriptors",
       [](const Sample& s) { return s.daemon.descriptors; }, true},
      {"worker_descriptors",
       [](const Sample& s) { return s.worker.descriptors; }, true},
      {"daemon_threads", [](const Sample& s) { return s.daemon.threads; },
       true},
      {"worker_threads", [](const Sample& s) { return s.worker.threads; },
       true},
      {"used_mib",
       [](const Sample& s) {
         return static_cast<double>(s.used_bytes) / (1 << 20);
       }},
      {"ttft_ms", [](const Sample& s) { return s.ttft_ms; }}};
  nlohmann::json json = {{"requests", options.requests},
                         {"evictions", samples.back().evictions}};
  if (!options.json) {
    std::printf(
        "%s%u requests, %llu evictions\n%-20s %10s %10s %10s %22s %20s\n",
        ToText(conditions).c_str(), options.requests,
        static_cast<unsigned long long>(samples.back().evictions), "", "first",
        "median", "last", "(second half)", "growth / 1,000");
  }
  std::vector<Bar> bars;
  for (const Line& line : lines) {
    const double growth = GrowthOf(samples, line.get);
    std::vector<double> values;
    values.reserve(samples.size());
    for (const Sample& s : samples) values.push_back(line.get(s));
    const Spread half = SpreadOf(SecondHalf(values));
    if (line.as_at_first) {
      bars.push_back({.name = absl::StrCat(line.name, " beyond the first"),
                      .value = half.median - values.front(),
                      .limit = 0});
    }
    if (options.json) {
      json["results"].push_back({{"name", line.name},
                                 {"median", half.median},
                                 {"min", half.low},
                                 {"max", half.high},
                                 {"growth_per_1000", growth},
                                 {"samples", values}});
    } else {
      std::printf(
          "%-20s %10.1f %10.1f %10.1f %22s %20.2f\n", line.name, values.front(),
          half.median, values.back(),
          absl::StrFormat("(%.1f to %.1f)", half.low, half.high).c_str(),
          growth);
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
  const Conditions conditions = ReadConditions(
      "descriptors and threads as at first; memory that stops growing");
  PC_ASSIGN_OR_RETURN(
      const auto node,
      BenchNode::Start(
          {.model = options.model, .daemon_args = {"--device_bytes=16MiB"}}));
  PC_ASSIGN_OR_RETURN(const std::vector<Sample> samples,
                      Growth(*node).Run(options));
  Print(options, conditions, samples);
  return absl::OkStatus();
}

}  // namespace
}  // namespace promptcache::bench

int main(int argc, char** argv) {
  promptcache::bench::Options options;
  CLI::App app("What a long life adds to daemon and worker");
  app.add_option("--model", options.model,
                 "a GGUF file or a folder; the small model otherwise");
  app.add_option("--requests", options.requests)
      ->check(CLI::Range(4, 100000000));
  app.add_option("--samples", options.samples)->check(CLI::Range(4, 1000));
  app.add_flag("--json", options.json);
  return promptcache::bench::BenchMain(
      argc, argv, app, [&] { return promptcache::bench::Run(options); });
}
