// promptcache-bench-acquire: how long workers wait for the daemon's answer,
// real processes over the Unix socket.
//
//   promptcache-bench-acquire [--workers 4] [--modules 64]
//                             [--metadata 1000 1000000] [--rate 0]
//                             [--seconds 5] [--repeat 5] [--json]
//
// For each number in --metadata: a daemon, and that many resident modules of
// one page each. Then, --repeat times and of each daemon in turn: --workers
// processes ask for --modules random modules at once, all hits. Closed loop, or
// each worker --rate times a second. Figures are medians of the repeats, the
// lowest and the highest beside them; the ratio is of the most modules to the
// fewest, in the same turn.
// As real workers keep the keys of their schemas, the processes make theirs
// before they ask: of up to 65,536 modules each, spread over all of them. They
// ask once the daemon has nothing left to do of what filled it: it goes on
// writing to its registry for a while.
// In the same turns they exchange messages of that length with a process that
// does nothing else: the floor, what waking and sockets take on this machine.

#include <time.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <random>
#include <string>
#include <vector>

#include "CLI/CLI.hpp"
#include "absl/functional/function_ref.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "common/child_process.h"
#include "common/digest.h"
#include "common/page_sum.h"
#include "common/status_macros.h"
#include "inference_worker/cache/cache_client.h"
#include "tools/bench/bare_exchange.h"
#include "tools/bench/bench_main.h"
#include "tools/bench/conditions.h"
#include "tools/bench/statistics.h"
#include "tools/cli/files.h"

