#include "cache_daemon/service/fd_server.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "common/status_macros.h"
#include "glog/logging.h"

namespace promptcache::daemon {
namespace {

// Linux 6.5; not in Debian 12's headers.
constexpr int kSoPeerPidfd = 77;
constexpr uint32_t kVersion = FdHello{}.version;
constexpr absl::Duration kMaxPoll = absl::Seconds(1);

absl::Status Errno(const char* what) {
  return absl::ErrnoToStatus(errno, what);
}

absl::StatusOr<FdToken> RandomToken() {
  FdToken token;
  if (::getrandom(token.data(), token.size(), 0) !=
      static_cast<ssize_t>(token.size())) {
    return Errno("getrandom");
  }
  return token;
}

template <typename T>
bool Contains(const std::vector<T>& values, T value) {
  return std::find(values.begin(), values.end(), value) != values.end();
}

}  // namespace

absl::Status CheckPidfd(int pidfd, pid_t pid) {
  if (pidfd < 0) {
    return absl::PermissionDeniedError(
        "no pidfd came with the hello, and the kernel has no SO_PEERPIDFD");
  }
  std::ifstream info(absl::StrCat("/proc/self/fdinfo/", pidfd));
  std::string line;
  while (std::getline(info, line)) {
    absl::string_view value = line;
    if (!absl::ConsumePrefix(&value, "Pid:")) continue;
    int64_t named = -1;
    if (absl::SimpleAtoi(value, &named) && named == pid && named >= 0) {
      return absl::OkStatus();
    }
    return absl::PermissionDeniedError(absl::StrCat(
        "the attached pidfd is of process ", named, ", the peer is ", pid));
  }
  return absl::PermissionDeniedError("the attached descriptor is no pidfd");
}

absl::StatusOr<PeerProcess> IdentifyPeer(int socket, UniqueFd attached) {
  PeerProcess peer;
  PC_ASSIGN_OR_RETURN(peer.credentials, GetPeerCredentials(socket));
  int pidfd = -1;
  socklen_t num_bytes = sizeof(pidfd);
  if (::getsockopt(socket, SOL_SOCKET, kSoPeerPidfd, &pidfd, &num_bytes) == 0) {
    peer.pidfd = UniqueFd(pidfd);
    return peer;
  }
  PC_RETURN_IF_ERROR(CheckPidfd(attached.get(), peer.credentials.pid));
  peer.pidfd = std::move(attached);
  return peer;
}

absl::Status FdServer::Options::Validate() const {
  if (path.empty()) {
    return absl::InvalidArgumentError("the descriptor socket's path is empty");
  }
  if (token_lifetime <= absl::ZeroDuration() ||
      hello_timeout <= absl::ZeroDuration()) {
    return absl::InvalidArgumentError(absl::StrCat(
        "descriptor socket: token_lifetime ",
        absl::FormatDuration(token_lifetime), " and hello_timeout ",
        absl::FormatDuration(hello_timeout), " must be above 0"));
  }
  if (max_connections == 0 || max_tokens == 0) {
    return absl::InvalidArgumentError(
        "descriptor socket: max_connections and max_tokens must not be 0");
  }
  return absl::OkStatus();
}

absl::StatusOr<std::unique_ptr<FdServer>> FdServer::Create(
    const Options& options, std::vector<Segment> segments, const Clock* clock) {
  PC_RETURN_IF_ERROR(options.Validate());
  PC_ASSIGN_OR_RETURN(UniqueFd listener, ListenUnix(options.path));
  UniqueFd wake(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!wake) return Errno("eventfd");
  if (::fcntl(listener.get(), F_SETFL, O_NONBLOCK) != 0) return Errno("fcntl");
  std::unique_ptr<FdServer> server(new FdServer(options, std::move(segments),
                                                clock, std::move(listener),
                                                std::move(wake)));
  server->thread_ = std::thread([raw = server.get()] { raw->Run(); });
  return server;
}

FdServer::FdServer(const Options& options, std::vector<Segment> segments,
                   const Clock* clock, UniqueFd listener, UniqueFd wake)
    : options_(options),
      segments_(std::move(segments)),
      clock_(clock),
      listener_(std::move(listener)),
      wake_(std::move(wake)) {}

FdServer::~FdServer() {
  {
    MutexLock lock(&mu_);
    stopping_ = true;
  }
  Wake();
  thread_.join();
  ::unlink(options_.path.c_str());
}

absl::StatusOr<PeerProcess> FdServer::RedeemToken(const std::string& token) {
  FdToken wanted;
  if (token.size() != wanted.size()) {
    return absl::PermissionDeniedError(absl::StrCat(
        "the session's token has ", token.size(), " bytes, 16 are due"));
  }
  std::memcpy(wanted.data(), token.data(), token.size());
  PeerProcess peer;
  {
    MutexLock lock(&mu_);
    const auto grant = grants_.find(wanted);
    if (grant == grants_.end() || grant->second.deadline <= clock_->Now()) {
      return absl::PermissionDeniedError(
          "the session's token is unknown, used or expired: connect to the "
          "descriptor socket first");
    }
    peer = std::move(grant->second.peer);
    grants_.erase(grant);
  }
  Wake();
  return peer;
}

FdServer::Stats FdServer::stats() const {
  MutexLock lock(&mu_);
  Stats stats = stats_;
  stats.num_tokens = grants_.size();
  return stats;
}

void FdServer::Wake() {
  const uint64_t one = 1;
  // Fails only when the counter is full, which wakes as well.
  [[maybe_unused]] const ssize_t written =
      ::write(wake_.get(), &one, sizeof(one));
}

int FdServer::PollTimeoutMs() const {
  absl::Duration wait = kMaxPoll;
  const absl::Time now = clock_->Now();
  for (const Connection& connection : connections_) {
    wait = std::min(wait, connection.deadline - now);
  }
  // Rounded up: a wait that ends a little early would spin.
  return static_cast<int>(std::max<int64_t>(
      0, absl::ToInt64Milliseconds(wait + absl::Milliseconds(1))));
}

void FdServer::Run() {
  bool accepting = true;
  while (true) {
    std::vector<pollfd> polled;
    polled.push_back({wake_.get(), POLLIN, 0});
    polled.push_back({accepting ? listener_.get() : -1, POLLIN, 0});
    for (const Connection& connection : connections_) {
      polled.push_back({connection.fd.get(), POLLIN, 0});
    }
    const int timeout_ms = accepting ? PollTimeoutMs() : 100;
    if (::poll(polled.data(), polled.size(), timeout_ms) < 0 &&
        errno != EINTR) {
      LOG(ERROR) << "descriptor socket: " << Errno("poll");
      return;
    }
    uint64_t count;
    // Level-triggered: emptied, whatever it said.
    [[maybe_unused]] const ssize_t got =
        ::read(wake_.get(), &count, sizeof(count));
    for (size_t i = 0; i < connections_.size(); ++i) {
      if (polled[i + 2].revents == 0) continue;
      const absl::Status status = Serve(&connections_[i]);
      if (status.ok()) continue;
      // The peer closing after its welcome is how it should end.
      if (!connections_[i].welcomed) {
        LOG(WARNING) << "descriptor socket: " << status;
        MutexLock lock(&mu_);
        ++stats_.refused;
      }
      connections_[i].fd.Reset();
    }
    accepting = accepting ? polled[1].revents == 0 || Accept() : true;
    DropFinished();
    MutexLock lock(&mu_);
    if (stopping_) return;
  }
}

bool FdServer::Accept() {
  UniqueFd fd(::accept4(listener_.get(), nullptr, nullptr,
                        SOCK_CLOEXEC | SOCK_NONBLOCK));
  if (!fd) return errno != EMFILE && errno != ENFILE;
  absl::Status verdict;
  const absl::StatusOr<PeerCredentials> peer = GetPeerCredentials(fd.get());
  if (!peer.ok()) {
    verdict = peer.status();
  } else if (peer->uid != ::geteuid() && peer->uid != 0 &&
             peer->gid != ::getegid() &&
             !Contains(options_.allowed_uids, peer->uid) &&
             !Contains(options_.allowed_gids, peer->gid)) {
    verdict = absl::PermissionDeniedError(
        absl::StrCat("process ", peer->pid, " of user ", peer->uid,
                     " and group ", peer->gid, " is not allowed"));
  } else if (connections_.size() >= options_.max_connections) {
    verdict = absl::ResourceExhaustedError(
        absl::StrCat("process ", peer->pid, ": ", options_.max_connections,
                     " connections are open"));
  }
  if (!verdict.ok()) LOG(WARNING) << "descriptor socket: " << verdict;
  MutexLock lock(&mu_);
  if (verdict.ok()) {
    ++stats_.accepted;
    connections_.push_back(
        {.fd = std::move(fd),
         .deadline = clock_->Now() + options_.hello_timeout});
  } else {
    ++stats_.refused;
  }
  return true;
}

absl::Status FdServer::Serve(Connection* connection) {
  FdHello hello;
  absl::StatusOr<UniqueFd> attached = ReceiveWithFd(
      connection->fd.get(), &hello, sizeof(hello), absl::ZeroDuration());
  if (!attached.ok()) return attached.status();
  if (connection->welcomed) {
    return absl::InvalidArgumentError("a second hello");
  }
  if (hello.magic != kFdMagic || hello.version != kVersion) {
    return absl::InvalidArgumentError(absl::StrCat(
        "a hello of version ", hello.version, ", magic ",
        absl::Hex(hello.magic), ": version ", kVersion, " is spoken here"));
  }
  PC_ASSIGN_OR_RETURN(PeerProcess peer,
                      IdentifyPeer(connection->fd.get(), *std::move(attached)));
  const auto& padded = hello.device_uuid;
  std::string device_uuid(padded.begin(),
                          std::find(padded.begin(), padded.end(), '\0'));
  if (device_uuid.empty()) device_uuid = "CPU";
  return Welcome(connection, std::move(peer), device_uuid);
}

absl::Status FdServer::Welcome(Connection* connection, PeerProcess peer,
                               const std::string& device_uuid) {
  FdWelcome welcome;
  PC_ASSIGN_OR_RETURN(welcome.token, RandomToken());
  const absl::Time deadline = clock_->Now() + options_.token_lifetime;
  // Valid before it is sent: the peer may present it at once.
  {
    MutexLock lock(&mu_);
    if (grants_.size() >= options_.max_tokens) {
      return absl::ResourceExhaustedError(absl::StrCat(
          "process ", peer.credentials.pid, ": ", options_.max_tokens,
          " tokens are neither used nor expired"));
    }
    grants_[welcome.token] = {.peer = std::move(peer), .deadline = deadline};
  }
  const absl::Status sent = Send(connection->fd.get(), welcome, device_uuid);
  if (!sent.ok()) {
    MutexLock lock(&mu_);
    grants_.erase(welcome.token);
    return sent;
  }
  connection->welcomed = true;
  connection->deadline = deadline;
  connection->token = welcome.token;
  return absl::OkStatus();
}

absl::Status FdServer::Send(int socket, FdWelcome welcome,
                            const std::string& device_uuid) const {
  const auto is_for_it = [&](const Segment& segment) {
    return segment.device_uuid.empty() || segment.device_uuid == device_uuid;
  };
  welcome.num_segments =
      static_cast<uint32_t>(std::ranges::count_if(segments_, is_for_it));
  PC_RETURN_IF_ERROR(SendWithFd(socket, &welcome, sizeof(welcome), -1));
  for (const Segment& segment : segments_) {
    if (!is_for_it(segment)) continue;
    const FdSegment message{.kind = segment.kind,
                            .segment = segment.segment,
                            .bytes = segment.bytes};
    PC_RETURN_IF_ERROR(
        SendWithFd(socket, &message, sizeof(message), segment.fd));
  }
  return absl::OkStatus();
}

void FdServer::DropFinished() {
  const absl::Time now = clock_->Now();
  MutexLock lock(&mu_);
  for (auto grant = grants_.begin(); grant != grants_.end();) {
    grant =
        grant->second.deadline <= now ? grants_.erase(grant) : std::next(grant);
  }
  std::vector<Connection> kept;
  for (Connection& connection : connections_) {
    if (!connection.fd) continue;
    if (connection.welcomed && !grants_.contains(connection.token)) continue;
    if (!connection.welcomed && connection.deadline <= now) {
      ++stats_.refused;
      continue;
    }
    kept.push_back(std::move(connection));
  }
  connections_ = std::move(kept);
  stats_.num_connections = connections_.size();
}

}  // namespace promptcache::daemon
