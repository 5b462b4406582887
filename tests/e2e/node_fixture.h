#pragma once

#include <gtest/gtest.h>

#include <cstdlib>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "common/child_process.h"
#include "promptcache/v1/cache.pb.h"
#include "promptcache/v1/inference.pb.h"
#include "promptcache/v1/schema.pb.h"
#include "tests/support/gguf_writer.h"
#include "tests/support/test_files.h"

namespace promptcache::e2e {

// What one Generate gave, in full.
struct Answer {
  absl::Status status;  // with its details (common/rpc/grpc_status.h)
  v1::Started started;
  v1::Completed completed;
  std::string text;
  std::vector<int32_t> ids;
  std::vector<float> margins;  // best minus second logit, with top_logprobs

  const v1::Usage& usage() const { return completed.usage(); }
};

// What the daemon tells its watchers, from construction on.
class EventLog {
 public:
  explicit EventLog(const std::string& daemon_address);
  ~EventLog();
  std::vector<v1::CacheEvent> events() const;
  // Events of that kind so far.
  std::vector<v1::CacheEvent> Of(v1::CacheEvent::Kind kind) const;

 private:
  struct Call;
  std::unique_ptr<Call> call_;
};

// A real promptcache-worker process and a client of it.
class WorkerProcess {
 public:
  WorkerProcess(ChildProcess process, const std::string& address);
  ~WorkerProcess();

  ChildProcess& process() { return process_; }
  const std::string& address() const { return address_; }

  // `cancel_after`: cancels the call when so many tokens came (0: never).
  Answer Generate(const v1::GenerateRequest& request,
                  absl::Duration timeout = absl::Seconds(120),
                  int cancel_after = 0);
  absl::StatusOr<v1::CreateSchemaResponse> PutSchema(const std::string& text);
  absl::StatusOr<v1::ListSchemasResponse> ListSchemas();
  absl::StatusOr<v1::ModelInfo> ModelInfo();
  absl::Status Warm(const std::string& schema);

 private:
  struct Stubs;
  ChildProcess process_;
  const std::string address_;
  std::unique_ptr<Stubs> stubs_;
};

// An environment variable of the children that are started while it lives.
class ScopedEnv {
 public:
  ScopedEnv(const char* name, const std::string& value) : name_(name) {
    ::setenv(name, value.c_str(), 1);
  }
  ~ScopedEnv() { ::unsetenv(name_); }
  ScopedEnv(const ScopedEnv&) = delete;
  ScopedEnv& operator=(const ScopedEnv&) = delete;

 private:
  const char* const name_;
};

// Starts the real programs on a private socket and free ports, below a
// directory that goes with the test; none outlives it.
class NodeTest : public ::testing::Test {
 protected:
  NodeTest();
  ~NodeTest() override;
  // On failure prints the servers' logs.
  void TearDown() override;

  // Both return when the server answers. FLAGS as `--name=value`.
  void StartDaemon(const std::vector<std::string>& flags = {});
  std::unique_ptr<WorkerProcess> StartWorker(
      const std::vector<std::string>& flags = {});
  ChildProcess& daemon() { return daemon_; }
  const std::string& daemon_address() const { return daemon_address_; }

  absl::StatusOr<v1::CacheStats> Stats();
  // A tier now, of the device with that number among the daemon's; fails the
  // test when the daemon does not answer.
  v1::TierStats TierNow(v1::Tier tier, int device = 0);
  v1::TierStats DeviceTier(int device = 0) {
    return TierNow(v1::TIER_DEVICE, device);
  }
  std::vector<v1::Module> Modules(bool include_absent);
  // Every module of the schema, of which there are some, lies in the host tier.
  bool AllInHost(const std::string& schema);
  uint64_t PageBytes() const;

  // Polls until `condition`, at most `timeout`; false when it never held.
  static bool Eventually(absl::Duration timeout,
                         const std::function<bool()>& condition);
  void WaitAttached(WorkerProcess* worker);

  // A model that computes in no time; "" spec fields as in TinyLlamaSpec.
  void UseTinyModel(const worker::TinyLlamaSpec& spec = {});
  // One whose prefill of a long module takes long enough to be interrupted.
  void UseSlowModel();
  void UseModelFile(const std::string& path) { model_path_ = path; }
  // Servers that are started from now on run as in containers: each in PID, IPC
  // and mount namespaces of its own, where it is process 1. False: not to be
  // had here. Their ChildProcess is the launcher: SIGKILL reaches the server.
  bool UseContainers();
  // Daemon and workers from now on: those of build/bin/emulated, on its GPUs
  // (PC_EMU_DEVICES says which a process sees).
  void UseEmulatedGpu();
  // A tests/e2e/page_worker of that node, which is not waited for.
  ChildProcess StartPageWorker(const std::vector<std::string>& flags);

  const std::string& dir() const { return dir_.path(); }
  const std::string& model_path() const { return model_path_; }

 private:
  TempDir dir_;
  std::string model_path_;
  std::string programs_;  // folder below build/bin
  std::string device_ = "cpu";
  worker::TinyLlamaSpec spec_;
  std::vector<std::string> launcher_;
  int num_workers_ = 0;
  int num_daemons_ = 0;
  std::string daemon_address_;
  ChildProcess daemon_;
  std::vector<std::string> logs_;
};

// "<schema name=...>" with a preamble and modules a, b, c in a system message.
std::string SmallSchema(const std::string& name);
// `num_words` words of seven tokens each in the random models' vocabulary.
std::string Words(int num_words);
// A schema of one module "big" of `num_words` words.
std::string BigSchema(const std::string& name, int num_words);

// Greedy, `max_tokens` long, with the hash of the logits.
v1::GenerateRequest Request(const std::string& pml, uint32_t max_tokens = 16);
v1::GenerateRequest Bypass(v1::GenerateRequest request);

}  // namespace promptcache::e2e
