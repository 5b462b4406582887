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
constexpr int kVersion = 2;

std::string AbsolutePath(const std::string& path) {
  std::error_code error;
  const fs::path absolute = fs::canonical(path, error);
  return error ? fs::absolute(path, error).string() : absolute.string();
}

// Everything that an entry is valid for, then the fingerprint, then a sum over
// both: a line each.
std::string Entry(std::span<const IdentifiedFile> files, const Digest& digest) {
  std::string entry =
      absl::StrCat("promptcache model fingerprint ", kVersion, "\n");
  for (const auto& [path, identity] : files) {
    absl::StrAppend(&entry, absl::CEscape(AbsolutePath(path)), "\ndevice ",
                    identity.device, " inode ", identity.inode, " bytes ",
                    identity.num_bytes, " modified ", identity.modified_ns,
                    " changed ", identity.changed_ns, "\n");
  }
  absl::StrAppend(&entry, digest.ToHex(), "\n");
  absl::StrAppend(&entry, Sha256Of(entry).ToHex(), "\n");
  return entry;
}

fs::path EntryPath(const std::string& dir,
                   std::span<const IdentifiedFile> files) {
  Sha256 sha;
  for (const IdentifiedFile& file : files) {
    sha.Add("path", AbsolutePath(file.path));
  }
  return fs::path(dir) / (sha.Finish().ToHex() + ".fingerprint");
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
  const auto add_float = [sha](std::string_view tag, float value) {
    sha->Add(tag, uint64_t{std::bit_cast<uint32_t>(value)});
  };
  const auto add_enum = [sha](std::string_view tag, auto value) {
    sha->Add(tag, static_cast<uint64_t>(value));
  };
  sha->Add("fingerprint version", uint64_t{kVersion})
      .Add("architecture", config.architecture)
      .Add("layers", uint64_t{config.num_layers})
      .Add("hidden", uint64_t{config.hidden_dim})
      .Add("heads", uint64_t{config.num_heads})
      .Add("kv heads", uint64_t{config.num_kv_heads})
      .Add("head dim", uint64_t{config.head_dim})
      .Add("ffn", uint64_t{config.ffn_dim})
      .Add("vocabulary", uint64_t{config.vocab_size})
      .Add("rope dims", uint64_t{config.rope.dims})
      .Add("position offset", uint64_t{config.position_table_offset});
  add_float("norm epsilon", config.norm_epsilon);
  add_float("norm offset", config.norm_weight_offset);
  add_float("embedding scale", config.embedding_scale);
  add_float("attention scale", config.attention_scale);
  add_float("alibi", config.alibi_max_bias);
  add_float("rope theta", config.rope.theta);
  add_float("local rope theta", config.local_rope_theta);
  add_enum("rope pairing", config.rope.pairing);
  add_enum("positions", config.positions);
  add_enum("norm", config.norm);
  add_enum("activation", config.activation);
  add_enum("residual", config.residual);
  add_enum("alibi before scale", config.alibi_before_scale);
  add_enum("gated", config.gated_ffn);
  add_enum("shared norm", config.shared_parallel_norm);
  add_enum("q and k norm", config.qk_norm);
  add_enum("post norms", config.post_norms);
  for (const uint32_t window : config.layer_windows) {
    sha->Add("window", uint64_t{window});
  }
  const RopeScaling& scaling = config.rope.scaling;
  add_enum("rope scaling", scaling.kind);
  sha->Add("rope context", uint64_t{scaling.original_context});
  for (const float value :
       {scaling.factor, scaling.low_freq_factor, scaling.high_freq_factor,
        scaling.beta_fast, scaling.beta_slow, scaling.attention_factor}) {
    add_float("rope scaling value", value);
  }
  if (config.is_encoder_decoder()) {
    sha->Add("encoder layers", uint64_t{config.encoder_layers})
        .Add("decoder start", static_cast<uint64_t>(config.decoder_start_token))
        .Add("relative buckets", uint64_t{config.relative_buckets})
        .Add("relative distance", uint64_t{config.relative_max_distance});
    add_float("output scale", config.output_scale);
  }
  for (const float value : scaling.divisors) add_float("divisor", value);
  for (const float value : scaling.long_divisors) add_float("long", value);
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
    std::span<const IdentifiedFile> files) const {
  if (dir_.empty()) return std::nullopt;
  std::ifstream in(EntryPath(dir_, files), std::ios::binary);
  if (!in) return std::nullopt;
  const std::string found{std::istreambuf_iterator<char>(in), {}};
  // The digest is the last line but one; an entry counts only if it is what
  // Keep would have written, to the letter.
  constexpr size_t kLineBytes = 65;
  if (found.size() < 2 * kLineBytes) return std::nullopt;
  const auto digest = Digest::FromHex(std::string_view(found).substr(
      found.size() - 2 * kLineBytes, kLineBytes - 1));
  if (!digest.ok() || found != Entry(files, *digest)) return std::nullopt;
  return *digest;
}

void FingerprintCache::Keep(std::span<const IdentifiedFile> files,
                            const Digest& digest) const {
  if (dir_.empty()) return;
  for (const IdentifiedFile& file : files) {
    const auto now = IdentifyFile(file.path);
    if (!now.ok() || *now != file.identity) return;
  }
  std::error_code error;
  fs::create_directories(dir_, error);
  const absl::Status status =
      WriteAtomically(EntryPath(dir_, files), Entry(files, digest));
  if (!status.ok()) LOG(WARNING) << "fingerprint not kept: " << status;
}

Digest FingerprintOf(const ModelConfig& config, const TensorTable& tensors,
                     std::span<const IdentifiedFile> files,
                     const std::string& cache_dir) {
  const FingerprintCache cache(cache_dir);
  if (const auto kept = cache.Find(files)) return *kept;
  Sha256 sha;
  AddModelGeometry(config, &sha);
  for (const auto& [name, view] : tensors.whole()) AddTensor(view, &sha);
  const Digest digest = sha.Finish();
  cache.Keep(files, digest);
  return digest;
}

}  // namespace promptcache::worker
