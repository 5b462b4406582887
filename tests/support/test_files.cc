#include "tests/support/test_files.h"

#include <stdlib.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <sstream>

#include "glog/logging.h"

namespace promptcache {
namespace {

// Where tools/fetch_model keeps `name`, or "" when it is not there.
std::string FetchedPath(const std::string& name) {
  const char* cache = std::getenv("XDG_CACHE_HOME");
  const char* home = std::getenv("HOME");
  std::filesystem::path dir;
  if (cache != nullptr && *cache != '\0') {
    dir = cache;
  } else if (home != nullptr) {
    dir = std::filesystem::path(home) / ".cache";
  }
  const std::filesystem::path path = dir / "promptcache" / "models" / name;
  return std::filesystem::exists(path) ? path.string() : "";
}

}  // namespace

std::string ReadFileOrDie(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  CHECK(in.good()) << "cannot read " << path;
  std::ostringstream out;
  out << in.rdbuf();
  return out.str();
}

void WriteFileOrDie(const std::string& path, const std::string& contents) {
  std::ofstream out(path, std::ios::binary | std::ios::trunc);
  out << contents;
  out.close();
  CHECK(out.good()) << "cannot write " << path;
}

std::string TestDataPath(const std::string& relative) {
  return std::string(PROMPTCACHE_TEST_DATA) + "/" + relative;
}

std::string SmolLm2Path() {
  return FetchedPath("SmolLM2-135M-Instruct.Q4_1.gguf");
}

std::string Gemma3Path() { return FetchedPath("gemma-3-270m-q4_k_m.gguf"); }

std::string VocabularyPath(const std::string& name) {
  return FetchedPath("ggml-vocab-" + name + ".gguf");
}

TempDir::TempDir() {
  std::string name =
      (std::filesystem::temp_directory_path() / "promptcache.XXXXXX").string();
  CHECK(::mkdtemp(name.data()) != nullptr) << name;
  path_ = name;
}

TempDir::~TempDir() {
  std::error_code ignored;
  std::filesystem::remove_all(path_, ignored);
}

}  // namespace promptcache
