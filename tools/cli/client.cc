#include "tools/cli/client.h"

#include <grpcpp/grpcpp.h>

#include <mutex>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/mutex.h"
#include "common/rpc/grpc_status.h"
#include "promptcache/v1/cache.grpc.pb.h"
#include "promptcache/v1/inference.grpc.pb.h"
#include "promptcache/v1/schema.grpc.pb.h"
#include "tools/cli/cli_status.h"

namespace promptcache::cli {
namespace {

// Unary calls that do no work of the model.
constexpr absl::Duration kCallTimeout = absl::Seconds(30);
// The longest schema, 4 MiB, took 17 s to judge on a loaded machine.
constexpr absl::Duration kCreateSchemaTimeout = absl::Minutes(5);
// Above the schema's limit of 4 MiB.
constexpr int kMaxMessageBytes = 64 << 20;

std::chrono::system_clock::time_point DeadlineIn(absl::Duration timeout) {
  return absl::ToChronoTime(absl::Now() + timeout);
}

std::shared_ptr<grpc::Channel> MakeChannel(const std::string& address) {
  grpc::ChannelArguments args;
  args.SetMaxReceiveMessageSize(kMaxMessageBytes);
  args.SetMaxSendMessageSize(kMaxMessageBytes);
  // A proxy of the environment must not come between two local processes.
  args.SetInt(GRPC_ARG_ENABLE_HTTP_PROXY, 0);
  return grpc::CreateCustomChannel(address, grpc::InsecureChannelCredentials(),
                                   args);
}

absl::StatusOr<std::shared_ptr<grpc::Channel>> ConnectTo(
    const std::string& what, const std::string& flag,
    const std::string& address, absl::Duration timeout) {
  auto channel = MakeChannel(address);
  if (channel->WaitForConnected(DeadlineIn(timeout))) return channel;
  return WithExitCode(
      absl::UnavailableError(absl::StrCat(
          "no ", what, " answers at ", address,
          ". Start both servers with `promptcache up`, or say where it "
          "listens with --",
          flag, " HOST:PORT")),
      kExitUnreachable);
}

// Who is asked.
struct Server {
  const char* what;  // "a cache daemon"
  const char* name;  // "daemon"
  std::string address;
};

// What a call ended with, as the command line reports it. Unavailable is a
// connection that was lost, or a worker that lacks its daemon.
absl::Status CallStatus(const grpc::Status& status, const Server& server) {
  if (status.ok()) return absl::OkStatus();
  // What gRPC itself says, without words, of a service that is not there.
  if (status.error_code() == grpc::StatusCode::UNIMPLEMENTED &&
      status.error_message().empty()) {
    return WithExitCode(
        absl::UnimplementedError(
            absl::StrCat("what listens at ", server.address, " is not ",
                         server.what, ": are --worker and --daemon swapped?")),
        kExitUnreachable);
  }
  return WithExitCode(rpc::FromGrpcStatus(status),
                      status.error_code() == grpc::StatusCode::UNAVAILABLE
                          ? kExitUnreachable
                          : kExitRefused);
}

// Running calls to one server, so that another thread can end them.
class Calls {
 public:
  explicit Calls(Server server) : server_(std::move(server)) {}
  const Server& server() const { return server_; }
  // Returns false when all calls have been cancelled for good.
  bool Add(grpc::ClientContext* context) ABSL_LOCKS_EXCLUDED(mu_) {
    MutexLock lock(&mu_);
    if (cancelled_) return false;
    current_ = context;
    return true;
  }
  void Remove() ABSL_LOCKS_EXCLUDED(mu_) {
    MutexLock lock(&mu_);
    current_ = nullptr;
  }
  void Cancel() ABSL_LOCKS_EXCLUDED(mu_) {
    MutexLock lock(&mu_);
    cancelled_ = true;
    if (current_ != nullptr) current_->TryCancel();
  }

 private:
  const Server server_;

  Mutex mu_;
  grpc::ClientContext* current_ ABSL_GUARDED_BY(mu_) = nullptr;
  bool cancelled_ ABSL_GUARDED_BY(mu_) = false;
};

class ScopedCall {
 public:
  explicit ScopedCall(Calls* calls)
      : calls_(calls), allowed_(calls->Add(&context_)) {}
  ~ScopedCall() { calls_->Remove(); }
  ScopedCall(const ScopedCall&) = delete;
  ScopedCall& operator=(const ScopedCall&) = delete;
  bool allowed() const { return allowed_; }
  grpc::ClientContext* context() { return &context_; }

