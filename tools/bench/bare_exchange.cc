#include "tools/bench/bare_exchange.h"

#include <poll.h>
#include <sys/socket.h>

#include <array>
#include <cerrno>
#include <cstddef>
#include <utility>
#include <vector>

#include "absl/time/clock.h"
#include "common/fd_socket.h"
#include "common/status_macros.h"

namespace promptcache::bench {
namespace {

using Message = std::array<std::byte, kAskedBytes>;
static_assert(kAnsweredBytes <= kAskedBytes);

// Of a whole message, whose bounds the socket keeps. False once the peer has
// closed.
bool Receive(int fd, Message* message, size_t num_bytes) {
  return ::recv(fd, message->data(), num_bytes, 0) ==
         static_cast<ssize_t>(num_bytes);
}
bool Send(int fd, const Message& message, size_t num_bytes) {
  return ::send(fd, message.data(), num_bytes, MSG_NOSIGNAL) ==
         static_cast<ssize_t>(num_bytes);
}

}  // namespace

absl::Status AnswerExchanges(const std::string& path) {
  PC_ASSIGN_OR_RETURN(const UniqueFd listener, ListenUnix(path));
  std::vector<UniqueFd> asking;
  Message message{};
  while (true) {
    std::vector<pollfd> polled = {{.fd = listener.get(), .events = POLLIN}};
    for (const UniqueFd& fd : asking) {
      polled.push_back({.fd = fd.get(), .events = POLLIN});
    }
    if (::poll(polled.data(), polled.size(), -1) < 0 && errno != EINTR) {
      return absl::ErrnoToStatus(errno, "poll");
    }
    for (size_t i = asking.size(); i > 0; --i) {
      if (polled[i].revents == 0) continue;
      if (!Receive(polled[i].fd, &message, kAskedBytes) ||
          !Send(polled[i].fd, message, kAnsweredBytes)) {
        asking.erase(asking.begin() + static_cast<std::ptrdiff_t>(i) - 1);
      }
    }
    if (polled[0].revents != 0) {
      UniqueFd fd(::accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC));
      if (fd.get() >= 0) asking.push_back(std::move(fd));
    }
  }
}

absl::StatusOr<BareExchange> BareExchange::Connect(const std::string& path,
                                                   absl::Duration timeout) {
  const absl::Time deadline = absl::Now() + timeout;
  while (true) {
    absl::StatusOr<UniqueFd> fd = ConnectUnix(path);
    if (fd.ok()) return BareExchange(*std::move(fd));
    if (absl::Now() > deadline) return fd.status();
    absl::SleepFor(absl::Milliseconds(10));
  }
}

absl::Status BareExchange::Once() {
  Message message{};
  return Send(fd_.get(), message, kAskedBytes) &&
                 Receive(fd_.get(), &message, kAnsweredBytes)
             ? absl::OkStatus()
             : absl::UnavailableError("who answers exchanges has ended");
}

}  // namespace promptcache::bench
