#include "inference_worker/serving/worker_server.h"

#include "absl/strings/str_cat.h"
#include "common/rpc/endpoints.h"
#include "common/status_macros.h"
#include "grpcpp/ext/proto_server_reflection_plugin.h"
#include "grpcpp/health_check_service_interface.h"

namespace promptcache::worker {
namespace {

// Above PML's limits: a schema of 4 MiB with what is around it.
constexpr int kMaxMessageBytes = 16 << 20;
constexpr int kMaxMetadataBytes = 16 << 10;
constexpr uint32_t kRegistryThreads = 2;
// For answers on their way when the server stops.
constexpr absl::Duration kCancelGrace = absl::Milliseconds(100);

void SetServing(grpc::Server* server, bool serving) {
  auto* health = server->GetHealthCheckService();
  if (health == nullptr) return;
  health->SetServingStatus(serving);
  health->SetServingStatus("promptcache.v1.InferenceService", serving);
  health->SetServingStatus("promptcache.v1.SchemaService", serving);
}

}  // namespace

absl::Status WorkerServer::Options::Validate() const {
  PC_RETURN_IF_ERROR(inference.Validate());
  if (!listen.empty()) PC_RETURN_IF_ERROR(rpc::CheckListen(listen));
  if (listen.empty() || insecure_listen || rpc::IsLoopbackAddress(listen)) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(absl::StrCat(
      "--listen=", listen,
      " can be reached from other machines, without TLS: listen on 127.0.0.1, "
      "or pass --insecure_listen"));
}

WorkerServer::WorkerServer(const Options& options, PromptCompiler* compiler,
                           Scheduler* scheduler, RegistryClient* registry)
    : scheduler_(scheduler),
      limit_(options.max_calls > 0 ? options.max_calls
                                   : scheduler->max_requests()),
      inference_(options.inference, compiler, scheduler, &limit_),
      schemas_(compiler, registry, &limit_, kRegistryThreads) {}

absl::StatusOr<std::unique_ptr<WorkerServer>> WorkerServer::Create(
    const Options& options, PromptCompiler* compiler, Scheduler* scheduler,
    RegistryClient* registry) {
  if (absl::Status s = options.Validate(); !s.ok()) return s;
  grpc::EnableDefaultHealthCheckService(true);
  grpc::reflection::InitProtoReflectionServerBuilderPlugin();
  std::unique_ptr<WorkerServer> worker(
      new WorkerServer(options, compiler, scheduler, registry));
  grpc::ServerBuilder builder;
  if (!options.listen.empty()) {
    builder.AddListeningPort(options.listen, grpc::InsecureServerCredentials(),
                             &worker->port_);
  }
  builder.SetMaxReceiveMessageSize(kMaxMessageBytes);
  builder.SetMaxSendMessageSize(kMaxMessageBytes);
  builder.AddChannelArgument(GRPC_ARG_MAX_METADATA_SIZE, kMaxMetadataBytes);
  // Two workers on one port would be a surprise.
  builder.AddChannelArgument(GRPC_ARG_ALLOW_REUSEPORT, 0);
  builder.RegisterService(&worker->inference_);
  builder.RegisterService(&worker->schemas_);
  worker->server_ = builder.BuildAndStart();
  if (worker->server_ == nullptr ||
      (!options.listen.empty() && worker->port_ == 0)) {
    return absl::UnavailableError(
        absl::StrCat("cannot listen on ", options.listen,
                     ": the address is in use or not of this machine"));
  }
  SetServing(worker->server_.get(), true);
  return worker;
}

WorkerServer::~WorkerServer() {
  if (server_ != nullptr) Shutdown(absl::ZeroDuration());
}

bool WorkerServer::Shutdown(absl::Duration grace) {
  const absl::Time deadline = absl::Now() + grace;
  // Calls that are in may still ask the scheduler for more: a warm-up does.
  limit_.Close();
  SetServing(server_.get(), false);
  bool drained = limit_.AwaitNone(deadline);
  drained = scheduler_->Drain(deadline) && drained;
  // Cancels what is left, and who watches our health or reads our protos: they
  // would hold us up until the deadline.
  server_->Shutdown(absl::ToChronoTime(absl::Now() + kCancelGrace));
  server_->Wait();
  return drained;
}

}  // namespace promptcache::worker
