#include "inference_worker/cache/registry_client.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "common/rpc/endpoints.h"
#include "common/rpc/grpc_status.h"
#include "common/status_macros.h"
#include "glog/logging.h"
#include "grpcpp/grpcpp.h"
#include "promptcache/node/v1/node.grpc.pb.h"

namespace promptcache::worker {
namespace {

// Above the largest schema with its policies.
constexpr int kMaxMessageBytes = 16 << 20;
constexpr absl::Duration kMaxReconnectBackoff = absl::Milliseconds(500);

class GrpcRegistryClient final : public RegistryClient {
 public:
  explicit GrpcRegistryClient(const Options& options) : options_(options) {
    grpc::ChannelArguments args;
    args.SetMaxReceiveMessageSize(kMaxMessageBytes);
    args.SetMaxSendMessageSize(kMaxMessageBytes);
    // A restarted daemon is found soon, not after gRPC's usual minutes.
    args.SetInt(GRPC_ARG_INITIAL_RECONNECT_BACKOFF_MS, 50);
    args.SetInt(GRPC_ARG_MIN_RECONNECT_BACKOFF_MS, 50);
    args.SetInt(
        GRPC_ARG_MAX_RECONNECT_BACKOFF_MS,
        static_cast<int>(absl::ToInt64Milliseconds(kMaxReconnectBackoff)));
    args.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
    stub_ = node::v1::NodeService::NewStub(
        grpc::CreateCustomChannel(rpc::UnixTarget(options.socket_path),
                                  grpc::InsecureChannelCredentials(), args));
  }

  absl::StatusOr<node::v1::PutSchemaResponse> PutSchema(
      const node::v1::PutSchemaRequest& request) override {
    return Call<node::v1::PutSchemaResponse>(
        &node::v1::NodeService::Stub::PutSchema, request);
  }

  absl::StatusOr<v1::Schema> GetSchema(const std::string& name,
                                       uint64_t revision) override {
    v1::GetSchemaRequest request;
    request.set_name(name);
    request.set_revision(revision);
    return Call<v1::Schema>(&node::v1::NodeService::Stub::GetSchema, request);
  }

  absl::StatusOr<v1::ListSchemasResponse> ListSchemas(
      const v1::ListSchemasRequest& request) override {
    return Call<v1::ListSchemasResponse>(
        &node::v1::NodeService::Stub::ListSchemas, request);
  }

  absl::Status DeleteSchema(const std::string& name) override {
    v1::DeleteSchemaRequest request;
    request.set_name(name);
    return Call<v1::DeleteSchemaResponse>(
               &node::v1::NodeService::Stub::DeleteSchema, request)
        .status();
  }

 private:
  template <typename Response, typename Request>
  absl::StatusOr<Response> Call(
      grpc::Status (node::v1::NodeService::Stub::*method)(grpc::ClientContext*,
                                                          const Request&,
                                                          Response*),
      const Request& request) {
    Response response;
    const auto attempt = [&](bool wait, absl::Duration timeout) {
      grpc::ClientContext context;
      context.set_wait_for_ready(wait);
      context.set_deadline(absl::ToChronoTime(absl::Now() + timeout));
      return rpc::FromGrpcStatus(
          (stub_.get()->*method)(&context, request, &response));
    };
    absl::Status status = attempt(/*wait=*/false, options_.timeout);
    if (absl::IsUnavailable(status)) {
      // The channel may still be backing off from a daemon that is back by now
      // (the session attaches over another one): give it one more round.
      const absl::Status again = attempt(
          /*wait=*/true, std::min(options_.timeout, 2 * kMaxReconnectBackoff));
      // Nobody came: the first answer says why.
      if (!absl::IsDeadlineExceeded(again)) status = again;
    }
    if (status.ok()) return response;
    if (absl::IsUnavailable(status)) {
      LOG(WARNING) << "no cache daemon: " << status.message();
      return absl::UnavailableError(absl::StrCat(
          "the worker reaches no cache daemon at ", options_.socket_path,
          ": start promptcache-daemon --socket=", options_.socket_path,
          ", or both servers with `promptcache up`"));
    }
    if (absl::IsDeadlineExceeded(status)) {
      return absl::DeadlineExceededError(absl::StrCat(
          "the cache daemon at ", options_.socket_path, " has not answered in ",
          absl::FormatDuration(options_.timeout)));
    }
    return status;
  }

  const Options options_;
  std::unique_ptr<node::v1::NodeService::Stub> stub_;
};

class NoRegistry final : public RegistryClient {
 public:
  absl::StatusOr<node::v1::PutSchemaResponse> PutSchema(
      const node::v1::PutSchemaRequest&) override {
    return Refusal();
  }
  absl::StatusOr<v1::Schema> GetSchema(const std::string&, uint64_t) override {
    return Refusal();
  }
  absl::StatusOr<v1::ListSchemasResponse> ListSchemas(
      const v1::ListSchemasRequest&) override {
    return Refusal();
  }
  absl::Status DeleteSchema(const std::string&) override { return Refusal(); }

 private:
  static absl::Status Refusal() {
    return absl::UnavailableError(
        "schemas are kept by the cache daemon, and this worker was started "
        "without one");
  }
};

}  // namespace

absl::StatusOr<std::unique_ptr<RegistryClient>> RegistryClient::Create(
    const Options& options) {
  if (options.socket_path.empty()) {
    return absl::InvalidArgumentError("the daemon's socket path is empty");
  }
  if (options.timeout <= absl::ZeroDuration()) {
    return absl::InvalidArgumentError(
        absl::StrCat("registry timeout ", absl::FormatDuration(options.timeout),
                     " is not above 0"));
  }
  return std::make_unique<GrpcRegistryClient>(options);
}

std::unique_ptr<RegistryClient> RegistryClient::None() {
  return std::make_unique<NoRegistry>();
}

}  // namespace promptcache::worker
