#include <iostream>
#include <memory>
#include <nlohmann/json.hpp>

#include "common/status_macros.h"
#include "inference_worker/engine/compute_device.h"
#include "inference_worker/engine/self_check.h"
#include "inference_worker/model/model_file.h"
#include "tools/cli/app.h"
#include "tools/cli/cli_status.h"
#include "tools/cli/files.h"
#include "tools/cli/terminal.h"

namespace promptcache::cli {
namespace {

using Json = nlohmann::ordered_json;

// Room for the self-check's longest sequences.
constexpr uint64_t kPrivateTokens = 1024;

struct VerifyFlags {
  std::string model;
  std::string kernels = "auto";
  std::string numerics = "auto";
  std::string device = "auto";
};

const char* RuleName(worker::ReuseRule rule) {
  switch (rule) {
    case worker::ReuseRule::kAnywhere:
      return "anywhere";
    case worker::ReuseRule::kInPlace:
      return "in place";
    case worker::ReuseRule::kNever:
      return "never";
  }
  return "";
}

absl::StatusOr<Json> VerifyModel(const VerifyFlags& flags) {
  PC_ASSIGN_OR_RETURN(const std::string path, FindModel(flags.model));
  PC_ASSIGN_OR_RETURN(const worker::Numerics numerics,
                      worker::ParseNumerics(flags.numerics));
  PC_ASSIGN_OR_RETURN(const auto file, worker::OpenModelFile(path, {}));
  PC_ASSIGN_OR_RETURN(const auto device,
                      worker::ComputeDevice::Open(flags.device));
  ProgressBar bar("loading");
  PC_ASSIGN_OR_RETURN(
      const auto backend,
      device->CreateBackend(
          *file, {.numerics = numerics,
                  .kernels = flags.kernels,
                  .progress = [&](double done) { bar.Update(done, ""); }}));
  const KvLayout& layout = backend->layout();
  PC_ASSIGN_OR_RETURN(const auto memory,
                      worker::KvMemory::Create(device->memory()));
  PC_ASSIGN_OR_RETURN(
      const auto pages,
      worker::PrivatePages::Create(
          layout, layout.PagesFor(kPrivateTokens) * layout.page_bytes(),
          memory.get()));
  const worker::ReuseRule rule = worker::ReuseRuleOf(file->config());
  PC_ASSIGN_OR_RETURN(const worker::ReuseErrors errors,
                      worker::CheckReuse(*backend, *pages, rule));
  return Json{{"model", path},
              {"architecture", file->config().architecture},
              {"numerics", backend->numerics()},
              {"reuse", RuleName(rule)},
              {"in_place_error", errors.in_place},
              {"moved_error", errors.moved},
              {"tolerance", errors.tolerance},
              {"passed", errors.ok()}};
}

int Verify(const Globals& globals, const VerifyFlags& flags) {
  auto json = VerifyModel(flags);
  if (!json.ok()) return Report(json.status(), globals.json);
  const bool passed = json->at("passed").get<bool>();
  if (globals.json) {
    std::cout << json->dump(2) << "\n";
  } else {
    for (const auto& [name, value] : json->items()) {
      std::cout << name << ": "
                << (value.is_string() ? value.get<std::string>() : value.dump())
                << "\n";
    }
  }
  return passed ? kExitOk : kExitFailed;
}

}  // namespace

void AddVerify(CLI::App* app, const Globals* globals, Action* action) {
  auto flags = std::make_shared<VerifyFlags>();
  CLI::App* command = app->add_subcommand(
      "verify",
      "load a model and compare reused states with computed ones, as a worker "
      "does when it starts; no server. Errors are relative to the logits");
  command->add_option("--model", flags->model,
                      "a GGUF file or a model's folder (the small model that "
                      "tools/fetch_model fetched otherwise)");
  command
      ->add_option("--device", flags->device,
                   "where it runs: cpu, cuda, a GPU by its UUID, or auto")
      ->capture_default_str();
  command->add_option("--kernels", flags->kernels,
                      "auto, or a set of kernels by name");
  command->add_option("--numerics", flags->numerics, "auto, exact or fast")
      ->check(CLI::IsMember({"auto", "exact", "fast"}));
  command->callback(
      [=] { *action = [=] { return Verify(*globals, *flags); }; });
}

}  // namespace promptcache::cli
