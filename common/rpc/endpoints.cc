#include "common/rpc/endpoints.h"

#include <arpa/inet.h>

#include <cstdint>

#include "absl/strings/ascii.h"

namespace promptcache::rpc {

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
