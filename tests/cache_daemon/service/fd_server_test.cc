#include "cache_daemon/service/fd_server.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <grp.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstring>

#include "absl/strings/str_cat.h"
#include "cuda/runtime/segment.h"
#include "tests/support/fake_clock.h"
#include "tests/support/status_matchers.h"
#include "tests/support/test_files.h"

namespace promptcache::daemon {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr absl::Duration kPatience = absl::Seconds(20);

UniqueFd PidfdOf(pid_t pid) {
  return UniqueFd(static_cast<int>(::syscall(SYS_pidfd_open, pid, 0)));
}

class FdServerTest : public ::testing::Test {
 protected:
  FdServerTest() {
    auto segment = gpu::HostSegment::Create("pages", 1 << 16);
    PC_EXPECT_OK(segment);
    segment_ = *std::move(segment);
    auto generations = gpu::HostSegment::Create("generations", 4096);
    PC_EXPECT_OK(generations);
    generations_ = *std::move(generations);
  }
  std::string Path() const { return dir_.path() + "/d.sock.fd"; }
  void Start(FdServer::Options options = {}) {
    options.path = Path();
    auto server = FdServer::Create(
        options,
        {{FdKind::kSegment, 7, segment_.bytes(), segment_.fd()},
         {FdKind::kGenerations, 0, generations_.bytes(), generations_.fd()},
         {FdKind::kCudaSegment, 1, segment_.bytes(), segment_.fd(), "GPU-1"},
         {FdKind::kCudaSegment, 2, segment_.bytes(), segment_.fd(), "GPU-2"}},
        &clock_);
    PC_ASSERT_OK(server);
    server_ = *std::move(server);
  }
  UniqueFd Connect() {
    auto fd = ConnectUnix(Path());
    PC_EXPECT_OK(fd);
    return fd.ok() ? *std::move(fd) : UniqueFd();
  }
  absl::StatusOr<FdWelcome> SayHello(int socket, FdHello hello = {}) {
    const UniqueFd self = PidfdOf(::getpid());
    PC_EXPECT_OK(SendWithFd(socket, &hello, sizeof(hello), self.get()));
    FdWelcome welcome;
    auto fd = ReceiveWithFd(socket, &welcome, sizeof(welcome), kPatience);
    if (!fd.ok()) return fd.status();
    received_.clear();
    for (uint32_t i = 0; i < welcome.num_segments; ++i) {
      FdSegment told;
      fd = ReceiveWithFd(socket, &told, sizeof(told), kPatience);
      if (!fd.ok()) return fd.status();
      received_.emplace_back(told, *std::move(fd));
    }
    return welcome;
  }
  // True when the server closes the connection; never waits in vain.
  static bool Closed(int socket) {
    char byte[4096];
    while (true) {
      auto fd = ReceiveWithFd(socket, byte, sizeof(byte), kPatience);
      if (absl::IsUnavailable(fd.status())) return true;
      if (!absl::IsInvalidArgument(fd.status())) return false;
    }
  }
  static std::string Bytes(const FdToken& token) {
    return std::string(token.begin(), token.end());
  }

