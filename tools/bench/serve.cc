// promptcache-bench-serve: a load of requests that share one module, through
// gRPC against a daemon and a worker of their own.
//
//   promptcache-bench-serve [--model FILE] [--rate 2 | --closed 16]
//       [--requests 64] [--module-tokens 2000] [--fresh-tokens 32]
//       [--max-tokens 32] [--repeat 5] [--prompts FILE] [--json]
//
// --rate: an open loop. Requests come when a Poisson process of that many a
// second says, whether or not earlier ones are answered, and a latency counts
// from the moment at which its request was due. Each waits in a thread: when
// all --max-open of them do, a request starts late. That is counted and told,
// since such a loop is no longer open. --closed: so many callers, each of which
// asks again when it has its answer. One request before the clock starts leaves
// the module in the cache.
//
// Percentiles are of a histogram with buckets of 1/64: the median of those of
// --repeat loads, the lowest and the highest beside it. In an open loop each
// load has arrivals of its own. Fails when a request did, or when less than
// half of them were answered.
//
// --prompts: the texts as JSON, {"module", "fresh": [...]}, the last of them
// the first to be asked, for a peer to be asked the same.

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <fstream>
#include <functional>
#include <memory>
#include <nlohmann/json.hpp>
#include <random>
#include <span>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "CLI/CLI.hpp"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/time/clock.h"
#include "common/status_macros.h"
#include "tools/bench/bench_main.h"
#include "tools/bench/bench_node.h"
#include "tools/bench/conditions.h"
#include "tools/bench/hdr_histogram.h"
#include "tools/bench/statistics.h"

namespace promptcache::bench {
namespace {

constexpr uint32_t kFirstSeed = 11;

struct Options {
  std::string model;
  double rate = 0;
  uint32_t closed = 0;
  uint32_t requests = 64;
  uint32_t module_tokens = 2000;
  uint32_t fresh_tokens = 32;
  uint32_t max_tokens = 32;
  uint32_t max_open = 256;  // of the open loop: callers
  uint32_t repeat = 5;
  std::vector<std::string> daemon_args;
  std::vector<std::string> worker_args;
  std::string prompts;
  bool json = false;
};

// Latencies in microseconds.
struct Result {
  HdrHistogram ttft;
  HdrHistogram between_tokens;
  HdrHistogram total;
  uint64_t answered = 0;
  uint64_t refused = 0;  // RESOURCE_EXHAUSTED
  uint64_t failed = 0;
  uint64_t tokens = 0;
  uint64_t cached_tokens = 0;
  uint64_t late = 0;  // of the open loop: no caller was free when it was due
  absl::Duration latest;
  double seconds = 0;  // of the whole load
  std::string first_error;

  double tokens_per_s() const { return static_cast<double>(tokens) / seconds; }
  double requests_per_s() const {
    return static_cast<double>(answered) / seconds;
  }

  void Merge(const Result& other) {
    ttft.Merge(other.ttft);
    between_tokens.Merge(other.between_tokens);
    total.Merge(other.total);
    answered += other.answered;
    refused += other.refused;
    failed += other.failed;
    tokens += other.tokens;
    cached_tokens += other.cached_tokens;
    late += other.late;
    latest = std::max(latest, other.latest);
    if (first_error.empty()) first_error = other.first_error;
  }
};

uint64_t Microseconds(absl::Duration d) {
  return static_cast<uint64_t>(
      std::max<int64_t>(0, absl::ToInt64Microseconds(d)));
}

// What processes hold together, in MiB: a page that several of them have
// mapped, or one of them twice, counts once (the proportional set size).
double HeldMib(std::span<const pid_t> pids) {
  double all = 0;
  for (const pid_t pid : pids) {
    std::ifstream rollup(absl::StrCat("/proc/", pid, "/smaps_rollup"));
    std::string line;
    while (std::getline(rollup, line)) {
      std::istringstream words(line);
      std::string key;
      double kib = 0;
      if (words >> key >> kib && key == "Pss:") all += kib / 1024;
    }
  }
  return all;
}

// The most that they held at a sample, ten a second.
class PeakMemory {
 public:
  explicit PeakMemory(std::vector<pid_t> pids)
      : pids_(std::move(pids)), thread_([this] { Sample(); }) {}
  ~PeakMemory() { Stop(); }

  double Stop() {
    stop_ = true;
    if (thread_.joinable()) thread_.join();
    return peak_mib_;
  }

