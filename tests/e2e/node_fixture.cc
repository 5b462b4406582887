#include "tests/e2e/node_fixture.h"

#include <grpcpp/grpcpp.h>

#include <cstdlib>
#include <fstream>
#include <iostream>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "common/mutex.h"
#include "common/rpc/grpc_status.h"
#include "promptcache/v1/cache.grpc.pb.h"
#include "promptcache/v1/inference.grpc.pb.h"
#include "promptcache/v1/schema.grpc.pb.h"

namespace promptcache::e2e {
namespace {

// Sanitizer builds on a busy machine start slowly.
constexpr absl::Duration kStartTimeout = absl::Seconds(90);

std::shared_ptr<grpc::Channel> ChannelTo(const std::string& address) {
  grpc::ChannelArguments args;
  args.SetInt(GRPC_ARG_ENABLE_HTTP_PROXY, 0);
  // A channel of its own for each client, not a shared connection.
  args.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  return grpc::CreateCustomChannel(address, grpc::InsecureChannelCredentials(),
                                   args);
}

void SetTimeout(grpc::ClientContext* context, absl::Duration timeout) {
  context->set_deadline(absl::ToChronoTime(absl::Now() + timeout));
}

std::string ReadPort(const std::string& path) {
  std::ifstream in(path);
  std::string port;
  std::getline(in, port);
  return in.eof() ? "" : port;
}

// Starts a server, by way of `launcher` if there is one, and waits for the port
// that it says it serves.
ChildProcess StartServer(std::vector<std::string> launcher,
                         const std::string& program,
                         const std::vector<std::string>& flags,
                         const std::string& base, std::string* address) {
  const std::string port_path = base + ".port";
  std::vector<std::string> words = std::move(launcher);
  words.push_back(PROMPTCACHE_BIN + program);
  words.insert(words.end(), flags.begin(), flags.end());
  words.push_back("--listen=127.0.0.1:0");
  words.push_back("--port_file=" + port_path);
  auto process = ChildProcess::Start({.program = words.front(),
                                      .args = {words.begin() + 1, words.end()},
                                      .log_path = base + ".log"});
  if (!process.ok()) {
    ADD_FAILURE() << process.status();
    return {};
  }
  const absl::Time deadline = absl::Now() + kStartTimeout;
  while (ReadPort(port_path).empty()) {
    if (!process->Running() || absl::Now() > deadline) {
      ADD_FAILURE() << program << " does not serve:\n" << process->Log();
      return {};
    }
    absl::SleepFor(absl::Milliseconds(5));
  }
  *address = absl::StrCat("127.0.0.1:", ReadPort(port_path));
  if (!ChannelTo(*address)->WaitForConnected(absl::ToChronoTime(deadline))) {
    ADD_FAILURE() << program << " does not answer at " << *address;
  }
  return *std::move(process);
}

}  // namespace

struct EventLog::Call {
  std::unique_ptr<v1::CacheService::Stub> stub;
  grpc::ClientContext context;
  std::unique_ptr<grpc::ClientReader<v1::CacheEvent>> reader;
  std::thread thread;
  mutable Mutex mu;
  std::vector<v1::CacheEvent> events ABSL_GUARDED_BY(mu);
};

EventLog::EventLog(const std::string& daemon_address)
    : call_(std::make_unique<Call>()) {
  call_->stub = v1::CacheService::NewStub(ChannelTo(daemon_address));
  call_->reader =
      call_->stub->WatchEvents(&call_->context, v1::WatchEventsRequest());
  call_->reader->WaitForInitialMetadata();  // events are collected from now on
  call_->thread = std::thread([call = call_.get()] {
    v1::CacheEvent event;
    while (call->reader->Read(&event)) {
      MutexLock lock(&call->mu);
      call->events.push_back(event);
    }
    call->reader->Finish();
  });
}

EventLog::~EventLog() {
  call_->context.TryCancel();
  call_->thread.join();
}

std::vector<v1::CacheEvent> EventLog::events() const {
  MutexLock lock(&call_->mu);
  return call_->events;
}

std::vector<v1::CacheEvent> EventLog::Of(v1::CacheEvent::Kind kind) const {
  std::vector<v1::CacheEvent> found = events();
  std::erase_if(found, [kind](const auto& e) { return e.kind() != kind; });
  return found;
}

struct WorkerProcess::Stubs {
  explicit Stubs(const std::shared_ptr<grpc::Channel>& channel)
      : inference(v1::InferenceService::NewStub(channel)),
        schemas(v1::SchemaService::NewStub(channel)) {}
  std::unique_ptr<v1::InferenceService::Stub> inference;
  std::unique_ptr<v1::SchemaService::Stub> schemas;
};

WorkerProcess::WorkerProcess(ChildProcess process, const std::string& address)
    : process_(std::move(process)),
      address_(address),
      stubs_(std::make_unique<Stubs>(ChannelTo(address))) {}

WorkerProcess::~WorkerProcess() = default;

Answer WorkerProcess::Generate(const v1::GenerateRequest& request,
                               absl::Duration timeout, int cancel_after) {
  grpc::ClientContext context;
  SetTimeout(&context, timeout);
  auto reader = stubs_->inference->Generate(&context, request);
  Answer answer;
  v1::GenerateResponse event;
  while (reader->Read(&event)) {
    if (event.has_started()) answer.started = event.started();
    if (event.has_completed()) answer.completed = event.completed();
    answer.text += event.delta().text();
    for (const auto& token : event.delta().tokens()) {
      answer.ids.push_back(token.id());
      answer.margins.push_back(token.margin());
    }
    if (cancel_after > 0 &&
        answer.ids.size() >= static_cast<size_t>(cancel_after)) {
      context.TryCancel();
    }
  }
  answer.status = rpc::FromGrpcStatus(reader->Finish());
  return answer;
}

absl::StatusOr<v1::CreateSchemaResponse> WorkerProcess::PutSchema(
    const std::string& text) {
  grpc::ClientContext context;
  SetTimeout(&context, absl::Seconds(60));
  v1::CreateSchemaRequest request;
  request.set_text(text);
  v1::CreateSchemaResponse response;
  const grpc::Status status =
      stubs_->schemas->CreateSchema(&context, request, &response);
  if (!status.ok()) return rpc::FromGrpcStatus(status);
  return response;
}

absl::StatusOr<v1::ListSchemasResponse> WorkerProcess::ListSchemas() {
  grpc::ClientContext context;
  SetTimeout(&context, absl::Seconds(60));
  v1::ListSchemasResponse response;
  const grpc::Status status =
      stubs_->schemas->ListSchemas(&context, {}, &response);
  if (!status.ok()) return rpc::FromGrpcStatus(status);
  return response;
}

absl::StatusOr<v1::ModelInfo> WorkerProcess::ModelInfo() {
  grpc::ClientContext context;
  SetTimeout(&context, absl::Seconds(60));
  v1::ModelInfo info;
  const grpc::Status status =
      stubs_->inference->GetModelInfo(&context, {}, &info);
  if (!status.ok()) return rpc::FromGrpcStatus(status);
  return info;
}

absl::Status WorkerProcess::Warm(const std::string& schema) {
  grpc::ClientContext context;
  SetTimeout(&context, absl::Seconds(120));
  v1::WarmModulesRequest request;
  request.set_schema(schema);
  auto reader = stubs_->inference->WarmModules(&context, request);
  v1::WarmModulesResponse progress;
  while (reader->Read(&progress)) {
  }
  return rpc::FromGrpcStatus(reader->Finish());
}

NodeTest::NodeTest() = default;
NodeTest::~NodeTest() = default;

void NodeTest::TearDown() {
  if (!HasFailure()) return;
  for (const std::string& path : logs_) {
    std::ifstream in(path);
    std::cerr << "==== " << path << "\n" << in.rdbuf() << "\n";
  }
}

void NodeTest::StartDaemon(const std::vector<std::string>& flags) {
  const std::string base = absl::StrCat(dir_.path(), "/daemon", num_daemons_++);
  std::vector<std::string> args{"--socket=" + dir_.path() + "/daemon.sock",
                                "--db=" + dir_.path() + "/registry.db",
                                "--device=" + device_, "--device_bytes=32MiB",
                                "--segment_bytes=8MiB"};
  args.insert(args.end(), flags.begin(), flags.end());
  logs_.push_back(base + ".log");
  daemon_ = StartServer(launcher_, programs_ + "promptcache-daemon", args, base,
                        &daemon_address_);
}

void NodeTest::UseEmulatedGpu() {
  programs_ = "emulated/";
  device_ = "cuda";
}

ChildProcess NodeTest::StartPageWorker(const std::vector<std::string>& flags) {
  const std::string log =
      absl::StrCat(dir_.path(), "/pages", num_workers_++, ".log");
  std::vector<std::string> args{"--daemon_socket=" + dir_.path() +
                                "/daemon.sock"};
  args.insert(args.end(), flags.begin(), flags.end());
  logs_.push_back(log);
  auto process = ChildProcess::Start(
      {.program = absl::StrCat(PROMPTCACHE_BIN, "emulated/page-worker"),
       .args = std::move(args),
       .log_path = log});
  EXPECT_TRUE(process.ok()) << process.status();
  return process.ok() ? *std::move(process) : ChildProcess();
}

std::unique_ptr<WorkerProcess> NodeTest::StartWorker(
    const std::vector<std::string>& flags) {
  const std::string base = absl::StrCat(dir_.path(), "/worker", num_workers_++);
  std::vector<std::string> args{
      "--daemon_socket=" + dir_.path() + "/daemon.sock",
      "--model=" + model_path_, "--tail_bytes=64MiB",
      "--fingerprint_cache=" + dir_.path() + "/fingerprints"};
  args.insert(args.end(), flags.begin(), flags.end());
  logs_.push_back(base + ".log");
  std::string address;
  ChildProcess process = StartServer(
      launcher_, programs_ + "promptcache-worker", args, base, &address);
  return std::make_unique<WorkerProcess>(std::move(process), address);
}

absl::StatusOr<v1::CacheStats> NodeTest::Stats() {
  auto stub = v1::CacheService::NewStub(ChannelTo(daemon_address_));
  grpc::ClientContext context;
  SetTimeout(&context, absl::Seconds(30));
  v1::CacheStats stats;
  const grpc::Status status = stub->GetStats(&context, {}, &stats);
  if (!status.ok()) return rpc::FromGrpcStatus(status);
  return stats;
}

v1::TierStats NodeTest::TierNow(v1::Tier wanted, int device) {
  auto stats = Stats();
  if (!stats.ok()) {
    ADD_FAILURE() << stats.status();
    return {};
  }
  for (const auto& tier : stats->tiers()) {
    if (tier.tier() == wanted && device-- == 0) return tier;
  }
  ADD_FAILURE() << "no tier " << v1::Tier_Name(wanted);
  return {};
}

std::vector<v1::Module> NodeTest::Modules(bool include_absent) {
  auto stub = v1::CacheService::NewStub(ChannelTo(daemon_address_));
  grpc::ClientContext context;
  SetTimeout(&context, absl::Seconds(30));
  v1::ListModulesRequest request;
  request.set_include_absent(include_absent);
  request.set_page_size(1000);
  v1::ListModulesResponse response;
  const grpc::Status status = stub->ListModules(&context, request, &response);
  EXPECT_TRUE(status.ok()) << status.error_message();
  return {response.modules().begin(), response.modules().end()};
}

bool NodeTest::AllInHost(const std::string& schema) {
  int in_host = 0;
  for (const v1::Module& module : Modules(false)) {
    if (module.schema() != schema) continue;
    if (module.tier() != v1::TIER_HOST ||
        module.state() != v1::MODULE_STATE_COMMITTED) {
      return false;
    }
    ++in_host;
  }
  return in_host > 0;
}

uint64_t NodeTest::PageBytes() const {
  return uint64_t{16} * 2 * 2 * spec_.layers * spec_.kv_heads * spec_.head_dim;
}

bool NodeTest::Eventually(absl::Duration timeout,
                          const std::function<bool()>& condition) {
  const absl::Time deadline = absl::Now() + timeout;
  for (;;) {
    if (condition()) return true;
    if (absl::Now() > deadline) return false;
    absl::SleepFor(absl::Milliseconds(2));
  }
}

void NodeTest::WaitAttached(WorkerProcess* worker) {
  EXPECT_TRUE(Eventually(absl::Seconds(30), [&] {
    auto info = worker->ModelInfo();
    return info.ok() && info->daemon_attached();
  })) << "the worker does not attach to the daemon";
}

void NodeTest::UseTinyModel(const worker::TinyLlamaSpec& spec) {
  spec_ = spec;
  model_path_ = dir_.path() + "/model.gguf";
  worker::WriteTinyLlama(model_path_, spec);
}

void NodeTest::UseSlowModel() {
  UseTinyModel({.layers = 12,
                .heads = 8,
                .kv_heads = 2,
                .head_dim = 32,
                .hidden = 256,
                .ffn = 1536,
                .context = 8192});
}

bool NodeTest::UseContainers() {
  std::vector<std::string> args{"--pid",  "--ipc",        "--mount",
                                "--fork", "--mount-proc", "--kill-child"};
  launcher_ = {"/usr/bin/unshare"};
  launcher_.insert(launcher_.end(), args.begin(), args.end());
  args.push_back("true");
  auto tried = ChildProcess::Start({.program = launcher_.front(),
                                    .args = std::move(args),
                                    .log_path = dir_.path() + "/unshare.log"});
  if (!tried.ok()) return false;
  const auto end = tried->Wait(absl::Seconds(20));
  return end.ok() && *end == "exit status 0";
}

std::string SmallSchema(const std::string& name) {
  return absl::StrCat(
      "<schema name=\"", name,
      "\"><system>You are the clerk of a small library.\n"
      "<module name=\"a\">The library opens at nine and closes at five; on "
      "Friday it closes at noon.\n</module>"
      "<module name=\"b\">A reader may borrow three books for two weeks and "
      "bring them back to any desk.\n</module>"
      "<module name=\"c\">Lost books are paid for at the price they cost when "
      "they were new.\n</module></system></schema>");
}

std::string Words(int num_words) {
  std::string text;
  for (int i = 0; i < num_words; ++i) {
    absl::StrAppend(&text, "word", i % 97, " ");
  }
  return text;
}

std::string BigSchema(const std::string& name, int num_words) {
  return absl::StrCat("<schema name=\"", name, "\"><module name=\"big\">",
                      Words(num_words), "</module></schema>");
}

v1::GenerateRequest Request(const std::string& pml, uint32_t max_tokens) {
  v1::GenerateRequest request;
  request.mutable_prompt()->set_pml(pml);
  request.set_max_tokens(max_tokens);
  request.set_ignore_eos(true);
  request.set_top_logprobs(1);
  request.set_include_plan(true);
  return request;
}

v1::GenerateRequest Bypass(v1::GenerateRequest request) {
  request.set_cache_mode(v1::CACHE_MODE_BYPASS);
  return request;
}

}  // namespace promptcache::e2e
