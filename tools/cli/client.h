#pragma once

#include <functional>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "promptcache/v1/cache.pb.h"
#include "promptcache/v1/inference.pb.h"
#include "promptcache/v1/schema.pb.h"

namespace promptcache::cli {

// Errors of every call below carry an exit code (cli_status.h): kExitRefused
// with the server's words and details, kExitUnreachable when nobody answered.

// A worker. Thread-compatible, but for CancelAll.
class WorkerClient {
 public:
  // Unreachable, with the address and how a worker is started, when it does
  // not answer within `timeout`.
  static absl::StatusOr<std::unique_ptr<WorkerClient>> Connect(
      const std::string& address, absl::Duration timeout);
  ~WorkerClient();

  // `on_event` returns false to cancel; that is not an error.
  absl::Status Generate(
      const v1::GenerateRequest& request,
      const std::function<bool(const v1::GenerateResponse&)>& on_event);
  absl::Status WarmModules(
      const v1::WarmModulesRequest& request,
      const std::function<void(const v1::WarmModulesResponse&)>& on_progress);
  absl::StatusOr<v1::CountTokensResponse> CountTokens(
      const v1::CountTokensRequest& request);
  absl::StatusOr<v1::ModelInfo> GetModelInfo();

  absl::StatusOr<v1::CreateSchemaResponse> CreateSchema(
      const v1::CreateSchemaRequest& request);
  absl::StatusOr<v1::Schema> GetSchema(const v1::GetSchemaRequest& request);
  absl::StatusOr<v1::ListSchemasResponse> ListSchemas(
      const v1::ListSchemasRequest& request);
  absl::Status DeleteSchema(const v1::DeleteSchemaRequest& request);

  // Ends the call that runs and refuses later ones. Thread-safe.
  void CancelAll();

 private:
  explicit WorkerClient(const std::string& address);
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

// The daemon's public services. Thread-compatible.
class DaemonClient {
 public:
  static absl::StatusOr<std::unique_ptr<DaemonClient>> Connect(
      const std::string& address, absl::Duration timeout);
  ~DaemonClient();

  absl::StatusOr<v1::CacheStats> GetStats();
  absl::StatusOr<v1::ListModulesResponse> ListModules(
      const v1::ListModulesRequest& request);
  absl::StatusOr<v1::Module> GetModule(const std::string& key);
  absl::StatusOr<v1::EvictModulesResponse> EvictModules(
      const v1::EvictModulesRequest& request);
  absl::StatusOr<v1::PinModulesResponse> PinModules(
      const v1::PinModulesRequest& request);
  // Until the server ends the stream or `on_event` returns false.
  absl::Status WatchEvents(
      const std::function<bool(const v1::CacheEvent&)>& on_event);

 private:
  explicit DaemonClient(const std::string& address);
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

// One question to the gRPC health service: does it serve now?
bool IsServing(const std::string& address, absl::Duration timeout);

}  // namespace promptcache::cli
