#pragma once

#include <CLI/CLI.hpp>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "promptcache/v1/inference.pb.h"

namespace promptcache::cli {

// How a prompt is given on the command line, and the layout of its plan.
class PromptFlags {
 public:
  void AddTo(CLI::App* command);
  // Reads files and standard input. Usage error for none or several prompts.
  absl::StatusOr<v1::Prompt> Prompt() const;
  v1::PlanLayout layout() const;
  // Whose prompt it is; "" or "-" when it is no file's.
  const std::string& file() const {
    return pml_file_.empty() ? file_ : pml_file_;
  }

 private:
  std::string file_;
  std::string pml_file_;
  std::optional<std::string> text_;
  std::vector<std::string> messages_;
  std::string layout_ = "compact";
};

}  // namespace promptcache::cli
