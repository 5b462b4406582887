#pragma once

#include <grpc/grpc.h>

#include <string>
#include <string_view>
#include <utility>

#include "absl/status/status.h"

namespace promptcache::rpc {

// gRPC's name for the Unix socket at `path`, to listen on and to connect to.
// Bytes that a URI gives another meaning are escaped.
std::string UnixTarget(std::string_view path);

// Channel arguments for both ends of a Unix socket. There is no bandwidth to
// find out: without the pings that look for it, and with a window that holds
// what a busy session has under way.
inline constexpr std::pair<const char*, int> kUnixSocketArgs[] = {
    {GRPC_ARG_HTTP2_BDP_PROBE, 0},
    {GRPC_ARG_HTTP2_STREAM_LOOKAHEAD_BYTES, 4 << 20},
};

// InvalidArgument, with the address, unless it ends in ":PORT" of at most 65535
// (gRPC takes a larger one modulo 65536) behind a host, an IPv6 host in
// brackets, or is a Unix socket's ("unix:PATH"). gRPC's other schemes
// ("dns:///HOST:PORT") are left to gRPC but for the port.
absl::Status CheckAddress(std::string_view address);
// The same, of the flag --listen.
absl::Status CheckListen(std::string_view address);

// Binds "host:port" and lets it go again, for a server whose start takes long:
// Unavailable, with why, when it could not listen there. What gRPC alone knows,
// Unix sockets and its schemes, is not tried, nor is port 0.
absl::Status TryListen(const std::string& address);

// Whether "host:port" names only this machine: 127.0.0.0/8, [::1], localhost.
bool IsLoopbackAddress(std::string_view address);

}  // namespace promptcache::rpc