 private:
  void Sample() {
    do {
      peak_mib_ = std::max(peak_mib_, HeldMib(pids_));
      absl::SleepFor(absl::Milliseconds(100));
    } while (!stop_);
  }

  const std::vector<pid_t> pids_;
  double peak_mib_ = 0;  // the thread's until it has ended
  std::atomic<bool> stop_{false};
  std::thread thread_;
};

class Load {
 public:
  Load(const Options& options, std::vector<v1::GenerateRequest> requests,
       std::string address, uint32_t seed)
      : options_(options),
        requests_(std::move(requests)),
        address_(std::move(address)) {
    std::mt19937 random(seed);
    std::exponential_distribution<double> gap(std::max(options.rate, 1e-9));
    double due = 0;
    for (size_t i = 0; i < requests_.size(); ++i) {
      due_s_.push_back(due);
      due += gap(random);
    }
  }

  absl::StatusOr<Result> Run() {
    const uint32_t callers = options_.closed > 0
                                 ? options_.closed
                                 : static_cast<uint32_t>(std::min<size_t>(
                                       options_.max_open, requests_.size()));
    std::vector<std::unique_ptr<cli::WorkerClient>> clients;
    clients.reserve(callers);
    for (uint32_t i = 0; i < callers; ++i) {
      PC_ASSIGN_OR_RETURN(
          clients.emplace_back(),
          cli::WorkerClient::Connect(address_, absl::Seconds(20)));
    }
    std::vector<Result> results(callers);
    begin_ = absl::Now();
    std::vector<std::thread> threads;
    for (uint32_t i = 0; i < callers; ++i) {
      threads.emplace_back([&, i] { Call(clients[i].get(), &results[i]); });
    }
    for (std::thread& thread : threads) thread.join();
    Result all;
    all.seconds = absl::ToDoubleSeconds(absl::Now() - begin_);
    for (const Result& result : results) all.Merge(result);
    return all;
  }

 private:
  // Less is what starting threads and waking up takes.
  static constexpr absl::Duration kLate = absl::Milliseconds(10);

  // Takes the next request until there is none.
  void Call(cli::WorkerClient* client, Result* result) {
    for (size_t i = next_++; i < requests_.size(); i = next_++) {
      absl::Time due = absl::Now();
      if (options_.closed == 0) {
        due = begin_ + absl::Seconds(due_s_[i]);
        const absl::Duration late_by = absl::Now() - due;
        result->late += late_by > kLate;
        result->latest = std::max(result->latest, late_by);
        absl::SleepFor(-late_by);
      }
      One(client, requests_[i], due, result);
    }
  }

  static void One(cli::WorkerClient* client, const v1::GenerateRequest& request,
                  absl::Time due, Result* result) {
    absl::Time last;
    uint64_t tokens = 0;
    HdrHistogram between;
    absl::Duration ttft;
    const absl::Status status =
        client->Generate(request, [&](const v1::GenerateResponse& event) {
          const absl::Time now = absl::Now();
          if (event.has_delta()) {
            if (tokens == 0) {
              ttft = now - due;
            } else {
              between.Add(Microseconds(now - last));
            }
            tokens += static_cast<uint64_t>(event.delta().tokens_size());
            last = now;
          }
          if (event.has_completed()) {
            result->cached_tokens += event.completed().usage().cached_tokens();
          }
          return true;
        });
    if (!status.ok()) {
      ++(absl::IsResourceExhausted(status) ? result->refused : result->failed);
      if (result->first_error.empty()) {
        result->first_error = std::string(status.message());
      }
      return;
    }
    ++result->answered;
    result->tokens += tokens;
    result->ttft.Add(Microseconds(ttft));
    result->between_tokens.Merge(between);
    result->total.Add(Microseconds(absl::Now() - due));
  }

