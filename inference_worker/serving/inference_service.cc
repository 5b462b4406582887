#include "inference_worker/serving/inference_service.h"

#include <unistd.h>

#include <algorithm>
#include <memory>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "common/rpc/duration.h"
#include "common/rpc/grpc_status.h"
#include "common/status_macros.h"
#include "inference_worker/serving/generate_reactor.h"
#include "inference_worker/serving/proto_convert.h"
#include "inference_worker/serving/unary_call.h"
#include "inference_worker/serving/warm_reactor.h"

namespace promptcache::worker {
namespace {

absl::Time DeadlineOf(const grpc::CallbackServerContext& context) {
  const auto deadline = context.deadline();
  // gRPC's "none" is the clock's last instant or near it.
  if (deadline - std::chrono::system_clock::now() >
      std::chrono::hours(24 * 365)) {
    return absl::InfiniteFuture();
  }
  return absl::FromChrono(deadline);
}

}  // namespace

absl::Status InferenceService::Options::Validate() const {
  if (retain_ttl >= absl::ZeroDuration()) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("--retain_ttl=", absl::FormatDuration(retain_ttl),
                   ", must not be negative"));
}

InferenceService::InferenceService(const Options& options,
                                   PromptCompiler* compiler,
                                   Scheduler* scheduler, CallLimit* limit)
    : options_(options),
      compiler_(compiler),
      scheduler_(scheduler),
      limit_(limit),
      chooser_(options.cache),
      id_prefix_(absl::StrCat(absl::Hex(absl::ToUnixMicros(absl::Now())), "-",
                              getpid(), "-")),
      executor_(options.compile_threads) {}

std::string InferenceService::NextRequestId() {
  return absl::StrCat(id_prefix_, next_id_.fetch_add(1));
}

absl::StatusOr<std::shared_ptr<const CompiledPrompt>> InferenceService::Compile(
    const PromptForm& form, v1::PlanLayout proto_layout, MatchMode match,
    const GenerationRequest& request) {
  PC_ASSIGN_OR_RETURN(const auto layout, ToLayout(proto_layout));
  PC_ASSIGN_OR_RETURN(std::shared_ptr<const CompiledPrompt> prompt,
                      compiler_->Compile(form, layout, match));
  return chooser_.Choose(std::move(prompt), request.cache_mode,
                         request.isolation_domain);
}

std::optional<ModulePolicy> InferenceService::DefaultRetain(
    const GenerationRequest& request) const {
  const CompiledPrompt& prompt = *request.prompt;
  const int64_t most_tokens =
      int64_t{prompt.plan->num_tokens} + request.max_tokens - 1;
  if (options_.retain_ttl == absl::ZeroDuration() ||
      options_.cache == nullptr || prompt.chunk_tokens == 0 ||
      most_tokens < prompt.chunk_tokens || request.full_attention ||
      request.cache_mode != CacheMode::kReadWrite) {
    return std::nullopt;
  }
  return ModulePolicy{
      .ttl = std::min(options_.retain_ttl, absl::Seconds(rpc::kMaxTtlSeconds))};
}

absl::StatusOr<GenerationRequest> InferenceService::MakeRequest(
    const v1::GenerateRequest& request, absl::Time arrival,
    absl::Time deadline) {
  const absl::Time begin = absl::Now();
  PC_ASSIGN_OR_RETURN(GenerationRequest out, ToGenerationRequest(request));
  PC_ASSIGN_OR_RETURN(const PromptForm form, ToPromptForm(request.prompt()));
  PC_ASSIGN_OR_RETURN(MatchMode match, ToMatch(request.match()));
  // Whether a conversation can be kept must not depend on others' schemas.
  if (out.retain.has_value() && match == MatchMode::kAuto) {
    match = MatchMode::kPrefix;
  }
  PC_ASSIGN_OR_RETURN(out.prompt, Compile(form, request.layout(), match, out));
  const bool names_schema = std::holds_alternative<PmlText>(form) ||
                            std::holds_alternative<pml::StructuredPrompt>(form);
  out.matched = !names_schema && out.prompt->chunk_tokens == 0 &&
                !out.prompt->plan->schema.empty();
  PC_RETURN_IF_ERROR(CheckRetain(out));
  if (request.no_retain() && out.retain.has_value()) {
    return rpc::InvalidFieldError("no_retain", "not with retain");
  }
  if (!request.no_retain() && !out.retain.has_value()) {
    out.retain = DefaultRetain(out);
  }
  out.arrival = arrival;
  out.deadline = deadline;
  out.compile_time = absl::Now() - begin;
  return out;
}

