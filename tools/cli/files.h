#pragma once

#include <string>

#include "absl/status/statusor.h"

namespace promptcache::cli {

// A whole file; "-" is standard input.
absl::StatusOr<std::string> ReadFile(const std::string& path);

// ${XDG_CACHE_HOME:-~/.cache}/promptcache/models/SmolLM2-135M-Instruct….gguf:
// where tools/fetch_model leaves the small model.
std::string DefaultModelPath();
// `model` when it is not empty, else the default one. NotFound, saying how to
// get one, when the file is not there.
absl::StatusOr<std::string> FindModel(const std::string& model);

// A program that is installed beside this one (promptcache-daemon, …).
absl::StatusOr<std::string> FindSibling(const std::string& name);

// Where `up` keeps its socket, registry and logs unless told otherwise:
// ${XDG_STATE_HOME:-~/.local/state}/promptcache.
std::string DefaultStateDir();

// A private directory (0700), removed with all in it when this goes.
class PrivateDir {
 public:
  static absl::StatusOr<PrivateDir> Create();
  PrivateDir(PrivateDir&& other) noexcept;
  PrivateDir& operator=(PrivateDir&&) = delete;
  ~PrivateDir();
  const std::string& path() const { return path_; }

 private:
  explicit PrivateDir(std::string path) : path_(std::move(path)) {}
  std::string path_;
};

}  // namespace promptcache::cli
