#pragma once

#include <string>
#include <string_view>

namespace promptcache::rpc {

// gRPC's name for the Unix socket at `path`, to listen on and to connect to.
// Bytes that a URI gives another meaning are escaped.
std::string UnixTarget(std::string_view path);

// Whether "host:port" names only this machine: 127.0.0.0/8, [::1], localhost.
bool IsLoopbackAddress(std::string_view address);

}  // namespace promptcache::rpc
