#pragma once

#include <grpc/grpc.h>

#include <string>
#include <string_view>
#include <utility>

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

// Whether "host:port" names only this machine: 127.0.0.0/8, [::1], localhost.
bool IsLoopbackAddress(std::string_view address);

}  // namespace promptcache::rpc
