#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "absl/status/statusor.h"

namespace promptcache::worker {

// What tells one state of a file from another without reading it.
struct FileIdentity {
  uint64_t device = 0;
  uint64_t inode = 0;
  uint64_t num_bytes = 0;
  int64_t modified_ns = 0;
  // Of the inode: moves also when somebody sets the time of modification.
  int64_t changed_ns = 0;

  friend bool operator==(const FileIdentity&, const FileIdentity&) = default;
};

// A whole regular file, mapped read-only. Immutable and thread-safe. The file
// must not be shortened while it is mapped: no process survives reading what
// is no longer there. Replacing it by a rename is fine.
class MappedFile {
 public:
  // NotFound, InvalidArgument (a folder, empty) or what the system says.
  static absl::StatusOr<std::unique_ptr<MappedFile>> Open(
      const std::string& path);
  ~MappedFile();
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;

  std::span<const std::byte> bytes() const { return bytes_; }
  const FileIdentity& identity() const { return identity_; }

 private:
  MappedFile() = default;

  std::span<const std::byte> bytes_;
  FileIdentity identity_;
};

// The identity of the file that `path` names now.
absl::StatusOr<FileIdentity> IdentifyFile(const std::string& path);

}  // namespace promptcache::worker
