#pragma once

#include <cstdint>

#include "inference_worker/cache/registry_client.h"
#include "inference_worker/serving/call_limit.h"
#include "inference_worker/serving/executor.h"
#include "inference_worker/serving/prompt_compiler.h"
#include "promptcache/v1/schema.grpc.pb.h"

namespace promptcache::worker {

// promptcache.v1.SchemaService: judges documents here, keeps them in the
// daemon's registry. UNAVAILABLE while there is no daemon. Thread-safe. Must
// not outlive what it is given.
class SchemaService final : public v1::SchemaService::CallbackService {
 public:
  // `limit` counts every call.
  SchemaService(PromptCompiler* compiler, RegistryClient* registry,
                CallLimit* limit, uint32_t num_threads);

  grpc::ServerUnaryReactor* CreateSchema(
      grpc::CallbackServerContext* context,
      const v1::CreateSchemaRequest* request,
      v1::CreateSchemaResponse* response) override;
  grpc::ServerUnaryReactor* GetSchema(grpc::CallbackServerContext* context,
                                      const v1::GetSchemaRequest* request,
                                      v1::Schema* response) override;
  grpc::ServerUnaryReactor* ListSchemas(
      grpc::CallbackServerContext* context,
      const v1::ListSchemasRequest* request,
      v1::ListSchemasResponse* response) override;
  grpc::ServerUnaryReactor* DeleteSchema(
      grpc::CallbackServerContext* context,
      const v1::DeleteSchemaRequest* request,
      v1::DeleteSchemaResponse* response) override;

 private:
  absl::Status Create(const v1::CreateSchemaRequest& request,
                      v1::CreateSchemaResponse* response);

  PromptCompiler* const compiler_;
  RegistryClient* const registry_;
  CallLimit* const limit_;
  Executor executor_;
};

// Schemas for the compiler, from the daemon's registry. Thread-safe.
class RegistrySchemaSource final : public SchemaSource {
 public:
  explicit RegistrySchemaSource(RegistryClient* registry)
      : registry_(registry) {}
  absl::StatusOr<SchemaRecord> Fetch(const std::string& name) override;
  absl::StatusOr<std::vector<std::string>> List(uint32_t max_names) override;

 private:
  RegistryClient* const registry_;
};

}  // namespace promptcache::worker
