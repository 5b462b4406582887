#include "tools/bench/bench_node.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "common/status_macros.h"

namespace promptcache::bench {

absl::StatusOr<std::unique_ptr<BenchNode>> BenchNode::Start(
    const Options& options) {
  PC_ASSIGN_OR_RETURN(cli::PrivateDir dir, cli::PrivateDir::Create());
  std::unique_ptr<BenchNode> node(new BenchNode(std::move(dir)));
  PC_ASSIGN_OR_RETURN(node->model_, cli::FindModel(options.model));
  PC_ASSIGN_OR_RETURN(BenchText text, BenchText::Open(node->model_));
  node->text_ = std::make_unique<BenchText>(std::move(text));
  cli::Interrupt interrupt;
  PC_ASSIGN_OR_RETURN(
      node->servers_,
      cli::LocalNode::Start({.dir = node->dir_.path(),
                             .model = node->model_,
                             .daemon_args = options.daemon_args,
                             .worker_args = options.worker_args},
                            &interrupt, [](const std::string&) {}));
  PC_ASSIGN_OR_RETURN(node->worker_,
                      cli::WorkerClient::Connect(
                          node->servers_->worker_address(), absl::Seconds(20)));
  PC_ASSIGN_OR_RETURN(node->daemon_,
                      cli::DaemonClient::Connect(
                          node->servers_->daemon_address(), absl::Seconds(20)));
  return node;
}

absl::Status BenchNode::PutSchema(const std::string& name,
                                  std::span<const std::string> modules) {
  v1::CreateSchemaRequest request;
  std::string* text = request.mutable_text();
  absl::StrAppend(text, "<schema name=\"", name, "\">");
  for (size_t i = 0; i < modules.size(); ++i) {
    absl::StrAppend(text, "<module name=\"m", i, "\">", modules[i],
                    "</module>");
  }
  absl::StrAppend(text, "</schema>");
  return worker_->CreateSchema(request).status();
}

absl::StatusOr<FirstToken> BenchNode::TimeFirstToken(
    const v1::GenerateRequest& request) {
  FirstToken first;
  const absl::Time start = absl::Now();
  PC_RETURN_IF_ERROR(
      worker_->Generate(request, [&](const v1::GenerateResponse& event) {
        if (event.has_delta() && first.ms == 0) {
          first.ms = absl::ToDoubleMilliseconds(absl::Now() - start);
        }
        if (event.has_completed()) first.completed = event.completed();
        return true;
      }));
  if (first.ms == 0) return absl::InternalError("no token came");
  return first;
}

v1::GenerateRequest PromptOver(const std::string& schema, size_t num_modules,
                               const std::string& fresh, uint32_t max_tokens) {
  v1::GenerateRequest request;
  std::string* pml = request.mutable_prompt()->mutable_pml();
  absl::StrAppend(pml, "<prompt schema=\"", schema, "\">");
  for (size_t i = 0; i < num_modules; ++i) absl::StrAppend(pml, "<m", i, "/>");
  absl::StrAppend(pml, fresh, "</prompt>");
  request.set_max_tokens(max_tokens);
  request.set_ignore_eos(true);
  return request;
}

}  // namespace promptcache::bench
