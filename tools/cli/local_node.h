#pragma once

#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/child_process.h"
#include "common/file_lock.h"
#include "tools/cli/interrupt.h"

namespace promptcache::cli {

// A cache daemon and a worker as children of this process, for laptops: `demo`
// and `up`. Both are ended, the worker first, when this goes.
// Thread-compatible.
class LocalNode {
 public:
  struct Options {
    std::string dir;    // gets the socket, the registry, port files and logs
    std::string model;  // a file that is there
    std::string worker_listen = "127.0.0.1:0";
    std::string daemon_listen = "127.0.0.1:0";
    std::vector<std::string> daemon_args;  // passed on as they are
    std::vector<std::string> worker_args;
    std::string daemon_task;  // what its start takes time for; may be empty
    absl::Duration start_timeout = absl::Seconds(120);
  };

  // Returns when both serve and the worker is attached to the daemon. The error
  // of a server that ends says why (server_end.h), that of one that does not
  // come up has the end of its log. FailedPrecondition, and nothing is touched,
  // when another node runs in `dir`.
  // `on_progress` is told, several times a second, what is waited for.
  static absl::StatusOr<std::unique_ptr<LocalNode>> Start(
      const Options& options, Interrupt* interrupt,
      const std::function<void(const std::string&)>& on_progress);

  const std::string& worker_address() const { return worker_.address; }
  const std::string& daemon_address() const { return daemon_.address; }
  pid_t worker_pid() const { return worker_.process.pid(); }
  pid_t daemon_pid() const { return daemon_.process.pid(); }
  // Where workers reach the daemon.
  const std::string& socket() const { return socket_; }
  const std::string& worker_log() const { return worker_.log_path; }
  const std::string& daemon_log() const { return daemon_.log_path; }

  // Aborted, with why (server_end.h), when one of the two has ended.
  absl::Status CheckAlive();

 private:
  struct Server {
    std::string name;
    std::string log_path;
    std::string port_path;
    std::string address;
    ChildProcess process;
  };

  explicit LocalNode(FileLock lock) : lock_(std::move(lock)) {}
  absl::Status StartServer(const Options& options, Server* server,
                           std::vector<std::string> args);
  absl::Status WaitServing(const Options& options, Interrupt* interrupt,
                           const std::function<void(const std::string&)>& tell,
                           Server* server);
  absl::Status WaitAttached(const Options& options, Interrupt* interrupt);
  static absl::Status Alive(Server* server);

  const FileLock lock_;  // of the directory
  std::string socket_;
  // The worker is declared last, so that it is ended first.
  Server daemon_;
  Server worker_;
};

}  // namespace promptcache::cli
