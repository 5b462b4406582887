#include "inference_worker/serving/schema_service.h"

#include <algorithm>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/rpc/grpc_status.h"
#include "common/status_macros.h"
#include "glog/logging.h"
#include "inference_worker/serving/proto_convert.h"
#include "inference_worker/serving/unary_call.h"

namespace promptcache::worker {
namespace {

// Policies that can be kept, for modules that there are.
absl::Status CheckPolicies(const v1::CreateSchemaRequest& request,
                           const std::vector<pml::ModuleSummary>& modules) {
  if (request.has_policy()) {
    PC_RETURN_IF_ERROR(ToModulePolicy(request.policy(), "policy").status());
  }
  for (const auto& [path, policy] : request.module_policies()) {
    const std::string field = absl::StrCat("module_policies[\"", path, "\"]");
    PC_RETURN_IF_ERROR(ToModulePolicy(policy, field).status());
    const auto it = std::find_if(
        modules.begin(), modules.end(),
        [&wanted = path](const auto& m) { return m.path == wanted; });
    if (it == modules.end()) {
      return rpc::InvalidFieldError(field, "the schema has no such module");
    }
    if (!it->cached) {
      return rpc::InvalidFieldError(field, "the module is never cached");
    }
  }
  return absl::OkStatus();
}

}  // namespace

SchemaService::SchemaService(PromptCompiler* compiler, RegistryClient* registry,
                             CallLimit* limit, uint32_t num_threads)
    : compiler_(compiler),
      registry_(registry),
      limit_(limit),
      executor_(num_threads) {}

absl::Status SchemaService::Create(const v1::CreateSchemaRequest& request,
                                   v1::CreateSchemaResponse* response) {
  PC_ASSIGN_OR_RETURN(const auto schema, compiler_->Judge(request.text()));
  const std::vector<pml::ModuleSummary> modules = schema->Modules();
  PC_RETURN_IF_ERROR(CheckPolicies(request, modules));
  for (const pml::ModuleSummary& module : modules) {
    v1::ModuleSummary* summary = response->add_modules();
    summary->set_path(module.path);
    summary->set_num_tokens(static_cast<uint32_t>(module.num_tokens));
    summary->set_cached(module.cached);
  }
  for (const std::string& warning : schema->BorderWarnings()) {
    response->add_warnings(warning);
  }
  if (request.validate_only()) {
    response->mutable_schema()->set_name(schema->name());
    return absl::OkStatus();
  }
  node::v1::PutSchemaRequest put;
  put.set_name(schema->name());
  put.set_text(request.text());
  if (request.has_policy()) *put.mutable_policy() = request.policy();
  *put.mutable_module_policies() = request.module_policies();
  PC_ASSIGN_OR_RETURN(node::v1::PutSchemaResponse kept,
                      registry_->PutSchema(put));
  // Before the daemon's push comes: the caller may use it at once.
  compiler_->Invalidate(schema->name());
  *response->mutable_schema() = std::move(*kept.mutable_schema());
  response->set_created(kept.created());
  response->mutable_pins_refused()->Swap(kept.mutable_pins_refused());
  return absl::OkStatus();
}

grpc::ServerUnaryReactor* SchemaService::CreateSchema(
    grpc::CallbackServerContext*, const v1::CreateSchemaRequest* request,
    v1::CreateSchemaResponse* response) {
  return UnaryCall::Start(limit_, &executor_, [this, request, response] {
    return Create(*request, response);
  });
}

grpc::ServerUnaryReactor* SchemaService::GetSchema(
    grpc::CallbackServerContext*, const v1::GetSchemaRequest* request,
    v1::Schema* response) {
  return UnaryCall::Start(limit_, &executor_, [this, request, response] {
    auto schema = registry_->GetSchema(request->name(), request->revision());
    if (schema.ok()) *response = *std::move(schema);
    return schema.status();
  });
}

grpc::ServerUnaryReactor* SchemaService::ListSchemas(
    grpc::CallbackServerContext*, const v1::ListSchemasRequest* request,
    v1::ListSchemasResponse* response) {
  return UnaryCall::Start(limit_, &executor_, [this, request, response] {
    auto schemas = registry_->ListSchemas(*request);
    if (schemas.ok()) *response = *std::move(schemas);
    return schemas.status();
  });
}

grpc::ServerUnaryReactor* SchemaService::DeleteSchema(
    grpc::CallbackServerContext*, const v1::DeleteSchemaRequest* request,
    v1::DeleteSchemaResponse*) {
  return UnaryCall::Start(limit_, &executor_, [this, request] {
    const absl::Status status = registry_->DeleteSchema(request->name());
    compiler_->Invalidate(request->name());
    return status;
  });
}

absl::StatusOr<SchemaRecord> RegistrySchemaSource::Fetch(
    const std::string& name) {
  PC_ASSIGN_OR_RETURN(const v1::Schema schema,
                      registry_->GetSchema(name, /*revision=*/0));
  return ToSchemaRecord(schema);
}

absl::StatusOr<std::vector<std::string>> RegistrySchemaSource::List(
    uint32_t max_names) {
  struct Listed {
    int64_t seconds = 0;  // since the epoch: when its revision was registered
    int32_t nanos = 0;
    std::string name;
  };
  std::vector<Listed> listed;
  v1::ListSchemasRequest request;
  request.set_page_size(1000);  // the most
  do {
    PC_ASSIGN_OR_RETURN(v1::ListSchemasResponse response,
                        registry_->ListSchemas(request));
    for (v1::Schema& schema : *response.mutable_schemas()) {
      listed.push_back({.seconds = schema.create_time().seconds(),
                        .nanos = schema.create_time().nanos(),
                        .name = std::move(*schema.mutable_name())});
    }
    request.set_page_token(response.next_page_token());
  } while (!request.page_token().empty());
  std::ranges::sort(listed, [](const Listed& a, const Listed& b) {
    return std::tie(b.seconds, b.nanos, a.name) <
           std::tie(a.seconds, a.nanos, b.name);
  });
  if (listed.size() > max_names) {
    LOG_EVERY_T(WARNING, 60)
        << listed.size() << " schemas are registered: match auto looks at the "
        << max_names << " that were registered last";
    listed.resize(max_names);
  }
  std::vector<std::string> names;
  for (Listed& schema : listed) names.push_back(std::move(schema.name));
  return names;
}

}  // namespace promptcache::worker
