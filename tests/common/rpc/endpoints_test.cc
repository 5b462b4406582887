#include "common/rpc/endpoints.h"

#include <gtest/gtest.h>

namespace promptcache::rpc {
namespace {

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

}  // namespace
}  // namespace promptcache::rpc
