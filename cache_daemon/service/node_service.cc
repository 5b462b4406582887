#include "cache_daemon/service/node_service.h"

#include <algorithm>
#include <utility>

#include "cache_daemon/service/pins.h"
#include "cache_daemon/service/proto_convert.h"
#include "cache_daemon/service/unary_service.h"
#include "common/status_macros.h"

namespace promptcache::daemon {
namespace {

constexpr uint32_t kDefaultPageSize = 100;
constexpr uint32_t kMaxPageSize = 1000;

}  // namespace

grpc::ServerBidiReactor<node::v1::SessionRequest, node::v1::SessionResponse>*
NodeService::Session(grpc::CallbackServerContext* context) {
  return SessionReactor::Start(sessions_, context);
}

grpc::ServerUnaryReactor* NodeService::PutSchema(
    grpc::CallbackServerContext* context,
    const node::v1::PutSchemaRequest* request,
    node::v1::PutSchemaResponse* response) {
  return RunAsTask(sessions_->tasks, context, [this, request, response] {
    return Put(*request, response);
  });
}

grpc::ServerUnaryReactor* NodeService::GetSchema(
    grpc::CallbackServerContext* context, const v1::GetSchemaRequest* request,
    v1::Schema* response) {
  return RunAsTask(
      sessions_->tasks, context, [this, request, response]() -> absl::Status {
        PC_ASSIGN_OR_RETURN(
            const SchemaRecord schema,
            registry_->GetSchema(request->name(), request->revision()));
        *response = ToProto(schema);
        return absl::OkStatus();
      });
}

grpc::ServerUnaryReactor* NodeService::ListSchemas(
    grpc::CallbackServerContext* context, const v1::ListSchemasRequest* request,
    v1::ListSchemasResponse* response) {
  return RunAsTask(sessions_->tasks, context, [this, request, response] {
    return List(*request, response);
  });
}

grpc::ServerUnaryReactor* NodeService::DeleteSchema(
    grpc::CallbackServerContext* context,
    const v1::DeleteSchemaRequest* request, v1::DeleteSchemaResponse*) {
  return RunAsTask(
      sessions_->tasks, context, [this, request]() -> absl::Status {
        PC_RETURN_IF_ERROR(registry_->DeleteSchema(request->name()));
        // Nobody asks for its modules any more: they age out.
        PC_ASSIGN_OR_RETURN(const PinResult unpinned,
                            sessions_->cache->Pin({.schema = request->name()},
                                                  /*pin=*/false));
        for (const ModuleKey& key : unpinned.keys) {
          registry_->modules().SetPin(key, false);
        }
        Changed(request->name(), 0);
        return absl::OkStatus();
      });
}

absl::Status NodeService::Put(const node::v1::PutSchemaRequest& request,
                              node::v1::PutSchemaResponse* response) {
  Registry::PutSchemaArgs args{.name = request.name(), .text = request.text()};
  if (request.has_policy()) {
    PC_ASSIGN_OR_RETURN(args.policy, FromProto(request.policy(), "policy"));
  }
  PC_ASSIGN_OR_RETURN(args.module_policies,
                      FromProto(request.module_policies(), "module_policies"));
  PC_ASSIGN_OR_RETURN(const Registry::PutSchemaResult result,
                      registry_->PutSchema(args));
  *response->mutable_schema() = ToProto(result.schema);
  response->set_created(result.created);
  if (args.policy.has_value() || !args.module_policies.empty()) {
    PC_RETURN_IF_ERROR(ApplyPolicies(result.schema, response));
  }
  if (result.changed) Changed(request.name(), result.schema.revision);
  return absl::OkStatus();
}

absl::Status NodeService::ApplyPolicies(const SchemaRecord& schema,
                                        node::v1::PutSchemaResponse* response) {
  SchemaPolicies policies{.policy = ToCore(schema.policy), .by_path = {}};
  for (const auto& [path, policy] : schema.module_policies) {
    policies.by_path[path] = ToCore(policy);
  }
  PC_ASSIGN_OR_RETURN(const PolicyResult result,
                      sessions_->cache->SetPolicy(schema.name, policies));
  ApplyPins(result, &registry_->modules());
  for (const RefusedPin& refused : result.pins_refused) {
    response->add_pins_refused(refused.path);
  }
  return absl::OkStatus();
}

absl::Status NodeService::List(const v1::ListSchemasRequest& request,
                               v1::ListSchemasResponse* response) {
  const uint32_t page_size = request.page_size() == 0
                                 ? kDefaultPageSize
                                 : std::min(request.page_size(), kMaxPageSize);
  PC_ASSIGN_OR_RETURN(const Registry::SchemaPage page,
                      registry_->ListSchemas(page_size, request.page_token()));
  for (const SchemaRecord& schema : page.schemas) {
    *response->add_schemas() = ToProto(schema);
  }
  response->set_next_page_token(page.next_page_token);
  return absl::OkStatus();
}

void NodeService::Changed(const std::string& name, uint64_t revision) {
  sessions_->hub->TellSchemaChanged(name, revision);
  CacheEvent event;
  event.kind = CacheEvent::Kind::kSchemaChanged;
  event.time = sessions_->clock->Now();
  event.schema = name;
  event.detail =
      revision == 0 ? "deleted" : "revision " + std::to_string(revision);
  events_->Emit(event);
}

}  // namespace promptcache::daemon
