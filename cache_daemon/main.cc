// promptcache-daemon: owns the cached KV of one node.

#include <malloc.h>
#include <signal.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <iostream>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "cache_daemon/service/daemon_server.h"
#include "common/byte_size.h"
#include "common/clock.h"
#include "common/default_paths.h"
#include "common/port_file.h"
#include "common/program_usage.h"
#include "common/status_macros.h"
#include "common/stop_signals.h"
#include "cuda/runtime/gpus.h"
#include "glog/logging.h"

namespace gpu = promptcache::gpu;
using promptcache::ByteSize;
using promptcache::daemon::DaemonServer;

ABSL_FLAG(std::string, socket, promptcache::DefaultDaemonSocket(),
          "Unix socket for workers; <socket>.fd and <socket>.lock lie beside");
ABSL_FLAG(std::string, listen, "127.0.0.1:7071",
          "host:port for operators (CacheService); port 0: any; empty: none");
ABSL_FLAG(bool, insecure_listen, false,
          "allow --listen on other addresses than loopback, without TLS");
ABSL_FLAG(std::string, port_file, "",
          "file that gets the TCP port, once it is served");
ABSL_FLAG(std::vector<std::string>, allow_uids, {},
          "user ids that may connect besides the daemon's own user and group");
ABSL_FLAG(std::vector<std::string>, allow_gids, {},
          "group ids that may connect, likewise");
ABSL_FLAG(uint32_t, max_sessions, 256, "workers at once");
ABSL_FLAG(
    std::vector<std::string>, device, {"auto"},
    "where device tiers lie: auto (every GPU, where there is one, else the "
    "CPU), cuda (every GPU), cpu, or GPUs by their UUIDs, with commas");
ABSL_FLAG(
    std::vector<std::string>, gpu_handles, {},
    "how workers map GPU memory: fd (CUDA VMM descriptors), ipc (CUDA IPC "
    "handles), or both in turn; empty: fd where the GPU can");
ABSL_FLAG(ByteSize, device_bytes, (ByteSize{uint64_t{1} << 30}),
          "device tier: KV that workers read in place; taken on each device, "
          "on four GPUs four times");
ABSL_FLAG(ByteSize, host_bytes, ByteSize{0},
          "host tier, one for all devices; without a GPU it is the same memory "
          "as the device tier");
ABSL_FLAG(ByteSize, segment_bytes, (ByteSize{uint64_t{64} << 20}),
          "size of one exported allocation");
ABSL_FLAG(std::string, db, promptcache::DefaultRegistryPath(),
          "file of the registry (SQLite): schemas and known modules");
ABSL_FLAG(absl::Duration, default_ttl, absl::Hours(24),
          "how long an unused module stays, when nobody says otherwise; inf: "
          "for ever");
ABSL_FLAG(ByteSize, pin_budget_bytes, (ByteSize{uint64_t{256} << 20}),
          "most bytes that pins may hold; never more than half of all tiers");