namespace promptcache {
namespace {

// The smallest pages that a segment is carved into whole: 4 KiB, 4 GiB for a
// million of them.
constexpr KvLayout kLayout{.num_layers = 1, .num_kv_heads = 1, .head_dim = 64};
constexpr uint32_t kTokens = 16;
// Modules of one Acquire while the daemon is being filled.
constexpr uint32_t kFillBatch = 1000;
// So many that the daemon's entries of them fit in no cache of a processor.
constexpr uint32_t kMostKeys = 65536;

struct Options {
  std::string daemon;  // empty: beside this program
  std::vector<uint32_t> metadata = {1000, 1'000'000};
  uint32_t workers = 4;
  uint32_t modules = 64;
  double rate = 0;
  double seconds = 5;
  uint32_t repeat = 5;
  bool json = false;
  // Set in the processes that ask: where the daemon is, and the file for what
  // was measured.
  std::string socket;
  std::string output;
  // Set in those of the floor: where its messages are answered; by whom asks,
  // who has an output, or by whom answers.
  std::string exchange;
};

// Of each repeat.
struct Times {
  std::vector<double> p50_us;
  std::vector<double> p99_us;
};

struct Result {
  uint32_t metadata = 0;
  size_t num_requests = 0;
  Times times;
  double fill_s = 0;
};

// A daemon that is full, while others are asked.
struct Full {
  cli::PrivateDir dir;
  ChildProcess daemon;
  Result result;
};

worker::AcquireKey KeyOf(uint32_t module) {
  return {.key = Sha256Of(absl::StrCat("module ", module)),
          .num_tokens = kTokens,
          .path = absl::StrCat("module", module)};
}

absl::StatusOr<std::unique_ptr<worker::CacheClient>> Connect(
    const std::string& socket, const std::string& worker_id) {
  PC_ASSIGN_OR_RETURN(auto client, worker::CacheClient::Create(
                                       {.socket_path = socket,
                                        .worker_id = worker_id,
                                        .model = "bench",
                                        .layout = kLayout,
                                        .acquire_timeout = absl::Seconds(30)}));
  PC_RETURN_IF_ERROR(client->WaitAttached(absl::Now() + absl::Seconds(60)));
  return client;
}

absl::Status CommitBatch(worker::CacheClient& client, uint32_t begin,
                         uint32_t end) {
  worker::CacheClient::AcquireArgs args{.schema = "bench"};
  for (uint32_t i = begin; i < end; ++i) args.keys.push_back(KeyOf(i));
  PC_ASSIGN_OR_RETURN(auto lease, client.Acquire(args));
  std::vector<worker::CommitModule> commits;
  for (size_t i = 0; i < lease->modules().size(); ++i) {
    const worker::AcquiredModule& module = lease->modules()[i];
    if (module.outcome != worker::AcquireOutcome::kReserved) {
      return absl::ResourceExhaustedError(
          absl::StrCat("the daemon has no room for module ", begin + i));
    }
    worker::CommitModule commit{.reservation_id = module.reservation_id,
                                .schema = "bench",
                                .path = args.keys[i].path,
                                .num_tokens = kTokens};
    for (std::byte* page : module.write_pages) {
      std::memset(page, 1, kLayout.page_bytes());
      commit.page_sums.push_back(PageSum({page, kLayout.page_bytes()}));
    }
    commits.push_back(std::move(commit));
  }
  return lease->Commit(commits, absl::Now() + absl::Seconds(60)).status();
}

// Different ones, evenly spread over all modules from a random one on.
std::vector<worker::AcquireKey> SomeKeys(uint32_t num_modules,
                                         std::mt19937* random) {
  std::vector<worker::AcquireKey> keys;
  const uint32_t count = std::min(num_modules, kMostKeys);
  const uint64_t step = num_modules / count;
  const uint64_t begin = (*random)() % num_modules;
  keys.reserve(count);
  for (uint32_t i = 0; i < count; ++i) {
    keys.push_back(
        KeyOf(static_cast<uint32_t>((begin + i * step) % num_modules)));
  }
  return keys;
}

// The body of a process that asks: what `ask` says that it took, in
// microseconds, one a line.
absl::Status AskOften(const Options& options,
                      absl::FunctionRef<absl::StatusOr<absl::Duration>()> ask) {
  const absl::Duration period =
      options.rate > 0 ? absl::Seconds(1 / options.rate) : absl::ZeroDuration();
  std::vector<double> microseconds;
  const absl::Time begin = absl::Now();
  // The first tenth warms up.
  const absl::Time counted = begin + absl::Seconds(options.seconds / 10);
  const absl::Time end = counted + absl::Seconds(options.seconds);
  for (absl::Time due = begin; absl::Now() < end; due += period) {
    absl::SleepFor(due - absl::Now());
    const bool counts = absl::Now() >= counted;
    PC_ASSIGN_OR_RETURN(const absl::Duration took, ask());
    if (counts) microseconds.push_back(absl::ToDoubleMicroseconds(took));
  }
  std::ofstream file(options.output);
  for (const double us : microseconds) file << us << "\n";
  return file.flush() ? absl::OkStatus()
                      : absl::DataLossError("cannot write " + options.output);
}

absl::Status AskDaemon(const Options& options, uint32_t num_modules) {
  // As the servers: Debian's absl looks for lock cycles at every lock.
  absl::SetMutexDeadlockDetectionMode(absl::OnDeadlockCycle::kIgnore);
  PC_ASSIGN_OR_RETURN(
      const auto client,
      Connect(options.socket, absl::StrCat("asks-", ::getpid())));
  std::mt19937 random(static_cast<uint32_t>(::getpid()));
  const std::vector<worker::AcquireKey> keys = SomeKeys(num_modules, &random);
  worker::CacheClient::AcquireArgs args{.schema = "bench"};
  return AskOften(options, [&]() -> absl::StatusOr<absl::Duration> {
    args.keys.clear();
    for (uint32_t i = 0; i < options.modules; ++i) {
      args.keys.push_back(keys[random() % keys.size()]);
    }
    const absl::Time start = absl::Now();
    PC_ASSIGN_OR_RETURN(const auto lease, client->Acquire(args));
    const absl::Duration took = absl::Now() - start;
    for (const worker::AcquiredModule& module : lease->modules()) {
      if (module.outcome != worker::AcquireOutcome::kHit) {
        return absl::InternalError(
            absl::StrCat("not a hit, for reason ",
                         static_cast<uint32_t>(module.miss_reason)));
      }
    }
    return took;
  });
}

absl::Status AskForNothing(const Options& options) {
  PC_ASSIGN_OR_RETURN(
      bench::BareExchange exchange,
      bench::BareExchange::Connect(options.exchange, absl::Seconds(60)));
  return AskOften(options, [&]() -> absl::StatusOr<absl::Duration> {
    const absl::Time start = absl::Now();
    PC_RETURN_IF_ERROR(exchange.Once());
    return absl::Now() - start;
  });
}

std::string ThisProgram() {
  return std::filesystem::read_symlink("/proc/self/exe");
}

// Processes with these arguments and those of the options, all at once; their
// p50 and p99 are added to `times`. Returns how often they asked.
absl::StatusOr<size_t> AskFromAll(const Options& options,
                                  const std::string& dir,
                                  const std::vector<std::string>& whom,
                                  Times* times) {
  std::vector<ChildProcess> workers;
  std::vector<std::string> outputs;
  for (uint32_t i = 0; i < options.workers; ++i) {
    outputs.push_back(absl::StrCat(dir, "/", i, ".us"));
    std::vector<std::string> args = {
        "--output",  outputs.back(),
        "--modules", absl::StrCat(options.modules),
        "--rate",    absl::StrCat(options.rate),
        "--seconds", absl::StrCat(options.seconds)};
    args.insert(args.end(), whom.begin(), whom.end());
    PC_ASSIGN_OR_RETURN(workers.emplace_back(),
                        ChildProcess::Start({.program = ThisProgram(),
                                             .args = std::move(args),
                                             .log_path = dir + "/asks.log"}));
  }
  std::vector<double> microseconds;
  for (size_t i = 0; i < workers.size(); ++i) {
    PC_ASSIGN_OR_RETURN(
        const std::string ended,
        workers[i].Wait(absl::Seconds(options.seconds * 2 + 120)));
    if (ended != "exit status 0") {
      return absl::InternalError(
          absl::StrCat("worker ended with ", ended, ": ", workers[i].Log()));
    }
    std::ifstream file(outputs[i]);
    for (double us = 0; file >> us;) microseconds.push_back(us);
  }
  if (microseconds.empty()) return absl::InternalError("nothing was measured");
  std::sort(microseconds.begin(), microseconds.end());
  times->p50_us.push_back(microseconds[microseconds.size() / 2]);
  times->p99_us.push_back(microseconds[microseconds.size() * 99 / 100]);
  return microseconds.size();
}

// Until `process` has used no processor time for half a second.
absl::Status WaitIdle(pid_t process) {
  clockid_t clock;
  if (clock_getcpuclockid(process, &clock) != 0) {
    return absl::InternalError("the daemon's processor time is not known");
  }
  const auto used = [clock] {
    timespec time{};
    clock_gettime(clock, &time);
    return absl::DurationFromTimespec(time);
  };
  const absl::Time deadline = absl::Now() + absl::Minutes(3);
  while (absl::Now() < deadline) {
    const absl::Duration before = used();
    absl::SleepFor(absl::Milliseconds(500));
    if (used() - before < absl::Milliseconds(10)) return absl::OkStatus();
  }
  return absl::DeadlineExceededError("the daemon is busy with nobody asking");
}

std::string DaemonBesideThis() {
  return std::filesystem::path(ThisProgram())
      .replace_filename("promptcache-daemon")
      .string();
}

absl::StatusOr<Full> Fill(const Options& options, uint32_t num_modules) {
  PC_ASSIGN_OR_RETURN(cli::PrivateDir private_dir, cli::PrivateDir::Create());
  const std::string& dir = private_dir.path();
  const uint64_t tier_bytes =
      (uint64_t{num_modules} + kFillBatch) * kLayout.page_bytes() + (1 << 20);
  PC_ASSIGN_OR_RETURN(
      ChildProcess daemon,
      ChildProcess::Start(
          {.program =
               options.daemon.empty() ? DaemonBesideThis() : options.daemon,
           .args = {"--socket=" + dir + "/d.sock",
                    "--listen=", "--db=" + dir + "/registry.db",
                    absl::StrCat("--device_bytes=", tier_bytes)},
           .log_path = dir + "/daemon.log"}));
  Result result = {.metadata = num_modules};
  const absl::Time start = absl::Now();
  {
    PC_ASSIGN_OR_RETURN(const auto client, Connect(dir + "/d.sock", "fills"));
    for (uint32_t i = 0; i < num_modules; i += kFillBatch) {
      PC_RETURN_IF_ERROR(
          CommitBatch(*client, i, std::min(i + kFillBatch, num_modules)));
    }
  }
  result.fill_s = absl::ToDoubleSeconds(absl::Now() - start);
  return Full{std::move(private_dir), std::move(daemon), std::move(result)};
}

absl::Status Measure(const Options& options, Full* full) {
  PC_RETURN_IF_ERROR(WaitIdle(full->daemon.pid()));
  PC_ASSIGN_OR_RETURN(
      const size_t num_requests,
      AskFromAll(options, full->dir.path(),
                 {"--socket", full->dir.path() + "/d.sock", "--metadata",
                  absl::StrCat(full->result.metadata)},
                 &full->result.times));
  full->result.num_requests += num_requests;
  return absl::OkStatus();
}

absl::Status MeasureFloor(const Options& options, Times* floor) {
  PC_ASSIGN_OR_RETURN(const cli::PrivateDir dir, cli::PrivateDir::Create());
  const std::string path = dir.path() + "/exchange.sock";
  PC_ASSIGN_OR_RETURN(
      const ChildProcess answers,
      ChildProcess::Start({.program = ThisProgram(),
                           .args = {"--exchange", path},
                           .log_path = dir.path() + "/answers.log"}));
  return AskFromAll(options, dir.path(), {"--exchange", path}, floor).status();
}

// Of the p50 among the most modules to that among the fewest, turn by turn.
bench::Spread RatioOf(const Result& fewest, const Result& most) {
  std::vector<double> ratios;
  ratios.reserve(most.times.p50_us.size());
  for (size_t i = 0; i < most.times.p50_us.size(); ++i) {
    ratios.push_back(most.times.p50_us[i] / fewest.times.p50_us[i]);
  }
  return bench::SpreadOf(ratios);
}

// Those that were asked as the bars say.
std::vector<bench::Bar> BarsOf(const Options& options,
                               const std::vector<Result>& results) {
  if (options.workers != 4 || options.modules != 64) return {};
  std::vector<bench::Bar> bars;
  bars.reserve(results.size() + 1);
  for (const Result& r : results) {
    bars.push_back({.name = absl::StrCat("p99 of 64 modules, 4 workers, ",
                                         r.metadata, " known, us"),
                    .value = bench::Median(r.times.p99_us),
                    .limit = 1000});
  }
  const auto [fewest, most] =
      std::ranges::minmax_element(results, {}, &Result::metadata);
  if (fewest->metadata == 1000 && most->metadata == 1'000'000) {
    bars.push_back({.name = "p50 with 1,000,000 known by that with 1,000",
                    .value = RatioOf(*fewest, *most).median,
                    .limit = 1.5});
  }
  return bars;
}

nlohmann::json ToJson(const Times& times) {
  const bench::Spread p50 = bench::SpreadOf(times.p50_us);
  const bench::Spread p99 = bench::SpreadOf(times.p99_us);
  return {{"p50_us", p50.median},   {"p50_min_us", p50.low},
          {"p50_max_us", p50.high}, {"p99_us", p99.median},
          {"p99_min_us", p99.low},  {"p99_max_us", p99.high}};
}
std::string ToText(const Times& times) {
  const bench::Spread p50 = bench::SpreadOf(times.p50_us);
  const bench::Spread p99 = bench::SpreadOf(times.p99_us);
  return absl::StrFormat(
      "p50 %6.0f us (%.0f to %.0f), p99 %6.0f us (%.0f to "
      "%.0f)",
      p50.median, p50.low, p50.high, p99.median, p99.low, p99.high);
}

void Print(const Options& options, const bench::Conditions& conditions,
           const Times& floor, double stolen,
           const std::vector<Result>& results) {
  const auto [fewest, most] =
      std::ranges::minmax_element(results, {}, &Result::metadata);
  const bench::Spread ratio = RatioOf(*fewest, *most);
  const std::vector<bench::Bar> bars = BarsOf(options, results);
  if (options.json) {
    nlohmann::json json = {{"workers", options.workers},
                           {"modules", options.modules},
                           {"rate_per_worker", options.rate},
                           {"repeat", options.repeat}};
    for (const Result& r : results) {
      nlohmann::json one = ToJson(r.times);
      one["name"] = absl::StrCat("acquire of ", options.modules, ", ",
                                 r.metadata, " known");
      one["metadata"] = r.metadata;
      one["requests"] = r.num_requests;
      one["fill_s"] = r.fill_s;
      json["results"].push_back(std::move(one));
    }
    json["floor"] = ToJson(floor);
    json["stolen_share"] = stolen;
    json["p50_ratio"] = {{"of", most->metadata},
                         {"to", fewest->metadata},
                         {"median", ratio.median},
                         {"min", ratio.low},
                         {"max", ratio.high}};
    json["bars"] = ToJson(bars);
    bench::PrintJson(conditions, std::move(json));
    return;
  }
  std::printf(
      "%sAcquire of %u modules, %u workers, %s; medians of %u\n",
      bench::ToText(conditions).c_str(), options.modules, options.workers,
      options.rate > 0 ? absl::StrCat(options.rate, " a second each").c_str()
                       : "closed loop",
      options.repeat);
  for (const Result& r : results) {
    std::printf("%8u modules known: %s, %zu requests (filled in %.1f s)\n",
                r.metadata, ToText(r.times).c_str(), r.num_requests, r.fill_s);
  }
  std::printf("floor, a bare exchange: %s\n", ToText(floor).c_str());
  if (stolen > 0) {
    std::printf("a hypervisor took %.1f %% of the processors' time\n",
                100 * stolen);
  }
  if (results.size() > 1) {
    std::printf("p50 among %u by that among %u: %.2f (%.2f to %.2f)\n",
                most->metadata, fewest->metadata, ratio.median, ratio.low,
                ratio.high);
  }
  std::printf("%s", ToText(bars).c_str());
}

absl::Status Run(const Options& options) {
  if (!options.socket.empty()) {
    return AskDaemon(options, options.metadata.front());
  }
  if (!options.exchange.empty()) {
    return options.output.empty() ? bench::AnswerExchanges(options.exchange)
                                  : AskForNothing(options);
  }
  const bench::Conditions conditions = bench::ReadConditions(
      "p99 of 64 modules, 4 workers <= 1,000 us; p50 with 1,000,000 known <= "
      "1.5 times that with 1,000");
  std::vector<Full> all;
  for (const uint32_t num_modules : options.metadata) {
    PC_ASSIGN_OR_RETURN(Full full, Fill(options, num_modules));
    all.push_back(std::move(full));
  }
  Times floor;
  const bench::StolenTime stolen;
  for (uint32_t i = 0; i < options.repeat; ++i) {
    for (Full& full : all) PC_RETURN_IF_ERROR(Measure(options, &full));
    PC_RETURN_IF_ERROR(MeasureFloor(options, &floor));
  }
  std::vector<Result> results;
  results.reserve(all.size());
  for (const Full& full : all) results.push_back(full.result);
  Print(options, conditions, floor, stolen.Share(), results);
  return absl::OkStatus();
}

}  // namespace
}  // namespace promptcache

