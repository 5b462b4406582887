// promptcache-worker: serves one model; stateless, so it may be killed and
// started at any moment.

#include <malloc.h>
#include <unistd.h>

#include <cstdio>
#include <string>
#include <utility>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "common/byte_size.h"
#include "common/chat_template.h"
#include "common/default_paths.h"
#include "common/pml/limits.h"
#include "common/port_file.h"
#include "common/program_usage.h"
#include "common/rpc/endpoints.h"
#include "common/status_macros.h"
#include "common/stop_signals.h"
#include "glog/logging.h"
#include "inference_worker/engine/compute_device.h"
#include "inference_worker/serving/proto_convert.h"
#include "inference_worker/serving/worker.h"
#include "inference_worker/serving/worker_server.h"

using promptcache::ByteSize;

namespace {
constexpr promptcache::pml::Limits kLimits;  // the defaults
using promptcache::worker::Scheduler;
}  // namespace

ABSL_FLAG(std::string, model, "",
          "the model: a GGUF file or a Hugging Face folder");
ABSL_FLAG(std::string, listen, "127.0.0.1:7070",
          "address of the gRPC services; port 0 takes any free one");
ABSL_FLAG(bool, insecure_listen, false,
          "allow an address that other machines can reach, without TLS");
ABSL_FLAG(std::string, port_file, "",
          "file to write the port to once it is bound");
ABSL_FLAG(std::string, daemon_socket, promptcache::DefaultDaemonSocket(),
          "Unix socket of the cache daemon; empty: without a cache");
ABSL_FLAG(std::string, device, "auto",
          "where the model runs: cpu, cuda (the first GPU), a GPU by its UUID, "
          "or auto: a GPU where there is one that can run the model");
ABSL_FLAG(bool, batch_invariant, false,
          "on a GPU: results do not depend on what else is computed at once; "
          "slower");
ABSL_FLAG(uint32_t, threads, 0, "threads of the model; 0: one for each core");
ABSL_FLAG(std::string, kernels, "auto",
          "CPU kernels: auto, portable, or a set that this processor can run");
ABSL_FLAG(std::string, numerics, "auto",
          "exact: weights as bf16; fast: quantised weights as they are, times "
          "8-bit activations; auto: fast where the file has such weights");
ABSL_FLAG(ByteSize, tail_bytes, ByteSize{uint64_t{512} << 20},
          "memory for what is not in the cache: prompts' own text and answers, "
          "and whole prompts when the cache cannot be used");
ABSL_FLAG(uint32_t, context_length, 0,
          "cap on the model's context, in tokens; 0: the model's own");
ABSL_FLAG(std::string, chat_template, "",
          absl::StrCat(promptcache::ChatTemplate::KnownNames(),
                       "; empty: as the model file says"));
ABSL_FLAG(ByteSize, max_schema_bytes,
          ByteSize{static_cast<uint64_t>(kLimits.schema_bytes)},
          "longest schema document");
ABSL_FLAG(ByteSize, max_prompt_bytes,
          ByteSize{static_cast<uint64_t>(kLimits.prompt_bytes)},
          "longest prompt document");
ABSL_FLAG(int64_t, max_depth, kLimits.depth,
          "elements of a document inside one another");
ABSL_FLAG(int64_t, max_modules, kLimits.modules, "modules of a schema");
ABSL_FLAG(int64_t, max_name_chars, kLimits.name_chars,
          "longest name in a document");
ABSL_FLAG(uint32_t, step_tokens, 256,
          "rows of one pass, shared by the requests that run");
ABSL_FLAG(uint32_t, max_running, 16,
          "requests that run at once; as many may wait besides for modules "
          "that others encode");
ABSL_FLAG(uint32_t, max_queue, 64,
          "requests that may wait; more are refused with RESOURCE_EXHAUSTED");
ABSL_FLAG(absl::Duration, retain_ttl, absl::ZeroDuration(),
          "how long prompts without schema, and their answers, stay in the "
          "cache after their last use, for those that go on from there, when a "
          "request does not say (retain, no_retain); 0: they do not");
