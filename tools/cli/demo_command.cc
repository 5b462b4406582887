#include <iostream>
#include <memory>
#include <nlohmann/json.hpp>

#include "absl/strings/str_cat.h"
#include "common/status_macros.h"
#include "tools/cli/app.h"
#include "tools/cli/cli_status.h"
#include "tools/cli/demo/demo_texts.h"
#include "tools/cli/demo_report.h"
#include "tools/cli/demo_run.h"
#include "tools/cli/files.h"
#include "tools/cli/local_node.h"
#include "tools/cli/terminal.h"

namespace promptcache::cli {
namespace {

struct DemoFlags {
  std::string model;
  uint32_t max_tokens = 32;
  uint32_t repeats = 5;
  std::string numerics = "auto";
  std::vector<std::string> worker_args;
};

// What stands in the prompt's <user> element.
std::string QuestionOf(const std::string& pml) {
  const size_t begin = pml.find("<user>") + std::string("<user>").size();
  return pml.substr(begin, pml.find("</user>") - begin);
}

std::vector<DemoPrompt> Prompts() {
  std::vector<DemoPrompt> prompts(2);
  prompts[0].name = "documents in order";
  prompts[0].key = "exact";
  prompts[0].pml = kDemoExactPrompt;
  prompts[1].name = "an order of its own";
  prompts[1].key = "modular";
  prompts[1].pml = kDemoModularPrompt;
  for (DemoPrompt& prompt : prompts) prompt.question = QuestionOf(prompt.pml);
  return prompts;
}

// The demo, step by step. Everything that it says goes to `out`, which is
// standard output, or nowhere with --json.
class Demo {
 public:
  Demo(const DemoFlags& flags, bool json) : flags_(flags), quiet_(json) {}

  absl::Status Run(Interrupt* interrupt);
  const std::vector<DemoPrompt>& prompts() const { return prompts_; }
  const v1::ModelInfo& model() const { return model_; }

 private:
  absl::Status StartServers(Interrupt* interrupt, const std::string& dir);
  absl::Status RegisterSchema();
  absl::Status AnswerPrompt(DemoPrompt* prompt);
  void Say(const std::string& text) {
    if (!quiet_) std::cout << text << std::flush;
  }

