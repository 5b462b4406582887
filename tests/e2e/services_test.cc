// What any gRPC client may ask of the servers without our protos: health and
// reflection. Their messages are read and written field by field.

#include <gmock/gmock.h>
#include <google/protobuf/descriptor.pb.h>
#include <google/protobuf/unknown_field_set.h>
#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/grpcpp.h>
#include <signal.h>

#include "absl/strings/str_cat.h"
#include "tests/e2e/node_fixture.h"
#include "tests/support/status_matchers.h"

namespace promptcache::e2e {
namespace {

using google::protobuf::UnknownField;
using google::protobuf::UnknownFieldSet;
using ::testing::Contains;
using ::testing::IsSupersetOf;

// A message with one string.
std::string OneString(int field, const std::string& value) {
  UnknownFieldSet message;
  message.AddLengthDelimited(field, value);
  std::string bytes;
  message.SerializeToString(&bytes);
  return bytes;
}

// Every value of a field of strings or messages.
std::vector<std::string> Values(const std::string& bytes, int field) {
  UnknownFieldSet message;
  EXPECT_TRUE(message.ParseFromString(bytes));
  std::vector<std::string> values;
  for (int i = 0; i < message.field_count(); ++i) {
    const UnknownField& f = message.field(i);
    if (f.number() == field && f.type() == UnknownField::TYPE_LENGTH_DELIMITED)
      values.push_back(f.length_delimited());
  }
  return values;
}

// One message to a method, streaming or not, and one back; "" when there is
// none.
std::string Ask(const std::string& address, const std::string& method,
                const std::string& request) {
  grpc::GenericStub stub(
      grpc::CreateChannel(address, grpc::InsecureChannelCredentials()));
  grpc::ClientContext context;
  context.set_deadline(absl::ToChronoTime(absl::Now() + absl::Seconds(30)));
  grpc::CompletionQueue queue;
  const auto done = [&queue] {
    void* tag = nullptr;
    bool ok = false;
    return queue.Next(&tag, &ok) && ok;
  };
  auto call = stub.PrepareCall(&context, method, &queue);
  call->StartCall(nullptr);
  if (!done()) return "";
  const grpc::Slice slice(request);
  call->Write(grpc::ByteBuffer(&slice, 1), nullptr);
  if (!done()) return "";
  call->WritesDone(nullptr);
  done();
  grpc::ByteBuffer response;
  call->Read(&response, nullptr);
  std::string bytes;
  if (done()) {
    std::vector<grpc::Slice> slices;
    EXPECT_TRUE(response.Dump(&slices).ok());
    for (const grpc::Slice& s : slices) {
      bytes.append(reinterpret_cast<const char*>(s.begin()), s.size());
    }
  }
  grpc::Status status;
  call->Finish(&status, nullptr);
  done();
  EXPECT_TRUE(status.ok()) << method << ": " << status.error_message();
  return bytes;
}

// ServingStatus: 1 = SERVING; 0 when the server does not know the service.
uint64_t Health(const std::string& address, const std::string& service) {
  const std::string response =
      Ask(address, "/grpc.health.v1.Health/Check", OneString(1, service));
  UnknownFieldSet message;
  if (!message.ParseFromString(response) || message.empty()) return 0;
  return message.field(0).number() == 1 ? message.field(0).varint() : 0;
}

std::string Reflect(const std::string& address, const std::string& request) {
  return Ask(address,
             "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
             request);
}

std::vector<std::string> ListedServices(const std::string& address) {
  std::vector<std::string> names;
  // list_services = 7; list_services_response = 6, its service = 1, its name.
  const std::string response = Reflect(address, OneString(7, "*"));
  for (const std::string& list : Values(response, 6)) {
    for (const std::string& service : Values(list, 1)) {
      for (const std::string& name : Values(service, 1)) names.push_back(name);
    }
  }
  return names;
}

// Methods of a service, as the server itself describes it.
std::vector<std::string> DescribedMethods(const std::string& address,
                                          const std::string& service) {
  std::vector<std::string> methods;
  // file_containing_symbol = 4; file_descriptor_response = 4, its files = 1.
  const std::string response = Reflect(address, OneString(4, service));
  for (const std::string& files : Values(response, 4)) {
    for (const std::string& bytes : Values(files, 1)) {
      google::protobuf::FileDescriptorProto file;
      EXPECT_TRUE(file.ParseFromString(bytes));
      for (const auto& s : file.service()) {
        if (absl::StrCat(file.package(), ".", s.name()) != service) continue;
        for (const auto& method : s.method()) methods.push_back(method.name());
      }
    }
  }
  return methods;
}

class ServicesTest : public NodeTest {
 protected:
  void SetUp() override {
    UseTinyModel();
    StartDaemon();
    worker_ = StartWorker();
    WaitAttached(worker_.get());
  }
  std::unique_ptr<WorkerProcess> worker_;
};

TEST_F(ServicesTest, ReflectionListsAndDescribesTheServices) {
  EXPECT_THAT(ListedServices(worker_->address()),
              IsSupersetOf({"promptcache.v1.InferenceService",
                            "promptcache.v1.SchemaService"}));
  EXPECT_THAT(
      DescribedMethods(worker_->address(), "promptcache.v1.InferenceService"),
      IsSupersetOf({"Generate", "WarmModules", "CountTokens"}));
  EXPECT_THAT(
      DescribedMethods(worker_->address(), "promptcache.v1.SchemaService"),
      Contains("CreateSchema"));
  EXPECT_THAT(ListedServices(daemon_address()),
              Contains("promptcache.v1.CacheService"));
  EXPECT_THAT(DescribedMethods(daemon_address(), "promptcache.v1.CacheService"),
              IsSupersetOf({"GetStats", "WatchEvents"}));
}

// A worker without its daemon still answers, only slower: it must not be taken
// out of service for that. Whether it is attached is in GetModelInfo.
TEST_F(ServicesTest, AWorkerIsServingWithAndWithoutItsDaemon) {
  EXPECT_EQ(Health(daemon_address(), "promptcache.v1.CacheService"), 1u);
  const auto expect_serving = [&] {
    for (const char* service : {"", "promptcache.v1.InferenceService",
                                "promptcache.v1.SchemaService"}) {
      EXPECT_EQ(Health(worker_->address(), service), 1u) << service;
    }
  };
  expect_serving();
  PC_ASSERT_OK(daemon().Signal(SIGKILL));
  ASSERT_TRUE(Eventually(absl::Seconds(30), [&] {
    auto info = worker_->ModelInfo();
    return info.ok() && !info->daemon_attached();
  }));
  expect_serving();
  v1::GenerateRequest request;
  request.mutable_prompt()->set_text("Once upon a time");
  request.set_max_tokens(3);
  PC_EXPECT_OK(worker_->Generate(request).status);
}

}  // namespace
}  // namespace promptcache::e2e
