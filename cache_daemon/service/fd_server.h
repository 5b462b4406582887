#pragma once

#include <sys/types.h>

#include <array>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "common/clock.h"
#include "common/fd_socket.h"
#include "common/mutex.h"
#include "common/unique_fd.h"

namespace promptcache::daemon {

using FdToken = std::array<uint8_t, 16>;

// A worker's process as the kernel vouches for it.
struct PeerProcess {
  PeerCredentials credentials;
  // Becomes readable when the process has died: the only proof that its
  // mappings are gone.
  UniqueFd pidfd;
};

// The raw descriptor socket (common/fd_socket.h): checks who connects, takes
// the process's pidfd, hands out the segments' descriptors and a token that
// opens one session within its lifetime.
//
// One thread serves all connections and never blocks on any of them: a peer
// that sends something else, sends nothing, or does not read is cut off.
// Thread-safe.
class FdServer {
 public:
  struct Options {
    std::string path;
    // Who may connect besides the daemon's own user and group, and root.
    // The file's mode (0660) and folder decide first.
    std::vector<uid_t> allowed_uids;
    std::vector<gid_t> allowed_gids;
    absl::Duration token_lifetime = absl::Seconds(30);
    absl::Duration hello_timeout = absl::Seconds(5);
    size_t max_connections = 64;
    size_t max_tokens = 1024;  // handed out and neither used nor expired
    absl::Status Validate() const;
  };
  // A descriptor to hand out; it must stay open as long as the server lives.
  struct Segment {
    FdKind kind = FdKind::kSegment;
    uint32_t segment = 0;
    uint64_t bytes = 0;
    int fd = -1;
    std::string device_uuid;  // for workers on it; empty: for all
  };
  struct Stats {
    uint64_t accepted = 0;
    uint64_t refused = 0;  // credentials, garbage, limits, too slow
    size_t num_connections = 0;
    size_t num_tokens = 0;
  };

  // FailedPrecondition when another daemon listens at the path. `clock` must
  // outlive the server.
  static absl::StatusOr<std::unique_ptr<FdServer>> Create(
      const Options& options, std::vector<Segment> segments,
      const Clock* clock);
  // Closes every connection and removes the socket's file.
  ~FdServer();
  FdServer(const FdServer&) = delete;
  FdServer& operator=(const FdServer&) = delete;

  // PermissionDenied for a token that was never given, was used, or expired.
  // Using it closes the connection that it was given on.
  absl::StatusOr<PeerProcess> RedeemToken(const std::string& token)
      ABSL_LOCKS_EXCLUDED(mu_);
  Stats stats() const ABSL_LOCKS_EXCLUDED(mu_);

 private:
  struct Connection {
    UniqueFd fd;
    bool welcomed = false;
    absl::Time deadline;
    FdToken token{};
  };
  struct Grant {
    PeerProcess peer;
    absl::Time deadline;
  };

  FdServer(const Options& options, std::vector<Segment> segments,
           const Clock* clock, UniqueFd listener, UniqueFd wake);
  void Run() ABSL_LOCKS_EXCLUDED(mu_);
  // False: not able to, for want of descriptors; try again later.
  bool Accept() ABSL_LOCKS_EXCLUDED(mu_);
  absl::Status Serve(Connection* connection) ABSL_LOCKS_EXCLUDED(mu_);
  absl::Status Welcome(Connection* connection, PeerProcess peer,
                       const std::string& device_uuid) ABSL_LOCKS_EXCLUDED(mu_);
  absl::Status Send(int socket, FdWelcome welcome,
                    const std::string& device_uuid) const;
  // Closes connections whose token is used or expired, or whose peer said
  // nothing in time.
  void DropFinished() ABSL_LOCKS_EXCLUDED(mu_);
  void Wake();
  int PollTimeoutMs() const;

  // Const after construction.
  const Options options_;
  const std::vector<Segment> segments_;
  const Clock* const clock_;
  const UniqueFd listener_;
  const UniqueFd wake_;  // eventfd
  std::thread thread_;

  // Used by the thread alone.
  std::vector<Connection> connections_;

  mutable Mutex mu_;
  std::map<FdToken, Grant> grants_ ABSL_GUARDED_BY(mu_);
  Stats stats_ ABSL_GUARDED_BY(mu_);
  bool stopping_ ABSL_GUARDED_BY(mu_) = false;
};

// The process on the other side of `socket`: from the kernel where it can say
// (SO_PEERPIDFD, Linux 6.5), else `attached`, which must be a pidfd of the
// process that connected. PermissionDenied when it is not.
absl::StatusOr<PeerProcess> IdentifyPeer(int socket, UniqueFd attached);
// The same from an attached pidfd alone.
absl::Status CheckPidfd(int pidfd, pid_t pid);

}  // namespace promptcache::daemon
