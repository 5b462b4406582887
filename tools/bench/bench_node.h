#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "promptcache/v1/inference.pb.h"
#include "tools/bench/bench_text.h"
#include "tools/cli/client.h"
#include "tools/cli/files.h"
#include "tools/cli/local_node.h"

namespace promptcache::bench {

struct FirstToken {
  double ms = 0;  // from the call, at the client
  v1::Completed completed;
};

// A daemon and a worker of a benchmark's own, in a private folder, and clients
// of both. All end, and the folder goes, with this. Thread-compatible.
class BenchNode {
 public:
  struct Options {
    std::string model;  // as cli::FindModel takes it
    std::vector<std::string> daemon_args;
    std::vector<std::string> worker_args;
  };
  static absl::StatusOr<std::unique_ptr<BenchNode>> Start(
      const Options& options);

  // Of modules m0, m1, ... with these texts.
  absl::Status PutSchema(const std::string& name,
                         std::span<const std::string> modules);
  absl::StatusOr<FirstToken> TimeFirstToken(const v1::GenerateRequest& request);

  const std::string& model() const { return model_; }  // the file
  BenchText& text() { return *text_; }                 // for that model
  const cli::LocalNode& servers() const { return *servers_; }
  cli::WorkerClient& worker() { return *worker_; }
  cli::DaemonClient& daemon() { return *daemon_; }

 private:
  explicit BenchNode(cli::PrivateDir dir) : dir_(std::move(dir)) {}

  const cli::PrivateDir dir_;  // the servers' while they run
  std::string model_;
  std::unique_ptr<BenchText> text_;
  std::unique_ptr<cli::LocalNode> servers_;
  std::unique_ptr<cli::WorkerClient> worker_;
  std::unique_ptr<cli::DaemonClient> daemon_;
};

// `fresh` after the first `num_modules` modules of what PutSchema made.
// Generates `max_tokens`, no fewer.
v1::GenerateRequest PromptOver(const std::string& schema, size_t num_modules,
                               const std::string& fresh, uint32_t max_tokens);

}  // namespace promptcache::bench
