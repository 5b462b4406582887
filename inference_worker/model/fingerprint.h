#pragma once

#include <optional>
#include <span>
#include <string>

#include "common/digest.h"
#include "inference_worker/model/mapped_file.h"
#include "inference_worker/model/model_file.h"
#include "inference_worker/model/tensor_table.h"

namespace promptcache::worker {

// What a model's states depend on besides its tensors: architecture, shape and
// rotation. Not its name, nor how long a context it is meant for.
void AddModelGeometry(const ModelConfig& config, Sha256* sha);
// Name, type, shape and data.
void AddTensor(const TensorView& tensor, Sha256* sha);

// A file and the state of it that was opened.
struct IdentifiedFile {
  std::string path;
  FileIdentity identity;
};

// Fingerprints of models by the paths and identities of their files, one small
// file each. Only a shortcut: an entry that is damaged, of other files or of
// another state of them is not there, and what cannot be written is not kept.
// Thread-safe; processes may share a folder.
class FingerprintCache {
 public:
  // "": keeps nothing.
  explicit FingerprintCache(std::string dir) : dir_(std::move(dir)) {}

  std::optional<Digest> Find(std::span<const IdentifiedFile> files) const;
  // The identities are what the files were when `digest` was begun. Not kept
  // when one is another by now.
  void Keep(std::span<const IdentifiedFile> files, const Digest& digest) const;

 private:
  const std::string dir_;
};

// The fingerprint of a model in these files: kept in `cache_dir`, or computed
// and then kept.
Digest FingerprintOf(const ModelConfig& config, const TensorTable& tensors,
                     std::span<const IdentifiedFile> files,
                     const std::string& cache_dir);

}  // namespace promptcache::worker
