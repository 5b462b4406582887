#pragma once

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "common/case_result.h"
#include "tools/cli/vector_files.h"

namespace promptcache::cli {

// Runs files of vectors. A case that cannot be run has failed, with the reason
// as its difference; nothing stops the rest. Models are loaded once, when a
// file first needs them. Thread-compatible.
class CheckRunner {
 public:
  // `model`: what --model said; "" is the default model.
  explicit CheckRunner(std::string model);
  ~CheckRunner();

  using OnFile = std::function<void(const std::string& file)>;
  using OnResult =
      std::function<void(const std::string& file, const CaseResult& result)>;
  void Run(const std::vector<std::string>& paths, const OnFile& on_file,
           const OnResult& on_result);

 private:
  struct Model;
  std::vector<CaseResult> RunFile(const std::string& path,
                                  const std::string& root, bool named);
  // The model of the folder that `path` lies in (or of one above it, up to
  // `root`), else the one that was named.
  std::string ModelFor(const std::string& path, const std::string& root) const;
  absl::StatusOr<std::vector<CaseResult>> RunText(VectorKind kind,
                                                  const std::string& text,
                                                  const std::string& model);
  absl::Status LoadTokenizer(const std::string& model, Model** out);
  absl::Status LoadBackend(const std::string& model, Model** out);

  const std::string model_;
  std::map<std::string, std::unique_ptr<Model>> models_;  // by path
};

}  // namespace promptcache::cli
