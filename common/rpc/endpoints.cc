#include "common/rpc/endpoints.h"

#include <arpa/inet.h>
#include <netdb.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <string>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "common/strings.h"
#include "common/unique_fd.h"

namespace promptcache::rpc {
namespace {

constexpr uint32_t kMaxPort = 65535;

// 0, or the errno of a bind as gRPC does it (a port whose last connections are
// still waiting to be forgotten can be had).
int BindError(const addrinfo& address) {
  const UniqueFd fd(::socket(address.ai_family,
                             address.ai_socktype | SOCK_CLOEXEC,
                             address.ai_protocol));
  if (!fd) return errno;
  const int on = 1;
  ::setsockopt(fd.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
  if (::bind(fd.get(), address.ai_addr, address.ai_addrlen) == 0 &&
      ::listen(fd.get(), 1) == 0) {
    return 0;
  }
  return errno;
}

}  // namespace

std::string UnixTarget(std::string_view path) {
  constexpr char kHex[] = "0123456789ABCDEF";
  std::string target = "unix:";
  for (const char c : path) {
    if (absl::ascii_isalnum(static_cast<unsigned char>(c)) || c == '/' ||
        c == '.' || c == '-' || c == '_' || c == '~') {
      target += c;
    } else {
      const auto byte = static_cast<uint8_t>(c);
      target += '%';
      target += kHex[byte >> 4];
      target += kHex[byte & 15];
    }
  }
  return target;
}

absl::Status CheckAddress(std::string_view address) {
  const absl::string_view text = ToAbsl(address);
  if (absl::StartsWith(text, "unix:") ||
      absl::StartsWith(text, "unix-abstract:")) {
    return absl::OkStatus();
  }
  const auto wrong = [&](absl::string_view why) {
    return absl::InvalidArgumentError(
        absl::StrCat("the address \"", text, "\" ", why));
  };
  const size_t colon = text.rfind(':');
  if (colon == absl::string_view::npos || colon == 0 ||
      absl::EndsWith(text, "]")) {
    return wrong("is not HOST:PORT");
  }
  const absl::string_view port = text.substr(colon + 1);
  uint32_t number = 0;
  if (port.empty() || !std::ranges::all_of(port, absl::ascii_isdigit)) {
    return wrong("is not HOST:PORT");
  }
  if (!absl::SimpleAtoi(port, &number) || number > kMaxPort) {
    return wrong(
        absl::StrCat("has the port ", port, ": ports end at ", kMaxPort));
  }
  const absl::string_view host = text.substr(0, colon);
  for (const char* scheme : {"dns:", "ipv4:", "ipv6:", "["}) {
    if (absl::StartsWith(host, scheme)) return absl::OkStatus();
  }
  if (absl::StrContains(host, ":")) {
    return wrong("is not HOST:PORT; IPv6 hosts stand in brackets, [::1]:7070");
  }
  return absl::OkStatus();
}

absl::Status CheckListen(std::string_view address) {
  const absl::Status status = CheckAddress(address);
  return absl::Status(status.code(),
                      absl::StrCat("--listen: ", status.message()));
}

absl::Status TryListen(const std::string& address) {
  const size_t colon = address.rfind(':');
  if (!CheckAddress(address).ok() || colon == std::string::npos) {
    return absl::OkStatus();
  }
  std::string host = address.substr(0, colon);
  const std::string port = address.substr(colon + 1);
  if (host.front() == '[') host = host.substr(1, host.size() - 2);
  uint32_t number = 0;
  if (!absl::SimpleAtoi(port, &number) || number == 0) return absl::OkStatus();
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_PASSIVE | AI_NUMERICSERV;
  addrinfo* found = nullptr;
  // A name that is not found is gRPC's to tell.
  if (::getaddrinfo(host.c_str(), port.c_str(), &hints, &found) != 0) {
    return absl::OkStatus();
  }
  // As gRPC: one address of a name is enough, but none may be another's.
  bool bound = false;
  int error = 0;
  for (const addrinfo* a = found; a != nullptr; a = a->ai_next) {
    const int now = BindError(*a);
    if (now == 0) bound = true;
    if (error != EADDRINUSE) error = now;
  }
  ::freeaddrinfo(found);
  if (error == EADDRINUSE) {
    return absl::UnavailableError(
        absl::StrCat("cannot listen on ", address, ": the port is taken"));
  }
  if (bound) return absl::OkStatus();
  return absl::UnavailableError(
      absl::StrCat("cannot listen on ", address, ": ", std::strerror(error)));
}

bool IsLoopbackAddress(std::string_view address) {
  const size_t colon = address.rfind(':');
  if (colon == std::string_view::npos) return false;
  std::string host(address.substr(0, colon));
  if (host == "localhost" || host == "[::1]") return true;
  in_addr v4{};
  if (::inet_pton(AF_INET, host.c_str(), &v4) != 1) return false;
  return (ntohl(v4.s_addr) >> 24) == 127;
}

}  // namespace promptcache::rpc
