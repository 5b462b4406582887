#include "inference_worker/serving/worker.h"

#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/available_memory.h"
#include "common/byte_size.h"
#include "common/status_macros.h"
#include "glog/logging.h"
#include "inference_worker/engine/self_check.h"
#include "inference_worker/serving/schema_service.h"
#include "inference_worker/tokenizer/bpe_tokenizer.h"

namespace promptcache::worker {
namespace {

absl::StatusOr<ChatTemplate> ChooseTemplate(const std::string& name,
                                            const ModelFile& file) {
  if (!name.empty()) return ChatTemplate::FromName(name);
  if (file.chat_template().empty()) {
    LOG(INFO) << "the model file has no chat template: messages are plain text "
                 "(--chat_template chooses one)";
    return ChatTemplate::FromName("plain");
  }
  return ChatTemplate::FromJinja(file.chat_template());
}

// For logs and statistics: in a container every worker is process 1.
std::string WorkerId() {
  char host[65] = {};
  if (::gethostname(host, sizeof(host) - 1) != 0) host[0] = '\0';
  return absl::StrCat(host[0] == '\0' ? "worker" : host, "-", ::getpid());
}

std::string VerifyName(VerifyMode mode) {
  switch (mode) {
    case VerifyMode::kNever:
      return "never";
    case VerifyMode::kSample:
      return "sample";
    case VerifyMode::kAlways:
      return "always";
  }
  return "";
}

// gRPC's own limit here and in the daemon is 16 MiB a message.
constexpr int64_t kMaxDocumentBytes = int64_t{12} << 20;
// The parser recurses.
constexpr int64_t kMaxDepth = 256;

absl::Status CheckLimit(const char* flag, int64_t value, int64_t most) {
  if (value >= 1 && value <= most) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("--", flag, "=", value, ", must be 1 to ", most));
}

absl::Status CheckLimits(const pml::Limits& limits) {
  PC_RETURN_IF_ERROR(
      CheckLimit("max_schema_bytes", limits.schema_bytes, kMaxDocumentBytes));
  PC_RETURN_IF_ERROR(
      CheckLimit("max_prompt_bytes", limits.prompt_bytes, kMaxDocumentBytes));
  PC_RETURN_IF_ERROR(CheckLimit("max_depth", limits.depth, kMaxDepth));
  PC_RETURN_IF_ERROR(CheckLimit("max_modules", limits.modules, 1'000'000));
  return CheckLimit("max_name_chars", limits.name_chars, 4096);
}

}  // namespace

absl::Status Worker::Options::Validate() const {
  if (model.empty()) {
    return absl::InvalidArgumentError(
        "--model is not set: give a GGUF file or a Hugging Face folder");
  }
  if (acquire_timeout <= absl::ZeroDuration()) {
    return absl::InvalidArgumentError("--acquire_timeout must be positive");
  }
  if (const auto parsed = ParseNumerics(numerics); !parsed.ok()) {
    return absl::InvalidArgumentError(
        absl::StrCat("--numerics: ", parsed.status().message()));
  }
  PC_RETURN_IF_ERROR(CheckLimits(limits));
  return scheduler.Validate();
}

std::string Worker::Options::ToString() const {
  return absl::StrCat(
      "--model=", model, "\n--daemon_socket=", daemon_socket,
      "\n--chat_template=", chat_template, "\n--kernels=", kernels,
      "\n--batch_invariant=", batch_invariant, "\n--numerics=", numerics,
      "\n--threads=", num_threads,
      "\n--tail_bytes=", FormatByteSize(tail_bytes),
      "\n--context_length=", scheduler.context_length,
      "\n--max_schema_bytes=", limits.schema_bytes,
      "\n--max_prompt_bytes=", limits.prompt_bytes,
      "\n--max_depth=", limits.depth, "\n--max_modules=", limits.modules,
      "\n--max_name_chars=", limits.name_chars,
      "\n--step_tokens=", scheduler.step_tokens,
      "\n--max_running=", scheduler.max_running,
      "\n--max_queue=", scheduler.max_queue,
      "\n--verify=", VerifyName(scheduler.verify),
      "\n--acquire_timeout=", absl::FormatDuration(acquire_timeout),
      "\n--pending_timeout=", absl::FormatDuration(scheduler.pending_timeout),
      "\n--reader_patience=", absl::FormatDuration(scheduler.reader_patience),
      "\n--reader_limit=", absl::FormatDuration(scheduler.reader_limit));
}