// CLI11 throws at names that no option may have, which would show at once.
// NOLINTNEXTLINE(bugprone-exception-escape)
int main(int argc, char** argv) {
  promptcache::Options options;
  CLI::App app("How long workers wait for the cache daemon's answer");
  app.add_option("--daemon", options.daemon,
                 "the daemon's program (default: beside this one)");
  app.add_option("--metadata", options.metadata, "modules that are resident")
      ->check(CLI::PositiveNumber);
  app.add_option("--workers", options.workers, "processes that ask")
      ->check(CLI::PositiveNumber);
  app.add_option("--modules", options.modules, "of one Acquire")
      ->check(CLI::PositiveNumber);
  app.add_option("--rate", options.rate,
                 "requests a second of each worker; 0: closed loop");
  app.add_option("--seconds", options.seconds, "of each repeat")
      ->check(CLI::PositiveNumber);
  app.add_option("--repeat", options.repeat, "of each number, in turn")
      ->check(CLI::PositiveNumber);
  app.add_flag("--json", options.json);
  app.add_option("--socket", options.socket)->group("");
  app.add_option("--output", options.output)->group("");
  app.add_option("--exchange", options.exchange)->group("");
  return promptcache::bench::BenchMain(
      argc, argv, app, [&] { return promptcache::Run(options); });
}
