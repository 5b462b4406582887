#include "common/rpc/endpoints.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include "absl/strings/str_cat.h"
#include "common/unique_fd.h"
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

TEST(EndpointsTest, ATakenPortIsFoundWithoutAServer) {
  const UniqueFd taken(::socket(AF_INET, SOCK_STREAM, 0));
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = ::htonl(INADDR_LOOPBACK);
  socklen_t num_bytes = sizeof(address);
  auto* const any = reinterpret_cast<sockaddr*>(&address);
  ASSERT_EQ(::bind(taken.get(), any, num_bytes), 0);
  ASSERT_EQ(::getsockname(taken.get(), any, &num_bytes), 0);
  ASSERT_EQ(::listen(taken.get(), 1), 0);
  const std::string port = absl::StrCat(":", ::ntohs(address.sin_port));
  for (const char* host : {"127.0.0.1", "localhost", "0.0.0.0"}) {
    EXPECT_THAT(TryListen(host + port),
                StatusIs(absl::StatusCode::kUnavailable,
                         HasSubstr(absl::StrCat("cannot listen on ", host, port,
                                                ": the port is taken"))));
  }
}

TEST(EndpointsTest, AFreePortIsFreeStill) {
  int port = 0;
  {
    const UniqueFd any(::socket(AF_INET, SOCK_STREAM, 0));
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = ::htonl(INADDR_LOOPBACK);
    socklen_t num_bytes = sizeof(address);
    auto* const name = reinterpret_cast<sockaddr*>(&address);
    ASSERT_EQ(::bind(any.get(), name, num_bytes), 0);
    ASSERT_EQ(::getsockname(any.get(), name, &num_bytes), 0);
    port = ::ntohs(address.sin_port);
  }
  for (int i = 0; i < 2; ++i) {
    PC_EXPECT_OK(TryListen(absl::StrCat("127.0.0.1:", port)));
  }
  PC_EXPECT_OK(TryListen("127.0.0.1:0"));
  PC_EXPECT_OK(TryListen("unix:/nowhere/d.sock"));
  EXPECT_THAT(
      TryListen("192.0.2.1:7070"),  // of no machine
      StatusIs(absl::StatusCode::kUnavailable, HasSubstr("192.0.2.1:7070: ")));
}

}  // namespace
}  // namespace promptcache::rpc
