#pragma once

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>

#include "common/rpc/grpc_status.h"
#include "inference_worker/serving/worker_server.h"
#include "promptcache/v1/inference.grpc.pb.h"
#include "promptcache/v1/schema.grpc.pb.h"
#include "tests/inference_worker/serving/serving_fixture.h"
#include "tests/support/fake_tokenizer.h"
#include "tests/support/status_matchers.h"

namespace promptcache::worker {

// The daemon's registry: one text a name. Thread-safe.
class FakeRegistry final : public RegistryClient {
 public:
  absl::StatusOr<node::v1::PutSchemaResponse> PutSchema(
      const node::v1::PutSchemaRequest& request) override {
    MutexLock lock(&mu_);
    if (down_) return Down();
    v1::Schema& schema = schemas_[request.name()];
    node::v1::PutSchemaResponse response;
    response.set_created(schema.text() != request.text());
    schema.set_name(request.name());
    schema.set_text(request.text());
    if (response.created()) {
      schema.set_revision(schema.revision() + 1);
      schema.mutable_create_time()->set_seconds(++clock_);
    }
    *schema.mutable_module_policies() = request.module_policies();
    *response.mutable_schema() = schema;
    return response;
  }
  absl::StatusOr<v1::Schema> GetSchema(const std::string& name,
                                       uint64_t) override {
    MutexLock lock(&mu_);
    if (down_) return Down();
    const auto it = schemas_.find(name);
    if (it == schemas_.end()) return absl::NotFoundError("no such schema");
    return it->second;
  }
  absl::StatusOr<v1::ListSchemasResponse> ListSchemas(
      const v1::ListSchemasRequest& request) override {
    ++lists_;
    if (list_hook_) list_hook_();
    MutexLock lock(&mu_);
    if (down_) return Down();
    v1::ListSchemasResponse response;
    for (auto it = schemas_.upper_bound(request.page_token());
         it != schemas_.end(); ++it) {
      if (response.schemas_size() == page_size_) {
        response.set_next_page_token(response.schemas().rbegin()->name());
        break;
      }
      *response.add_schemas() = it->second;
    }
    return response;
  }
  absl::Status DeleteSchema(const std::string& name) override {
    MutexLock lock(&mu_);
    if (down_) return Down();
    return schemas_.erase(name) > 0 ? absl::OkStatus()
                                    : absl::NotFoundError("no such schema");
  }
  void SetDown(bool down) {
    MutexLock lock(&mu_);
    down_ = down;
  }
  // Called by every ListSchemas. Before the first call.
  void SetListHook(std::function<void()> hook) { list_hook_ = std::move(hook); }
  int lists() const { return lists_; }
  // Before the first call.
  void SetPageSize(int page_size) { page_size_ = page_size; }

 private:
  static absl::Status Down() {
    return absl::UnavailableError("the cache daemon cannot be reached");
  }
  std::function<void()> list_hook_;
  std::atomic<int> lists_{0};
  int page_size_ = 1000;
  Mutex mu_;
  std::map<std::string, v1::Schema> schemas_ ABSL_GUARDED_BY(mu_);
  bool down_ ABSL_GUARDED_BY(mu_) = false;
  int64_t clock_ ABSL_GUARDED_BY(mu_) = 0;
};

inline constexpr char kSchema[] =
    "<schema name=\"s\">Hello there. <module name=\"m\">A module of "
    "words.</module><module name=\"n\" cache=\"false\">new</module></schema>";

struct Answer {
  grpc::Status status;
  v1::Started started;
  std::string text;
  int tokens = 0;
  v1::Completed completed;
};

class WorkerServerTest : public ::testing::Test {
 protected:
  // Until the gate opens. It must outlive every step.
  void HoldSteps(Gate* gate) {
    backend_.SetHook([gate](std::span<const RowGroup>) {
      gate->Wait();
      return absl::OkStatus();
    });
  }
  WorkerServerTest()
      : backend_(4, static_cast<uint32_t>(tokenizer_.vocab_size())),
        cache_(backend_.layout()),
        source_(&registry_) {
    PromptCompiler::Options options;
    options.context_length = 4000;
    compiler_ = std::make_unique<PromptCompiler>(
        options, &tokenizer_, *ChatTemplate::FromName("chatml"), &source_);
    pages_ = *PrivatePages::Create(backend_.layout(), 4000 * 64);
    client_ = cache_.NewClient();
    Serve({}, /*max_calls=*/4);
  }
  ~WorkerServerTest() override {
    EXPECT_TRUE(server_->Shutdown(absl::Seconds(20)));
    server_.reset();
    scheduler_.reset();
    EXPECT_EQ(pages_->free_pages(), pages_->capacity_pages());
    EXPECT_EQ(cache_.counters().live_leases, 0u);
  }

  void Serve(const Scheduler::Options& options, uint32_t max_calls = 0) {
    server_.reset();
    scheduler_ = *Scheduler::Create(options, &backend_, pages_.get(),
                                    &tokenizer_, client_.get());
    WorkerServer::Options server;
    server.listen = "";
    server.max_calls = max_calls;
    server.inference.model_info.set_name("hash");
    server.inference.cache = client_.get();
    server.inference.retain_ttl = retain_ttl_;
    server_ = *WorkerServer::Create(server, compiler_.get(), scheduler_.get(),
                                    &registry_);
    channel_ = server_->grpc_server()->InProcessChannel({});
    inference_ = v1::InferenceService::NewStub(channel_);
    schemas_ = v1::SchemaService::NewStub(channel_);
  }

  grpc::Status Put(const std::string& text,
                   v1::CreateSchemaResponse* response = nullptr) {
    v1::CreateSchemaResponse ignored;
    v1::CreateSchemaRequest request;
    request.set_text(text);
    grpc::ClientContext context;
    return schemas_->CreateSchema(&context, request,
                                  response == nullptr ? &ignored : response);
  }
  static v1::GenerateRequest Pml(const std::string& body) {
    v1::GenerateRequest request;
    request.mutable_prompt()->set_pml("<prompt schema=\"s\">" + body +
                                      "</prompt>");
    request.set_max_tokens(6);
    request.set_ignore_eos(true);
    request.set_top_logprobs(2);
    request.set_include_plan(true);
    return request;
  }
  Answer Generate(const v1::GenerateRequest& request) {
    Answer answer;
    grpc::ClientContext context;
    auto reader = inference_->Generate(&context, request);
    v1::GenerateResponse response;
    while (reader->Read(&response)) {
      if (response.has_started()) answer.started = response.started();
      if (response.has_delta()) {
        answer.text += response.delta().text();
        answer.tokens += response.delta().tokens_size();
      }
      if (response.has_completed()) answer.completed = response.completed();
    }
    answer.status = reader->Finish();
    return answer;
  }
  static absl::Status StatusOf(const Answer& answer) {
    return rpc::FromGrpcStatus(answer.status);
  }

  absl::Duration retain_ttl_;  // of the next Serve
  FakeTokenizer tokenizer_;
  HashBackend backend_;
  FakeCache cache_;
  FakeRegistry registry_;
  RegistrySchemaSource source_;
  std::unique_ptr<PromptCompiler> compiler_;
  std::unique_ptr<PrivatePages> pages_;
  std::unique_ptr<CacheClient> client_;
  std::unique_ptr<Scheduler> scheduler_;
  std::unique_ptr<WorkerServer> server_;
  std::shared_ptr<grpc::Channel> channel_;
  std::unique_ptr<v1::InferenceService::Stub> inference_;
  std::unique_ptr<v1::SchemaService::Stub> schemas_;
};

}  // namespace promptcache::worker
