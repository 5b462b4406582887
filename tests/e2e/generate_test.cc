#include <gmock/gmock.h>

#include <thread>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "common/rpc/grpc_status.h"
#include "grpcpp/grpcpp.h"
#include "promptcache/v1/inference.grpc.pb.h"
#include "tests/e2e/node_fixture.h"
#include "tests/support/status_matchers.h"

namespace promptcache::e2e {
namespace {

using ::testing::_;
using ::testing::HasSubstr;

constexpr char kPrompt[] =
    "<prompt schema=\"lib\"><c/><a/><user>When does it open?</user></prompt>";

class GenerateTest : public NodeTest {
 protected:
  void SetUp() override {
    UseTinyModel();
    StartDaemon();
    worker_ = StartWorker();
    WaitAttached(worker_.get());
  }
  std::unique_ptr<WorkerProcess> worker_;
};

TEST_F(GenerateTest, CachedAnswersEqualBypassBitForBit) {
  PC_ASSERT_OK(worker_->PutSchema(SmallSchema("lib")));
  const Answer bypass = worker_->Generate(Bypass(Request(kPrompt)));
  const Answer created = worker_->Generate(Request(kPrompt));
  const Answer cached = worker_->Generate(Request(kPrompt));
  for (const Answer* answer : {&bypass, &created, &cached}) {
    PC_ASSERT_OK(answer->status);
    EXPECT_EQ(answer->text, bypass.text);
    EXPECT_EQ(answer->ids, bypass.ids);
    EXPECT_EQ(answer->completed.logits_sha256(),
              bypass.completed.logits_sha256());
  }
  EXPECT_EQ(bypass.completed.logits_sha256().size(), 64u);
  EXPECT_EQ(bypass.usage().cached_tokens(), 0u);
  EXPECT_GT(created.usage().created_tokens(), 0u);
  EXPECT_EQ(created.usage().cached_tokens(), 0u);
  EXPECT_EQ(cached.usage().cached_tokens(), created.usage().created_tokens());
  EXPECT_EQ(cached.usage().created_tokens(), 0u);
  EXPECT_EQ(cached.completed.exactness(), v1::EXACTNESS_MODULAR);
}

// An encoder-decoder's cross-attention states, of two workers.
TEST_F(GenerateTest, AnEncoderDecoderAnswersFromTheCache) {
  const std::string flag = "--model=" + TestDataPath("models/later/tiny-t5");
  worker_ = StartWorker({flag});
  auto other = StartWorker({flag});
  WaitAttached(worker_.get());
  WaitAttached(other.get());
  PC_ASSERT_OK(worker_->PutSchema(SmallSchema("lib")));
  const Answer bypass = worker_->Generate(Bypass(Request(kPrompt)));
  const Answer created = worker_->Generate(Request(kPrompt));
  const Answer cached = other->Generate(Request(kPrompt));
  for (const Answer* answer : {&bypass, &created, &cached}) {
    PC_ASSERT_OK(answer->status);
    EXPECT_GT(answer->ids.size(), 1u);
    EXPECT_EQ(answer->ids, bypass.ids);
    EXPECT_EQ(answer->completed.logits_sha256(),
              bypass.completed.logits_sha256());
    EXPECT_EQ(answer->completed.exactness(), v1::EXACTNESS_MODULAR);
  }
  EXPECT_EQ(bypass.usage().cached_tokens(), 0u);
  EXPECT_GT(created.usage().created_tokens(), 0u);
  EXPECT_EQ(cached.usage().cached_tokens(), created.usage().created_tokens());
  EXPECT_EQ(cached.usage().created_tokens(), 0u);
}

v1::GenerateRequest Chat(const std::vector<std::string>& turns) {
  v1::GenerateRequest request;
  request.set_max_tokens(24);
  request.set_ignore_eos(true);
  request.set_top_logprobs(1);
  for (size_t i = 0; i < turns.size(); ++i) {
    v1::Message* message =
        request.mutable_prompt()->mutable_messages()->add_messages();
    message->set_role(i % 2 == 0 ? "user" : "assistant");
    message->set_content(turns[i]);
  }
  return request;
}

TEST_F(GenerateTest, AConversationIsReadWhereverItGoesOn) {
  v1::GenerateRequest first = Chat({Words(40)});
  first.mutable_retain()->mutable_ttl()->set_seconds(600);
  const Answer begun = worker_->Generate(first);
  PC_ASSERT_OK(begun.status);
  EXPECT_GT(begun.usage().created_tokens(), 128u);
  EXPECT_GE(begun.usage().retained_tokens(), begun.usage().created_tokens());
  EXPECT_EQ(begun.completed.exactness(), v1::EXACTNESS_EXACT);

  auto other = StartWorker();
  WaitAttached(other.get());
  const auto second = Chat({Words(40), begun.text, "And then?"});
  const Answer cached = other->Generate(second);
  PC_ASSERT_OK(cached.status);
  EXPECT_GE(cached.usage().cached_tokens(), begun.usage().created_tokens());
  EXPECT_EQ(cached.usage().created_tokens(), 0u);  // it did not ask to retain
  EXPECT_EQ(cached.completed.exactness(), v1::EXACTNESS_EXACT);
  const Answer bypass = other->Generate(Bypass(second));
  PC_ASSERT_OK(bypass.status);
  EXPECT_EQ(bypass.usage().cached_tokens(), 0u);
  EXPECT_EQ(cached.completed.logits_sha256(), bypass.completed.logits_sha256());
  EXPECT_EQ(cached.ids, bypass.ids);

  // They are modules like others: listed, and let go by name.
  uint64_t tokens = 0;
  for (const v1::Module& module : Modules(/*include_absent=*/false)) {
    EXPECT_EQ(module.schema(), "~prefix");
    tokens += module.num_tokens();
  }
  EXPECT_EQ(tokens, begun.usage().retained_tokens());
}

TEST_F(GenerateTest, AConversationStaysAsLongAsItsLastTurnSays) {
  v1::GenerateRequest first = Chat({Words(40)});
  first.mutable_retain()->mutable_ttl()->set_seconds(60);
  const Answer begun = worker_->Generate(first);
  PC_ASSERT_OK(begun.status);
  v1::GenerateRequest second = Chat({Words(40), begun.text, "And then?"});
  second.mutable_retain()->mutable_ttl()->set_seconds(3600);
  const Answer next = worker_->Generate(second);
  PC_ASSERT_OK(next.status);
  ASSERT_GT(next.usage().cached_tokens(), 0u);
  const int64_t soon = absl::ToUnixSeconds(absl::Now() + absl::Minutes(50));
  uint64_t tokens = 0;
  for (const v1::Module& module : Modules(/*include_absent=*/false)) {
    if (module.expire_time().seconds() > soon) tokens += module.num_tokens();
  }
  EXPECT_EQ(tokens, next.usage().retained_tokens());
}

TEST_F(GenerateTest, RegisteredModulesAreFoundInPlainText) {
  const std::string document = Words(30);
  PC_ASSERT_OK(worker_->PutSchema(
      "<schema name=\"doc\">Read this: <module name=\"text\">" + document +
      "</module></schema>"));
  v1::GenerateRequest request;
  request.mutable_prompt()->set_text("Read this: " + document + " Why?");
  request.set_max_tokens(8);
  request.set_ignore_eos(true);
  request.set_top_logprobs(1);
  request.set_match(v1::MATCH_AUTO);
  const Answer created = worker_->Generate(request);
  PC_ASSERT_OK(created.status);
  EXPECT_EQ(created.started.matched_schema(), "doc");
  EXPECT_GT(created.usage().created_tokens(), 100u);
  // What a prompt of that schema left there is found, too.
  const Answer imported = worker_->Generate(
      Request("<prompt schema=\"doc\"><text/> Why?</prompt>", 8));
  EXPECT_EQ(imported.usage().cached_tokens(), created.usage().created_tokens());
  const Answer cached = worker_->Generate(request);
  EXPECT_EQ(cached.usage().cached_tokens(), created.usage().created_tokens());
  const Answer bypass = worker_->Generate(Bypass(request));
  EXPECT_EQ(cached.completed.logits_sha256(), bypass.completed.logits_sha256());
  EXPECT_EQ(cached.completed.logits_sha256(),
            imported.completed.logits_sha256());
  request.clear_match();
  const Answer plain = worker_->Generate(request);
  EXPECT_EQ(plain.started.matched_schema(), "");
  EXPECT_EQ(plain.usage().cached_tokens(), 0u);
}

TEST_F(GenerateTest, RegisteredModulesAreFoundInConversations) {
  const std::string document = Words(30);
  PC_ASSERT_OK(worker_->PutSchema(
      "<schema name=\"doc\"><user>Read this: <module name=\"text\">" +
      document + "</module></user></schema>"));
  v1::GenerateRequest request =
      Chat({"Read this: " + document + " Why?", "So.", "Is that all?"});
  request.set_match(v1::MATCH_AUTO);
  const Answer created = worker_->Generate(request);
  PC_ASSERT_OK(created.status);
  EXPECT_EQ(created.started.matched_schema(), "doc");
  EXPECT_EQ(created.completed.exactness(), v1::EXACTNESS_EXACT);
  EXPECT_GT(created.usage().created_tokens(), 100u);
  // Prompts that import it, conversations that hold it: the same states.
  const Answer imported = worker_->Generate(
      Request("<prompt schema=\"doc\"><user><text/> Why?</user></prompt>", 8));
  EXPECT_EQ(imported.usage().cached_tokens(), created.usage().created_tokens());
  const Answer cached = worker_->Generate(request);
  EXPECT_EQ(cached.usage().cached_tokens(), created.usage().created_tokens());
  const Answer bypass = worker_->Generate(Bypass(request));
  EXPECT_EQ(cached.completed.logits_sha256(), bypass.completed.logits_sha256());
  request.clear_match();
  const Answer plain = worker_->Generate(request);
  EXPECT_EQ(plain.started.matched_schema(), "");
  EXPECT_EQ(plain.usage().cached_tokens(), 0u);
}

// As many as there are places. Others wait for a reader's patience (0.5 s);
// what they must not wait for is its limit (30 s).
constexpr absl::Duration kNoDelay = absl::Seconds(5);

TEST_F(GenerateTest, ReadersThatStopReadingDelayNobody) {
  worker_ = StartWorker({"--max_running=2"});
  WaitAttached(worker_.get());
  // Else the streams' windows grow until they hold a whole answer.
  grpc::ChannelArguments arguments;
  arguments.SetInt(GRPC_ARG_HTTP2_BDP_PROBE, 0);
  arguments.SetInt(GRPC_ARG_HTTP2_STREAM_LOOKAHEAD_BYTES, 4096);
  auto channel = grpc::CreateCustomChannel(
      worker_->address(), grpc::InsecureChannelCredentials(), arguments);
  auto stub = v1::InferenceService::NewStub(channel);
  v1::GenerateRequest slow = Request("", 900);
  slow.mutable_prompt()->set_text("On and on");
  slow.set_ignore_eos(true);
  slow.set_top_logprobs(20);  // more than the stream's window
  grpc::ClientContext contexts[2];
  std::unique_ptr<grpc::ClientReader<v1::GenerateResponse>> readers[] = {
      stub->Generate(&contexts[0], slow), stub->Generate(&contexts[1], slow)};
  v1::GenerateResponse event;
  for (const auto& reader : readers) ASSERT_TRUE(reader->Read(&event));
  v1::GenerateRequest quick = Request("", 12);
  quick.mutable_prompt()->set_text("Now");
  for (int i = 0; i < 3; ++i) {
    PC_ASSERT_OK(worker_->Generate(quick, kNoDelay).status);
  }
  // Nothing was lost meanwhile.
  std::vector<int32_t> ids[2];
  bool paused = false;
  for (int i = 0; i < 2; ++i) {
    while (readers[i]->Read(&event)) {
      for (const auto& token : event.delta().tokens()) {
        ids[i].push_back(token.id());
      }
      for (const std::string& notice : event.completed().notices()) {
        paused = paused || notice.find("reader was behind") != notice.npos;
      }
    }
    EXPECT_TRUE(readers[i]->Finish().ok());
  }
  EXPECT_TRUE(paused);
  EXPECT_EQ(ids[0].size(), 900u);
  EXPECT_EQ(ids[0], ids[1]);
}

TEST_F(GenerateTest, ASecondWorkerReadsWhatTheFirstEncoded) {
  PC_ASSERT_OK(worker_->PutSchema(SmallSchema("lib")));
  const Answer first = worker_->Generate(Request(kPrompt));
  PC_ASSERT_OK(first.status);
  const uint64_t used = DeviceTier().used_bytes();
  EXPECT_GT(used, 0u);
  auto other = StartWorker();
  WaitAttached(other.get());
  const Answer second = other->Generate(Request(kPrompt));
  PC_ASSERT_OK(second.status);
  EXPECT_EQ(second.usage().cached_tokens(), first.usage().created_tokens());
  EXPECT_EQ(second.usage().created_tokens(), 0u);
  EXPECT_EQ(second.completed.logits_sha256(), first.completed.logits_sha256());
  EXPECT_EQ(DeviceTier().used_bytes(), used);
}

TEST_F(GenerateTest, OneModuleInTwoSchemasHasOneKey) {
  PC_ASSERT_OK(worker_->PutSchema(SmallSchema("lib")));
  // The same preamble and module "c", at another place.
  PC_ASSERT_OK(worker_->PutSchema(
      "<schema name=\"lib2\"><system>You are the clerk of a small library.\n"
      "<module name=\"x\">Something else stands here.\n</module>"
      "<module name=\"c\">Lost books are paid for at the price they cost when "
      "they were new.\n</module></system></schema>"));
  PC_ASSERT_OK(
      worker_->Generate(Request("<prompt schema=\"lib\"><c/></prompt>"))
          .status);
  const uint64_t used = DeviceTier().used_bytes();
  const auto before = Stats();
  PC_ASSERT_OK(before);
  const Answer other =
      worker_->Generate(Request("<prompt schema=\"lib2\"><c/></prompt>"));
  PC_ASSERT_OK(other.status);
  EXPECT_EQ(other.usage().created_tokens(), 0u);
  EXPECT_GT(other.usage().cached_tokens(), 0u);
  EXPECT_EQ(DeviceTier().used_bytes(), used);
  const auto after = Stats();
  PC_ASSERT_OK(after);
  EXPECT_EQ(after->commits(), before->commits());
}

TEST_F(GenerateTest, ARefusedDocumentSaysReasonLineAndColumn) {
  PC_ASSERT_OK(worker_->PutSchema(SmallSchema("lib")));
  const Answer answer = worker_->Generate(
      Request("<prompt schema=\"lib\">\n  <a/>\n  <nothing/></prompt>"));
  EXPECT_THAT(answer.status, StatusIs(absl::StatusCode::kInvalidArgument, _));
  const auto info = rpc::GetErrorInfo(answer.status);
  ASSERT_TRUE(info.has_value());
  EXPECT_EQ(info->reason, "PML_UNKNOWN_MODULE");
  EXPECT_EQ(info->metadata.at("source"), "prompt");
  EXPECT_EQ(info->metadata.at("line"), "3");
  EXPECT_EQ(info->metadata.at("column"), "3");
}

TEST_F(GenerateTest, ASchemaThatIsRefusedSaysWhere) {
  const auto put = worker_->PutSchema(
      "<schema name=\"bad\">\n<module name=\"a\">x</module>\n"
      "<module name=\"a\">y</module></schema>");
  const auto info = rpc::GetErrorInfo(put.status());
  ASSERT_TRUE(info.has_value()) << put.status();
  EXPECT_EQ(info->reason, "PML_DUPLICATE_NAME");
  EXPECT_EQ(info->metadata.at("source"), "schema");
  EXPECT_EQ(info->metadata.at("line"), "3");
}

TEST_F(GenerateTest, TheWorkersLimitsAreItsFlags) {
  auto worker = StartWorker({"--max_modules=2", "--max_prompt_bytes=1KiB"});
  WaitAttached(worker.get());
  const absl::Status refused = worker->PutSchema(SmallSchema("lib")).status();
  auto info = rpc::GetErrorInfo(refused);
  ASSERT_TRUE(info.has_value()) << refused;
  EXPECT_EQ(info->reason, "PML_LIMIT");
  EXPECT_EQ(info->metadata.at("modules"), "3");
  EXPECT_EQ(info->metadata.at("limit"), "2");

  v1::GenerateRequest plain;
  plain.mutable_prompt()->set_text(std::string(2000, 'x'));
  for (const auto& request : {Request(std::string(2000, ' ')), plain}) {
    const absl::Status too_long = worker->Generate(request).status;
    EXPECT_THAT(too_long, StatusIs(absl::StatusCode::kInvalidArgument,
                                   HasSubstr("document bytes: 2000 is over "
                                             "the limit of 1024")));
    info = rpc::GetErrorInfo(too_long);
    ASSERT_TRUE(info.has_value()) << too_long;
    EXPECT_EQ(info->reason, "PML_LIMIT");
    EXPECT_EQ(info->metadata.at("source"), "prompt");
    EXPECT_EQ(info->metadata.at("document bytes"), "2000");
    EXPECT_EQ(info->metadata.at("limit"), "1024");
  }
}

TEST_F(GenerateTest, AnUnknownSchemaIsNotFound) {
  const Answer answer =
      worker_->Generate(Request("<prompt schema=\"none\">x</prompt>"));
  EXPECT_THAT(answer.status, StatusIs(absl::StatusCode::kNotFound, _));
}

TEST_F(GenerateTest, CancellationGivesEverythingBack) {
  PC_ASSERT_OK(worker_->PutSchema(SmallSchema("lib")));
  const Answer answer =
      worker_->Generate(Request(kPrompt, 1500), absl::Seconds(120),
                        /*cancel_after=*/3);
  EXPECT_THAT(answer.status, StatusIs(absl::StatusCode::kCancelled, _));
  EXPECT_LT(answer.ids.size(), 1500u);
  EXPECT_TRUE(Eventually(absl::Seconds(10), [&] {
    const auto stats = Stats();
    return stats.ok() && stats->num_leases() == 0 &&
           stats->num_reservations() == 0;
  }));
  EXPECT_EQ(DeviceTier().leased_bytes(), 0u);
  PC_EXPECT_OK(worker_->Generate(Request(kPrompt)).status);
}

TEST_F(GenerateTest, ADeadlineEndsTheWorkAndGivesEverythingBack) {
  PC_ASSERT_OK(worker_->PutSchema(SmallSchema("lib")));
  const Answer answer =
      worker_->Generate(Request(kPrompt, 1500), absl::Milliseconds(60));
  EXPECT_THAT(answer.status, StatusIs(absl::StatusCode::kDeadlineExceeded, _));
  EXPECT_TRUE(Eventually(absl::Seconds(10), [&] {
    const auto stats = Stats();
    return stats.ok() && stats->num_leases() == 0 &&
           stats->num_reservations() == 0;
  }));
  PC_EXPECT_OK(worker_->Generate(Request(kPrompt)).status);
}

TEST_F(GenerateTest, ManyRequestsAtOnceAreAllAnsweredAlike) {
  PC_ASSERT_OK(worker_->PutSchema(SmallSchema("lib")));
  const Answer alone = worker_->Generate(Bypass(Request(kPrompt)));
  PC_ASSERT_OK(alone.status);
  std::vector<Answer> answers(12);
  std::vector<std::thread> threads;
  for (Answer& answer : answers) {
    threads.emplace_back([&] { answer = worker_->Generate(Request(kPrompt)); });
  }
  for (std::thread& thread : threads) thread.join();
  for (const Answer& answer : answers) {
    PC_EXPECT_OK(answer.status);
    EXPECT_EQ(answer.completed.logits_sha256(),
              alone.completed.logits_sha256());
  }
}

TEST_F(GenerateTest, TheSameSeedGivesTheSameAnswer) {
  v1::GenerateRequest request;
  request.mutable_prompt()->set_text("The library");
  request.set_max_tokens(20);
  request.set_ignore_eos(true);
  request.mutable_sampling()->set_temperature(1);
  request.mutable_sampling()->set_seed(7);
  const Answer one = worker_->Generate(request);
  const Answer two = worker_->Generate(request);
  PC_ASSERT_OK(one.status);
  EXPECT_EQ(one.ids, two.ids);
  request.mutable_sampling()->set_seed(8);
  EXPECT_NE(worker_->Generate(request).ids, one.ids);
}

TEST_F(GenerateTest, NoMemoryMeansASlowerAnswerNotAWrongOne) {
  const Answer right = [&] {
    PC_EXPECT_OK(worker_->PutSchema(SmallSchema("lib")));
    return worker_->Generate(Bypass(Request(kPrompt)));
  }();
  worker_.reset();
  daemon().Stop(absl::Seconds(5));
  // Two pages of 16 tokens: less than the preamble and two modules need.
  StartDaemon({absl::StrCat("--device_bytes=", 2 * PageBytes()),
               absl::StrCat("--segment_bytes=", 2 * PageBytes())});
  worker_ = StartWorker();
  WaitAttached(worker_.get());
  for (int i = 0; i < 2; ++i) {
    const Answer answer = worker_->Generate(Request(kPrompt));
    PC_ASSERT_OK(answer.status);
    EXPECT_EQ(answer.completed.logits_sha256(),
              right.completed.logits_sha256());
    EXPECT_GT(answer.usage().fresh_tokens(), 0u);
  }
  EXPECT_LE(DeviceTier().used_bytes(), DeviceTier().capacity_bytes());
}

}  // namespace
}  // namespace promptcache::e2e
