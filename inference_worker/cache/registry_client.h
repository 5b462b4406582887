#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "promptcache/node/v1/node.pb.h"
#include "promptcache/v1/schema.pb.h"

namespace promptcache::worker {

// The daemon's registry of schemas, over its Unix socket. Every call blocks
// for at most Options::timeout; Unavailable when there is no daemon,
// DeadlineExceeded when it does not answer, else the daemon's status with its
// details. Connects by itself, again after every loss. Thread-safe.
//
// It never judges a schema's text: that is the worker's, before it is put.
class RegistryClient {
 public:
  struct Options {
    std::string socket_path;
    absl::Duration timeout = absl::Seconds(5);
  };
  // Succeeds without a daemon, too.
  static absl::StatusOr<std::unique_ptr<RegistryClient>> Create(
      const Options& options);
  // For a worker without a daemon: every call is Unavailable and says why.
  static std::unique_ptr<RegistryClient> None();
  virtual ~RegistryClient() = default;

  // Idempotent for the text that is there. An unset policy keeps the schema's
  // own; so do empty module_policies.
  virtual absl::StatusOr<node::v1::PutSchemaResponse> PutSchema(
      const node::v1::PutSchemaRequest& request) = 0;
  // Revision 0: the current one. NotFound.
  virtual absl::StatusOr<v1::Schema> GetSchema(const std::string& name,
                                               uint64_t revision) = 0;
  virtual absl::StatusOr<v1::ListSchemasResponse> ListSchemas(
      const v1::ListSchemasRequest& request) = 0;
  virtual absl::Status DeleteSchema(const std::string& name) = 0;
};

}  // namespace promptcache::worker
