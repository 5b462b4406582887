#include "tools/bench/bench_main.h"

#include <cstdio>

#include "glog/logging.h"

namespace promptcache::bench {

int BenchMain(int argc, char** argv, CLI::App& app,
              const std::function<absl::Status()>& run) {
  FLAGS_logtostderr = true;
  FLAGS_minloglevel = google::GLOG_WARNING;
  google::InitGoogleLogging(argv[0]);
  CLI11_PARSE(app, argc, argv);
  const absl::Status status = run();
  if (!status.ok()) std::fprintf(stderr, "%s\n", status.ToString().c_str());
  return status.ok() ? 0 : 1;
}

}  // namespace promptcache::bench
