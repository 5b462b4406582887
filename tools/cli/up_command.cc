#include <sys/stat.h>

#include <filesystem>
#include <iostream>
#include <memory>
#include <nlohmann/json.hpp>

#include "absl/strings/cord.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "common/byte_size.h"
#include "inference_worker/model/model_file.h"
#include "tools/cli/app.h"
#include "tools/cli/cache_capacity.h"
#include "tools/cli/cli_status.h"
#include "tools/cli/files.h"
#include "tools/cli/local_node.h"
#include "tools/cli/terminal.h"

namespace promptcache::cli {
namespace {

struct UpFlags {
  std::string model;
  std::string dir;
  std::string memory = "1GiB";
  std::string numerics = "auto";
  std::vector<std::string> daemon_args;
  std::vector<std::string> worker_args;
};

// As a shell reads it.
std::string Quoted(const std::string& path) {
  if (path.find_first_of(" \t\n'\"\\$`*?[](){}<>|&;!#~") == std::string::npos) {
    return path;
  }
  return "'" + absl::StrReplaceAll(path, {{"'", "'\\''"}}) + "'";
}

void SayHowToTalk(const Globals& globals, const std::string& model,
                  const LocalNode& node) {
  if (globals.json) {
    std::cout << nlohmann::ordered_json{{"worker", node.worker_address()},
                                        {"daemon", node.daemon_address()},
                                        {"socket", node.socket()},
                                        {"worker_pid", node.worker_pid()},
                                        {"daemon_pid", node.daemon_pid()},
                                        {"worker_log", node.worker_log()},
                                        {"daemon_log", node.daemon_log()}}
                     .dump()
              << "\n"
              << std::flush;
    return;
  }
  // Flags are needed only where the addresses are not the usual ones.
  const Globals usual;
  std::string to_worker, to_daemon;
  if (node.worker_address() != usual.worker) {
    to_worker = " --worker " + node.worker_address();
  }
  if (node.daemon_address() != usual.daemon) {
    to_daemon = " --daemon " + node.daemon_address();
  }
  std::cout << "worker  " << node.worker_address() << "  (log "
            << node.worker_log() << ")\n"
            << "daemon  " << node.daemon_address() << "  (log "
            << node.daemon_log() << ")\n"
            << "socket  " << node.socket() << "\n\n"
            << "In another terminal:\n"
            << "  promptcache" << to_worker
            << " generate --message user:'What is a cache?'\n"
            << "  promptcache" << to_worker << " schema put FILE\n"
            << "  promptcache" << to_daemon << " stats --watch\n\n"
            << "Another worker over the same cache:\n"
            << "  promptcache-worker --model=" << Quoted(model)
            << " --daemon_socket=" << Quoted(node.socket())
            << " --listen=127.0.0.1:0\n\n"
            << "Ctrl-C ends both.\n"
            << std::flush;
}

absl::StatusOr<LocalNode::Options> NodeOptions(const Globals& globals,
                                               const UpFlags& flags) {
  LocalNode::Options options;
  auto model = FindModel(flags.model);
  if (!model.ok()) return model.status();
  options.model = *model;
  options.dir = flags.dir.empty() ? DefaultStateDir() : flags.dir;
  options.worker_listen = globals.worker;
  options.daemon_listen = globals.daemon;
  auto memory_bytes = ParseByteSize(flags.memory);
  if (!memory_bytes.ok()) {
    return UsageError(
        absl::StrCat("--memory: ", memory_bytes.status().message()));
  }
  options.daemon_args = {absl::StrCat("--device_bytes=", *memory_bytes)};
  options.daemon_task =
      absl::StrCat("taking ", RoundedByteSize(*memory_bytes), " of memory");
  // Every page is touched: 13 s for a GiB on a loaded machine of two cores.
  options.start_timeout +=
      absl::Seconds(30) * static_cast<double>(*memory_bytes >> 30);
  options.daemon_args.insert(options.daemon_args.end(),
                             flags.daemon_args.begin(),
                             flags.daemon_args.end());
  options.worker_args = {"--numerics=" + flags.numerics};
  options.worker_args.insert(options.worker_args.end(),
                             flags.worker_args.begin(),
                             flags.worker_args.end());
  std::error_code error;
  std::filesystem::create_directories(options.dir, error);
  if (error) {
    return absl::FailedPreconditionError(
        absl::StrCat("cannot make ", options.dir, ": ", error.message()));
  }
  ::chmod(options.dir.c_str(), 0700);
  return options;
}

// What the daemon says of the flag that --memory became.
absl::Status InOurWords(const absl::Status& status) {
  absl::Status ours(
      status.code(),
      absl::StrReplaceAll(status.message(), {{"--device_bytes", "--memory"}}));
  status.ForEachPayload([&](absl::string_view url, const absl::Cord& payload) {
    ours.SetPayload(url, payload);
  });
  return ours;
}

// Below it, prompts hardly profit: a system message with a document or two.
constexpr uint64_t kFewTokens = 1024;

// 0: not known. A model that cannot be read is the worker's to tell.
absl::StatusOr<uint64_t> CapacityOf(const LocalNode::Options& options,
                                    uint64_t memory_bytes) {
  // Mapped; nothing of its weights is read.
  const auto file = worker::OpenModelFile(options.model, {});
  if (!file.ok()) return uint64_t{0};
  const worker::ModelConfig& config = (*file)->config();
  const KvLayout layout{.num_layers = config.num_layers,
                        .num_kv_heads = config.num_kv_heads,
                        .head_dim = config.head_dim};
  if (!layout.Validate().ok()) return uint64_t{0};
  return CapacityTokens(layout, memory_bytes);
}

int Up(const Globals& globals, const UpFlags& flags) {
  Interrupt interrupt;
  auto options = NodeOptions(globals, flags);
  if (!options.ok()) return Report(options.status(), globals.json);
  const auto tokens = CapacityOf(*options, *ParseByteSize(flags.memory));
  if (!tokens.ok()) return Report(tokens.status(), globals.json);
  if (*tokens > 0 && *tokens < kFewTokens) {
    std::cerr << "promptcache: note: --memory " << flags.memory << " holds "
              << *tokens << " tokens of this model\n";
  }
  absl::StatusOr<std::unique_ptr<LocalNode>> node;
  {
    ProgressBar bar("promptcache");
    node = LocalNode::Start(*options, &interrupt, [&](const std::string& what) {
      bar.Update(-1, what);
    });
  }
  if (interrupt.happened()) return kExitOk;
  if (!node.ok()) return Report(InOurWords(node.status()), globals.json);
  SayHowToTalk(globals, options->model, **node);
  while (interrupt.SleepFor(0.5)) {
    if (auto status = (*node)->CheckAlive(); !status.ok()) {
      return Report(status, globals.json);
    }
  }
  if (!globals.json) std::cout << "\nended\n";
  return kExitOk;
}

}  // namespace

void AddUp(CLI::App* app, const Globals* globals, Action* action) {
  auto flags = std::make_shared<UpFlags>();
  CLI::App* command = app->add_subcommand(
      "up",
      "start a daemon and a worker on this machine, in the foreground; they "
      "listen at --worker and --daemon (port 0: any)");
  command->add_option("--model", flags->model,
                      "a GGUF file or a Hugging Face folder; the small model "
                      "that tools/fetch_model fetched otherwise");
  command->add_option("--dir", flags->dir,
                      "for socket, registry and logs "
                      "(~/.local/state/promptcache otherwise)");
  command
      ->add_option(
          "--memory", flags->memory,
          "for cached states: 512MiB, 2GiB; taken on each GPU that this "
          "process sees (CUDA_VISIBLE_DEVICES)")
      ->capture_default_str();
  command
      ->add_option("--numerics", flags->numerics,
                   "exact: weights as bf16; fast: quantised weights as they "
                   "are; auto: fast where the file has such weights")
      ->check(CLI::IsMember({"auto", "exact", "fast"}))
      ->capture_default_str();
  command
      ->add_option("--daemon-arg", flags->daemon_args,
                   "a flag for promptcache-daemon, as it is; repeatable")
      ->allow_extra_args(false);
  command
      ->add_option("--worker-arg", flags->worker_args,
                   "a flag for promptcache-worker, as it is; repeatable")
      ->allow_extra_args(false);
  command->callback([=] { *action = [=] { return Up(*globals, *flags); }; });
}

}  // namespace promptcache::cli
