#include "tools/cli/files.h"

#include <errno.h>
#include <stdlib.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <iostream>
#include <sstream>
#include <utility>

#include "absl/strings/str_cat.h"

namespace promptcache::cli {
namespace {

namespace fs = std::filesystem;

// A directory of the XDG base directory specification.
fs::path XdgDir(const char* variable, const char* below_home) {
  const char* dir = std::getenv(variable);
  if (dir != nullptr && *dir != '\0') return dir;
  const char* home = std::getenv("HOME");
  return fs::path(home != nullptr ? home : "/") / below_home;
}

}  // namespace

absl::StatusOr<std::string> ReadFile(const std::string& path) {
  std::ostringstream out;
  if (path == "-") {
    out << std::cin.rdbuf();
    return out.str();
  }
  std::error_code error;
  if (fs::is_directory(path, error)) {
    return absl::InvalidArgumentError(absl::StrCat(path, " is a directory"));
  }
  errno = 0;
  std::ifstream in(path, std::ios::binary);
  if (!in.good()) {
    if (errno == ENOENT) return absl::NotFoundError("no file " + path);
    return absl::ErrnoToStatus(errno, absl::StrCat("cannot read ", path));
  }
  out << in.rdbuf();
  return out.str();
}

std::string DefaultModelPath() {
  return XdgDir("XDG_CACHE_HOME", ".cache") / "promptcache" / "models" /
         "SmolLM2-135M-Instruct.Q4_1.gguf";
}

absl::StatusOr<std::string> FindModel(const std::string& model) {
  std::string path = model.empty() ? DefaultModelPath() : model;
  std::error_code error;
  if (fs::exists(path, error)) return path;
  if (!model.empty()) {
    return absl::NotFoundError("no model " + path);
  }
  return absl::NotFoundError(
      absl::StrCat("no model: --model was not given and the small model is not "
                   "at ",
                   path, "; tools/fetch_model fetches it"));
}

absl::StatusOr<std::string> FindSibling(const std::string& name) {
  std::error_code error;
  const fs::path self = fs::read_symlink("/proc/self/exe", error);
  const fs::path path = self.parent_path() / name;
  if (!error && ::access(path.c_str(), X_OK) == 0) return path.string();
  return absl::NotFoundError(absl::StrCat(
      "the program ", name, " is not beside this one: ", path.string(),
      "; build the whole project (cmake --build build)"));
}

std::string DefaultStateDir() {
  return XdgDir("XDG_STATE_HOME", ".local/state") / "promptcache";
}

absl::StatusOr<PrivateDir> PrivateDir::Create() {
  std::error_code error;
  fs::path base = fs::temp_directory_path(error);
  // A Unix socket's path has 107 characters at most.
  if (error || base.string().size() > 60) base = "/tmp";
  std::string name = base / "promptcache.XXXXXX";
  if (::mkdtemp(name.data()) == nullptr) {
    return absl::ErrnoToStatus(errno, absl::StrCat("cannot make ", name));
  }
  return PrivateDir(name);
}

PrivateDir::PrivateDir(PrivateDir&& other) noexcept
    : path_(std::exchange(other.path_, "")) {}

PrivateDir::~PrivateDir() {
  std::error_code ignored;
  if (!path_.empty()) fs::remove_all(path_, ignored);
}

}  // namespace promptcache::cli