  const Options& options_;
  const std::vector<v1::GenerateRequest> requests_;
  const std::string address_;
  std::vector<double> due_s_;
  std::atomic<size_t> next_{0};
  absl::Time begin_;
};

constexpr double kPercentiles[] = {50, 90, 95, 99, 100};

// Over the loads.
template <typename Get>
Spread Over(const std::vector<Result>& loads, Get get) {
  std::vector<double> values;
  values.reserve(loads.size());
  for (const Result& load : loads) values.push_back(get(load));
  return SpreadOf(values);
}

Spread PercentileMs(const std::vector<Result>& loads,
                    HdrHistogram Result::* which, double p) {
  return Over(loads, [&](const Result& load) {
    return static_cast<double>((load.*which).Percentile(p)) / 1000;
  });
}

nlohmann::json ToJson(const std::vector<Result>& loads,
                      HdrHistogram Result::* which) {
  uint64_t count = 0;
  for (const Result& load : loads) count += (load.*which).count();
  nlohmann::json json = {{"count", count},
                         {"mean_ms", Over(loads, [&](const Result& load) {
                                       return (load.*which).mean() / 1000;
                                     }).median}};
  for (const double p : kPercentiles) {
    const std::string name = p == 100 ? "max" : absl::StrCat("p", p);
    const Spread spread = PercentileMs(loads, which, p);
    json[name + "_ms"] = spread.median;
    json[name + "_range_ms"] = {spread.low, spread.high};
  }
  return json;
}

void PrintAsJson(const Options& options, const Conditions& conditions,
                 const std::vector<Result>& loads, const Result& all,
                 double peak_mib) {
  const Spread tokens_per_s = Over(loads, std::mem_fn(&Result::tokens_per_s));
  const Spread requests_per_s =
      Over(loads, std::mem_fn(&Result::requests_per_s));
  PrintJson(
      conditions,
      {{"name", "serve"},
       {"loop", options.closed > 0 ? "closed" : "open"},
       {"rate", options.rate},
       {"callers", options.closed},
       {"module_tokens", options.module_tokens},
       {"fresh_tokens", options.fresh_tokens},
       {"max_tokens", options.max_tokens},
       {"repeat", options.repeat},
       {"seconds", Over(loads, std::mem_fn(&Result::seconds)).median},
       {"answered", all.answered},
       {"refused", all.refused},
       {"failed", all.failed},
       {"late_starts", all.late},
       {"latest_start_ms", absl::ToDoubleMilliseconds(all.latest)},
       {"cached_tokens", all.cached_tokens},
       {"tokens_per_s", tokens_per_s.median},
       {"tokens_per_s_range", {tokens_per_s.low, tokens_per_s.high}},
       {"requests_per_s", requests_per_s.median},
       {"requests_per_s_range", {requests_per_s.low, requests_per_s.high}},
       {"peak_mib", peak_mib},
       {"ttft", ToJson(loads, &Result::ttft)},
       {"between_tokens", ToJson(loads, &Result::between_tokens)},
       {"total", ToJson(loads, &Result::total)}});
}

void PrintLine(const char* name, const std::vector<Result>& loads,
               HdrHistogram Result::* which) {
  std::printf("%-15s", name);
  for (const double p : kPercentiles) {
    const Spread ms = PercentileMs(loads, which, p);
    std::printf(" %8.1f %-17s", ms.median,
                absl::StrFormat("(%.1f to %.1f)", ms.low, ms.high).c_str());
  }
  std::printf("\n");
}

void Print(const Options& options, const Conditions& conditions,
           const std::vector<Result>& loads, const Result& all,
           double peak_mib) {
  std::printf(
      "%s%s, %u requests over one module of %u tokens, %u new, %u back\n",
      ToText(conditions).c_str(),
      options.closed > 0
          ? absl::StrCat("closed loop of ", options.closed).c_str()
          : absl::StrCat("open loop, ", options.rate, " a second").c_str(),
      options.requests, options.module_tokens, options.fresh_tokens,
      options.max_tokens);
  const Spread tokens_per_s = Over(loads, std::mem_fn(&Result::tokens_per_s));
  std::printf(
      "%zu loads: %llu answered, %llu refused, %llu failed; %.1f tokens/s "
      "(%.1f "
      "to %.1f); worker and daemon held %.0f MiB at most\n",
      loads.size(), static_cast<unsigned long long>(all.answered),
      static_cast<unsigned long long>(all.refused),
      static_cast<unsigned long long>(all.failed), tokens_per_s.median,
      tokens_per_s.low, tokens_per_s.high, peak_mib);
  if (all.late > 0) {
    std::printf(
        "%llu requests started late, by %.0f ms at most: all %u callers were "
        "waiting, so the loop was not open\n",
        static_cast<unsigned long long>(all.late),
        absl::ToDoubleMilliseconds(all.latest), options.max_open);
  }
  std::printf("%-15s %-26s %-26s %-26s %-26s %s\n", "ms, medians", "     p50",
              "     p90", "     p95", "     p99", "     max");
  PrintLine("first token", loads, &Result::ttft);
  PrintLine("between tokens", loads, &Result::between_tokens);
  PrintLine("whole answer", loads, &Result::total);
}

struct Prompts {
  std::string module;
  std::vector<std::string> fresh;  // one more than is measured: to warm up
};

absl::StatusOr<Prompts> MakePrompts(const Options& options, BenchText* text) {
  Prompts prompts;
  PC_ASSIGN_OR_RETURN(prompts.module, text->Of(options.module_tokens));
  PC_ASSIGN_OR_RETURN(
      prompts.fresh, text->Several(options.requests + 1, options.fresh_tokens));
  return prompts;
}

absl::Status Run(const Options& options) {
  const Conditions conditions = ReadConditions(
      "llama-server in the same load (tools/bench/peers --only batch)");
  std::vector<std::string> daemon_args = {"--device_bytes=512MiB"};
  daemon_args.insert(daemon_args.end(), options.daemon_args.begin(),
                     options.daemon_args.end());
  PC_ASSIGN_OR_RETURN(const auto node,
                      BenchNode::Start({.model = options.model,
                                        .daemon_args = daemon_args,
                                        .worker_args = options.worker_args}));
  PC_ASSIGN_OR_RETURN(const Prompts prompts,
                      MakePrompts(options, &node->text()));
  if (!options.prompts.empty()) {
    std::ofstream(options.prompts) << nlohmann::json(
        {{"module", prompts.module}, {"fresh", prompts.fresh}});
  }
  PC_RETURN_IF_ERROR(node->PutSchema("serve", {&prompts.module, 1}));
  std::vector<v1::GenerateRequest> requests;
  requests.reserve(prompts.fresh.size());
  for (const std::string& fresh : prompts.fresh) {
    requests.push_back(PromptOver("serve", 1, fresh, options.max_tokens));
  }
  PC_RETURN_IF_ERROR(node->TimeFirstToken(requests.back()).status());
  requests.pop_back();
  const cli::LocalNode& servers = node->servers();
  PeakMemory peak({servers.worker_pid(), servers.daemon_pid()});
  std::vector<Result> loads;
  Result all;
  for (uint32_t i = 0; i < options.repeat; ++i) {
    Load load(options, requests, servers.worker_address(), kFirstSeed + i);
    PC_ASSIGN_OR_RETURN(loads.emplace_back(), load.Run());
    all.Merge(loads.back());
  }
  if (options.json) {
    PrintAsJson(options, conditions, loads, all, peak.Stop());
  } else {
    Print(options, conditions, loads, all, peak.Stop());
  }
  if (all.failed > 0) {
    return absl::InternalError(
        absl::StrCat(all.failed, " requests failed: ", all.first_error));
  }
  const uint64_t asked = uint64_t{options.requests} * options.repeat;
  if (all.answered * 2 >= asked) return absl::OkStatus();
  return absl::ResourceExhaustedError(
      absl::StrCat("only ", all.answered, " of ", asked,
                   " requests were answered: ", all.first_error));
}

}  // namespace
}  // namespace promptcache::bench