ABSL_FLAG(std::string, verify, "sample",
          "checksums of pages read from the cache: never, sample or always");
ABSL_FLAG(absl::Duration, acquire_timeout, absl::Seconds(1),
          "how long to wait for the daemon's answer before going on without");
ABSL_FLAG(absl::Duration, pending_timeout, absl::Seconds(30),
          "how long to wait for modules that another request is encoding");
ABSL_FLAG(absl::Duration, reader_patience, Scheduler::Options().reader_patience,
          "how long a client may be behind in reading its answer while others "
          "wait for its place or its memory; then it pauses for them");
ABSL_FLAG(absl::Duration, reader_limit, Scheduler::Options().reader_limit,
          "how long a client may be behind in reading while nobody waits");
ABSL_FLAG(absl::Duration, drain_timeout, absl::Seconds(30),
          "how long running requests may go on after SIGTERM");
ABSL_FLAG(std::string, fingerprint_cache,
          promptcache::DefaultFingerprintCache(),
          "folder that keeps model files' digests; empty: hash at every start");

namespace promptcache::worker {
namespace {

absl::StatusOr<VerifyMode> ParseVerify(const std::string& name) {
  if (name == "never") return VerifyMode::kNever;
  if (name == "sample") return VerifyMode::kSample;
  if (name == "always") return VerifyMode::kAlways;
  return absl::InvalidArgumentError(
      absl::StrCat("--verify=", name, ": use never, sample or always"));
}

// A line that fills up, on a terminal only.
void ShowProgress(double fraction) {
  static int shown = -1;
  const int percent = static_cast<int>(fraction * 100);
  if (percent == shown) return;
  shown = percent;
  std::fprintf(stderr, "\rloading the model %3d %%%s", percent,
               percent >= 100 ? "\n" : "");
  std::fflush(stderr);
}

absl::StatusOr<Worker::Options> OptionsFromFlags() {
  Worker::Options options;
  options.model = absl::GetFlag(FLAGS_model);
  options.daemon_socket = absl::GetFlag(FLAGS_daemon_socket);
  options.fingerprint_cache = absl::GetFlag(FLAGS_fingerprint_cache);
  options.chat_template = absl::GetFlag(FLAGS_chat_template);
  options.batch_invariant = absl::GetFlag(FLAGS_batch_invariant);
  options.kernels = absl::GetFlag(FLAGS_kernels);
  options.numerics = absl::GetFlag(FLAGS_numerics);
  options.num_threads = absl::GetFlag(FLAGS_threads);
  options.tail_bytes = absl::GetFlag(FLAGS_tail_bytes).num_bytes;
  options.limits = {
      .schema_bytes =
          static_cast<int64_t>(absl::GetFlag(FLAGS_max_schema_bytes).num_bytes),
      .prompt_bytes =
          static_cast<int64_t>(absl::GetFlag(FLAGS_max_prompt_bytes).num_bytes),
      .depth = absl::GetFlag(FLAGS_max_depth),
      .modules = absl::GetFlag(FLAGS_max_modules),
      .name_chars = absl::GetFlag(FLAGS_max_name_chars)};
  options.acquire_timeout = absl::GetFlag(FLAGS_acquire_timeout);
  options.scheduler.context_length = absl::GetFlag(FLAGS_context_length);
  options.scheduler.step_tokens = absl::GetFlag(FLAGS_step_tokens);
  options.scheduler.max_running = absl::GetFlag(FLAGS_max_running);
  options.scheduler.max_queue = absl::GetFlag(FLAGS_max_queue);
  options.scheduler.pending_timeout = absl::GetFlag(FLAGS_pending_timeout);
  options.scheduler.reader_patience = absl::GetFlag(FLAGS_reader_patience);
  options.scheduler.reader_limit = absl::GetFlag(FLAGS_reader_limit);
  PC_ASSIGN_OR_RETURN(options.scheduler.verify,
                      ParseVerify(absl::GetFlag(FLAGS_verify)));
  if (isatty(STDERR_FILENO)) options.progress = ShowProgress;
  return options;
}

absl::Status Run(StopSignals& signals) {
  PC_ASSIGN_OR_RETURN(Worker::Options options, OptionsFromFlags());
  PC_RETURN_IF_ERROR(options.Validate());
  WorkerServer::Options server_options;
  server_options.listen = absl::GetFlag(FLAGS_listen);
  server_options.insecure_listen = absl::GetFlag(FLAGS_insecure_listen);
  server_options.inference.retain_ttl = absl::GetFlag(FLAGS_retain_ttl);
  PC_RETURN_IF_ERROR(server_options.Validate());
  // Last: it looks for GPUs, and says what it found.
  PC_ASSIGN_OR_RETURN(const std::unique_ptr<ComputeDevice> device,
                      ComputeDevice::Open(absl::GetFlag(FLAGS_device)));
  options.device = device.get();
  LOG(INFO) << "options:\n--device=" << absl::GetFlag(FLAGS_device) << "\n"
            << options.ToString() << "\n--retain_ttl="
            << absl::FormatDuration(server_options.inference.retain_ttl);
  LOG(INFO) << "device: " << device->description();

  // Before the model, whose loading takes long.
  PC_RETURN_IF_ERROR(rpc::TryListen(server_options.listen));
  PC_ASSIGN_OR_RETURN(const std::unique_ptr<Worker> worker,
                      Worker::Create(options));
  // What loading and the self-check took (logits of a whole sequence, the
  // file's vocabulary) and gave back: requests need a fraction of it.
  malloc_trim(0);
  server_options.inference.model_info = ToProto(worker->description());
  server_options.inference.daemon_attached = [w = worker.get()] {
    return w->daemon_attached();
  };
  server_options.inference.cache = worker->cache();
  PC_ASSIGN_OR_RETURN(
      const std::unique_ptr<WorkerServer> server,
      WorkerServer::Create(server_options, worker->compiler(),
                           worker->scheduler(), worker->registry()));
  signals.Defer();
  PC_RETURN_IF_ERROR(
      WritePortFile(absl::GetFlag(FLAGS_port_file), server->port()));
  LOG(INFO) << "serving " << worker->description().name << " ("
            << worker->description().numerics << ", "
            << worker->description().num_threads << " threads) on port "
            << server->port();

  LOG(INFO) << "signal " << signals.Wait() << ": finishing what runs";
  const bool drained = server->Shutdown(absl::GetFlag(FLAGS_drain_timeout));
  LOG(INFO) << (drained ? "all requests are done"
                        : "requests that ran too long were cancelled");
  return absl::OkStatus();
}

}  // namespace
}  // namespace promptcache::worker

int main(int argc, char** argv) {
  // Debian's absl looks for lock cycles at every lock: 48 ns instead of 18.
  absl::SetMutexDeadlockDetectionMode(absl::OnDeadlockCycle::kIgnore);
  // Large buffers are kept: mapping them anew faults in every page (12 us each
  // where this was measured).
  mallopt(M_MMAP_THRESHOLD, 1 << 30);
  mallopt(M_TRIM_THRESHOLD, 1 << 30);
  promptcache::ParseCommandLine(
      argc, argv, "promptcache-worker",
      "serves a language model over cached modules of prompts\n"
      "  promptcache-worker --model=FILE_OR_FOLDER [--daemon_socket=PATH]");
  FLAGS_logtostderr = true;
  google::InitGoogleLogging(argv[0]);
  promptcache::StopSignals signals("promptcache-worker");
  const absl::Status status = promptcache::worker::Run(signals);
  if (status.ok()) return 0;
  // The last word, alone: `promptcache up` shows it.
  std::fprintf(stderr, "\npromptcache-worker: %s\n",
               std::string(status.message()).c_str());
  return absl::IsInvalidArgument(status) ? 2 : 1;
}