namespace {

absl::StatusOr<std::vector<uint32_t>> ParseIds(
    const char* flag, const std::vector<std::string>& texts) {
  std::vector<uint32_t> ids;
  for (const std::string& text : texts) {
    uint32_t id = 0;
    if (!absl::SimpleAtoi(text, &id)) {
      return absl::InvalidArgumentError(
          absl::StrCat("--", flag, ": \"", text, "\" is not a number"));
    }
    ids.push_back(id);
  }
  return ids;
}

using Devices = std::vector<std::unique_ptr<gpu::Device>>;

// The UUIDs that --device names; empty: it is one word, auto, cuda or cpu.
absl::StatusOr<std::vector<std::string>> UuidsFromFlags() {
  const std::vector<std::string> wanted = absl::GetFlag(FLAGS_device);
  if (wanted.size() == 1 &&
      (wanted[0] == "auto" || wanted[0] == "cuda" || wanted[0] == "cpu")) {
    return std::vector<std::string>();
  }
  for (auto it = wanted.begin(); it != wanted.end(); ++it) {
    if (!absl::StartsWith(*it, "GPU-")) {
      return absl::InvalidArgumentError(
          absl::StrCat("--device=", absl::StrJoin(wanted, ","),
                       ": use auto, cuda, cpu or GPUs' UUIDs"));
    }
    if (std::find(wanted.begin(), it, *it) != it) {
      return absl::InvalidArgumentError(
          absl::StrCat("--device names ", *it, " twice"));
    }
  }
  if (wanted.empty()) return absl::InvalidArgumentError("--device is empty");
  return wanted;
}

// Empty: the CPU.
absl::StatusOr<Devices> DevicesFromFlags() {
  PC_ASSIGN_OR_RETURN(std::vector<std::string> uuids, UuidsFromFlags());
  const std::string wanted = absl::GetFlag(FLAGS_device).front();
  Devices devices;
  if (wanted == "cpu") return devices;
  const gpu::GpuSurvey survey = gpu::FindGpus();
  if (wanted == "auto" && survey.gpus.empty()) {
    survey.LogNoGpu("the device tier is memory of the CPU");
    return devices;
  }
  LOG(INFO) << "found " << survey.ToString();
  if (uuids.empty()) {
    for (const gpu::DeviceInfo& info : survey.gpus) uuids.push_back(info.uuid);
  }
  // None: says what was found.
  if (uuids.empty()) uuids.emplace_back();
  for (const std::string& uuid : uuids) {
    PC_ASSIGN_OR_RETURN(std::unique_ptr<gpu::Device> device,
                        gpu::OpenGpu(survey, uuid));
    devices.push_back(std::move(device));
  }
  return devices;
}

absl::StatusOr<std::vector<gpu::HandleKind>> HandlesFromFlags() {
  std::vector<gpu::HandleKind> kinds;
  for (const std::string& name : absl::GetFlag(FLAGS_gpu_handles)) {
    const std::optional<gpu::HandleKind> kind = gpu::ParseHandleKind(name);
    if (!kind.has_value() || *kind == gpu::HandleKind::kMemfd) {
      return absl::InvalidArgumentError(
          absl::StrCat("--gpu_handles: \"", name, "\" is neither fd nor ipc"));
    }
    kinds.push_back(*kind);
  }
  return kinds;
}

absl::StatusOr<DaemonServer::Options> OptionsFromFlags(const Devices& devices) {
  DaemonServer::Options options;
  for (const auto& device : devices) {
    options.pool.devices.push_back(device.get());
  }
  PC_ASSIGN_OR_RETURN(options.pool.handles, HandlesFromFlags());
  options.socket_path = absl::GetFlag(FLAGS_socket);
  options.listen = absl::GetFlag(FLAGS_listen);
  options.insecure_listen = absl::GetFlag(FLAGS_insecure_listen);
  PC_ASSIGN_OR_RETURN(options.allowed_uids,
                      ParseIds("allow_uids", absl::GetFlag(FLAGS_allow_uids)));
  PC_ASSIGN_OR_RETURN(options.allowed_gids,
                      ParseIds("allow_gids", absl::GetFlag(FLAGS_allow_gids)));
  options.max_sessions = absl::GetFlag(FLAGS_max_sessions);
  options.pool.device_bytes = absl::GetFlag(FLAGS_device_bytes).num_bytes;
  options.pool.host_bytes = absl::GetFlag(FLAGS_host_bytes).num_bytes;
  options.pool.segment_bytes = absl::GetFlag(FLAGS_segment_bytes).num_bytes;
  options.cache.default_ttl = absl::GetFlag(FLAGS_default_ttl);
  options.cache.pin_budget_bytes =
      absl::GetFlag(FLAGS_pin_budget_bytes).num_bytes;
  options.registry.path = absl::GetFlag(FLAGS_db);
  PC_RETURN_IF_ERROR(options.Validate());
  return options;
}

// Each segment has a descriptor: those of many GPUs, or of a large host tier,
// are more than the 1024 that are usual.
void RaiseDescriptorLimit() {
  rlimit limit{};
  if (::getrlimit(RLIMIT_NOFILE, &limit) != 0) return;
  limit.rlim_cur = limit.rlim_max;
  if (::setrlimit(RLIMIT_NOFILE, &limit) != 0) PLOG(WARNING) << "setrlimit";
}

int Fail(const absl::Status& status, int exit_code) {
  // The last word, alone: `promptcache up` shows it.
  std::cerr << "\npromptcache-daemon: " << status.message() << "\n";
  return exit_code;
}

}  // namespace

int main(int argc, char** argv) {
  // Debian's absl looks for lock cycles at every lock: 48 ns instead of 18.
  absl::SetMutexDeadlockDetectionMode(absl::OnDeadlockCycle::kIgnore);
  FLAGS_logtostderr = true;
  google::InitGoogleLogging(argv[0]);
  promptcache::ParseCommandLine(
      argc, argv, "promptcache-daemon",
      "keeps cached attention states of this node in memory, for any number of "
      "workers.\nStops on SIGTERM and SIGINT.");
  // Large messages would be mapped and faulted anew each time.
  ::mallopt(M_MMAP_THRESHOLD, 64 << 20);
  ::mallopt(M_TRIM_THRESHOLD, 128 << 20);
  promptcache::StopSignals signals("promptcache-daemon");
  ::signal(SIGPIPE, SIG_IGN);

  RaiseDescriptorLimit();
  // Outlive everything that has memory of them.
  const absl::StatusOr<Devices> devices = DevicesFromFlags();
  if (!devices.ok()) {
    return Fail(devices.status(),
                absl::IsInvalidArgument(devices.status()) ? 2 : 1);
  }
  const absl::StatusOr<DaemonServer::Options> options =
      OptionsFromFlags(*devices);
  if (!options.ok()) return Fail(options.status(), 2);
  LOG(INFO) << "promptcache-daemon " << options->ToString();
  const promptcache::RealClock clock;
  const auto server = DaemonServer::Create(*options, &clock);
  signals.Defer();
  if (!server.ok()) return Fail(server.status(), 1);
  const absl::Status written = promptcache::WritePortFile(
      absl::GetFlag(FLAGS_port_file), (*server)->listen_port());
  if (!written.ok()) return Fail(written, 1);
  LOG(INFO) << "serving workers on " << options->socket_path
            << ", operators on port " << (*server)->listen_port()
            << ", as daemon " << (*server)->daemon_id();
  LOG(INFO) << "signal " << signals.Wait() << ": stopping";
  (*server)->Shutdown();
  LOG(INFO) << "stopped";
  return 0;
}
