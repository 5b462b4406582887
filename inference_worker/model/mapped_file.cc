#include "inference_worker/model/mapped_file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include <cerrno>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "common/status_macros.h"
#include "common/unique_fd.h"
#include "glog/logging.h"

namespace promptcache::worker {
namespace {

FileIdentity IdentityOf(const struct stat& st) {
  constexpr int64_t kNsPerSecond = 1'000'000'000;
  return {.device = st.st_dev,
          .inode = st.st_ino,
          .num_bytes = static_cast<uint64_t>(st.st_size),
          .modified_ns = st.st_mtim.tv_sec * kNsPerSecond + st.st_mtim.tv_nsec,
          .changed_ns = st.st_ctim.tv_sec * kNsPerSecond + st.st_ctim.tv_nsec};
}

}  // namespace

absl::StatusOr<std::unique_ptr<MappedFile>> MappedFile::Open(
    const std::string& path) {
  const UniqueFd fd(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  if (!fd) return absl::ErrnoToStatus(errno, "cannot open the file");
  struct stat st{};
  if (::fstat(fd.get(), &st) != 0) {
    return absl::ErrnoToStatus(errno, "cannot stat the file");
  }
  if (!S_ISREG(st.st_mode)) {
    return absl::InvalidArgumentError("not a regular file");
  }
  if (st.st_size <= 0) return absl::InvalidArgumentError("the file is empty");

  const auto num_bytes = static_cast<size_t>(st.st_size);
  void* base = ::mmap(nullptr, num_bytes, PROT_READ, MAP_PRIVATE, fd.get(),
                      /*offset=*/0);
  if (base == MAP_FAILED) {
    return absl::ErrnoToStatus(
        errno, absl::StrCat("cannot map ", num_bytes, " bytes"));
  }
  std::unique_ptr<MappedFile> file(new MappedFile());
  file->bytes_ = {static_cast<const std::byte*>(base), num_bytes};
  file->identity_ = IdentityOf(st);
  return file;
}

MappedFile::~MappedFile() {
  if (bytes_.empty()) return;
  // munmap takes void*, but only the mapping goes: nothing is written.
  void* base = const_cast<std::byte*>(bytes_.data());
  if (::munmap(base, bytes_.size()) != 0) PLOG(ERROR) << "munmap of a model";
}

absl::StatusOr<FileIdentity> IdentifyFile(const std::string& path) {
  struct stat st{};
  if (::stat(path.c_str(), &st) != 0) {
    return absl::ErrnoToStatus(errno, absl::StrCat("cannot stat ", path));
  }
  return IdentityOf(st);
}

}  // namespace promptcache::worker
