#include "tools/cli/local_node.h"

#include <filesystem>
#include <fstream>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "common/status_macros.h"
#include "tools/cli/client.h"
#include "tools/cli/files.h"
#include "tools/cli/server_end.h"

namespace promptcache::cli {
namespace {

constexpr double kPollSeconds = 0.05;

// What the server wrote when it had bound its port; "" until then.
std::string ReadPort(const std::string& path) {
  std::ifstream in(path);
  std::string port;
  in >> port;
  // Written in one piece, but a line without its end may still be half of it.
  return in.get() == '\n' ? port : "";
}

std::string HostOf(const std::string& listen) {
  return listen.substr(0, listen.rfind(':'));
}

}  // namespace

absl::Status LocalNode::StartServer(const Options& options, Server* server,
                                    std::vector<std::string> args) {
  server->log_path = absl::StrCat(options.dir, "/", server->name, ".log");
  server->port_path = absl::StrCat(options.dir, "/", server->name, ".port");
  std::error_code ignored;
  std::filesystem::remove(server->port_path, ignored);
  PC_ASSIGN_OR_RETURN(std::string program,
                      FindSibling(absl::StrCat("promptcache-", server->name)));
  args.push_back("--port_file=" + server->port_path);
  PC_ASSIGN_OR_RETURN(server->process,
                      ChildProcess::Start({.program = std::move(program),
                                           .args = std::move(args),
                                           .log_path = server->log_path}));
  return absl::OkStatus();
}

absl::Status LocalNode::Alive(Server* server) {
  auto ended = server->process.Wait(absl::ZeroDuration());
  if (!ended.ok()) return absl::OkStatus();
  return absl::AbortedError(
      WhyEnded(server->name, *ended, server->process.Log(), server->log_path));
}

absl::Status LocalNode::CheckAlive() {
  PC_RETURN_IF_ERROR(Alive(&daemon_));
  return Alive(&worker_);
}

absl::Status LocalNode::WaitServing(
    const Options& options, Interrupt* interrupt,
    const std::function<void(const std::string&)>& tell, Server* server) {
  const absl::Time deadline = absl::Now() + options.start_timeout;
  const std::string& listen =
      server == &daemon_ ? options.daemon_listen : options.worker_listen;
  const std::string task = server == &daemon_ && !options.daemon_task.empty()
                               ? ", " + options.daemon_task
                               : "";
  while (absl::Now() < deadline) {
    PC_RETURN_IF_ERROR(CheckAlive());
    tell(absl::StrCat("starting the ", server->name, task));
    const std::string port = ReadPort(server->port_path);
    if (!port.empty()) {
      server->address = absl::StrCat(HostOf(listen), ":", port);
      if (IsServing(server->address, absl::Milliseconds(500))) {
        return absl::OkStatus();
      }
    }
    if (!interrupt->SleepFor(kPollSeconds)) {
      return absl::CancelledError("interrupted");
    }
  }
  return absl::DeadlineExceededError(absl::StrCat(
      "the ", server->name, " does not serve after ",
      absl::FormatDuration(options.start_timeout), "; its log ",
      server->log_path, " ends:\n", LastLines(server->process.Log(), 12)));
}

absl::Status LocalNode::WaitAttached(const Options& options,
                                     Interrupt* interrupt) {
  PC_ASSIGN_OR_RETURN(
      auto worker, WorkerClient::Connect(worker_.address, absl::Seconds(10)));
  const absl::Time deadline = absl::Now() + options.start_timeout;
  while (absl::Now() < deadline) {
    PC_RETURN_IF_ERROR(CheckAlive());
    auto info = worker->GetModelInfo();
    if (info.ok() && info->daemon_attached()) return absl::OkStatus();
    if (!interrupt->SleepFor(kPollSeconds)) {
      return absl::CancelledError("interrupted");
    }
  }
  return absl::DeadlineExceededError(absl::StrCat(
      "the worker does not attach to the daemon; its log ", worker_.log_path,
      " ends:\n", LastLines(worker_.process.Log(), 12)));
}

absl::StatusOr<std::unique_ptr<LocalNode>> LocalNode::Start(
    const Options& options, Interrupt* interrupt,
    const std::function<void(const std::string&)>& on_progress) {
  // Before anything of another node's is touched: logs, port files.
  PC_ASSIGN_OR_RETURN(
      FileLock lock,
      FileLock::Take(options.dir + "/node.lock",
                     {.who = "another promptcache",
                      .does = absl::StrCat("runs in ", options.dir,
                                           ": end it, or choose another "
                                           "--dir")}));
  std::unique_ptr<LocalNode> node(new LocalNode(std::move(lock)));
  node->socket_ = options.dir + "/daemon.sock";
  node->daemon_.name = "daemon";
  node->worker_.name = "worker";
  std::vector<std::string> daemon_args{"--listen=" + options.daemon_listen,
                                       "--socket=" + node->socket_,
                                       "--db=" + options.dir + "/registry.db"};
  daemon_args.insert(daemon_args.end(), options.daemon_args.begin(),
                     options.daemon_args.end());
  std::vector<std::string> worker_args{"--listen=" + options.worker_listen,
                                       "--daemon_socket=" + node->socket_,
                                       "--model=" + options.model};
  worker_args.insert(worker_args.end(), options.worker_args.begin(),
                     options.worker_args.end());
  // Side by side: the worker packs its weights while the daemon populates
  // its segments.
  PC_RETURN_IF_ERROR(
      node->StartServer(options, &node->daemon_, std::move(daemon_args)));
  PC_RETURN_IF_ERROR(
      node->StartServer(options, &node->worker_, std::move(worker_args)));
  PC_RETURN_IF_ERROR(
      node->WaitServing(options, interrupt, on_progress, &node->daemon_));
  PC_RETURN_IF_ERROR(
      node->WaitServing(options, interrupt, on_progress, &node->worker_));
  PC_RETURN_IF_ERROR(node->WaitAttached(options, interrupt));
  return node;
}

}  // namespace promptcache::cli
