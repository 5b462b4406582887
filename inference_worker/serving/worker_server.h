#pragma once

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "grpcpp/grpcpp.h"
#include "inference_worker/cache/registry_client.h"
#include "inference_worker/serving/inference_service.h"
#include "inference_worker/serving/schema_service.h"

namespace promptcache::worker {

// The worker's gRPC server: both services, health and reflection. Thread-safe.
// Must not outlive what it is given.
class WorkerServer {
 public:
  struct Options {
    std::string listen = "127.0.0.1:7070";  // "": in-process channels only
    // Without TLS only this machine may connect, unless told otherwise.
    bool insecure_listen = false;
    // Calls that may be open at once, of whatever domain; more are refused with
    // RESOURCE_EXHAUSTED. 0: as many as the scheduler may have requests, so
    // that who is refused for want of places is its choice.
    uint32_t max_calls = 0;
    InferenceService::Options inference;
    absl::Status Validate() const;
  };
  static absl::StatusOr<std::unique_ptr<WorkerServer>> Create(
      const Options& options, PromptCompiler* compiler, Scheduler* scheduler,
      RegistryClient* registry);
  ~WorkerServer();

  // As bound: of port 0, the one that was given.
  int port() const { return port_; }
  grpc::Server* grpc_server() { return server_.get(); }
  // Health says NOT_SERVING and new calls get UNAVAILABLE; open ones end within
  // `grace`, or are cancelled. True when all ended by themselves.
  bool Shutdown(absl::Duration grace);

 private:
  WorkerServer(const Options& options, PromptCompiler* compiler,
               Scheduler* scheduler, RegistryClient* registry);

  Scheduler* const scheduler_;
  CallLimit limit_;
  InferenceService inference_;
  SchemaService schemas_;
  int port_ = 0;
  std::unique_ptr<grpc::Server> server_;
};

}  // namespace promptcache::worker
