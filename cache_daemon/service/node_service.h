#pragma once

#include "cache_daemon/core/event_hub.h"
#include "cache_daemon/registry/registry.h"
#include "cache_daemon/service/session_reactor.h"
#include "cache_daemon/service/task_queue.h"
#include "promptcache/node/v1/node.grpc.pb.h"

namespace promptcache::daemon {

// promptcache.node.v1, on the daemon's Unix socket. Thread-safe. Registry calls
// run on the task queue, since they wait for the disk.
class NodeService final : public node::v1::NodeService::CallbackService {
 public:
  // All must outlive the service and its calls.
  NodeService(const SessionDeps* sessions, Registry* registry, EventHub* events)
      : sessions_(sessions), registry_(registry), events_(events) {}

  grpc::ServerBidiReactor<node::v1::SessionRequest, node::v1::SessionResponse>*
  Session(grpc::CallbackServerContext* context) override;
  grpc::ServerUnaryReactor* PutSchema(
      grpc::CallbackServerContext* context,
      const node::v1::PutSchemaRequest* request,
      node::v1::PutSchemaResponse* response) override;
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
  absl::Status Put(const node::v1::PutSchemaRequest& request,
                   node::v1::PutSchemaResponse* response);
  absl::Status List(const v1::ListSchemasRequest& request,
                    v1::ListSchemasResponse* response);
  // To what is there already: whoever commits brings the policies along.
  absl::Status ApplyPolicies(const SchemaRecord& schema,
                             node::v1::PutSchemaResponse* response);
  // Tells workers and watchers.
  void Changed(const std::string& name, uint64_t revision);

  const SessionDeps* const sessions_;
  Registry* const registry_;
  EventHub* const events_;
};

}  // namespace promptcache::daemon