  TempDir dir_;
  FakeClock clock_;
  gpu::HostSegment segment_;
  gpu::HostSegment generations_;
  std::unique_ptr<FdServer> server_;
  std::vector<std::pair<FdSegment, UniqueFd>> received_;
};

TEST_F(FdServerTest, HandsOutTheVerySegments) {
  Start();
  const UniqueFd socket = Connect();
  const auto welcome = SayHello(socket.get());
  PC_ASSERT_OK(welcome);
  EXPECT_EQ(welcome->magic, kFdMagic);
  ASSERT_EQ(welcome->num_segments, 2u);
  auto& [told, fd] = received_.at(0);
  EXPECT_EQ(told.segment, 7u);
  EXPECT_EQ(told.kind, FdKind::kSegment);
  EXPECT_EQ(received_.at(1).first.kind, FdKind::kGenerations);
  auto mapped =
      gpu::MappedSegment::Map(std::move(fd), told.bytes, /*writable=*/true);
  PC_ASSERT_OK(mapped);
  std::memcpy(mapped->write_base() + 100, "hello", 5);
  EXPECT_EQ(std::memcmp(segment_.base() + 100, "hello", 5), 0);
}

TEST_F(FdServerTest, ATokenOpensOneSession) {
  Start();
  const UniqueFd socket = Connect();
  const auto welcome = SayHello(socket.get());
  PC_ASSERT_OK(welcome);
  const auto peer = server_->RedeemToken(Bytes(welcome->token));
  PC_ASSERT_OK(peer);
  EXPECT_EQ(peer->credentials.pid, ::getpid());
  EXPECT_TRUE(peer->pidfd);
  EXPECT_THAT(server_->RedeemToken(Bytes(welcome->token)),
              StatusIs(absl::StatusCode::kPermissionDenied, HasSubstr("used")));
  EXPECT_TRUE(Closed(socket.get()));
}

TEST_F(FdServerTest, TokensThatWereNeverGivenOpenNothing) {
  Start();
  EXPECT_THAT(
      server_->RedeemToken(std::string(16, '\0')),
      StatusIs(absl::StatusCode::kPermissionDenied, HasSubstr("token")));
  EXPECT_THAT(
      server_->RedeemToken("short"),
      StatusIs(absl::StatusCode::kPermissionDenied, HasSubstr("5 bytes")));
}

TEST_F(FdServerTest, ATokenExpiresAndItsConnectionIsClosed) {
  Start({.token_lifetime = absl::Seconds(30)});
  const UniqueFd socket = Connect();
  const auto welcome = SayHello(socket.get());
  PC_ASSERT_OK(welcome);
  clock_.Advance(absl::Seconds(31));
  EXPECT_THAT(
      server_->RedeemToken(Bytes(welcome->token)),
      StatusIs(absl::StatusCode::kPermissionDenied, HasSubstr("expired")));
  EXPECT_TRUE(Closed(socket.get()));
}

TEST_F(FdServerTest, ATokenOutlivesItsConnection) {
  Start();
  UniqueFd socket = Connect();
  const auto welcome = SayHello(socket.get());
  PC_ASSERT_OK(welcome);
  socket.Reset();
  PC_EXPECT_OK(server_->RedeemToken(Bytes(welcome->token)));
}

TEST_F(FdServerTest, AWorkerGetsWhatIsOfItsDeviceAndOfAll) {
  Start();
  FdHello hello;
  std::string("GPU-2").copy(hello.device_uuid.data(), 5);
  PC_ASSERT_OK(SayHello(Connect().get(), hello));
  std::vector<uint32_t> segments;
  for (const auto& [told, fd] : received_) segments.push_back(told.segment);
  EXPECT_THAT(segments, ElementsAre(7, 0, 2));
  PC_ASSERT_OK(SayHello(Connect().get()));
  EXPECT_EQ(received_.size(), 2u);
}

TEST_F(FdServerTest, GarbageIsCutOff) {
  Start();
  for (const std::string& garbage :
       {std::string("x"), std::string(8, 'y'), std::string(5000, 'z')}) {
    const UniqueFd socket = Connect();
    PC_ASSERT_OK(SendWithFd(socket.get(), garbage.data(), garbage.size(), -1));
    EXPECT_TRUE(Closed(socket.get()));
  }
  // Another version, and descriptors that nobody asked for.
  const UniqueFd socket = Connect();
  const FdHello hello{.version = 1};
  PC_ASSERT_OK(SendWithFd(socket.get(), &hello, sizeof(hello), segment_.fd()));
  EXPECT_TRUE(Closed(socket.get()));
  EXPECT_EQ(server_->stats().num_tokens, 0u);
  PC_EXPECT_OK(SayHello(Connect().get()));
}

TEST_F(FdServerTest, ASecondHelloIsCutOff) {
  Start();
  const UniqueFd socket = Connect();
  PC_ASSERT_OK(SayHello(socket.get()));
  const FdHello hello;
  PC_ASSERT_OK(SendWithFd(socket.get(), &hello, sizeof(hello), -1));
  EXPECT_TRUE(Closed(socket.get()));
}

TEST_F(FdServerTest, ASilentPeerIsCutOff) {
  Start({.hello_timeout = absl::Seconds(5)});
  const UniqueFd silent = Connect();
  PC_ASSERT_OK(SayHello(Connect().get()));  // the silent one is accepted now
  clock_.Advance(absl::Seconds(6));
  EXPECT_TRUE(Closed(silent.get()));
}

TEST_F(FdServerTest, AFullServerRefusesAndRecovers) {
  Start({.max_connections = 1});
  UniqueFd first = Connect();
  const auto welcome = SayHello(first.get());
  PC_ASSERT_OK(welcome);
  EXPECT_TRUE(Closed(Connect().get()));
  PC_ASSERT_OK(server_->RedeemToken(Bytes(welcome->token)));
  ASSERT_TRUE(Closed(first.get()));
  PC_EXPECT_OK(SayHello(Connect().get()));
}

TEST_F(FdServerTest, UnusedTokensAreBounded) {
  Start({.max_tokens = 2});
  PC_ASSERT_OK(SayHello(Connect().get()));
  PC_ASSERT_OK(SayHello(Connect().get()));
  const UniqueFd third = Connect();
  EXPECT_FALSE(SayHello(third.get()).ok());
  EXPECT_TRUE(Closed(third.get()));
  EXPECT_EQ(server_->stats().num_tokens, 2u);
}

TEST_F(FdServerTest, TheSocketIsForOwnerAndGroup) {
  Start();
  struct stat info{};
  ASSERT_EQ(::stat(Path().c_str(), &info), 0);
  EXPECT_EQ(info.st_mode & 07777u, 0660u);
}

TEST_F(FdServerTest, ASecondServerIsRefusedAndAStaleFileIsNot) {
  Start();
  EXPECT_THAT(FdServer::Create({.path = Path()}, {}, &clock_),
              StatusIs(absl::StatusCode::kFailedPrecondition,
                       HasSubstr("another daemon")));
  server_.reset();
  EXPECT_NE(::access(Path().c_str(), F_OK), 0);
  {
    auto stale = ListenUnix(Path());
  }  // left behind, as by a kill
  Start();
  PC_EXPECT_OK(SayHello(Connect().get()));
}

// Runs `body` as another user in a child; its exit status says how it went.
template <typename Body>
int AsUser(uid_t uid, gid_t gid, const Body& body) {
  const pid_t child = ::fork();
  if (child == 0) {
    if (::setgroups(0, nullptr) != 0 || ::setresgid(gid, gid, gid) != 0 ||
        ::setresuid(uid, uid, uid) != 0) {
      ::_exit(99);
    }
    ::_exit(body());
  }
  int status = -1;
  ::waitpid(child, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

// 0: welcomed, 1: closed without a welcome, 2: could not connect.
int TryAsStranger(const std::string& path) {
  auto socket = ConnectUnix(path);
  if (!socket.ok()) return 2;
  const UniqueFd self = PidfdOf(::getpid());
  const FdHello hello;
  if (!SendWithFd(socket->get(), &hello, sizeof(hello), self.get()).ok()) {
    return 1;
  }
  FdWelcome welcome;
  return ReceiveWithFd(socket->get(), &welcome, sizeof(welcome), kPatience).ok()
             ? 0
             : 1;
}

TEST_F(FdServerTest, OtherUsersAreRefusedUnlessAllowed) {
  if (::geteuid() != 0) GTEST_SKIP() << "needs root to become another user";
  constexpr uid_t kStranger = 54321;
  ::chmod(dir_.path().c_str(), 0755);
  Start();
  EXPECT_EQ(AsUser(kStranger, kStranger, [&] { return TryAsStranger(Path()); }),
            2);  // the file's mode
  ::chmod(Path().c_str(), 0666);
  EXPECT_EQ(AsUser(kStranger, kStranger, [&] { return TryAsStranger(Path()); }),
            1);  // its credentials
  server_.reset();
  Start({.allowed_uids = {kStranger}});
  ::chmod(Path().c_str(), 0666);
  EXPECT_EQ(AsUser(kStranger, kStranger, [&] { return TryAsStranger(Path()); }),
            0);
}

TEST(CheckPidfdTest, TellsWhoseItIs) {
  const UniqueFd self = PidfdOf(::getpid());
  PC_EXPECT_OK(CheckPidfd(self.get(), ::getpid()));
  EXPECT_THAT(CheckPidfd(self.get(), ::getppid()),
              StatusIs(absl::StatusCode::kPermissionDenied, HasSubstr("peer")));
  const UniqueFd file(::open("/dev/null", O_RDONLY));
  EXPECT_THAT(
      CheckPidfd(file.get(), ::getpid()),
      StatusIs(absl::StatusCode::kPermissionDenied, HasSubstr("no pidfd")));
  EXPECT_FALSE(CheckPidfd(-1, ::getpid()).ok());
}

TEST(CheckPidfdTest, RefusesADeadProcess) {
  const pid_t child = ::fork();
  if (child == 0) ::_exit(0);
  const UniqueFd pidfd = PidfdOf(child);
  ::waitpid(child, nullptr, 0);
  EXPECT_FALSE(CheckPidfd(pidfd.get(), child).ok());
}

}  // namespace
}  // namespace promptcache::daemon
