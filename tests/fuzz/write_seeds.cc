// write_seeds FOLDER: the seeds of each target, as FOLDER/TARGET/N.

#include <cstdio>
#include <filesystem>

#include "absl/strings/str_cat.h"
#include "tests/fuzz/fuzz_targets.h"
#include "tests/support/test_files.h"

namespace {

void Write(const std::string& folder, const std::vector<std::string>& seeds) {
  std::filesystem::create_directories(folder);
  for (size_t i = 0; i < seeds.size(); ++i) {
    promptcache::WriteFileOrDie(absl::StrCat(folder, "/", i), seeds[i]);
  }
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 2) {
    std::fprintf(stderr, "usage: write_seeds FOLDER\n");
    return 2;
  }
  const std::string folder = argv[1];
  Write(folder + "/gguf", promptcache::worker::GgufSeeds());
  Write(folder + "/hf_folder", promptcache::worker::HfFolderSeeds());
  Write(folder + "/tokenizer", promptcache::worker::HfFolderSeeds());
  Write(folder + "/pml", promptcache::worker::PmlSeeds());
  return 0;
}