  const DemoFlags flags_;
  const bool quiet_;
  std::unique_ptr<LocalNode> node_;
  std::shared_ptr<WorkerClient> worker_;
  v1::ModelInfo model_;
  std::vector<DemoPrompt> prompts_ = Prompts();
};

absl::Status Demo::StartServers(Interrupt* interrupt, const std::string& dir) {
  LocalNode::Options options;
  options.dir = dir;
  PC_ASSIGN_OR_RETURN(options.model, FindModel(flags_.model));
  options.daemon_args = {"--device_bytes=512MiB"};
  options.worker_args = {"--numerics=" + flags_.numerics};
  options.worker_args.insert(options.worker_args.end(),
                             flags_.worker_args.begin(),
                             flags_.worker_args.end());
  {
    ProgressBar bar("promptcache demo:");
    PC_ASSIGN_OR_RETURN(
        node_, LocalNode::Start(options, interrupt, [&](const std::string& s) {
          bar.Update(-1, s);
        }));
  }
  PC_ASSIGN_OR_RETURN(worker_, WorkerClient::Connect(node_->worker_address(),
                                                     absl::Seconds(10)));
  interrupt->SetCallback([worker = worker_] { worker->CancelAll(); });
  PC_ASSIGN_OR_RETURN(model_, worker_->GetModelInfo());
  Say(absl::StrCat(
      "Two processes on this machine, one model:\n", "  daemon  pid ",
      node_->daemon_pid(), ", ", node_->daemon_address(), ": keeps the cache\n",
      "  worker  pid ", node_->worker_pid(), ", ", node_->worker_address(),
      ": runs the model\n", "  model   ", model_.name(), " (",
      model_.num_layers(), " layers, ", model_.numerics(), ", ",
      model_.num_threads(), " threads)\n\n"));
  return absl::OkStatus();
}

absl::Status Demo::RegisterSchema() {
  v1::CreateSchemaRequest request;
  request.set_text(kDemoSchema);
  PC_ASSIGN_OR_RETURN(auto response, worker_->CreateSchema(request));
  uint64_t tokens = 0;
  std::string names;
  for (const auto& module : response.modules()) {
    tokens += module.num_tokens();
    if (module.path().empty()) continue;
    absl::StrAppend(&names, names.empty() ? "" : ", ", module.path());
  }
  Say(absl::StrCat("The schema \"", response.schema().name(), "\" has ",
                   response.modules_size(), " modules, ", WithCommas(tokens),
                   " tokens:\n", Wrap(names, "  ")));
  return absl::OkStatus();
}

absl::Status Demo::AnswerPrompt(DemoPrompt* prompt) {
  Say(absl::StrCat("\n== ", prompt->name, "\n   ", prompt->question, "\n"));
  for (const DemoMode& mode : DemoModes()) {
    Say(absl::StrCat("\n  [", mode.name, "] "));
    PC_ASSIGN_OR_RETURN(
        DemoAnswer answer,
        RunAnswer(worker_.get(), prompt->pml, mode, flags_.max_tokens,
                  [&](const std::string& text) { Say(text); }));
    prompt->answers.push_back(std::move(answer));
  }
  Say("\n\n");
  {
    ProgressBar bar("measuring");
    PC_RETURN_IF_ERROR(MeasureRepeats(
        worker_.get(), flags_.repeats,
        [&](uint32_t i) {
          bar.Update(static_cast<double>(i) / flags_.repeats, prompt->name);
        },
        prompt));
  }
  Say(DemoTable(*prompt));
  return absl::OkStatus();
}

absl::Status Demo::Run(Interrupt* interrupt) {
  PC_ASSIGN_OR_RETURN(const PrivateDir dir, PrivateDir::Create());
  absl::Status status = [&]() -> absl::Status {
    PC_RETURN_IF_ERROR(StartServers(interrupt, dir.path()));
    PC_RETURN_IF_ERROR(RegisterSchema());
    for (DemoPrompt& prompt : prompts_) {
      PC_RETURN_IF_ERROR(AnswerPrompt(&prompt));
    }
    Say("\n" + DemoSummary(prompts_));
    return absl::OkStatus();
  }();
  interrupt->SetCallback(nullptr);
  // Why a call failed is often that its server died: say that instead.
  absl::Status alive =
      node_ == nullptr ? absl::OkStatus() : node_->CheckAlive();
  node_.reset();  // before the directory goes
  if (!status.ok() && !alive.ok()) return alive;
  return status;
}

int RunDemo(const Globals& globals, const DemoFlags& flags) {
  Interrupt interrupt;
  Demo demo(flags, globals.json);
  const absl::Status status = demo.Run(&interrupt);
  if (interrupt.happened()) {
    std::cerr << "\ninterrupted; both servers are ended\n";
    return kExitInterrupted;
  }
  if (!status.ok()) return Report(status, globals.json);
  if (globals.json) {
    std::cout << DemoJson(demo.prompts(), demo.model())
                     .dump(2, ' ', false,
                           nlohmann::ordered_json::error_handler_t::replace)
              << "\n";
  }
  const std::vector<std::string> faults = DemoFaults(demo.prompts());
  for (const std::string& fault : faults) {
    std::cerr << "promptcache demo: FAILED: " << fault << "\n";
  }
  return faults.empty() ? kExitOk : kExitFailed;
}

}  // namespace

void AddDemo(CLI::App* app, const Globals* globals, Action* action) {
  auto flags = std::make_shared<DemoFlags>();
  CLI::App* command = app->add_subcommand(
      "demo",
      "start a daemon and a worker in a private place, answer two prompts with "
      "and without the cache, show what it saves, end everything");
  command->add_option("--model", flags->model,
                      "a GGUF file or a Hugging Face folder; the small model "
                      "that tools/fetch_model fetched otherwise");
  command->add_option("--max-tokens", flags->max_tokens, "longest answer")
      ->check(CLI::Range(1, 2048))
      ->capture_default_str();
  command
      ->add_option("--repeats", flags->repeats,
                   "how often each time is taken; the median is shown")
      ->check(CLI::Range(1, 1000))
      ->capture_default_str();
  command
      ->add_option("--numerics", flags->numerics,
                   "exact: weights as bf16; fast: quantised weights as they "
                   "are; auto: fast where the file has such weights")
      ->check(CLI::IsMember({"auto", "exact", "fast"}))
      ->capture_default_str();
  command
      ->add_option("--worker-arg", flags->worker_args,
                   "a flag for promptcache-worker, as it is; repeatable")
      ->allow_extra_args(false);
  command->callback(
      [=] { *action = [=] { return RunDemo(*globals, *flags); }; });
}

}  // namespace promptcache::cli