 private:
  Calls* const calls_;
  grpc::ClientContext context_;
  const bool allowed_;
};

absl::Status Interrupted() { return absl::CancelledError("interrupted"); }

// One unary call of `stub`.
template <typename Response, typename Stub, typename Request>
absl::StatusOr<Response> Unary(
    Calls* calls, Stub* stub,
    grpc::Status (Stub::*method)(grpc::ClientContext*, const Request&,
                                 Response*),
    const Request& request, absl::Duration timeout = kCallTimeout) {
  ScopedCall call(calls);
  if (!call.allowed()) return Interrupted();
  call.context()->set_deadline(DeadlineIn(timeout));
  Response response;
  absl::Status status = CallStatus(
      (stub->*method)(call.context(), request, &response), calls->server());
  if (!status.ok()) return status;
  return response;
}

// Reads a stream to its end; stops early when `on_message` returns false.
template <typename Response, typename OnMessage>
absl::Status ReadAll(grpc::ClientContext* context, const Server& server,
                     std::unique_ptr<grpc::ClientReader<Response>> reader,
                     const OnMessage& on_message) {
  Response response;
  bool begun = false;
  bool stopped = false;
  while (reader->Read(&response)) {
    begun = true;
    if (!stopped && !on_message(response)) {
      stopped = true;
      context->TryCancel();
    }
  }
  const grpc::Status status = reader->Finish();
  if (stopped && status.error_code() == grpc::StatusCode::CANCELLED) {
    return absl::OkStatus();
  }
  // gRPC says no more than "Socket closed".
  if (begun && status.error_code() == grpc::StatusCode::UNAVAILABLE) {
    return WithExitCode(absl::UnavailableError(absl::StrCat(
                            "the ", server.name, " at ", server.address,
                            " went away in the middle of the answer (",
                            status.error_message(), ")")),
                        kExitUnreachable);
  }
  return CallStatus(status, server);
}

}  // namespace

struct WorkerClient::Impl {
  explicit Impl(const std::string& address)
      : calls({"an inference worker", "worker", address}) {}
  std::shared_ptr<grpc::Channel> channel;
  std::unique_ptr<v1::InferenceService::Stub> inference;
  std::unique_ptr<v1::SchemaService::Stub> schemas;
  Calls calls;
};

WorkerClient::WorkerClient(const std::string& address)
    : impl_(std::make_unique<Impl>(address)) {}
WorkerClient::~WorkerClient() = default;

absl::StatusOr<std::unique_ptr<WorkerClient>> WorkerClient::Connect(
    const std::string& address, absl::Duration timeout) {
  auto channel = ConnectTo("inference worker", "worker", address, timeout);
  if (!channel.ok()) return channel.status();
  std::unique_ptr<WorkerClient> client(new WorkerClient(address));
  client->impl_->channel = *channel;
  client->impl_->inference = v1::InferenceService::NewStub(*channel);
  client->impl_->schemas = v1::SchemaService::NewStub(*channel);
  return client;
}

absl::Status WorkerClient::Generate(
    const v1::GenerateRequest& request,
    const std::function<bool(const v1::GenerateResponse&)>& on_event) {
  ScopedCall call(&impl_->calls);
  if (!call.allowed()) return Interrupted();
  return ReadAll(call.context(), impl_->calls.server(),
                 impl_->inference->Generate(call.context(), request), on_event);
}

absl::Status WorkerClient::WarmModules(
    const v1::WarmModulesRequest& request,
    const std::function<void(const v1::WarmModulesResponse&)>& on_progress) {
  ScopedCall call(&impl_->calls);
  if (!call.allowed()) return Interrupted();
  return ReadAll(call.context(), impl_->calls.server(),
                 impl_->inference->WarmModules(call.context(), request),
                 [&](const v1::WarmModulesResponse& response) {
                   on_progress(response);
                   return true;
                 });
}

absl::StatusOr<v1::CountTokensResponse> WorkerClient::CountTokens(
    const v1::CountTokensRequest& request) {
  return Unary<v1::CountTokensResponse>(
      &impl_->calls, impl_->inference.get(),
      &v1::InferenceService::Stub::CountTokens, request);
}

absl::StatusOr<v1::ModelInfo> WorkerClient::GetModelInfo() {
  return Unary<v1::ModelInfo>(&impl_->calls, impl_->inference.get(),
                              &v1::InferenceService::Stub::GetModelInfo,
                              v1::GetModelInfoRequest());
}

absl::StatusOr<v1::CreateSchemaResponse> WorkerClient::CreateSchema(
    const v1::CreateSchemaRequest& request) {
  return Unary<v1::CreateSchemaResponse>(&impl_->calls, impl_->schemas.get(),
                                         &v1::SchemaService::Stub::CreateSchema,
                                         request, kCreateSchemaTimeout);
}

absl::StatusOr<v1::Schema> WorkerClient::GetSchema(
    const v1::GetSchemaRequest& request) {
  return Unary<v1::Schema>(&impl_->calls, impl_->schemas.get(),
                           &v1::SchemaService::Stub::GetSchema, request);
}

absl::StatusOr<v1::ListSchemasResponse> WorkerClient::ListSchemas(
    const v1::ListSchemasRequest& request) {
  return Unary<v1::ListSchemasResponse>(&impl_->calls, impl_->schemas.get(),
                                        &v1::SchemaService::Stub::ListSchemas,
                                        request);
}

absl::Status WorkerClient::DeleteSchema(
    const v1::DeleteSchemaRequest& request) {
  return Unary<v1::DeleteSchemaResponse>(&impl_->calls, impl_->schemas.get(),
                                         &v1::SchemaService::Stub::DeleteSchema,
                                         request)
      .status();
}

void WorkerClient::CancelAll() { impl_->calls.Cancel(); }

struct DaemonClient::Impl {
  explicit Impl(const std::string& address)
      : calls({"a cache daemon", "daemon", address}) {}
  std::unique_ptr<v1::CacheService::Stub> cache;
  Calls calls;
};

DaemonClient::DaemonClient(const std::string& address)
    : impl_(std::make_unique<Impl>(address)) {}
DaemonClient::~DaemonClient() = default;

absl::StatusOr<std::unique_ptr<DaemonClient>> DaemonClient::Connect(
    const std::string& address, absl::Duration timeout) {
  auto channel = ConnectTo("cache daemon", "daemon", address, timeout);
  if (!channel.ok()) return channel.status();
  std::unique_ptr<DaemonClient> client(new DaemonClient(address));
  client->impl_->cache = v1::CacheService::NewStub(*channel);
  return client;
}

absl::StatusOr<v1::CacheStats> DaemonClient::GetStats() {
  return Unary<v1::CacheStats>(&impl_->calls, impl_->cache.get(),
                               &v1::CacheService::Stub::GetStats,
                               v1::GetStatsRequest());
}

absl::StatusOr<v1::ListModulesResponse> DaemonClient::ListModules(
    const v1::ListModulesRequest& request) {
  return Unary<v1::ListModulesResponse>(&impl_->calls, impl_->cache.get(),
                                        &v1::CacheService::Stub::ListModules,
                                        request);
}

absl::StatusOr<v1::Module> DaemonClient::GetModule(const std::string& key) {
  v1::GetModuleRequest request;
  request.set_key(key);
  return Unary<v1::Module>(&impl_->calls, impl_->cache.get(),
                           &v1::CacheService::Stub::GetModule, request);
}

absl::StatusOr<v1::EvictModulesResponse> DaemonClient::EvictModules(
    const v1::EvictModulesRequest& request) {
  return Unary<v1::EvictModulesResponse>(&impl_->calls, impl_->cache.get(),
                                         &v1::CacheService::Stub::EvictModules,
                                         request);
}

absl::StatusOr<v1::PinModulesResponse> DaemonClient::PinModules(
    const v1::PinModulesRequest& request) {
  return Unary<v1::PinModulesResponse>(&impl_->calls, impl_->cache.get(),
                                       &v1::CacheService::Stub::PinModules,
                                       request);
}

absl::Status DaemonClient::WatchEvents(
    const std::function<bool(const v1::CacheEvent&)>& on_event) {
  ScopedCall call(&impl_->calls);
  return ReadAll(
      call.context(), impl_->calls.server(),
      impl_->cache->WatchEvents(call.context(), v1::WatchEventsRequest()),
      on_event);
}

}  // namespace promptcache::cli
