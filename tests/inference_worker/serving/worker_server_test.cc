// The services as clients see them, over an in-process channel.

#include "inference_worker/serving/worker_server.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <functional>
#include <limits>
#include <map>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/rpc/duration.h"
#include "common/rpc/grpc_status.h"
#include "tests/inference_worker/serving/worker_server_fixture.h"

namespace promptcache::worker {
namespace {

using ::testing::HasSubstr;
using ::testing::StartsWith;

TEST_F(WorkerServerTest, AnswersComeInOrderAndCountEverything) {
  ASSERT_TRUE(Put(kSchema).ok());
  const Answer created = Generate(Pml("<m/>why"));
  PC_ASSERT_OK(StatusOf(created));
  const Answer cached = Generate(Pml("<m/>why"));
  EXPECT_EQ(created.tokens, 6);
  EXPECT_EQ(cached.text, created.text);
  EXPECT_EQ(cached.completed.logits_sha256(),
            created.completed.logits_sha256());
  const v1::Usage& usage = cached.completed.usage();
  EXPECT_EQ(
      usage.prompt_tokens(),
      usage.cached_tokens() + usage.created_tokens() + usage.fresh_tokens());
  EXPECT_EQ(usage.fresh_tokens(), 3u);
  EXPECT_EQ(created.completed.usage().created_tokens(), usage.cached_tokens());
  EXPECT_EQ(cached.started.spans(0).source(), v1::SPAN_SOURCE_READ);
  EXPECT_EQ(created.started.spans(1).miss_reason(), v1::MISS_REASON_NEVER_SEEN);
  EXPECT_EQ(cached.completed.finish_reason(), v1::FINISH_REASON_MAX_TOKENS);
  EXPECT_GT(cached.completed.timings().ttft_ms(), 0);
  EXPECT_FALSE(cached.started.request_id().empty());
}

TEST_F(WorkerServerTest, MissesAreToldWithTheFieldThatDiffers) {
  ASSERT_TRUE(Put(kSchema).ok());
  cache_.SetDifferingField(IdentityField::kContext);
  v1::GenerateRequest request = Pml("<m/>why");
  const Answer with_plan = Generate(request);
  PC_ASSERT_OK(StatusOf(with_plan));
  EXPECT_EQ(with_plan.started.spans(1).miss_reason(),
            v1::MISS_REASON_IDENTITY_DIFFERS);
  EXPECT_EQ(with_plan.started.spans(1).differing_field(), "context");
  cache_.RevokeAll();
  request.set_include_plan(false);
  const v1::Started started = Generate(request).started;
  EXPECT_EQ(started.spans_size(), 0);
  ASSERT_EQ(started.misses_size(), 2);
  EXPECT_EQ(started.misses(0).path(), "");
  EXPECT_EQ(started.misses(1).path(), "m");
  EXPECT_EQ(started.misses(1).reason(), v1::MISS_REASON_IDENTITY_DIFFERS);
  EXPECT_EQ(started.misses(1).differing_field(), "context");
  EXPECT_EQ(started.misses(0).num_tokens() + started.misses(1).num_tokens(),
            started.usage().created_tokens());
  EXPECT_EQ(Generate(request).started.misses_size(), 0);
}

TEST_F(WorkerServerTest, FullAttentionIsExactWhateverThePlanIs) {
  ASSERT_TRUE(Put("<schema name=\"s\"><module name=\"m\">one text</module>"
                  "<module name=\"o\">another</module></schema>")
                  .ok());
  v1::GenerateRequest request = Pml("<o/><m/>why");
  EXPECT_EQ(Generate(request).completed.exactness(), v1::EXACTNESS_MODULAR);
  request.set_attention(v1::ATTENTION_MODE_FULL);
  const Answer full = Generate(request);
  EXPECT_EQ(full.started.exactness(), v1::EXACTNESS_EXACT);
  EXPECT_EQ(full.completed.exactness(), v1::EXACTNESS_EXACT);
}

TEST_F(WorkerServerTest, EveryFormOfAPromptIsAnswered) {
  ASSERT_TRUE(Put(kSchema).ok());
  v1::GenerateRequest text;
  text.mutable_prompt()->set_text("once upon");
  v1::GenerateRequest messages;
  auto* message = messages.mutable_prompt()->mutable_messages()->add_messages();
  message->set_role("user");
  message->set_content("hi");
  v1::GenerateRequest structured;
  auto* s = structured.mutable_prompt()->mutable_structured();
  s->set_schema("s");
  s->add_items()->mutable_import()->set_path("m");
  s->add_items()->set_text("why");
  for (v1::GenerateRequest* request : {&text, &messages, &structured}) {
    request->set_max_tokens(2);
    PC_EXPECT_OK(StatusOf(Generate(*request)));
  }
}

TEST_F(WorkerServerTest, PmlFaultsCarryReasonAndPlace) {
  ASSERT_TRUE(Put(kSchema).ok());
  const Answer answer = Generate(Pml("x <nope/>"));
  EXPECT_EQ(answer.status.error_code(), grpc::INVALID_ARGUMENT);
  const auto info = rpc::GetErrorInfo(StatusOf(answer));
  ASSERT_TRUE(info.has_value());
  EXPECT_EQ(info->reason, "PML_UNKNOWN_MODULE");
  EXPECT_EQ(info->metadata.at("source"), "prompt");
  EXPECT_EQ(info->metadata.at("line"), "1");
  EXPECT_EQ(info->metadata.at("column"), "22");

  const absl::Status refused = rpc::FromGrpcStatus(
      Put("<schema name=\"t\"><module name=\"schema\">x</module></schema>"));
  ASSERT_TRUE(rpc::GetErrorInfo(refused).has_value());
  EXPECT_EQ(rpc::GetErrorInfo(refused)->reason, "PML_BAD_NAME");
}

TEST_F(WorkerServerTest, BadFieldsAreNamed) {
  ASSERT_TRUE(Put(kSchema).ok());
  std::map<std::string, v1::GenerateRequest> bad;
  bad["prompt"] = {};
  bad["top_logprobs"] = Pml("x");
  bad["top_logprobs"].set_top_logprobs(21);
  bad["sampling"] = Pml("x");
  bad["sampling"].mutable_sampling()->set_temperature(-1);
  bad["stop"] = Pml("x");
  bad["stop"].add_stop("");
  bad["cache_mode"] = Pml("x");
  bad["cache_mode"].set_cache_mode(static_cast<v1::CacheMode>(9));
  bad["match"] = Pml("x");
  bad["match"].set_match(static_cast<v1::Match>(9));
  bad["retain"] = Pml("x");  // a schema says what is kept
  bad["retain"].mutable_retain();
  bad["no_retain"] = {};
  bad["no_retain"].mutable_prompt()->set_text("x");
  bad["no_retain"].mutable_retain();
  bad["no_retain"].set_no_retain(true);
  for (const auto& [field, request] : bad) {
    const absl::Status status = StatusOf(Generate(request));
    EXPECT_THAT(status, StatusIs(absl::StatusCode::kInvalidArgument,
                                 StartsWith(field)));
    ASSERT_EQ(rpc::GetFieldViolations(status).size(), 1u) << field;
    EXPECT_EQ(rpc::GetFieldViolations(status)[0].field, field);
  }
}

TEST_F(WorkerServerTest, APromptThatNamesNoSchemaIsAtFaultItself) {
  v1::GenerateRequest request;
  request.mutable_prompt()->set_pml("<prompt><m/></prompt>");
  const absl::Status status = StatusOf(Generate(request));
  EXPECT_THAT(status, StatusIs(absl::StatusCode::kInvalidArgument,
                               HasSubstr("<prompt> needs a schema")));
  ASSERT_TRUE(rpc::GetErrorInfo(status).has_value());
  EXPECT_EQ(rpc::GetErrorInfo(status)->reason, "PML_UNKNOWN_SCHEMA");
  EXPECT_EQ(rpc::GetErrorInfo(status)->metadata.at("column"), "1");
}

TEST_F(WorkerServerTest, UnknownSchemasAndALostDaemonAreToldApart) {
  EXPECT_EQ(Generate(Pml("x")).status.error_code(), grpc::NOT_FOUND);
  registry_.SetDown(true);
  EXPECT_EQ(Generate(Pml("x")).status.error_code(), grpc::UNAVAILABLE);
  EXPECT_EQ(Put(kSchema).error_code(), grpc::UNAVAILABLE);
}

TEST_F(WorkerServerTest, SchemasArePutListedReadAndDeleted) {
  v1::CreateSchemaResponse response;
  ASSERT_TRUE(Put(kSchema, &response).ok());
  EXPECT_TRUE(response.created());
  ASSERT_EQ(response.modules_size(), 3);
  EXPECT_EQ(response.modules(1).path(), "m");
  EXPECT_FALSE(response.modules(2).cached());
  response.Clear();
  ASSERT_TRUE(Put(kSchema, &response).ok());
  EXPECT_FALSE(response.created());
  {
    grpc::ClientContext context;
    v1::GetSchemaRequest request;
    request.set_name("s");
    v1::Schema schema;
    ASSERT_TRUE(schemas_->GetSchema(&context, request, &schema).ok());
    EXPECT_EQ(schema.text(), kSchema);
  }
  {
    grpc::ClientContext context;
    v1::ListSchemasResponse list;
    ASSERT_TRUE(schemas_->ListSchemas(&context, {}, &list).ok());
    EXPECT_EQ(list.schemas_size(), 1);
  }
  PC_EXPECT_OK(StatusOf(Generate(Pml("x"))));
  {
    grpc::ClientContext context;
    v1::DeleteSchemaRequest request;
    request.set_name("s");
    v1::DeleteSchemaResponse deleted;
    ASSERT_TRUE(schemas_->DeleteSchema(&context, request, &deleted).ok());
  }
  EXPECT_EQ(Generate(Pml("x")).status.error_code(), grpc::NOT_FOUND);
}

TEST_F(WorkerServerTest, PoliciesMustNameModulesThatAreCached) {
  for (const auto& [path, ok] :
       std::map<std::string, bool>{{"m", true}, {"n", false}, {"zz", false}}) {
    v1::CreateSchemaRequest request;
    request.set_text(kSchema);
    (*request.mutable_module_policies())[path].set_pin(true);
    request.set_validate_only(true);
    grpc::ClientContext context;
    v1::CreateSchemaResponse response;
    EXPECT_EQ(schemas_->CreateSchema(&context, request, &response).ok(), ok)
        << path;
  }
  EXPECT_EQ(Generate(Pml("x")).status.error_code(), grpc::NOT_FOUND);
}

// What the daemon would refuse, and the whole Commit with it.
TEST_F(WorkerServerTest, APolicyThatIsTooLongNamesItsFieldAndComputesNothing) {
  ASSERT_TRUE(Put(kSchema).ok());
  const auto expect = [](const grpc::Status& status, const std::string& field) {
    const absl::Status got = rpc::FromGrpcStatus(status);
    EXPECT_THAT(got,
                StatusIs(absl::StatusCode::kInvalidArgument,
                         HasSubstr(absl::StrCat(rpc::kMaxTtlSeconds, " s"))));
    ASSERT_EQ(rpc::GetFieldViolations(got).size(), 1u);
    EXPECT_EQ(rpc::GetFieldViolations(got)[0].field, field);
  };
  for (const int64_t seconds :
       {rpc::kMaxTtlSeconds + 1, std::numeric_limits<int64_t>::max()}) {
    v1::CachePolicy policy;
    policy.mutable_ttl()->set_seconds(seconds);

    v1::GenerateRequest request;
    request.mutable_prompt()->set_text("A text");
    *request.mutable_retain() = policy;
    expect(Generate(request).status, "retain.ttl");

    v1::CreateSchemaRequest create;
    create.set_text(kSchema);
    *create.mutable_policy() = policy;
    v1::CreateSchemaResponse created;
    grpc::ClientContext of_all;
    expect(schemas_->CreateSchema(&of_all, create, &created), "policy.ttl");
    create.clear_policy();
    (*create.mutable_module_policies())["m"] = policy;
    grpc::ClientContext of_one;
    expect(schemas_->CreateSchema(&of_one, create, &created),
           "module_policies[\"m\"].ttl");

    v1::WarmModulesRequest warm;
    warm.set_schema("s");
    *warm.mutable_policy() = policy;
    grpc::ClientContext warming;
    expect(inference_->WarmModules(&warming, warm)->Finish(), "policy.ttl");
  }
  EXPECT_EQ(backend_.passes(), 0u);
}

TEST_F(WorkerServerTest, WarmingStreamsProgress) {
  ASSERT_TRUE(Put(kSchema).ok());
  for (const uint32_t already : {0u, 2u}) {
    grpc::ClientContext context;
    v1::WarmModulesRequest request;
    request.set_schema("s");
    auto reader = inference_->WarmModules(&context, request);
    v1::WarmModulesResponse response;
    uint32_t messages = 0;
    while (reader->Read(&response)) {
      EXPECT_EQ(response.modules_done(), ++messages);
      EXPECT_EQ(response.modules_total(), 2u);
    }
    ASSERT_TRUE(reader->Finish().ok());
    EXPECT_EQ(messages, 2u);
    EXPECT_EQ(response.path(), "m");
    EXPECT_EQ(response.tokens_done(), response.tokens_total());
    EXPECT_EQ(response.already_cached(), already);
  }
  EXPECT_EQ(Generate(Pml("<m/>x")).completed.usage().created_tokens(), 0u);
}

TEST_F(WorkerServerTest, CountsWithoutComputing) {
  ASSERT_TRUE(Put(kSchema).ok());
  grpc::ClientContext context;
  v1::CountTokensRequest request;
  *request.mutable_prompt() = Pml("<m/>why").prompt();
  v1::CountTokensResponse response;
  ASSERT_TRUE(inference_->CountTokens(&context, request, &response).ok());
  EXPECT_EQ(response.prompt_tokens(), response.cacheable_tokens() + 3);
  EXPECT_EQ(response.spans_size(), 3);
  EXPECT_EQ(backend_.passes(), 0u);
}

TEST_F(WorkerServerTest, ADeadlineEndsTheCall) {
  v1::GenerateRequest request;
  request.mutable_prompt()->set_text("on and on");
  request.set_max_tokens(3000);
  request.set_ignore_eos(true);
  backend_.SetHook([](std::span<const RowGroup>) {
    absl::SleepFor(absl::Milliseconds(5));
    return absl::OkStatus();
  });
  grpc::ClientContext context;
  context.set_deadline(
      absl::ToChronoTime(absl::Now() + absl::Milliseconds(150)));
  auto reader = inference_->Generate(&context, request);
  v1::GenerateResponse response;
  while (reader->Read(&response)) {
  }
  EXPECT_EQ(reader->Finish().error_code(), grpc::DEADLINE_EXCEEDED);
  EXPECT_TRUE(scheduler_->Drain(absl::Now() + absl::Seconds(5)));
  EXPECT_LT(backend_.passes(), 200u);
}

// As many as there are places, and in a channel where nothing waits but what
// the reactor keeps.
TEST_F(WorkerServerTest, ReadersThatLeaveOrStopReadingHoldNobodyUp) {
  Serve({.max_running = 2, .reader_patience = absl::Milliseconds(20)});
  v1::GenerateRequest request;
  request.mutable_prompt()->set_text("on and on");
  request.set_max_tokens(300);
  request.set_ignore_eos(true);
  const std::string text = Generate(request).text;
  grpc::ClientContext leaving, pausing;
  auto left = inference_->Generate(&leaving, request);
  auto paused = inference_->Generate(&pausing, request);
  v1::GenerateResponse response;
  ASSERT_TRUE(left->Read(&response));
  ASSERT_TRUE(paused->Read(&response));
  // They do not read on; others are served meanwhile.
  for (int i = 0; i < 3; ++i) EXPECT_EQ(Generate(request).text, text);
  EXPECT_GT(scheduler_->stats().reader_pauses, 0u);
  leaving.TryCancel();
  EXPECT_EQ(left->Finish().error_code(), grpc::CANCELLED);
  std::string rest;
  while (paused->Read(&response)) rest += response.delta().text();
  EXPECT_TRUE(paused->Finish().ok());
  EXPECT_EQ(rest, text);
}

TEST_F(WorkerServerTest, TooManyCallsAreRefusedWithADelay) {
  v1::GenerateRequest request;
  request.mutable_prompt()->set_text("on and on");
  request.set_max_tokens(3);
  Gate gate;
  HoldSteps(&gate);
  std::vector<std::unique_ptr<grpc::ClientContext>> contexts;
  std::vector<std::unique_ptr<grpc::ClientReader<v1::GenerateResponse>>> calls;
  for (int i = 0; i < 4; ++i) {
    contexts.push_back(std::make_unique<grpc::ClientContext>());
    calls.push_back(inference_->Generate(contexts.back().get(), request));
  }
  while (scheduler_->num_requests() < 4) absl::SleepFor(absl::Milliseconds(1));
  const absl::Status refused = StatusOf(Generate(request));
  EXPECT_THAT(refused, StatusIs(absl::StatusCode::kResourceExhausted,
                                HasSubstr("queue is full")));
  EXPECT_TRUE(rpc::GetRetryDelay(refused).has_value());
  const auto refused_too = [](const grpc::Status& status) {
    return status.error_code() == grpc::RESOURCE_EXHAUSTED &&
           rpc::GetRetryDelay(rpc::FromGrpcStatus(status)).has_value();
  };
  EXPECT_TRUE(refused_too(Put(kSchema)));
  {
    grpc::ClientContext context;
    v1::CountTokensRequest count;
    *count.mutable_prompt() = request.prompt();
    v1::CountTokensResponse response;
    EXPECT_TRUE(
        refused_too(inference_->CountTokens(&context, count, &response)));
  }
  {
    grpc::ClientContext context;
    v1::WarmModulesResponse response;
    auto warm = inference_->WarmModules(&context, v1::WarmModulesRequest());
    EXPECT_FALSE(warm->Read(&response));
    EXPECT_TRUE(refused_too(warm->Finish()));
  }
  gate.Open();
  for (auto& call : calls) {
    v1::GenerateResponse response;
    while (call->Read(&response)) {
    }
    EXPECT_TRUE(call->Finish().ok());
  }
}

// The limit on calls knows no domains.
TEST_F(WorkerServerTest, WhoIsOneTooManyIsTheSchedulersChoice) {
  Serve({.max_running = 1, .max_queue = 2});
  v1::GenerateRequest request;
  request.mutable_prompt()->set_text("on and on");
  request.set_max_tokens(3);
  Gate gate;
  HoldSteps(&gate);
  std::vector<std::thread> calls;
  for (int i = 0; i < 3; ++i) {
    calls.emplace_back([&] { PC_EXPECT_OK(StatusOf(Generate(request))); });
  }
  while (scheduler_->num_requests() < 3) absl::SleepFor(absl::Milliseconds(1));
  EXPECT_THAT(StatusOf(Generate(request)),
              StatusIs(absl::StatusCode::kResourceExhausted,
                       HasSubstr("requests are running or waiting")));
  GenerationRequest other;
  other.prompt = *compiler_->Compile(PlainText{"x"}, pml::Layout::kCompact);
  other.isolation_domain = "other";
  const auto sink = std::make_shared<RecordingSink>();
  PC_EXPECT_OK(scheduler_->Submit(other, sink));
  EXPECT_EQ(scheduler_->max_requests(), 9u);
  gate.Open();
  EXPECT_TRUE(sink->WaitDone());  // it waits at the gate, too
  for (std::thread& call : calls) call.join();
}

TEST_F(WorkerServerTest, ACallWhoseCallerHasLeftIsNotBegun) {
  Gate gate;
  registry_.SetListHook([&] { gate.Wait(); });
  // As many as there are threads for schemas.
  std::vector<std::thread> lists;
  for (int i = 0; i < 2; ++i) {
    lists.emplace_back([this] {
      grpc::ClientContext context;
      v1::ListSchemasResponse response;
      EXPECT_TRUE(schemas_->ListSchemas(&context, {}, &response).ok());
    });
  }
  while (registry_.lists() < 2) absl::SleepFor(absl::Milliseconds(1));
  v1::CreateSchemaRequest request;
  request.set_text(kSchema);
  v1::CreateSchemaResponse response;
  grpc::ClientContext context;
  context.set_deadline(
      absl::ToChronoTime(absl::Now() + absl::Milliseconds(50)));
  EXPECT_EQ(schemas_->CreateSchema(&context, request, &response).error_code(),
            grpc::DEADLINE_EXCEEDED);
  absl::SleepFor(absl::Milliseconds(200));
  gate.Open();
  for (std::thread& list : lists) list.join();
  // Two more: the executor is done with what came before them.
  for (int i = 0; i < 2; ++i) {
    grpc::ClientContext again;
    v1::ListSchemasResponse listed;
    ASSERT_TRUE(schemas_->ListSchemas(&again, {}, &listed).ok());
    EXPECT_EQ(listed.schemas_size(), 0);
  }
}

TEST_F(WorkerServerTest, WarmingWaitsWhileTheQueueIsFull) {
  ASSERT_TRUE(Put(kSchema).ok());
  Gate gate;
  HoldSteps(&gate);
  GenerationRequest filler;
  filler.prompt = *compiler_->Compile(PlainText{"x"}, pml::Layout::kCompact);
  filler.max_tokens = 1;
  const auto sink = std::make_shared<RecordingSink>();
  while (scheduler_->Submit(filler, sink).ok()) {
  }
  v1::WarmModulesRequest request;
  request.set_schema("s");
  v1::WarmModulesResponse response;
  {
    grpc::ClientContext context;
    context.set_deadline(
        absl::ToChronoTime(absl::Now() + absl::Milliseconds(100)));
    auto reader = inference_->WarmModules(&context, request);
    EXPECT_FALSE(reader->Read(&response));
    EXPECT_EQ(reader->Finish().error_code(), grpc::DEADLINE_EXCEEDED);
  }
  grpc::ClientContext context;
  auto reader = inference_->WarmModules(&context, request);
  absl::SleepFor(absl::Milliseconds(60));
  gate.Open();
  while (reader->Read(&response)) {
  }
  ASSERT_TRUE(reader->Finish().ok());
  EXPECT_EQ(response.modules_done(), 2u);
}

// It asks the scheduler for one prompt after another, also while it is told to
// end.
TEST_F(WorkerServerTest, AWarmUpThatRunsIsFinishedAtTheEnd) {
  ASSERT_TRUE(Put(kSchema).ok());
  Gate gate;
  HoldSteps(&gate);
  v1::WarmModulesRequest request;
  request.set_schema("s");
  grpc::ClientContext context;
  auto reader = inference_->WarmModules(&context, request);
  while (scheduler_->num_requests() < 1) absl::SleepFor(absl::Milliseconds(1));
  std::thread end(
      [this] { EXPECT_TRUE(server_->Shutdown(absl::Seconds(60))); });
  grpc::Status refused;
  do {
    grpc::ClientContext late;
    v1::ListSchemasResponse listed;
    refused = schemas_->ListSchemas(&late, {}, &listed);
  } while (refused.ok());
  EXPECT_EQ(refused.error_code(), grpc::UNAVAILABLE);
  EXPECT_THAT(refused.error_message(), HasSubstr("shutting down"));
  gate.Open();
  v1::WarmModulesResponse response;
  while (reader->Read(&response)) {
  }
  EXPECT_TRUE(reader->Finish().ok());
  EXPECT_EQ(response.modules_done(), 2u);
  end.join();
}

TEST_F(WorkerServerTest, ModulesThatAreNotKeptAreCounted) {
  ASSERT_TRUE(Put(kSchema).ok());
  cache_.SetNoMemory(true);
  v1::WarmModulesRequest request;
  request.set_schema("s");
  grpc::ClientContext context;
  auto reader = inference_->WarmModules(&context, request);
  v1::WarmModulesResponse response;
  while (reader->Read(&response)) {
  }
  ASSERT_TRUE(reader->Finish().ok());
  EXPECT_EQ(response.modules_done(), 2u);
  EXPECT_EQ(response.not_kept(), 2u);
}

TEST_F(WorkerServerTest, SaysWhatItServes) {
  grpc::ClientContext context;
  v1::ModelInfo info;
  ASSERT_TRUE(inference_->GetModelInfo(&context, {}, &info).ok());
  EXPECT_EQ(info.name(), "hash");
}

TEST(WorkerServerOptionsTest, OnlyThisMachineWithoutTls) {
  WorkerServer::Options options;
  PC_EXPECT_OK(options.Validate());
  options.listen = "0.0.0.0:7070";
  EXPECT_THAT(options.Validate(), StatusIs(absl::StatusCode::kInvalidArgument,
                                           HasSubstr("--insecure_listen")));
  options.insecure_listen = true;
  PC_EXPECT_OK(options.Validate());
}

}  // namespace
}  // namespace promptcache::worker
