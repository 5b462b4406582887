#include "inference_worker/serving/proto_convert.h"

#include <cmath>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "common/pml/error.h"
#include "common/rpc/duration.h"
#include "common/rpc/grpc_status.h"
#include "common/status_macros.h"

namespace promptcache::worker {
namespace {

constexpr uint32_t kDefaultMaxTokens = 256;
constexpr uint32_t kMaxTopLogprobs = 20;
constexpr int kMaxStopStrings = 16;
constexpr size_t kMaxStopBytes = 1024;

absl::StatusOr<pml::StructuredImport> ToImport(const v1::ModuleImport& import) {
  pml::StructuredImport out;
  out.path = import.path();
  out.arguments.insert(import.arguments().begin(), import.arguments().end());
  for (const v1::ModuleImport& inner : import.imports()) {
    PC_ASSIGN_OR_RETURN(out.imports.emplace_back(), ToImport(inner));
  }
  return out;
}

absl::StatusOr<std::vector<pml::StructuredItem>> ToItems(
    const google::protobuf::RepeatedPtrField<v1::PromptItem>& items,
    const std::string& field) {
  std::vector<pml::StructuredItem> out;
  for (int i = 0; i < items.size(); ++i) {
    const v1::PromptItem& item = items[i];
    switch (item.item_case()) {
      case v1::PromptItem::kText:
        out.push_back({item.text()});
        break;
      case v1::PromptItem::kImport: {
        PC_ASSIGN_OR_RETURN(auto import, ToImport(item.import()));
        out.push_back({std::move(import)});
        break;
      }
      case v1::PromptItem::kMessage: {
        pml::StructuredMessage message;
        message.role = item.message().role();
        PC_ASSIGN_OR_RETURN(
            message.items,
            ToItems(item.message().items(),
                    absl::StrCat(field, "[", i, "].message.items")));
        out.push_back({std::move(message)});
        break;
      }
      case v1::PromptItem::ITEM_NOT_SET:
        return rpc::InvalidFieldError(absl::StrCat(field, "[", i, "]"),
                                      "an item without content");
    }
  }
  return out;
}

absl::StatusOr<SamplingOptions> ToSampling(const v1::Sampling& sampling) {
  SamplingOptions out;
  out.temperature = sampling.temperature();
  out.top_k = sampling.top_k();
  if (sampling.top_p() != 0) out.top_p = sampling.top_p();
  out.min_p = sampling.min_p();
  if (sampling.repetition_penalty() != 0) {
    out.repetition_penalty = sampling.repetition_penalty();
  }
  if (sampling.repetition_window() != 0) {
    out.repetition_window = sampling.repetition_window();
  }
  out.seed = sampling.seed();
  if (absl::Status s = out.Validate(); !s.ok()) {
    return rpc::InvalidFieldError("sampling", std::string(s.message()));
  }
  return out;
}

absl::Status CheckStops(const v1::GenerateRequest& request) {
  if (request.stop_size() > kMaxStopStrings) {
    return rpc::InvalidFieldError(
        "stop", absl::StrCat(request.stop_size(), " strings, at most ",
                             kMaxStopStrings));
  }
  for (const std::string& stop : request.stop()) {
    if (stop.empty() || stop.size() > kMaxStopBytes) {
      return rpc::InvalidFieldError(
          "stop", absl::StrCat("a string of ", stop.size(),
                               " bytes, must be 1 to ", kMaxStopBytes));
    }
  }
  return absl::OkStatus();
}

std::string FieldName(IdentityField field) {
  return field == IdentityField::kNone ? ""
                                       : std::string(IdentityFieldName(field));
}

v1::SpanSource ToProto(StateSource source) {
  switch (source) {
    case StateSource::kRead:
      return v1::SPAN_SOURCE_READ;
    case StateSource::kCreated:
      return v1::SPAN_SOURCE_CREATED;
    case StateSource::kComputed:
      return v1::SPAN_SOURCE_COMPUTED;
    case StateSource::kFresh:
      return v1::SPAN_SOURCE_FRESH;
  }
  return v1::SPAN_SOURCE_UNSPECIFIED;
}

v1::FinishReason ToProto(FinishReason reason) {
  switch (reason) {
    case FinishReason::kNone:
      return v1::FINISH_REASON_UNSPECIFIED;
    case FinishReason::kStop:
      return v1::FINISH_REASON_STOP;
    case FinishReason::kStopString:
      return v1::FINISH_REASON_STOP_STRING;
    case FinishReason::kMaxTokens:
      return v1::FINISH_REASON_MAX_TOKENS;
    case FinishReason::kContext:
      return v1::FINISH_REASON_CONTEXT;
  }
  return v1::FINISH_REASON_UNSPECIFIED;
}

}  // namespace

grpc::Status ToClientStatus(absl::Status status, const CallLimit& limit) {
  if (const auto error = pml::PmlErrorOf(status)) {
    rpc::ErrorInfo info;
    info.reason = error->reason;
    for (const auto& [key, value] : error->Metadata()) {
      info.metadata[key] = value;
    }
    rpc::SetErrorInfo(info, &status);
  } else if (absl::IsResourceExhausted(status)) {
    rpc::SetRetryDelay(limit.RetryAfter(absl::Now()), &status);
  }
  return rpc::ToGrpcStatus(status);
}

absl::StatusOr<PromptForm> ToPromptForm(const v1::Prompt& prompt) {
  switch (prompt.form_case()) {
    case v1::Prompt::kPml:
      return PmlText{prompt.pml()};
    case v1::Prompt::kText:
      return PlainText{prompt.text()};
    case v1::Prompt::kStructured: {
      pml::StructuredPrompt out;
      out.schema = prompt.structured().schema();
      PC_ASSIGN_OR_RETURN(out.items, ToItems(prompt.structured().items(),
                                             "prompt.structured.items"));
      return out;
    }
    case v1::Prompt::kMessages: {
      std::vector<pml::ChatMessage> out;
      for (const v1::Message& m : prompt.messages().messages()) {
        out.push_back({m.role(), m.content()});
      }
      return out;
    }
    case v1::Prompt::FORM_NOT_SET:
      break;
  }
  return rpc::InvalidFieldError(
      "prompt", "is not set: give pml, structured, text or messages");
}

absl::StatusOr<MatchMode> ToMatch(v1::Match match) {
  switch (match) {
    case v1::MATCH_UNSPECIFIED:
    case v1::MATCH_PREFIX:
      return MatchMode::kPrefix;
    case v1::MATCH_NONE:
      return MatchMode::kNone;
    case v1::MATCH_AUTO:
      return MatchMode::kAuto;
    default:
      return rpc::InvalidFieldError("match", absl::StrCat("unknown: ", match));
  }
}

absl::Status CheckRetain(const GenerationRequest& request) {
  if (!request.retain.has_value() || request.prompt->chunk_tokens > 0) {
    return absl::OkStatus();
  }
  if (!request.prompt->plan->schema.empty()) {
    return rpc::InvalidFieldError(
        "retain",
        "is for text and messages; a schema keeps its modules itself");
  }
  return rpc::InvalidFieldError(
      "retain",
      "not with match none, nor with an encoder-decoder: nothing of such a "
      "prompt is cut into chunks");
}

absl::StatusOr<std::optional<pml::Layout>> ToLayout(v1::PlanLayout layout) {
  switch (layout) {
    case v1::PLAN_LAYOUT_UNSPECIFIED:
      return std::nullopt;
    case v1::PLAN_LAYOUT_COMPACT:
      return pml::Layout::kCompact;
    case v1::PLAN_LAYOUT_SCHEMA:
      return pml::Layout::kSchema;
    default:
      return rpc::InvalidFieldError("layout",
                                    absl::StrCat("unknown: ", layout));
  }
}

absl::StatusOr<GenerationRequest> ToGenerationRequest(
    const v1::GenerateRequest& request) {
  GenerationRequest out;
  out.max_tokens =
      request.max_tokens() == 0 ? kDefaultMaxTokens : request.max_tokens();
  PC_ASSIGN_OR_RETURN(out.sampling, ToSampling(request.sampling()));
  PC_RETURN_IF_ERROR(CheckStops(request));
  out.stop.assign(request.stop().begin(), request.stop().end());
  switch (request.cache_mode()) {
    case v1::CACHE_MODE_UNSPECIFIED:
    case v1::CACHE_MODE_READ_WRITE:
      out.cache_mode = CacheMode::kReadWrite;
      break;
    case v1::CACHE_MODE_READ_ONLY:
      out.cache_mode = CacheMode::kReadOnly;
      break;
    case v1::CACHE_MODE_BYPASS:
      out.cache_mode = CacheMode::kBypass;
      break;
    default:
      return rpc::InvalidFieldError(
          "cache_mode", absl::StrCat("unknown: ", request.cache_mode()));
  }
  switch (request.attention()) {
    case v1::ATTENTION_MODE_UNSPECIFIED:
    case v1::ATTENTION_MODE_PLAN:
      break;
    case v1::ATTENTION_MODE_FULL:
      out.full_attention = true;
      break;
    default:
      return rpc::InvalidFieldError(
          "attention", absl::StrCat("unknown: ", request.attention()));
  }
  if (request.top_logprobs() > kMaxTopLogprobs) {
    return rpc::InvalidFieldError(
        "top_logprobs",
        absl::StrCat(request.top_logprobs(), ", at most ", kMaxTopLogprobs));
  }
  out.top_logprobs = request.top_logprobs();
  out.ignore_eos = request.ignore_eos();
  out.pending_compute = request.pending_compute();
  out.link_tokens = request.link_tokens();
  if (request.has_retain()) {
    PC_ASSIGN_OR_RETURN(out.retain, ToModulePolicy(request.retain(), "retain"));
  }
  return out;
}

absl::StatusOr<ModulePolicy> ToModulePolicy(const v1::CachePolicy& policy,
                                            const std::string& field) {
  ModulePolicy out;
  if (policy.has_ttl()) {
    PC_ASSIGN_OR_RETURN(out.ttl,
                        rpc::TtlFromProto(policy.ttl(), field + ".ttl"));
  }
  out.absolute_ttl = policy.absolute_ttl();
  out.pin = policy.pin();
  return out;
}

absl::StatusOr<SchemaRecord> ToSchemaRecord(const v1::Schema& schema) {
  SchemaRecord out;
  out.name = schema.name();
  out.revision = schema.revision();
  out.text = schema.text();
  PC_ASSIGN_OR_RETURN(out.policy, ToModulePolicy(schema.policy(), "policy"));
  for (const auto& [path, policy] : schema.module_policies()) {
    PC_ASSIGN_OR_RETURN(
        out.module_policies[path],
        ToModulePolicy(policy,
                       absl::StrCat("module_policies[\"", path, "\"]")));
  }
  return out;
}

v1::ModelInfo ToProto(const ModelDescription& model) {
  v1::ModelInfo info;
  info.set_name(model.name);
  info.set_architecture(model.architecture);
  info.set_path(model.path);
  info.set_context_length(model.context_length);
  info.set_vocab_size(model.vocab_size);
  info.set_num_layers(model.num_layers);
  info.set_numerics(model.numerics);
  info.set_kernels(model.kernels);
  info.set_chat_template(model.chat_template);
  info.set_fingerprint(model.fingerprint);
  info.set_num_threads(model.num_threads);
  return info;
}

v1::Exactness ToProto(pml::Exactness exactness) {
  return exactness == pml::Exactness::kExact ? v1::EXACTNESS_EXACT
                                             : v1::EXACTNESS_MODULAR;
}

void ToProto(const Usage& usage, v1::Usage* out) {
  out->set_prompt_tokens(usage.prompt_tokens);
  out->set_cached_tokens(usage.cached_tokens);
  out->set_created_tokens(usage.created_tokens);
  out->set_fresh_tokens(usage.fresh_tokens);
  out->set_completion_tokens(usage.completion_tokens);
  out->set_retained_tokens(usage.retained_tokens);
}

void SpansToProto(const pml::Plan& plan, const std::vector<SpanReport>& reports,
                  google::protobuf::RepeatedPtrField<v1::SpanSummary>* out) {
  for (size_t i = 0; i < plan.spans.size(); ++i) {
    const pml::PlanSpan& span = plan.spans[i];
    v1::SpanSummary* summary = out->Add();
    summary->set_module(span.name);
    summary->set_start(static_cast<uint32_t>(span.start));
    summary->set_num_tokens(static_cast<uint32_t>(span.num_tokens()));
    summary->set_cached(span.kind == pml::SpanKind::kCached);
    if (i >= reports.size()) continue;
    summary->set_source(ToProto(reports[i].source));
    summary->set_miss_reason(
        static_cast<v1::MissReason>(reports[i].miss_reason));
    summary->set_differing_field(FieldName(reports[i].differing_field));
  }
}

void MissesToProto(const pml::Plan& plan, const std::vector<MissReport>& misses,
                   google::protobuf::RepeatedPtrField<v1::Miss>* out) {
  for (const MissReport& report : misses) {
    const pml::PlanModule& module = plan.modules[report.module];
    v1::Miss* miss = out->Add();
    miss->set_path(module.path);
    miss->set_reason(static_cast<v1::MissReason>(report.reason));
    miss->set_differing_field(FieldName(report.differing_field));
    miss->set_num_tokens(static_cast<uint32_t>(module.num_tokens()));
  }
}

void ToProto(const TokenEvent& event, bool with_logprobs, v1::Delta* out) {
  out->set_text(event.text);
  v1::TokenInfo* token = out->add_tokens();
  token->set_id(event.id);
  if (!with_logprobs) return;
  token->set_logprob(event.logprob);
  token->set_margin(event.margin);
  for (const auto& [id, logprob] : event.top) {
    token->add_top_ids(id);
    token->add_top_logprobs(logprob);
  }
}

void ToProto(const CompletedEvent& event, pml::Exactness exactness,
             v1::Completed* out) {
  ToProto(event.usage, out->mutable_usage());
  const Timings& t = event.timings;
  v1::Timings* timings = out->mutable_timings();
  timings->set_queue_ms(absl::ToDoubleMilliseconds(t.queue));
  timings->set_compile_ms(absl::ToDoubleMilliseconds(t.compile));
  timings->set_acquire_ms(absl::ToDoubleMilliseconds(t.acquire));
  timings->set_wait_pending_ms(absl::ToDoubleMilliseconds(t.wait_pending));
  timings->set_prefill_ms(absl::ToDoubleMilliseconds(t.prefill));
  timings->set_ttft_ms(absl::ToDoubleMilliseconds(t.ttft));
  timings->set_decode_ms(absl::ToDoubleMilliseconds(t.decode));
  timings->set_total_ms(absl::ToDoubleMilliseconds(t.total));
  timings->set_arrival_ms(absl::ToDoubleMilliseconds(t.arrival));
  out->set_exactness(ToProto(exactness));
  out->set_finish_reason(ToProto(event.finish_reason));
  out->set_stop_string(event.stop_string);
  for (const std::string& notice : event.notices) out->add_notices(notice);
  out->set_logits_sha256(event.logits_sha256);
}

}  // namespace promptcache::worker