absl::StatusOr<std::unique_ptr<ModelFile>> Worker::LoadModel(
    const Options& options) {
  PC_ASSIGN_OR_RETURN(
      std::unique_ptr<ModelFile> file,
      OpenModelFile(options.model,
                    {.fingerprint_cache_dir = options.fingerprint_cache}));
  PC_ASSIGN_OR_RETURN(tokenizer_, CreateTokenizer(*file));
  PC_ASSIGN_OR_RETURN(chat_template_,
                      ChooseTemplate(options.chat_template, *file));
  PC_ASSIGN_OR_RETURN(const Digest fingerprint, file->Fingerprint());
  PC_ASSIGN_OR_RETURN(const Numerics numerics, ParseNumerics(options.numerics));
  PC_ASSIGN_OR_RETURN(backend_,
                      options.device->CreateBackend(
                          *file, {.numerics = numerics,
                                  .num_threads = options.num_threads,
                                  .kernels = options.kernels,
                                  .batch_invariant = options.batch_invariant,
                                  .progress = options.progress}));
  // States depend on the arithmetic, too.
  model_fingerprint_ = Sha256()
                           .Add("file", fingerprint)
                           .Add("numerics", backend_->numerics())
                           .Finish();

  const ModelConfig& config = file->config();
  reuse_rule_ = ReuseRuleOf(config);
  description_.name = config.name;
  description_.architecture = config.architecture;
  description_.path = file->path();
  description_.context_length = options.scheduler.context_length == 0
                                    ? backend_->context_length()
                                    : std::min(options.scheduler.context_length,
                                               backend_->context_length());
  description_.vocab_size = backend_->vocab_size();
  description_.num_layers = config.num_layers;
  description_.numerics = backend_->numerics();
  description_.kernels =
      backend_->numerics().substr(backend_->numerics().find('/') + 1);
  description_.chat_template = chat_template_.name();
  description_.fingerprint = model_fingerprint_.ToHex();
  description_.num_threads = backend_->num_threads();
  return file;
}

absl::StatusOr<std::string> Worker::ReuseRefusal() const {
  if (reuse_rule_ == ReuseRule::kNever) {
    return std::string(
        "this model's rotation depends on the length of a request");
  }
  PC_ASSIGN_OR_RETURN(const ReuseErrors errors,
                      CheckReuse(*backend_, *pages_, reuse_rule_));
  if (errors.ok()) {
    LOG(INFO) << "self-check: " << errors.ToString();
    return std::string();
  }
  LOG(ERROR) << "self-check failed, nothing is cached: " << errors.ToString();
  return absl::StrCat("the model's self-check failed: ", errors.ToString());
}

absl::Status Worker::Connect(const Options& options) {
  if (options.daemon_socket.empty()) {
    registry_ = RegistryClient::None();
  } else {
    PC_ASSIGN_OR_RETURN(registry_, RegistryClient::Create(
                                       {.socket_path = options.daemon_socket}));
  }
  schemas_ = std::make_unique<RegistrySchemaSource>(registry_.get());
  PromptCompiler::Options compile;
  compile.identity.model_fingerprint = model_fingerprint_;
  compile.identity.tokenizer_digest = tokenizer_->digest();
  compile.identity.layout = backend_->layout();
  compile.identity.absolute_positions = reuse_rule_ == ReuseRule::kInPlace;
  compile.separate_segments = backend_->decoder_start().has_value();
  compile.context_length = static_cast<int32_t>(description_.context_length);
  compile.limits = options.limits;
  compiler_ = std::make_unique<PromptCompiler>(compile, tokenizer_.get(),
                                               chat_template_, schemas_.get());
  if (options.daemon_socket.empty()) return absl::OkStatus();

  CacheClient::Options cache;
  cache.socket_path = options.daemon_socket;
  cache.worker_id = WorkerId();
  cache.model = description_.name;
  cache.layout = backend_->layout();
  cache.device = options.device->gpu();
  cache.acquire_timeout = options.acquire_timeout;
  cache.reads_arriving = cache.device != nullptr;
  cache.on_schema_changed = [compiler = compiler_.get()](
                                const std::string& name, uint64_t) {
    compiler->Invalidate(name);
  };
  cache.on_attached = [compiler = compiler_.get()] {
    compiler->InvalidateAll();
  };
  PC_ASSIGN_OR_RETURN(cache_, CacheClient::Create(cache));
  return absl::OkStatus();
}

absl::StatusOr<std::unique_ptr<Worker>> Worker::Create(const Options& options) {
  PC_RETURN_IF_ERROR(options.Validate());
  if (options.device == nullptr) {
    return absl::InvalidArgumentError("no device");
  }
  if (options.device->gpu() == nullptr) {
    // Now, and not after minutes of packing weights.
    PC_RETURN_IF_ERROR(CheckMemory("--tail_bytes", options.tail_bytes,
                                   AvailableMemoryBytes()));
  }
  std::unique_ptr<Worker> worker(new Worker());
  {
    // The file is not needed once its weights are packed.
    PC_ASSIGN_OR_RETURN(const std::unique_ptr<ModelFile> file,
                        worker->LoadModel(options));
  }
  PC_ASSIGN_OR_RETURN(worker->memory_,
                      KvMemory::Create(options.device->memory()));
  PC_ASSIGN_OR_RETURN(
      worker->pages_,
      PrivatePages::Create(worker->backend_->layout(), options.tail_bytes,
                           worker->memory_.get()));
  PC_RETURN_IF_ERROR(worker->Connect(options));
  PC_ASSIGN_OR_RETURN(worker->no_reuse_, worker->ReuseRefusal());
  Scheduler::Options scheduler = options.scheduler;
  scheduler.no_reuse = worker->no_reuse_;
  PC_ASSIGN_OR_RETURN(
      worker->scheduler_,
      Scheduler::Create(scheduler, worker->backend_.get(), worker->pages_.get(),
                        worker->tokenizer_.get(), worker->cache_.get()));
  return worker;
}

Worker::~Worker() = default;

}  // namespace promptcache::worker
