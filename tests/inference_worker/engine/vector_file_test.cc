#include "inference_worker/engine/vector_file.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "tests/support/status_matchers.h"
#include "tests/support/test_files.h"

namespace promptcache::worker {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using Json = nlohmann::json;

Json Published(const char* file) {
  return Json::parse(
      ReadFileOrDie(TestDataPath(std::string("smollm2/") + file)));
}

TEST(VectorFileTest, ReadsThePublishedFiles) {
  auto plain = ParseVectorFile(Published("vectors.json").dump());
  PC_ASSERT_OK(plain);
  ASSERT_EQ(plain->size(), 8u);
  EXPECT_EQ((*plain)[4].name, "chat-capital");
  EXPECT_EQ((*plain)[4].plan.at(0).fresh.size(), 28u);
  EXPECT_EQ((*plain)[4].nll.size(), 27u);
  EXPECT_EQ((*plain)[4].greedy_ids.size(), 24u);
  auto modular = ParseVectorFile(Published("modular.json").dump());
  PC_ASSERT_OK(modular);
  ASSERT_EQ(modular->size(), 8u);
  const VectorCase& chain = (*modular)[6];
  EXPECT_EQ(chain.name, "nested-chain-exact");
  EXPECT_THAT(chain.segments.at(2).context, ElementsAre(0u, 1u));
  EXPECT_EQ(chain.plan.at(1).segment, 1u);
  EXPECT_EQ(chain.plan.at(3).start, 112);
  EXPECT_EQ(chain.logsumexp.back(), chain.last_logsumexp);
}

TEST(VectorFileTest, RefusesWhatIsNotSuchAFile) {
  for (const char* text :
       {"", "[", "{}", "{\"vectors\": [{}]}", "{\"cases\": [{\"name\": 3}]}"}) {
    EXPECT_THAT(ParseVectorFile(text),
                StatusIs(absl::StatusCode::kInvalidArgument,
                         HasSubstr("not a file of logit vectors")))
        << text;
  }
}

struct Damage {
  const char* field;  // a JSON pointer into the case three-modules
  Json value;
  const char* message;
};

TEST(VectorFileTest, NamesTheCaseThatDoesNotHoldTogether) {
  const Damage damages[] = {
      {"/segments/1/context", {1}, "segment 1 sees segment 1"},
      {"/segments/0/ids", Json::array(), "segment 0 has no ids"},
      {"/plan/0/segment", 4, "names no segment"},
      {"/plan/4/fresh", Json::array(), "holds no tokens"},
      {"/plan/4", {{"segment", 0}, {"start", 240}}, "does not end in fresh"},
      {"/fresh_argmax", {1}, "18 fresh tokens with 1 argmax"},
      {"/fresh_logsumexp", {1.0}, "1 log-sum-exps"},
      {"/top_last/ids", {1}, "different lengths"},
  };
  for (const Damage& damage : damages) {
    Json json = Published("modular.json");
    json["cases"][2][Json::json_pointer(damage.field)] = damage.value;
    EXPECT_THAT(ParseVectorFile(json.dump()),
                StatusIs(absl::StatusCode::kInvalidArgument,
                         AllOf(HasSubstr("case three-modules"),
                               HasSubstr(damage.message))))
        << damage.field;
  }
}

}  // namespace
}  // namespace promptcache::worker
