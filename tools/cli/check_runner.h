#pragma once

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "common/case_result.h"
#include "inference_worker/engine/compute_device.h"
#include "inference_worker/engine/numerics.h"
#include "inference_worker/engine/vector_check.h"
#include "tools/cli/vector_files.h"

namespace promptcache::cli {

// Runs files of vectors. A case that cannot be run has failed, with the reason
// as its difference; nothing stops the rest. Models are loaded once, when a
// file first needs them. Thread-compatible.
class CheckRunner {
 public:
  // `model`: what --model said; "" is the default model.
  // `device`: as ComputeDevice::Open takes it.
  explicit CheckRunner(std::string model,
                       worker::Numerics numerics = worker::Numerics::kExact,
                       std::string device = "cpu");
  ~CheckRunner();

  using OnFile = std::function<void(const std::string& file)>;
  using OnResult =
      std::function<void(const std::string& file, const CaseResult& result)>;
  void Run(const std::vector<std::string>& paths, const OnFile& on_file,
           const OnResult& on_result);
  // Of all logits that were compared so far.
  const worker::LogitErrors& logit_errors() const { return logit_errors_; }

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
  absl::StatusOr<worker::ComputeDevice*> Device();
  absl::Status LoadTokenizer(const std::string& model, Model** out);
  absl::Status LoadBackend(const std::string& model, Model** out);

  const std::string model_;
  const worker::Numerics numerics_;
  const std::string device_name_;
  std::unique_ptr<worker::ComputeDevice> device_;  // once it is needed
  worker::LogitErrors logit_errors_;
  std::map<std::string, std::unique_ptr<Model>> models_;  // by path
};

}  // namespace promptcache::cli