// CLI11 throws at names that no option may have, which would show at once.
// NOLINTNEXTLINE(bugprone-exception-escape)
int main(int argc, char** argv) {
  promptcache::bench::Options options;
  CLI::App app("A load of requests that share one module");
  app.add_option("--model", options.model,
                 "a GGUF file or a folder; the small model otherwise");
  auto* rate =
      app.add_option("--rate", options.rate, "open loop: requests a second")
          ->check(CLI::PositiveNumber);
  app.add_option("--closed", options.closed, "closed loop: callers")
      ->check(CLI::Range(1, 1024))
      ->excludes(rate);
  app.add_option("--requests", options.requests)->check(CLI::PositiveNumber);
  app.add_option("--module-tokens", options.module_tokens)
      ->check(CLI::Range(4, 1000000));
  app.add_option("--fresh-tokens", options.fresh_tokens)
      ->check(CLI::Range(4, 100000));
  app.add_option("--max-tokens", options.max_tokens)
      ->check(CLI::PositiveNumber);
  app.add_option("--max-open", options.max_open, "callers of the open loop")
      ->check(CLI::Range(1, 1024));
  app.add_option("--repeat", options.repeat,
                 "loads, each with its own arrivals")
      ->check(CLI::PositiveNumber);
  app.add_option("--daemon-arg", options.daemon_args,
                 "passed on to the daemon; repeatable");
  app.add_option("--worker-arg", options.worker_args,
                 "passed on to the worker; repeatable");
  app.add_option("--prompts", options.prompts, "file that gets the texts");
  app.add_flag("--json", options.json);
  return promptcache::bench::BenchMain(argc, argv, app, [&] {
    if (options.rate == 0 && options.closed == 0) options.closed = 16;
    return promptcache::bench::Run(options);
  });
}
