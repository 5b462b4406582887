#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "inference_worker/serving/call_limit.h"
#include "inference_worker/serving/executor.h"
#include "inference_worker/serving/prompt_choice.h"
#include "inference_worker/serving/prompt_compiler.h"
#include "inference_worker/serving/scheduler.h"
#include "promptcache/v1/inference.grpc.pb.h"

namespace promptcache::worker {

// promptcache.v1.InferenceService: validates, converts, hands over. Prompts
// are compiled on an executor, since that may ask the daemon for a schema.
// Thread-safe. Must not outlive what it is given.
class InferenceService final : public v1::InferenceService::CallbackService {
 public:
  struct Options {
    uint32_t compile_threads = 2;
    // All that stays the same while the worker runs.
    v1::ModelInfo model_info;
    // Whether the daemon's session is open; may be empty.
    std::function<bool()> daemon_attached;
    // That of the scheduler; null: without a cache.
    CacheClient* cache = nullptr;
    // How long a prompt without schema, and its answer, stay in the cache when
    // the request does not say: as by its `retain`. Zero: they do not.
    absl::Duration retain_ttl;

    absl::Status Validate() const;
  };
  // `limit` counts every call but GetModelInfo's, which is answered at once.
  InferenceService(const Options& options, PromptCompiler* compiler,
                   Scheduler* scheduler, CallLimit* limit);

  grpc::ServerWriteReactor<v1::GenerateResponse>* Generate(
      grpc::CallbackServerContext* context,
      const v1::GenerateRequest* request) override;
  grpc::ServerUnaryReactor* CountTokens(
      grpc::CallbackServerContext* context,
      const v1::CountTokensRequest* request,
      v1::CountTokensResponse* response) override;
  grpc::ServerWriteReactor<v1::WarmModulesResponse>* WarmModules(
      grpc::CallbackServerContext* context,
      const v1::WarmModulesRequest* request) override;
  grpc::ServerUnaryReactor* GetModelInfo(grpc::CallbackServerContext* context,
                                         const v1::GetModelInfoRequest* request,
                                         v1::ModelInfo* response) override;

 private:
  // Of a prompt in which modules were found, what it is answered with.
  absl::StatusOr<std::shared_ptr<const CompiledPrompt>> Compile(
      const PromptForm& form, v1::PlanLayout layout, MatchMode match,
      const GenerationRequest& request);
  // Of one that says nothing of it. Nothing where it could come to nothing only
  // (and would have to say so).
  std::optional<ModulePolicy> DefaultRetain(
      const GenerationRequest& request) const;
  absl::StatusOr<GenerationRequest> MakeRequest(
      const v1::GenerateRequest& request, absl::Time arrival,
      absl::Time deadline);
  std::string NextRequestId();

  const Options options_;
  PromptCompiler* const compiler_;
  Scheduler* const scheduler_;
  CallLimit* const limit_;
  PromptChooser chooser_;
  const std::string id_prefix_;
  std::atomic<uint64_t> next_id_{1};
  Executor executor_;
};

}  // namespace promptcache::worker
