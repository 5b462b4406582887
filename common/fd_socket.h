#pragma once

#include <sys/types.h>

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "common/unique_fd.h"

namespace promptcache {

// The raw descriptor socket beside the daemon's gRPC socket: gRPC carries
// neither descriptors nor peer credentials.
//
// Protocol, version 2, over SOCK_SEQPACKET: the client connects and sends
// FdHello with its own pidfd attached; the daemon checks SO_PEERCRED, answers
// FdWelcome, then `num_segments` messages FdSegment with one descriptor each:
// those of the client's device and of the host tier.
// The daemon closes the connection when the token has been used or
// kFdTokenLifetime has passed; the worker closes it whenever it likes.

inline constexpr uint32_t kFdMagic = 0x31444650;  // "PFD1"

enum class FdKind : uint32_t {
  kSegment = 1,      // memfd with pages; `bytes` long
  kGenerations = 2,  // memfd of uint64_t[num_segments][pages_stride], read-only
  kCudaSegment = 3,  // CUDA VMM allocation with pages; `bytes` long
};

struct FdHello {
  uint32_t magic = kFdMagic;
  uint32_t version = 2;
  // What the client computes on, padded with zeros; empty: the CPU.
  std::array<char, 48> device_uuid{};
};

struct FdWelcome {
  uint32_t magic = kFdMagic;
  uint32_t num_segments = 0;  // messages that follow, generations included
  // Presented in the session's first message; single use.
  std::array<uint8_t, 16> token{};
};

struct FdSegment {
  FdKind kind = FdKind::kSegment;
  uint32_t segment = 0;
  uint64_t bytes = 0;
};

struct PeerCredentials {
  pid_t pid = 0;
  uid_t uid = 0;
  gid_t gid = 0;
};

// A listening SOCK_SEQPACKET socket at `path`, mode 0660; a stale socket file
// is removed first, a live one gives FailedPrecondition.
absl::StatusOr<UniqueFd> ListenUnix(const std::string& path);
// Unavailable when nobody listens there.
absl::StatusOr<UniqueFd> ConnectUnix(const std::string& path);
absl::StatusOr<PeerCredentials> GetPeerCredentials(int fd);

// One message with at most one descriptor. Send dups `attached_fd` (-1: none).
absl::Status SendWithFd(int socket, const void* data, size_t num_bytes,
                        int attached_fd);
// Receives exactly `num_bytes`; DeadlineExceeded after `timeout`, Unavailable
// when the peer has closed, InvalidArgument for another length.
absl::StatusOr<UniqueFd> ReceiveWithFd(int socket, void* data, size_t num_bytes,
                                       absl::Duration timeout);

}  // namespace promptcache
