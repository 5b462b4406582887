#include "common/fd_socket.h"

#include <poll.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>

#include <cerrno>
#include <cstring>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "common/status_macros.h"

namespace promptcache {
namespace {

absl::Status Errno(const char* what, const std::string& detail = "") {
  return absl::ErrnoToStatus(errno, absl::StrCat(what, " ", detail));
}

absl::StatusOr<sockaddr_un> Address(const std::string& path) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  if (path.empty() || path.size() >= sizeof(address.sun_path)) {
    return absl::InvalidArgumentError(absl::StrCat(
        "socket path \"", path, "\" has ", path.size(), " bytes, 1 to ",
        sizeof(address.sun_path) - 1, " are possible"));
  }
  std::memcpy(address.sun_path, path.data(), path.size());
  return address;
}

}  // namespace

absl::StatusOr<UniqueFd> ConnectUnix(const std::string& path) {
  PC_ASSIGN_OR_RETURN(const sockaddr_un address, Address(path));
  UniqueFd fd(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
  if (!fd) return Errno("socket");
  if (::connect(fd.get(), reinterpret_cast<const sockaddr*>(&address),
                sizeof(address)) != 0) {
    return absl::UnavailableError(absl::StrCat("no daemon listens at ", path,
                                               ": ", std::strerror(errno)));
  }
  return fd;
}

absl::StatusOr<UniqueFd> ListenUnix(const std::string& path) {
  PC_ASSIGN_OR_RETURN(const sockaddr_un address, Address(path));
  if (ConnectUnix(path).ok()) {
    return absl::FailedPreconditionError(
        absl::StrCat("another daemon listens at ", path));
  }
  ::unlink(path.c_str());
  UniqueFd fd(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
  if (!fd) return Errno("socket");
  if (::bind(fd.get(), reinterpret_cast<const sockaddr*>(&address),
             sizeof(address)) != 0) {
    return Errno("bind", path);
  }
  if (::chmod(path.c_str(), 0660) != 0) return Errno("chmod", path);
  if (::listen(fd.get(), 64) != 0) return Errno("listen", path);
  return fd;
}

absl::StatusOr<PeerCredentials> GetPeerCredentials(int fd) {
  ucred cred{};
  socklen_t cred_bytes = sizeof(cred);
  if (::getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &cred, &cred_bytes) != 0) {
    return Errno("SO_PEERCRED");
  }
  return PeerCredentials{.pid = cred.pid, .uid = cred.uid, .gid = cred.gid};
}

absl::Status SendWithFd(int socket, const void* data, size_t num_bytes,
                        int attached_fd) {
  iovec iov{.iov_base = const_cast<void*>(data), .iov_len = num_bytes};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  msghdr message{};
  message.msg_iov = &iov;
  message.msg_iovlen = 1;
  if (attached_fd >= 0) {
    message.msg_control = control;
    message.msg_controllen = sizeof(control);
    cmsghdr* header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(sizeof(int));
    std::memcpy(CMSG_DATA(header), &attached_fd, sizeof(int));
  }
  ssize_t sent;
  do {
    sent = ::sendmsg(socket, &message, MSG_NOSIGNAL);
  } while (sent < 0 && errno == EINTR);
  if (sent < 0) return Errno("sendmsg");
  return absl::OkStatus();
}

absl::StatusOr<UniqueFd> ReceiveWithFd(int socket, void* data, size_t num_bytes,
                                       absl::Duration timeout) {
  pollfd poll_fd{.fd = socket, .events = POLLIN, .revents = 0};
  int ready;
  do {
    ready = ::poll(&poll_fd, 1,
                   static_cast<int>(absl::ToInt64Milliseconds(timeout)));
  } while (ready < 0 && errno == EINTR);
  if (ready < 0) return Errno("poll");
  if (ready == 0) {
    return absl::DeadlineExceededError(
        absl::StrCat("no message within ", absl::FormatDuration(timeout)));
  }
  iovec iov{.iov_base = data, .iov_len = num_bytes};
  alignas(cmsghdr) char control[CMSG_SPACE(4 * sizeof(int))] = {};
  msghdr message{};
  message.msg_iov = &iov;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = sizeof(control);
  ssize_t received;
  do {
    received = ::recvmsg(socket, &message, MSG_CMSG_CLOEXEC);
  } while (received < 0 && errno == EINTR);
  if (received < 0) return Errno("recvmsg");
  // Take every descriptor first, so that none leaks on the errors below.
  UniqueFd fd;
  for (cmsghdr* header = CMSG_FIRSTHDR(&message); header != nullptr;
       header = CMSG_NXTHDR(&message, header)) {
    if (header->cmsg_level != SOL_SOCKET || header->cmsg_type != SCM_RIGHTS) {
      continue;
    }
    const size_t num_fds = (header->cmsg_len - CMSG_LEN(0)) / sizeof(int);
    for (size_t i = 0; i < num_fds; ++i) {
      int raw;
      std::memcpy(&raw, CMSG_DATA(header) + i * sizeof(int), sizeof(int));
      fd = UniqueFd(raw);
    }
  }
  if (received == 0) return absl::UnavailableError("the peer has closed");
  if (static_cast<size_t>(received) != num_bytes ||
      (message.msg_flags & MSG_TRUNC) != 0) {
    return absl::InvalidArgumentError(absl::StrCat(
        "a message of ", received, " bytes where ", num_bytes, " were due"));
  }
  return fd;
}

}  // namespace promptcache
