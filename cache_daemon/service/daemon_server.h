#pragma once

#include <sys/types.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "cache_daemon/core/module_cache.h"
#include "cache_daemon/core/page_pool.h"
#include "cache_daemon/registry/registry.h"
#include "common/clock.h"

namespace promptcache::daemon {

// The cache daemon as one object: memory, core, registry, and the sockets that
// they are served on. What it owns is started in Create and stopped, in the
// reverse order, in Shutdown.
// Thread-safe.
class DaemonServer {
 public:
  struct Options {
    // gRPC for workers; the descriptor socket is "<path>.fd", the lock that
    // keeps a second daemon away "<path>.lock".
    std::string socket_path;
    // host:port of CacheService over TCP; port 0: any; empty: not at all.
    std::string listen;
    // Other addresses than loopback, although there is no TLS.
    bool insecure_listen = false;
    // Who may connect besides the daemon's own user and group, and root.
    std::vector<uid_t> allowed_uids;
    std::vector<gid_t> allowed_gids;
    size_t max_sessions = 256;
    // Answers that wait for a worker that does not read them; beyond it the
    // session is cut off.
    size_t max_session_queue_bytes = size_t{16} << 20;
    PagePool::Options pool;
    ModuleCache::Options cache;
    Registry::Options registry;

    absl::Status Validate() const;
    // For the log.
    std::string ToString() const;
  };

  // FailedPrecondition when another daemon serves the socket. `clock` must
  // outlive the server.
  static absl::StatusOr<std::unique_ptr<DaemonServer>> Create(
      const Options& options, const Clock* clock);
  ~DaemonServer();
  DaemonServer(const DaemonServer&) = delete;
  DaemonServer& operator=(const DaemonServer&) = delete;

  // 0 when there is no TCP listener.
  int listen_port() const;
  const std::string& daemon_id() const;
  ModuleCache& cache() const;
  Registry& registry() const;

  // Ends every session, finishes what is running, removes the sockets' files
  // and writes what the registry has queued. Idempotent.
  void Shutdown();

 private:
  struct Parts;
  explicit DaemonServer(std::unique_ptr<Parts> parts);

  const std::unique_ptr<Parts> parts_;
};

}  // namespace promptcache::daemon
