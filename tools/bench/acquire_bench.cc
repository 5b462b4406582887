// Round trips of Acquire between a worker's client and a daemon process.
//
//   acquire_bench [--daemon PROGRAM] [--seconds N]
//
// Starts the daemon (default: promptcache-daemon beside this program), commits
// modules of one page, and times hits on 1 and on 64 of them, one caller.

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <string>
#include <vector>

#include "CLI/CLI.hpp"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "common/child_process.h"
#include "common/digest.h"
#include "common/page_sum.h"
#include "common/status_macros.h"
#include "glog/logging.h"
#include "inference_worker/cache/cache_client.h"

namespace promptcache {
namespace {

constexpr KvLayout kLayout{.num_layers = 4, .num_kv_heads = 1, .head_dim = 16};
constexpr uint32_t kTokens = 16;

worker::CacheClient::AcquireArgs Args(int num_modules) {
  worker::CacheClient::AcquireArgs args{.schema = "bench"};
  for (int i = 0; i < num_modules; ++i) {
    args.keys.push_back({.key = Sha256Of(absl::StrCat(i)),
                         .num_tokens = kTokens,
                         .path = absl::StrCat("module", i)});
  }
  return args;
}

absl::Status CommitAll(worker::CacheClient* client, int num_modules) {
  PC_ASSIGN_OR_RETURN(auto lease, client->Acquire(Args(num_modules)));
  std::vector<worker::CommitModule> commits;
  for (const worker::AcquiredModule& module : lease->modules()) {
    worker::CommitModule commit{.reservation_id = module.reservation_id,
                                .schema = "bench",
                                .num_tokens = kTokens};
    for (std::byte* page : module.write_pages) {
      std::memset(page, 1, kLayout.page_bytes());
      commit.page_sums.push_back(PageSum({page, kLayout.page_bytes()}));
    }
    commits.push_back(commit);
  }
  return lease->Commit(commits, absl::Now() + absl::Seconds(10)).status();
}

absl::Status Measure(worker::CacheClient* client, int num_modules,
                     absl::Duration time) {
  const auto args = Args(num_modules);
  std::vector<double> microseconds;
  const absl::Time end = absl::Now() + time;
  while (absl::Now() < end) {
    const absl::Time start = absl::Now();
    PC_ASSIGN_OR_RETURN(const auto lease, client->Acquire(args));
    microseconds.push_back(absl::ToDoubleMicroseconds(absl::Now() - start));
    if (lease->modules().back().outcome != worker::AcquireOutcome::kHit) {
      return absl::InternalError("not a hit");
    }
  }
  std::sort(microseconds.begin(), microseconds.end());
  const size_t n = microseconds.size();
  std::printf("acquire of %2d modules: p50 %6.0f us, p99 %6.0f us, n %zu\n",
              num_modules, microseconds[n / 2], microseconds[n * 99 / 100], n);
  return absl::OkStatus();
}

absl::Status Run(const std::string& program, const std::string& dir,
                 absl::Duration time) {
  const std::string socket = dir + "/d.sock";
  PC_ASSIGN_OR_RETURN(
      ChildProcess daemon,
      ChildProcess::Start({.program = program,
                           .args = {"--socket=" + socket,
                                    "--listen=", "--db=" + dir + "/registry.db",
                                    "--device_bytes=64MiB"},
                           .log_path = dir + "/daemon.log"}));
  PC_ASSIGN_OR_RETURN(auto client,
                      worker::CacheClient::Create({.socket_path = socket,
                                                   .worker_id = "bench",
                                                   .model = "bench",
                                                   .layout = kLayout}));
  PC_RETURN_IF_ERROR(client->WaitAttached(absl::Now() + absl::Seconds(30)));
  PC_RETURN_IF_ERROR(CommitAll(client.get(), 64));
  PC_RETURN_IF_ERROR(Measure(client.get(), 1, time / 10));  // warm up
  PC_RETURN_IF_ERROR(Measure(client.get(), 1, time));
  return Measure(client.get(), 64, time);
}

}  // namespace
}  // namespace promptcache

int main(int argc, char** argv) {
  FLAGS_logtostderr = true;
  FLAGS_minloglevel = google::GLOG_WARNING;
  google::InitGoogleLogging(argv[0]);
  CLI::App app("Round trips of Acquire to a cache daemon");
  std::string program =
      (std::filesystem::read_symlink("/proc/self/exe").parent_path() /
       "promptcache-daemon")
          .string();
  double seconds = 2;
  app.add_option("--daemon", program, "the daemon's program");
  app.add_option("--seconds", seconds, "per line");
  CLI11_PARSE(app, argc, argv);
  std::string dir =
      (std::filesystem::temp_directory_path() / "acquire_bench.XXXXXX")
          .string();
  if (::mkdtemp(dir.data()) == nullptr) return 1;
  const absl::Status status =
      promptcache::Run(program, dir, absl::Seconds(seconds));
  std::filesystem::remove_all(dir);
  if (!status.ok()) std::fprintf(stderr, "%s\n", status.ToString().c_str());
  return status.ok() ? 0 : 1;
}
