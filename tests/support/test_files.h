#pragma once

#include <string>

namespace promptcache {

// Contents of a file; fails the test when it cannot be read.
std::string ReadFileOrDie(const std::string& path);

// Creates or replaces a file; fails the test when it cannot.
void WriteFileOrDie(const std::string& path, const std::string& contents);

// A file of tests/data.
std::string TestDataPath(const std::string& relative);

// The real model (SmolLM2-135M-Instruct, fetched by tools/fetch_model into
// ${XDG_CACHE_HOME:-~/.cache}/promptcache/models), or "" when it is not there:
// then the test skips loudly. tools/test fetches it first.
std::string SmolLm2Path();
// Gemma 3 270M (tools/fetch_model --gemma3), or "".
std::string Gemma3Path();
// The vocabulary of that name beside it (tools/fetch_model --vocab NAME), or
// "".
std::string VocabularyPath(const std::string& name);

// A fresh directory, removed with everything in it when this goes.
class TempDir {
 public:
  TempDir();
  ~TempDir();
  TempDir(const TempDir&) = delete;
  TempDir& operator=(const TempDir&) = delete;
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

}  // namespace promptcache
