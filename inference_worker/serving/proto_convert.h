#pragma once

#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "grpcpp/support/status.h"
#include "inference_worker/serving/call_limit.h"
#include "inference_worker/serving/generation.h"
#include "inference_worker/serving/prompt_compiler.h"
#include "inference_worker/serving/worker.h"
#include "promptcache/v1/inference.pb.h"
#include "promptcache/v1/schema.pb.h"

// Between the messages of promptcache.v1 and the plain types inside. Free
// functions, thread-safe.
namespace promptcache::worker {

// The status as clients see it: a PmlError with ErrorInfo, a full queue with
// RetryInfo, which is what `limit` says.
grpc::Status ToClientStatus(absl::Status status, const CallLimit& limit);

// InvalidArgument, naming the field. Loops no deeper than gRPC's own limit.
absl::StatusOr<PromptForm> ToPromptForm(const v1::Prompt& prompt);
// None: what the model's default is.
absl::StatusOr<MatchMode> ToMatch(v1::Match match);
// InvalidArgument for a prompt that cannot be left in the cache as it is.
absl::Status CheckRetain(const GenerationRequest& request);
absl::StatusOr<std::optional<pml::Layout>> ToLayout(v1::PlanLayout layout);
// All but prompt, deadline and arrival.
absl::StatusOr<GenerationRequest> ToGenerationRequest(
    const v1::GenerateRequest& request);

absl::StatusOr<ModulePolicy> ToModulePolicy(const v1::CachePolicy& policy,
                                            const std::string& field);
absl::StatusOr<SchemaRecord> ToSchemaRecord(const v1::Schema& schema);

v1::ModelInfo ToProto(const ModelDescription& model);
v1::Exactness ToProto(pml::Exactness exactness);
void ToProto(const Usage& usage, v1::Usage* out);
// `reports` empty: a plan that is not run.
void SpansToProto(const pml::Plan& plan, const std::vector<SpanReport>& reports,
                  google::protobuf::RepeatedPtrField<v1::SpanSummary>* out);
void MissesToProto(const pml::Plan& plan, const std::vector<MissReport>& misses,
                   google::protobuf::RepeatedPtrField<v1::Miss>* out);
void ToProto(const TokenEvent& event, bool with_logprobs, v1::Delta* out);
void ToProto(const CompletedEvent& event, pml::Exactness exactness,
             v1::Completed* out);

}  // namespace promptcache::worker
