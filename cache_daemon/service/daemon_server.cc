#include "cache_daemon/service/daemon_server.h"

#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "cache_daemon/core/event_hub.h"
#include "cache_daemon/core/mover.h"
#include "cache_daemon/core/process_watcher.h"
#include "cache_daemon/core/work_signal.h"
#include "cache_daemon/service/cache_service.h"
#include "cache_daemon/service/fd_server.h"
#include "cache_daemon/service/node_service.h"
#include "cache_daemon/service/proto_convert.h"
#include "cache_daemon/service/session_reactor.h"
#include "cache_daemon/service/socket_lock.h"
#include "cache_daemon/service/task_queue.h"
#include "common/byte_size.h"
#include "common/rpc/endpoints.h"
#include "common/status_macros.h"
#include "glog/logging.h"
#include "grpcpp/ext/proto_server_reflection_plugin.h"
#include "grpcpp/grpcpp.h"
#include "grpcpp/health_check_service_interface.h"

namespace promptcache::daemon {
namespace {

// Schemas have 4 MiB, and a commit of everything that a prompt may import has
// some MiB of page sums.
constexpr int kMaxNodeMessageBytes = 64 << 20;
constexpr int kMaxOperatorMessageBytes = 4 << 20;
constexpr size_t kMaxTasks = 4096;
// What is running when the daemon stops gets so long to end by itself.
constexpr std::chrono::milliseconds kDrain{200};

std::string NewDaemonId() {
  uint64_t id = 0;
  if (::getrandom(&id, sizeof(id), 0) != sizeof(id)) {
    id = static_cast<uint64_t>(absl::ToUnixNanos(absl::Now()));
  }
  return absl::StrCat(absl::Hex(id, absl::kZeroPad16));
}

void SetLimits(int max_message_bytes, grpc::ServerBuilder* builder) {
  builder->SetMaxReceiveMessageSize(max_message_bytes);
  builder->SetMaxSendMessageSize(max_message_bytes);
  grpc::ResourceQuota quota("daemon");
  quota.Resize(size_t{512} << 20);
  builder->SetResourceQuota(quota);
  builder->AddChannelArgument(GRPC_ARG_MAX_CONCURRENT_STREAMS, 256);
  builder->AddChannelArgument(GRPC_ARG_MAX_METADATA_SIZE, 16 << 10);
  // A peer that is gone without a word is noticed within 80 s; one that asks
  // more often than every 10 s whether we are is sent away.
  builder->AddChannelArgument(GRPC_ARG_KEEPALIVE_TIME_MS, 60'000);
  builder->AddChannelArgument(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, 20'000);
  builder->AddChannelArgument(
      GRPC_ARG_HTTP2_MIN_RECV_PING_INTERVAL_WITHOUT_DATA_MS, 10'000);
  builder->AddChannelArgument(GRPC_ARG_KEEPALIVE_PERMIT_WITHOUT_CALLS, 1);
  builder->AddChannelArgument(GRPC_ARG_ALLOW_REUSEPORT, 0);
}

// Global in gRPC: for every server that is built from then on.
void EnablePlugins() {
  static const bool enabled = [] {
    grpc::EnableDefaultHealthCheckService(true);
    grpc::reflection::InitProtoReflectionServerBuilderPlugin();
    return true;
  }();
  (void)enabled;
}

void SetServing(grpc::Server* server, bool serving) {
  if (server == nullptr) return;
  auto* health = server->GetHealthCheckService();
  if (health == nullptr) return;
  health->SetServingStatus(serving);
  health->SetServingStatus("promptcache.v1.CacheService", serving);
}

// What --device says in full.
std::string DeviceNames(const PagePool::Options& pool) {
  if (pool.devices.empty()) return "cpu";
  return absl::StrJoin(pool.devices, ",",
                       [](std::string* out, const gpu::Device* device) {
                         out->append(device->info().uuid);
                       });
}

std::vector<FdServer::Segment> Exports(const PagePool& pool) {
  std::vector<FdServer::Segment> segments;
  for (uint32_t i = 0; i < pool.num_segments(); ++i) {
    const gpu::SharedSegment& segment = pool.segment(i);
    if (segment.fd() < 0) continue;  // its handle comes with the welcome
    segments.push_back(
        {.kind = segment.on_host() ? FdKind::kSegment : FdKind::kCudaSegment,
         .segment = i,
         .bytes = segment.num_bytes(),
         .fd = segment.fd(),
         .device_uuid = pool.tier(i) == Tier::kDevice
                            ? pool.device_info(pool.device(i)).uuid
                            : ""});
  }
  segments.push_back({.kind = FdKind::kGenerations,
                      .segment = 0,
                      .bytes = pool.generations_bytes(),
                      .fd = pool.generations_fd(),
                      .device_uuid = ""});
  return segments;
}

}  // namespace

// In the order of construction; what is named later may use what is earlier.
struct DaemonServer::Parts {
  std::string daemon_id = NewDaemonId();
  std::string socket_path;
  std::optional<FileLock> lock;
  std::unique_ptr<PagePool> pool;
  WorkSignal signal;
  EventHub events;
  std::unique_ptr<ModuleCache> cache;
  std::unique_ptr<Registry> registry;
  std::unique_ptr<Mover> mover;
  std::unique_ptr<PidfdWatcher> processes;
  std::unique_ptr<FdServer> fd_server;
  std::unique_ptr<TaskQueue> tasks;
  std::unique_ptr<SessionHub> hub;
  SessionDeps session_deps;
  std::unique_ptr<NodeService> node_service;
  // One a server: gRPC does not promise that servers may share a service.
  std::unique_ptr<CacheService> node_cache_service;
  std::unique_ptr<CacheService> cache_service;
  std::unique_ptr<grpc::Server> node_server;
  std::unique_ptr<grpc::Server> tcp_server;
  int listen_port = 0;
  std::atomic<bool> stopped{false};

  absl::Status MakeCore(const Options& options, const Clock* clock);
  absl::Status MakeServices(const Options& options, const Clock* clock);
  absl::Status Listen(const Options& options);
};

absl::Status DaemonServer::Options::Validate() const {
  if (socket_path.empty()) {
    return absl::InvalidArgumentError("--socket must not be empty");
  }
  if (!listen.empty()) PC_RETURN_IF_ERROR(rpc::CheckListen(listen));
  if (!listen.empty() && !insecure_listen && !rpc::IsLoopbackAddress(listen)) {
    return absl::InvalidArgumentError(absl::StrCat(
        "--listen=", listen,
        " is not loopback, and there is no TLS: anybody who can connect could "
        "evict modules. Listen on 127.0.0.1 and put a proxy before it, or "
        "accept that with --insecure_listen"));
  }
  if (max_sessions == 0) {
    return absl::InvalidArgumentError("--max_sessions must not be 0");
  }
  PC_RETURN_IF_ERROR(pool.Validate());
  return registry.Validate();
}

std::string DaemonServer::Options::ToString() const {
  return absl::StrCat(
      "--socket=", socket_path, " --listen=", listen,
      " --insecure_listen=", insecure_listen ? "true" : "false",
      " --allow_uids=", absl::StrJoin(allowed_uids, ","),
      " --allow_gids=", absl::StrJoin(allowed_gids, ","),
      " --max_sessions=", max_sessions, " --device=", DeviceNames(pool),
      " --gpu_handles=",
      absl::StrJoin(pool.handles, ",",
                    [](std::string* out, gpu::HandleKind kind) {
                      out->append(gpu::HandleKindName(kind));
                    }),
      " --device_bytes=", FormatByteSize(pool.device_bytes),
      " --host_bytes=", FormatByteSize(pool.host_bytes),
      " --segment_bytes=", FormatByteSize(pool.segment_bytes),
      " --default_ttl=", absl::FormatDuration(cache.default_ttl),
      " --pin_budget_bytes=", FormatByteSize(cache.pin_budget_bytes),
      " --db=", registry.path);
}

absl::Status DaemonServer::Parts::MakeCore(const Options& options,
                                           const Clock* clock) {
  PC_RETURN_IF_ERROR(MakeSocketFolder(options.socket_path));
  PC_ASSIGN_OR_RETURN(lock, LockSocket(options.socket_path));
  // Before the memory, which takes long.
  if (!options.listen.empty()) {
    PC_RETURN_IF_ERROR(rpc::TryListen(options.listen));
  }
  PC_ASSIGN_OR_RETURN(registry, Registry::Open(options.registry, clock));
  PC_ASSIGN_OR_RETURN(pool, PagePool::Create(options.pool));
  PC_ASSIGN_OR_RETURN(cache, ModuleCache::Create(options.cache, pool.get(),
                                                 clock, &signal, &events));
  PC_ASSIGN_OR_RETURN(const std::vector<ModuleRecord> known,
                      registry->LoadModules());
  for (const ModuleRecord& record : known) {
    cache->AddKnown(ToInfo(record), record.parts);
  }
  LOG(INFO) << known.size() << " modules are known from before";
  mover = std::make_unique<Mover>(cache.get(), &signal, Mover::Options{});
  mover->Start();
  PC_ASSIGN_OR_RETURN(processes,
                      PidfdWatcher::Create([this](ProcessId process) {
                        cache->OnProcessDeath(process);
                      }));
  return absl::OkStatus();
}

absl::Status DaemonServer::Parts::MakeServices(const Options& options,
                                               const Clock* clock) {
  PC_ASSIGN_OR_RETURN(fd_server,
                      FdServer::Create({.path = options.socket_path + ".fd",
                                        .allowed_uids = options.allowed_uids,
                                        .allowed_gids = options.allowed_gids},
                                       Exports(*pool), clock));
  tasks = std::make_unique<TaskQueue>(kMaxTasks);
  hub = std::make_unique<SessionHub>(options.max_sessions);
  session_deps = {.cache = cache.get(),
                  .processes = processes.get(),
                  .fd_server = fd_server.get(),
                  .module_log = &registry->modules(),
                  .tasks = tasks.get(),
                  .hub = hub.get(),
                  .clock = clock,
                  .daemon_id = daemon_id,
                  .max_queued_bytes = options.max_session_queue_bytes};
  node_service =
      std::make_unique<NodeService>(&session_deps, registry.get(), &events);
  const CacheService::Deps deps{.cache = cache.get(),
                                .registry = registry.get(),
                                .events = &events,
                                .tasks = tasks.get(),
                                .daemon_id = daemon_id,
                                .start_time = clock->Now()};
  node_cache_service = std::make_unique<CacheService>(deps);
  cache_service = std::make_unique<CacheService>(deps);
  return absl::OkStatus();
}

absl::Status DaemonServer::Parts::Listen(const Options& options) {
  EnablePlugins();
  socket_path = options.socket_path;
  if (!options.listen.empty()) {
    grpc::ServerBuilder builder;
    SetLimits(kMaxOperatorMessageBytes, &builder);
    builder.AddListeningPort(options.listen, grpc::InsecureServerCredentials(),
                             &listen_port);
    builder.RegisterService(cache_service.get());
    tcp_server = builder.BuildAndStart();
    if (tcp_server == nullptr || listen_port == 0) {
      return absl::UnavailableError(absl::StrCat(
          "cannot listen on ", options.listen, ": is the port taken?"));
    }
  }
  grpc::ServerBuilder builder;
  SetLimits(kMaxNodeMessageBytes, &builder);
  for (const auto& [name, value] : rpc::kUnixSocketArgs) {
    builder.AddChannelArgument(name, value);
  }
  builder.AddListeningPort(rpc::UnixTarget(socket_path),
                           grpc::InsecureServerCredentials());
  builder.RegisterService(node_service.get());
  builder.RegisterService(node_cache_service.get());
  // gRPC makes the file: never for others, not even until the chmod.
  const mode_t old_mask = ::umask(0117);
  node_server = builder.BuildAndStart();
  ::umask(old_mask);
  if (node_server == nullptr) {
    return absl::UnavailableError(absl::StrCat(
        "cannot listen on ", socket_path,
        " (a Unix socket's path has at most 107 bytes, in a folder that this "
        "user may write)"));
  }
  if (::chmod(socket_path.c_str(), 0660) != 0) {
    return absl::ErrnoToStatus(errno, absl::StrCat("chmod ", socket_path));
  }
  SetServing(node_server.get(), true);
  SetServing(tcp_server.get(), true);
  return absl::OkStatus();
}

absl::StatusOr<std::unique_ptr<DaemonServer>> DaemonServer::Create(
    const Options& options, const Clock* clock) {
  PC_RETURN_IF_ERROR(options.Validate());
  std::unique_ptr<DaemonServer> server(
      new DaemonServer(std::make_unique<Parts>()));
  PC_RETURN_IF_ERROR(server->parts_->MakeCore(options, clock));
  PC_RETURN_IF_ERROR(server->parts_->MakeServices(options, clock));
  PC_RETURN_IF_ERROR(server->parts_->Listen(options));
  return server;
}

DaemonServer::DaemonServer(std::unique_ptr<Parts> parts)
    : parts_(std::move(parts)) {}

DaemonServer::~DaemonServer() { Shutdown(); }

int DaemonServer::listen_port() const { return parts_->listen_port; }
const std::string& DaemonServer::daemon_id() const { return parts_->daemon_id; }
ModuleCache& DaemonServer::cache() const { return *parts_->cache; }
Registry& DaemonServer::registry() const { return *parts_->registry; }

void DaemonServer::Shutdown() {
  Parts& parts = *parts_;
  if (parts.stopped.exchange(true)) return;
  SetServing(parts.node_server.get(), false);
  SetServing(parts.tcp_server.get(), false);
  // Nobody gets a token any more; then no session is left and none begins.
  if (parts.hub != nullptr) parts.hub->EndAll();
  const auto deadline = std::chrono::system_clock::now() + kDrain;
  for (grpc::Server* server :
       {parts.node_server.get(), parts.tcp_server.get()}) {
    if (server == nullptr) continue;
    server->Shutdown(deadline);
    server->Wait();
  }
  parts.fd_server.reset();
  if (parts.node_server != nullptr) ::unlink(parts.socket_path.c_str());
  parts.tasks.reset();
  parts.processes.reset();
  parts.mover.reset();
  if (parts.registry != nullptr) {
    const absl::Status flushed = parts.registry->modules().Flush();
    if (!flushed.ok()) LOG(ERROR) << "at the end: " << flushed;
  }
}

}  // namespace promptcache::daemon