grpc::ServerWriteReactor<v1::GenerateResponse>* InferenceService::Generate(
    grpc::CallbackServerContext* context, const v1::GenerateRequest* request) {
  const absl::Time arrival = absl::Now();
  absl::Status room = limit_->Enter();
  auto reactor = GenerateReactor::Create(scheduler_, limit_, NextRequestId(),
                                         request->include_plan());
  if (!room.ok()) {
    reactor->Start(std::move(room));
    return reactor.get();
  }
  // The message lives as long as the call, which this task keeps open.
  executor_.Add(
      [this, reactor, request, arrival, deadline = DeadlineOf(*context)] {
        reactor->Start(MakeRequest(*request, arrival, deadline));
      });
  return reactor.get();
}

grpc::ServerUnaryReactor* InferenceService::CountTokens(
    grpc::CallbackServerContext*, const v1::CountTokensRequest* request,
    v1::CountTokensResponse* response) {
  return UnaryCall::Start(
      limit_, &executor_, [this, request, response]() -> absl::Status {
        PC_ASSIGN_OR_RETURN(const PromptForm form,
                            ToPromptForm(request->prompt()));
        PC_ASSIGN_OR_RETURN(const MatchMode match, ToMatch(request->match()));
        PC_ASSIGN_OR_RETURN(
            const auto prompt,
            Compile(form, request->layout(), match, GenerationRequest()));
        const pml::Plan& plan = *prompt->plan;
        response->set_prompt_tokens(static_cast<uint32_t>(plan.num_tokens));
        response->set_cacheable_tokens(
            static_cast<uint32_t>(plan.num_cached_tokens));
        response->set_exactness(ToProto(plan.exactness));
        SpansToProto(plan, {}, response->mutable_spans());
        return absl::OkStatus();
      });
}

grpc::ServerWriteReactor<v1::WarmModulesResponse>*
InferenceService::WarmModules(grpc::CallbackServerContext* context,
                              const v1::WarmModulesRequest* request) {
  absl::Status room = limit_->Enter();
  auto reactor = WarmReactor::Create(scheduler_, limit_, DeadlineOf(*context));
  if (!room.ok()) {
    reactor->Start(std::move(room));
    return reactor.get();
  }
  executor_.Add([this, reactor, request] {
    const auto compile = [&]() -> absl::StatusOr<WarmReactor::Prompts> {
      if (reactor->cancelled()) {
        return absl::CancelledError("cancelled by the caller");
      }
      ModulePolicy policy;
      if (request->has_policy()) {
        PC_ASSIGN_OR_RETURN(policy,
                            ToModulePolicy(request->policy(), "policy"));
      }
      return compiler_->CompileWarm(
          request->schema(), {request->paths().begin(), request->paths().end()},
          request->has_policy() ? &policy : nullptr);
    };
    reactor->Start(compile());
  });
  return reactor.get();
}

grpc::ServerUnaryReactor* InferenceService::GetModelInfo(
    grpc::CallbackServerContext* context, const v1::GetModelInfoRequest*,
    v1::ModelInfo* response) {
  *response = options_.model_info;
  response->set_daemon_attached(options_.daemon_attached &&
                                options_.daemon_attached());
  grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
  reactor->Finish(grpc::Status::OK);
  return reactor;
}

}  // namespace promptcache::worker
