#include "common/rpc/endpoints.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/support/status_matchers.h"

namespace promptcache::rpc {
namespace {

using ::testing::HasSubstr;

TEST(EndpointsTest, UnixTargetsEscapeWhatAUriReadsOtherwise) {
  EXPECT_EQ(UnixTarget("/run/p-c/d_1.sock"), "unix:/run/p-c/d_1.sock");
  EXPECT_EQ(UnixTarget("a b%#?"), "unix:a%20b%25%23%3F");
  EXPECT_EQ(UnixTarget("/\xc3\xa9"), "unix:/%C3%A9");
}

TEST(EndpointsTest, OnlyThisMachineIsLoopback) {
  for (const char* address :
       {"127.0.0.1:7071", "127.9.0.1:0", "localhost:1", "[::1]:7071"}) {
    EXPECT_TRUE(IsLoopbackAddress(address)) << address;
  }
  // 127.1 would be the same machine, but is not written so on purpose.
  for (const char* address :
       {"0.0.0.0:7071", "[::]:7071", "10.0.0.1:1", "127.0.0.1", "127.1:1",
        "127.0.0.1.example.org:1", "example.org:1", ":7071", ""}) {
    EXPECT_FALSE(IsLoopbackAddress(address)) << address;
  }
}

TEST(EndpointsTest, AddressesAreHostsWithPorts) {
  for (const char* address :
       {"127.0.0.1:0", "127.0.0.1:65535", "localhost:7070", "[::1]:7071",
        "example.org:1", "unix:/run/d.sock", "unix-abstract:d",
        "dns:///example.org:7070", "ipv4:10.0.0.1:7070", "ipv6:[::1]:7070"}) {
    PC_EXPECT_OK(CheckAddress(address));
  }
  for (const char* address :
       {"", "127.0.0.1", ":7070", "localhost:", "localhost:http", "[::1]",
        "::1:7070", "127.0.0.1:-1", "127.0.0.1:+1", "127.0.0.1: 1",
        "127.0.0.1:7070x", "example.org"}) {
    EXPECT_THAT(CheckAddress(address),
                StatusIs(absl::StatusCode::kInvalidArgument,
                         HasSubstr("is not HOST:PORT")))
        << address;
  }
}

TEST(EndpointsTest, PortsEndAt65535) {
  for (const char* address :
       {"127.0.0.1:80000", "localhost:65536", "[::1]:99999",
        "dns:///example.org:80000", "127.0.0.1:18446744073709551617"}) {
    EXPECT_THAT(CheckAddress(address),
                StatusIs(absl::StatusCode::kInvalidArgument,
                         HasSubstr("ports end at 65535")))
        << address;
  }
}

}  // namespace
}  // namespace promptcache::rpc
