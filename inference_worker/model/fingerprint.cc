#include "inference_worker/model/fingerprint.h"

#include <fcntl.h>
#include <stdlib.h>
#include <unistd.h>

#include <bit>
#include <cerrno>
#include <filesystem>
#include <fstream>
#include <iterator>

#include "absl/status/status.h"
#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "common/strings.h"
#include "common/unique_fd.h"
#include "glog/logging.h"
#include "inference_worker/model/tensor_types.h"

namespace promptcache::worker {
namespace {

namespace fs = std::filesystem;

// Moves when what is hashed, or the form of an entry, changes.
constexpr int kVersion = 1;

std::string AbsolutePath(const std::string& path) {
  std::error_code error;
  const fs::path absolute = fs::canonical(path, error);
  return error ? fs::absolute(path, error).string() : absolute.string();
}

// Everything that an entry is valid for, then the fingerprint, then a sum over
// both: a line each.
std::string Entry(const std::string& path, const FileIdentity& identity,
                  const Digest& digest) {
  std::string entry = absl::StrCat(
      "promptcache model fingerprint ", kVersion, "\n", absl::CEscape(path),
      "\ndevice ", identity.device, " inode ", identity.inode, " bytes ",
      identity.num_bytes, " modified ", identity.modified_ns, " changed ",
      identity.changed_ns, "\n", digest.ToHex(), "\n");
  absl::StrAppend(&entry, Sha256Of(entry).ToHex(), "\n");
  return entry;
}

fs::path EntryPath(const std::string& dir, const std::string& path) {
  return fs::path(dir) / (Sha256Of(path).ToHex() + ".fingerprint");
}

// Written beside its place and renamed: readers see all of it or nothing.
absl::Status WriteAtomically(const fs::path& path, const std::string& text) {
  std::string temporary = path.string() + ".XXXXXX";
  const UniqueFd fd(::mkostemp(temporary.data(), O_CLOEXEC));
  if (!fd) return absl::ErrnoToStatus(errno, temporary);
  const ssize_t written = ::write(fd.get(), text.data(), text.size());
  if (written != static_cast<ssize_t>(text.size()) ||
      ::rename(temporary.c_str(), path.c_str()) != 0) {
    const absl::Status status = absl::ErrnoToStatus(errno, temporary);
    ::unlink(temporary.c_str());
    return status;
  }
  return absl::OkStatus();
}

}  // namespace

void AddModelGeometry(const ModelConfig& config, Sha256* sha) {
  sha->Add("fingerprint version", uint64_t{kVersion})
      .Add("architecture", config.architecture)
      .Add("layers", uint64_t{config.num_layers})
      .Add("hidden", uint64_t{config.hidden_dim})
      .Add("heads", uint64_t{config.num_heads})
      .Add("kv heads", uint64_t{config.num_kv_heads})
      .Add("head dim", uint64_t{config.head_dim})
      .Add("ffn", uint64_t{config.ffn_dim})
      .Add("vocabulary", uint64_t{config.vocab_size})
      .Add("norm epsilon", std::bit_cast<uint32_t>(config.norm_epsilon))
      .Add("rope theta", std::bit_cast<uint32_t>(config.rope.theta))
      .Add("rope dims", uint64_t{config.rope.dims})
      .Add("rope pairing", static_cast<uint64_t>(config.rope.pairing));
}

void AddTensor(const TensorView& tensor, Sha256* sha) {
  sha->Add("tensor", tensor.name)
      .Add("type", TensorTypeName(tensor.type))
      .Add("rows", tensor.rows)
      .Add("cols", tensor.cols)
      .Add("data",
           std::string_view(reinterpret_cast<const char*>(tensor.data.data()),
                            tensor.data.size()));
}

std::optional<Digest> FingerprintCache::Find(
    const std::string& path, const FileIdentity& identity) const {
  if (dir_.empty()) return std::nullopt;
  const std::string absolute = AbsolutePath(path);
  std::ifstream in(EntryPath(dir_, absolute), std::ios::binary);
  if (!in) return std::nullopt;
  const std::string found{std::istreambuf_iterator<char>(in), {}};
  // The digest is the last line but one; an entry counts only if it is what
  // Keep would have written, to the letter.
  constexpr size_t kLineBytes = 65;
  if (found.size() < 2 * kLineBytes) return std::nullopt;
  const auto digest = Digest::FromHex(std::string_view(found).substr(
      found.size() - 2 * kLineBytes, kLineBytes - 1));
  if (!digest.ok() || found != Entry(absolute, identity, *digest)) {
    return std::nullopt;
  }
  return *digest;
}

void FingerprintCache::Keep(const std::string& path,
                            const FileIdentity& identity,
                            const Digest& digest) const {
  if (dir_.empty()) return;
  const auto now = IdentifyFile(path);
  if (!now.ok() || *now != identity) return;
  std::error_code error;
  fs::create_directories(dir_, error);
  const std::string absolute = AbsolutePath(path);
  const absl::Status status = WriteAtomically(
      EntryPath(dir_, absolute), Entry(absolute, identity, digest));
  if (!status.ok()) LOG(WARNING) << "fingerprint not kept: " << status;
}

}  // namespace promptcache::worker
