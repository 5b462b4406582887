#pragma once

#include <optional>
#include <string>

#include "common/digest.h"
#include "inference_worker/model/mapped_file.h"
#include "inference_worker/model/model_file.h"

namespace promptcache::worker {

// What a model's states depend on besides its tensors: architecture, shape and
// rotation. Not its name, nor how long a context it is meant for.
void AddModelGeometry(const ModelConfig& config, Sha256* sha);
// Name, type, shape and data.
void AddTensor(const TensorView& tensor, Sha256* sha);

// Fingerprints of files by path and identity, one small file each. Only a
// shortcut: an entry that is damaged, of another file or of another state of
// the file is not there, and what cannot be written is not kept.
// Thread-safe; processes may share a folder.
class FingerprintCache {
 public:
  // "": keeps nothing.
  explicit FingerprintCache(std::string dir) : dir_(std::move(dir)) {}

  std::optional<Digest> Find(const std::string& path,
                             const FileIdentity& identity) const;
  // `identity` is what the file was when `digest` was begun. Not kept when it
  // is another file by now.
  void Keep(const std::string& path, const FileIdentity& identity,
            const Digest& digest) const;

 private:
  const std::string dir_;
};

}  // namespace promptcache::worker
